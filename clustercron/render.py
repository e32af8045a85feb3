"""Facts as text: tables for people, documents for programs. What an instant, an age or a length looks like is said here.

Tables fit the width of the terminal: with room, a column each; with less, columns that belong together are stacked in
one; with still less, the least important are left out and named. Piped, they are plain lines of any length. Texts that
came from Redis are shown with control characters escaped, and never read as markup.

Every document has `"version": 1`. Beside the keys that scripts can rely on it has the further keys of FURTHER_KEYS.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from clustercron import report, schema, tick
from clustercron.messages import escaped, print_output
from clustercron.zone import day_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TypeAlias

    from rich.table import Table
    from rich.text import Text

    from clustercron.report import ComingTick, Explanation, JobStatus, Run
    from clustercron.zone import Zone

    Json: TypeAlias = "str | int | bool | Sequence[Json] | Mapping[str, Json] | None"

VERSION = 1
# Keys that a document has beyond those that are promised for version 1, for the man pages.
FURTHER_KEYS = {
    "next": {
        "job": "the job whose schedule it is, null with --schedule",
        "schedule": "the schedule",
        "tz": "its zone",
        "truncated": "whether there are more ticks before --to than are listed",
    },
    "explain": {
        "fired_at": "the instant asked about",
        "grace_seconds": "the grace",
        "tz": "the schedule's zone",
        "daemon_tz": "the zone of this node's cron",
        "reason": "why, in a sentence",
    },
    "history": {
        "tz": "the zone of the job's schedule, null when it is not known",
        "runs[].faults": "what is wrong with the record, a sentence each",
    },
    "status": {
        "jobs[].missed_since": "the instant from which missed ticks are counted, null when none are",
        "jobs[].faults": "what is wrong with the job's records, a sentence each",
    },
}
_STYLES = {
    "succeeded": "green",
    "running": "cyan",
    "claimed": "yellow",
    "waiting": "yellow",
    "failed": "bold red",
    "killed": "bold red",
    "timed-out": "bold red",
    "start-failed": "bold red",
    "lost": "bold red",
    "lease-lost": "bold red",
    "unclaimed": "magenta",
    "cancelled": "yellow",
    "replaced": "yellow",
    "abandoned": "yellow",
}
_GAP = 2
_MOST_CELL = 60
_LEAST_NAME = 8
_MOST_OTHERS = 400
_MOST_LISTED = 10
_ANY_WIDTH = 100_000


@dataclass(frozen=True)
class Screen:
    """What the output can show.

    Attributes:
        width: columns, None for any length.
        terminal: whether somebody looks at it.
        colour: whether escapes for colour may be written.
        unicode: whether more than ASCII may be written.
        environ: for what the terminal is.
    """

    width: int | None
    terminal: bool
    colour: bool
    unicode: bool
    environ: Mapping[str, str]


def screen_of(environ: Mapping[str, str], descriptor: int = 1) -> Screen:
    """Find out what a file descriptor can show."""
    terminal = os.isatty(descriptor)
    width = None
    if terminal or environ.get("COLUMNS"):
        width = max(20, shutil.get_terminal_size((80, 24)).columns)
    colour = terminal and not environ.get("NO_COLOR") and environ.get("TERM", "dumb") not in ("", "dumb")
    return Screen(width, terminal, colour, _locale_is_utf8(environ), environ)


def _locale_is_utf8(environ: Mapping[str, str]) -> bool:
    """Whether the user's locale can show more than ASCII; Python itself calls the C locale UTF-8."""
    locale = environ.get("LC_ALL") or environ.get("LANG") or ""
    ctype = environ.get("LC_CTYPE") or ""
    # Without LC_ALL, Python puts LC_CTYPE=C.UTF-8 in place of a C locale.
    if not environ.get("LC_ALL") and ctype and ctype != "C.UTF-8":
        locale = ctype
    return locale.lower().replace("-", "").partition(".")[2].startswith("utf8")


def write(text: str, screen: Screen, descriptor: int = 1) -> None:
    """Write the whole output; a reader that has enough is no trouble.

    Raises:
        CannotWrite: the output is closed, full or broken.
    """
    print_output(text, "utf-8" if screen.unicode else "ascii", descriptor)


def document(content: Mapping[str, Json]) -> str:
    """Write one JSON document, in ASCII: control characters of any text are escaped."""
    return json.dumps({"version": VERSION, **content}, indent=2) + "\n"


# Documents


def next_document(
    ticks: Sequence[ComingTick], job: str | None, schedule_text: str, zone: Zone, *, truncated: bool
) -> Mapping[str, Json]:
    """Answer the document of `next`."""
    return {
        "job": job,
        "schedule": schedule_text,
        "tz": zone.name,
        "ticks": [{"tick": tick.utc_text(t.tick), "local": t.local, "note": t.note} for t in ticks],
        "truncated": truncated,
    }


def explain_document(
    explanation: Explanation, fired_at_ms: int, grace_s: int, zone: Zone, daemon_zone: Zone
) -> Mapping[str, Json]:
    """Answer the document of `explain`."""
    return {
        "decision": explanation.decision,
        "tick": _utc(explanation.tick),
        "late_seconds": explanation.late_seconds,
        "previous": _utc(explanation.previous),
        "next": _utc(explanation.next),
        "fired_at": schema.utc_ms(fired_at_ms),
        "grace_seconds": grace_s,
        "tz": zone.name,
        "daemon_tz": daemon_zone.name,
        "reason": explanation.reason,
    }


def run_object(run: Run) -> Mapping[str, Json]:
    """Answer one run as it stands in the documents of `history` and `status`."""
    return {
        "tick": tick.utc_text(run.tick),
        "attempt": run.attempt,
        "node": run.node,
        "outcome": run.outcome,
        "exit_code": run.exit_code,
        "signal": run.signal,
        "fired_at": _utc_ms(run.fired_at_ms),
        "claimed_at": _utc_ms(run.claimed_at_ms),
        "started_at": _utc_ms(run.started_at_ms),
        "ended_at": _utc_ms(run.ended_at_ms),
        "late_seconds": run.late_seconds,
        "fencing_token": run.fencing_token,
        "tried": list(run.tried),
        "faults": list(run.faults),
    }


def history_document(job: str, runs: Sequence[Run], zone_name: str | None) -> Mapping[str, Json]:
    """Answer the document of `history`."""
    return {"job": job, "tz": zone_name, "runs": [run_object(run) for run in runs]}


def status_document(jobs: Sequence[JobStatus]) -> Mapping[str, Json]:
    """Answer the document of `status`."""
    return {"jobs": [_status_object(job) for job in jobs]}


def _status_object(job: JobStatus) -> Mapping[str, Json]:
    return {
        "job": job.job,
        "schedule": job.schedule,
        "tz": job.tz,
        "last_run": run_object(job.last_run) if job.last_run else None,
        "last_success": _utc(job.last_success),
        "next_tick": _utc(job.next_tick),
        "missed": [tick.utc_text(instant) for instant in job.missed.ticks],
        "missed_total": job.missed.total,
        "missed_since": _utc(job.missed.since),
        "running": [run_object(run) for run in job.running],
        "effective_interval_seconds": job.effective_interval_seconds,
        "paused": None,
        "faults": list(job.faults),
    }


def _utc(instant: int | None) -> str | None:
    return None if instant is None else tick.utc_text(instant)


def _utc_ms(instant_ms: int | None) -> str | None:
    return None if instant_ms is None else schema.utc_ms(instant_ms)


# Screens


def next_screen(ticks: Sequence[ComingTick], zone: Zone, now: int, screen: Screen, *, truncated: bool) -> str:
    """Show the coming ticks; `now` is epoch seconds."""
    groups = [
        _Group([[_Column("TICK (UTC)", [_Cell(_short_utc(t.tick)) for t in ticks])]]),
        _Group([[_Column(f"LOCAL ({zone.name})", [_Cell(_weekday_local(t.local)) for t in ticks])]]),
        _Group([[_Column("WHEN", [_Cell(age_text(t.tick, now), "dim") for t in ticks])]], rank=1),
        _Group([[_Column("NOTE", [_Cell(t.note or "", "yellow") for t in ticks], breaks="words")]]),
    ]
    text = _table(groups, screen)
    if truncated:
        text += _footnotes(["there are more before --to: --count shows as many as you like"], screen)
    return text


def explain_screen(explanation: Explanation, screen: Screen) -> str:
    """Show what a fire serves, in words."""
    style = {"run": "green", "too-late": "yellow", "not-due": "yellow", "zone-mismatch": "bold red"}
    console = _Printer(screen)
    console.line(explanation.decision, style[explanation.decision])
    console.line(explanation.reason)
    for name, instant in (("previous", explanation.previous), ("next", explanation.next)):
        console.line(f"{name:8}  {tick.utc_text(instant) if instant is not None else 'none'}", "dim")
    return console.text()


def history_screen(job: str, runs: Sequence[Run], zone: Zone | None, title: str, now_ms: int, screen: Screen) -> str:
    """Show the runs of a job, newest first."""
    now = now_ms // 1000
    local = [_Cell(_short_local(tick.local_text(zone, r.tick)) if zone else "") for r in runs]
    attempts = ["" if r.attempt is None else f"attempt {r.attempt}" for r in runs]
    late = ["" if r.late_seconds is None else report.spell_seconds(r.late_seconds) for r in runs]
    groups = [
        _Group(
            [
                [_Column("TICK", [_Cell(_short_utc(r.tick)) for r in runs])],
                [_Column("AGE", [_Cell(age_text(r.tick, now), "dim") for r in runs])],
            ]
        ),
        _Group([[_Column("LOCAL", local)]], rank=2),
        _Group(
            [
                [_Column("OUTCOME", [_outcome(r) for r in runs], breaks="words")],
                [_Column("ATTEMPT", [_Cell(attempt, "dim") for attempt in attempts])],
            ]
        ),
        _Group(
            [
                [_Column("NODE", [_untrusted(r.node or "-") for r in runs], breaks="name")],
                [
                    _Column(
                        "ALSO TRIED", [_untrusted(" ".join(r.tried), "dim", _MOST_OTHERS) for r in runs], breaks="name"
                    )
                ],
            ]
        ),
        _Group(
            [
                [_Column("FIRED", [_clock(r.fired_at_ms, r.tick) for r in runs])],
                [_Column("CLAIMED", [_clock(r.claimed_at_ms, r.tick) for r in runs])],
            ],
            rank=1,
        ),
        _Group(
            [
                [_Column("STARTED", [_clock(r.started_at_ms, r.tick) for r in runs])],
                [_Column("ENDED", [_clock(r.ended_at_ms, r.tick) for r in runs])],
            ]
        ),
        _Group(
            [
                [_Column("LATE", [_Cell(text) for text in late])],
                [_Column("TOOK", [_Cell(length_text(r.lasted_ms(now_ms))) for r in runs])],
            ]
        ),
        _Group([[_Column("TOKEN", [_Cell(str(r.fencing_token or "")) for r in runs])]], rank=3),
    ]
    if zone is None or all(zone.offset_at(r.tick) == 0 for r in runs):
        del groups[1]
    notes = [
        f"{_short_utc(r.tick)} attempt {r.attempt or '?'}: damaged record: {fault}" for r in runs for fault in r.faults
    ]
    heading = ""
    if screen.width is not None:  # for a person, not for a program that reads rows
        printer = _Printer(screen)
        printer.line(f"{job}: {title}", "bold")
        heading = printer.text()
    return heading + _table(groups, screen) + _footnotes(notes, screen)


def status_screen(jobs: Sequence[JobStatus], now_ms: int, screen: Screen, *, details: bool) -> str:
    """Show a row a job; with `details` also which ticks were missed."""
    now = now_ms // 1000
    last = [job.last_run for job in jobs]
    groups = [
        _Group([[_Column("JOB", [_Cell(job.job) for job in jobs], breaks="name")]]),
        _Group(
            [
                [_Column("SCHEDULE", [_untrusted(job.schedule or "-") for job in jobs], breaks="words")],
                [_Column("ZONE", [_untrusted(job.tz or "-", "dim") for job in jobs])],
            ],
            rank=1,
        ),
        _Group(
            [
                [_Column("LAST TICK", [_Cell(_short_utc(r.tick) if r else "never") for r in last])],
                [_Column("AGE", [_Cell(age_text(r.tick, now) if r else "", "dim") for r in last])],
            ]
        ),
        _Group(
            [
                [_Column("OUTCOME", [_outcome(r) if r else _Cell("-") for r in last], breaks="words")],
                [
                    _Column("NODE", [_untrusted((r.node if r else None) or "-") for r in last], breaks="name"),
                    _Column("TOOK", [_Cell(length_text(r.lasted_ms(now_ms)) if r else "", "dim") for r in last]),
                ],
            ]
        ),
        _Group(
            [
                [_Column("NEXT TICK", [_next_local(job) for job in jobs])],
                [_Column("UTC", [_next_utc(job, now) for job in jobs])],
            ]
        ),
        _Group(
            [
                [_Column("MISSED", [_missed_count(job) for job in jobs])],
                [_Column("NOW", [_running_now(job) for job in jobs])],
            ]
        ),
    ]
    notes = [f"{job.job}: {fault}" for job in jobs for fault in job.faults]
    if details:
        for job in jobs:
            if job.missed.total and job.missed.since is not None:
                shown = job.missed.ticks[-_MOST_LISTED:]
                more = "" if job.missed.total == len(shown) else f", the last {len(shown)} of them"
                notes.append(
                    f"{job.job}: missed {job.missed.total} since {tick.utc_text(job.missed.since)}{more}: "
                    + ", ".join(map(tick.utc_text, shown))
                )
    return _table(groups, screen) + _footnotes(notes, screen)


def sentence(text: str, screen: Screen, style: str = "") -> str:
    """Show a text, broken at blanks where it does not fit."""
    printer = _Printer(screen)
    printer.line(text, style)
    return printer.text()


def said(when: str, who: str, text: str, screen: Screen, *, who_style: str, style: str = "") -> str:
    """Show that somebody said something; what does not fit goes on below itself."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, _GAP, 0, 0))
    for width in (len(when), _wide(who), None):
        grid.add_column(width=width, overflow="fold")
    shown = (_shown(escaped(part), screen) for part in (when, who, text))
    grid.add_row(*(Text(part, part_style) for part, part_style in zip(shown, ("dim", who_style, style), strict=True)))
    printer = _Printer(screen)
    printer.print(grid)
    return printer.text()


def countdown(text: str, share: float, screen: Screen) -> str:
    """Show how much of a wait is over, in one line that the next one overwrites; an empty text takes it away.

    Empty where nobody looks.
    """
    if not screen.terminal or screen.width is None:
        return ""
    room = screen.width - 1
    bar = max(0, min(40, room - len(text) - _GAP)) if text else 0
    done = round(bar * share)
    full, rest = ("━", "─") if screen.unicode else ("#", "-")
    printer = _Printer(screen)
    printer.join([(text, ""), (" " * _GAP if bar else "", ""), (full * done, "green"), (rest * (bar - done), "dim")])
    return f"\r{' ' * room}\r{printer.text().rstrip()}"


def age_text(instant: int, now: int) -> str:
    """Write how long ago an instant was, or how soon it will be, in its largest unit: `3 h ago`, `in 20 h`."""
    gap = abs(now - instant)
    size, unit = next(
        ((s, u) for most, s, u in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")) if gap < most), (86400, "d")
    )
    if gap == 0:
        return "now"
    return f"{gap // size} {unit} ago" if instant < now else f"in {gap // size} {unit}"


def length_text(milliseconds: int | None) -> str:
    """Write how long something took: `0.42 s`, `12 s`, `3 min 5 s`; empty for None."""
    if milliseconds is None:
        return ""
    if milliseconds < 10_000:
        return f"{milliseconds / 1000:.2g} s" if milliseconds >= 10 else "0 s"
    return report.spell_seconds(milliseconds // 1000)


def _short_utc(instant: int) -> str:
    date, _, clock = tick.utc_text(instant).partition("T")
    return f"{date} {clock[:5]}Z"


def _short_local(local: str) -> str:
    """Shorten `2026-09-17T04:00:00+02:00` to `2026-09-17 04:00+02`; what is not on the hour keeps its minutes."""
    date, _, clock = local.partition("T")
    return f"{date} {clock[:5]}{clock[8:].removesuffix(':00')}"


def _weekday_local(local: str) -> str:
    year, month, day = (int(part) for part in local.partition("T")[0].rsplit("-", 2))
    # 1970-01-01 was a Thursday.
    weekday = ("Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed")[day_number(year, month, day) % 7]
    return f"{weekday} {_short_local(local)}"


def _clock(instant_ms: int | None, beside: int) -> _Cell:
    """Write the time of day, with the date where it is not that of the tick."""
    if instant_ms is None:
        return _Cell("")
    text = schema.utc_ms(instant_ms)
    same_day = text[:10] == tick.utc_text(beside)[:10]
    return _Cell(f"{text[11:19]}Z" if same_day else f"{text[:10]} {text[11:19]}Z")


def _outcome(run: Run) -> _Cell:
    text = run.outcome or "unknown"
    if run.lapsed:
        text += ", lapsed"
    if run.signal is not None:
        text += f", signal {run.signal}"
    elif run.exit_code:
        text += f", exit {run.exit_code}"
    return _untrusted(text, _STYLES.get(run.outcome or "", ""))


def _running_now(job: JobStatus) -> _Cell:
    if not job.running:
        return _Cell("")
    return _Cell(f"{len(job.running)} running", "cyan")


def _next_local(job: JobStatus) -> _Cell:
    if job.next_tick is None or job.zone is None:
        return _Cell("-")
    return _Cell(_short_local(tick.local_text(job.zone, job.next_tick)))


def _next_utc(job: JobStatus, now: int) -> _Cell:
    if job.next_tick is None or job.zone is None:
        return _Cell("")
    text = _short_utc(job.next_tick)
    if text[:10] == tick.local_text(job.zone, job.next_tick)[:10]:
        text = text[11:]
    return _Cell(f"{text} {age_text(job.next_tick, now)}", "dim")


def _missed_count(job: JobStatus) -> _Cell:
    if job.missed.since is None:
        return _Cell("-")
    return _Cell(str(job.missed.total), "bold red" if job.missed.total else "dim")


# Tables


@dataclass(frozen=True)
class _Cell:
    text: str
    style: str = ""


@dataclass(frozen=True)
class _Column:
    """A header and a cell a row. Where there is no room, `words` may be broken at blanks and a `name` anywhere."""

    header: str
    cells: list[_Cell]
    breaks: Literal["never", "words", "name"] = "never"

    @property
    def used(self) -> bool:
        return any(cell.text for cell in self.cells)


@dataclass(frozen=True)
class _Group:
    """Columns that share one column of the table where there is no room for them side by side: lines of columns.

    A group of rank 0 is never left out; of the others the highest rank goes first.
    """

    lines: list[list[_Column]]
    rank: int = 0

    @property
    def columns(self) -> list[_Column]:
        return [column for line in self.lines for column in line]

    @property
    def width(self) -> int:
        return max(_wide(text) for text in self._texts())

    @property
    def least_width(self) -> int:
        """The width down to which nothing is broken that should not be."""
        least = 0
        for column in self.columns:
            parts = [column.header, *(cell.text for cell in column.cells)]
            if column.breaks != "never":
                parts = [word for text in parts for word in text.split(" ")]
            most = _LEAST_NAME if column.breaks == "name" else self.width
            least = max(least, *(min(most, _wide(part)) for part in parts))
        return least

    def header(self) -> str:
        return "\n".join(self._joined([column.header for column in line]) for line in self.lines)

    def row(self, index: int, screen: Screen) -> Text:
        from rich.text import Text

        text = Text()
        for number, line in enumerate(self.lines):
            if number:
                text.append("\n")
            cells = [cell for column in line if (cell := column.cells[index]).text]
            for place, cell in enumerate(cells):
                text.append(", " if place else "", "dim")
                text.append(_shown(cell.text, screen), cell.style)
        text.rstrip()
        return text

    def _texts(self) -> Iterator[str]:
        for line in self.lines:
            yield self._joined([column.header for column in line])
            yield from (self._joined(texts) for texts in zip(*([c.text for c in x.cells] for x in line), strict=True))

    @staticmethod
    def _joined(texts: Sequence[str]) -> str:
        return ", ".join(filter(None, texts))


def _wide(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _untrusted(text: str, style: str = "", most: int = _MOST_CELL) -> _Cell:
    shown = escaped(text)
    return _Cell(shown if len(shown) <= most else f"{shown[: most - 3]}...", style)


def _table(groups: list[_Group], screen: Screen) -> str:
    left_out: list[str] = []
    apart = [_Group([[column]]) for group in groups for column in group.columns if column.used]
    if screen.width is None or _total([group.width for group in apart]) <= screen.width:
        shown = apart
    else:
        shown = [group for group in groups if any(column.used for column in group.columns)]
        while _total([group.width for group in shown]) > screen.width:
            least = max(shown, key=lambda group: group.rank)
            if least.rank == 0:
                break
            shown = [group for group in shown if group is not least]
            left_out += [column.header.lower() for column in least.columns if column.header]
    if screen.width is None:
        return _plain_table(apart)
    widths = _fitted(shown, screen.width)
    table = _new_table(screen)
    height = max(len(group.lines) for group in shown)
    for group, width in zip(shown, widths, strict=True):
        # Headers begin in the first line, as cells do.
        header = group.header() + "\n" * (height - len(group.lines))
        table.add_column(header, overflow="fold", width=width)
    for index in range(len(shown[0].columns[0].cells)):
        table.add_row(*(group.row(index, screen) for group in shown))
    printer = _Printer(screen)
    printer.print(table)
    if left_out:
        printer.line(f"no room for: {', '.join(left_out)}; a wider terminal or --json shows them", "dim")
    return printer.text()


def _plain_table(groups: Sequence[_Group]) -> str:
    """Write a line a row, of any length: what reads it cuts it up, and a thousand jobs should not take a second."""
    widths = [group.width for group in groups]
    columns = [[group.header(), *(cell.text for cell in group.columns[0].cells)] for group in groups]
    padded = ([text.ljust(width) for text in column] for column, width in zip(columns, widths, strict=True))
    return "".join(f"{(' ' * _GAP).join(row).rstrip()}\n" for row in zip(*padded, strict=True))


def _fitted(groups: Sequence[_Group], room: int | None) -> list[int]:
    """Answer the width of each group, made narrower where they may be until they fit."""
    widths = [group.width for group in groups]
    least = [group.least_width for group in groups]
    while room is not None and _total(widths) > room:
        slack = [width - low for width, low in zip(widths, least, strict=True)]
        # With everything at its least, a terminal this narrow breaks what is widest.
        narrower = slack.index(max(slack)) if max(slack) > 0 else widths.index(max(widths))
        if widths[narrower] == 1:
            break
        widths[narrower] -= 1
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _shown(text: str, screen: Screen) -> str:
    return text if screen.unicode else text.encode("ascii", "backslashreplace").decode()


def _new_table(screen: Screen) -> Table:
    from rich.box import Box
    from rich.table import Table

    line = "─" if screen.unicode else "-"
    rule = Box("    \n    \n" + line * 4 + "\n" + "    \n" * 5, ascii=not screen.unicode)
    # The box has a column of blanks of its own between two columns.
    return Table(box=rule, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), header_style="bold")


class _Printer:
    """Renders to a text with the escapes that the screen allows, without blanks at the ends of lines."""

    def __init__(self, screen: Screen) -> None:
        from rich.console import Console

        self._screen = screen
        self._file = io.StringIO()
        self._console = Console(
            file=self._file,
            force_terminal=screen.colour,
            color_system="auto" if screen.colour else None,
            width=screen.width or _ANY_WIDTH,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
            _environ=dict(screen.environ),
        )

    def print(self, thing: Table | Text) -> None:
        self._console.print(thing)

    def line(self, text: str, style: str = "") -> None:
        from rich.text import Text

        self._console.print(Text(_shown(escaped(text), self._screen), style))

    def join(self, parts: Sequence[tuple[str, str]]) -> None:
        """Print one line of texts with their styles."""
        from rich.text import Text

        self._console.print(Text.assemble(*parts), overflow="crop", no_wrap=True)

    def text(self) -> str:
        return "".join(f"{line.rstrip(' ')}\n" for line in self._file.getvalue().splitlines())


def _footnotes(notes: Sequence[str], screen: Screen) -> str:
    if not notes:
        return ""
    printer = _Printer(screen)
    for note in notes:
        printer.line(note if len(note) <= 400 else f"{note[:400]}...", "yellow")
    return printer.text()
