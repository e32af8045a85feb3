"""Facts for the views, made of what was read and the time: no clock, no I/O, and the tick enumerator of `run`.

Records are somebody's words. What is missing, too long or no number becomes None and a fault that is shown with the run;
nothing here raises because of a record. Texts keep their control characters: whoever shows them escapes them.

Instants named `*_ms` are milliseconds since the epoch; ticks are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from clustercron import schedule as schedules
from clustercron import schema, tick
from clustercron.errors import BadSchedule, BadZone
from clustercron.zone import civil, day_number, is_leap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from clustercron.schedule import Schedule
    from clustercron.store import JobRecords
    from clustercron.zone import Zone

    LoadZone = Callable[[str], Zone]

MISSED_LISTED = 100
# Of a job with more records, missed ticks are counted over its list of taken ticks only.
_MOST_RECORDS = 50_000
_INTERVALS = 10
_MOST_TICK = 253_402_300_800  # the year 10000
_MOST_RECORD = 1 << 16
_MOST_TEXT = 1_000
_MOST_DEFINITIONS = 32
_MOST_TRIED = 100
# The script keeps that many taken ticks; with fewer, all that were ever taken are in the list.
_KEPT_TICKS = 1_024
# States of a tick's latest attempt in which nothing was executed.
_NOT_RUN = ("claimed", "abandoned", "waiting")


@dataclass(frozen=True)
class Run:
    """One attempt at a tick.

    Attributes:
        job: name of the job.
        tick: epoch seconds.
        attempt: from 1.
        node: the node that has or had the attempt.
        outcome: a word of clustercron(7), or what a newer version wrote; None where the record has none. `lost` is a run
            whose lease ran out without an end.
        lapsed: a claim that was not started in time: another node may take it over.
        exit_code: of the command; None when it has none.
        signal: the signal it died of, or None.
        fired_at_ms: when cron fired the winner, by the node's clock; all other instants are by Redis's.
        claimed_at_ms: when the attempt was claimed.
        started_at_ms: when the command could be executed.
        ended_at_ms: when it ended.
        fencing_token: rises with every claim of the job.
        tried: nodes that lost the tick; `#N` for one that is not known any more.
        faults: what is wrong with the record.
    """

    job: str
    tick: int
    attempt: int | None
    node: str | None
    outcome: str | None
    lapsed: bool
    exit_code: int | None
    signal: int | None
    fired_at_ms: int | None
    claimed_at_ms: int | None
    started_at_ms: int | None
    ended_at_ms: int | None
    fencing_token: int | None
    tried: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def late_seconds(self) -> int | None:
        """Whole seconds from the tick to the start, to the fire where it did not start; never below 0."""
        began_ms = self.started_at_ms if self.started_at_ms is not None else self.fired_at_ms
        return None if began_ms is None else max(0, began_ms // 1000 - self.tick)

    def lasted_ms(self, now_ms: int) -> int | None:
        """Milliseconds from the start to the end, to now for a run that is going on; None where that is not known."""
        end_ms = now_ms if self.outcome == "running" else self.ended_at_ms
        return None if self.started_at_ms is None or end_ms is None else max(0, end_ms - self.started_at_ms)


@dataclass(frozen=True)
class Definition:
    """A schedule of a job, and the tick from which it holds; `fault` says why it cannot be read."""

    begin: int
    schedule_text: str
    zone_name: str
    schedule: Schedule | None
    zone: Zone | None
    fault: str | None


@dataclass(frozen=True)
class Missed:
    """Ticks that nobody ran and no fire can claim any more.

    Attributes:
        ticks: the newest of them, at most MISSED_LISTED, in order.
        total: how many there are.
        since: the instant from which they are counted, epoch seconds: the job is not known, or its records are not kept,
            before it. None when nothing is counted.
    """

    ticks: tuple[int, ...] = ()
    total: int = 0
    since: int | None = None


@dataclass(frozen=True)
class Window:
    """The ticks of a job that can be missed: from `begin` on, before `end` (epoch seconds), `expected` in number.

    `deep` says that it begins before the list of taken ticks does, so that the records must be asked.
    """

    begin: int
    end: int
    expected: int
    deep: bool


@dataclass(frozen=True)
class JobStatus:
    """How a job is doing.

    Attributes:
        job: its name.
        schedule: text of the schedule in force, None when no claim has told it.
        tz: name of its zone.
        zone: the same as a value, None where its rules cannot be read.
        last_run: the latest attempt at the latest tick.
        last_success: the latest tick whose run succeeded.
        next_tick: the first tick after now.
        missed: what nobody ran.
        running: the attempts that are alive.
        effective_interval_seconds: median of the gaps between the starts of the last runs.
        faults: what is wrong with the job's records.
    """

    job: str
    schedule: str | None
    tz: str | None
    zone: Zone | None
    last_run: Run | None
    last_success: int | None
    next_tick: int | None
    missed: Missed
    running: tuple[Run, ...]
    effective_interval_seconds: int | None
    faults: tuple[str, ...]


class Job:
    """What was read of one job, with its schedules understood.

    Args:
        records: as the store has them.
        now_ms: Redis's clock, from before they were read.
        load_zone: answers a zone by its name, raises BadZone.
    """

    def __init__(self, records: JobRecords, now_ms: int, load_zone: LoadZone) -> None:
        self.name = records.name
        self.now_ms = now_ms
        self.records = records
        self.definitions = tuple(_read_definitions(records.state.get("definitions", ""), load_zone))
        self._numbers = _node_numbers(records.nodes)

    @property
    def definition(self) -> Definition | None:
        """The schedule that holds now."""
        return self.definitions[-1] if self.definitions else None

    def run(self, field: str) -> Run | None:
        """Read one record; None for a field that names no tick."""
        return read_run(self.name, field, self.records.runs.get(field, ""), self._numbers, self.now_ms)

    def runs(self) -> list[Run]:
        """Answer all runs that were read, newest tick first, of one tick the latest attempt first."""
        found = [run for field in self.records.runs if (run := self.run(field)) is not None]
        return sorted(found, key=lambda run: (run.tick, run.attempt or 0, run.claimed_at_ms or 0), reverse=True)

    def has_success(self) -> bool:
        """Whether a success is among the records that were read."""
        return any(_letter(record, "s") == "succeeded" for record in self.records.runs.values())

    def faults(self) -> tuple[str, ...]:
        """What is wrong with the job's records, without those of single runs."""
        faults = list(self.records.faults)
        faults += [d.fault for d in self.definitions[-1:] if d.fault]
        if self.records.state.get("definitions") and not self.definitions:
            faults.append("its schedule is not recorded as it should be")
        for field in ("layout", "known"):
            text = self.records.state.get(field, "1")
            if _whole(text) is None:
                faults.append(f"`{field}` is {_shortened(text)!r}, not a whole number")
        return tuple(faults)


def read_run(job: str, field: str, record: str, numbers: Mapping[str, str], now_ms: int) -> Run | None:
    """Read the record of one attempt.

    Args:
        job: name of the job.
        field: `TICK`, or `TICK.ATTEMPT` for an attempt with a successor, or `TICK.OWNER` for a run without a claim.
        record: its letters and values.
        numbers: short numbers of nodes to their names.
        now_ms: Redis's clock, no later than the record was read.

    Returns:
        None when the field names no tick.
    """
    instant = _tick_of(field)
    if instant is None:
        return None
    faults: list[str] = []
    if len(record) > _MOST_RECORD:
        faults.append(f"the record is {len(record)} characters long")
        record = record[:_MOST_RECORD]
    values = schema.decode(record, schema.RECORD_LETTERS)
    for name, text in values.items():
        if len(text) > _MOST_TEXT:
            faults.append(f"{_shortened(name)}: {len(text)} characters long")
            values[name] = text[:_MOST_TEXT]

    def number(name: str, most: int = _MOST_TICK * 1000) -> int | None:
        text = values.get(name)
        if text is None:
            return None
        value = _whole(text)
        if value is None or value >= most:
            faults.append(f"{name} is {_shortened(text)!r}, not a number it can be")
            return None
        return value

    outcome = values.get("state") or None
    if outcome is None:
        faults.append("the record has no state")
    lease_until_ms = number("lease_until_ms")
    over = lease_until_ms is None or lease_until_ms < now_ms
    if outcome == "running" and over:
        outcome = "lost"
    suffix = field.partition(".")[2]
    attempt = number("attempt", 1_000_000)
    if attempt is None and len(suffix) < 7:
        attempt = _whole(suffix)
    tried = [n for n in values.get("tried", "").split(",") if n][:_MOST_TRIED]
    return Run(
        job=job,
        tick=instant,
        attempt=attempt,
        node=values.get("node") or None,
        outcome=outcome,
        lapsed=outcome == "claimed" and over,
        exit_code=number("exit_code", 1 << 32),
        signal=number("signal", 1 << 16),
        fired_at_ms=number("fired_at_ms"),
        claimed_at_ms=number("claimed_at_ms"),
        started_at_ms=number("started_at_ms"),
        ended_at_ms=number("ended_at_ms"),
        fencing_token=number("fencing_token", 1 << 63),
        tried=tuple(numbers.get(n, f"#{n}") for n in tried),
        faults=tuple(faults),
    )


def newest_fields(fields: Iterable[str], count: int) -> list[str]:
    """Choose the fields of the runs hash with the newest ticks, at most `count`."""
    known = [(instant, field) for field in fields if (instant := _tick_of(field)) is not None]
    known.sort(key=lambda pair: (pair[0], "." not in pair[1], _whole(pair[1].partition(".")[2]) or 0), reverse=True)
    return [field for _, field in known[:count]]


def fields_of_day(fields: Iterable[str], zone: Zone, date: tuple[int, int, int]) -> list[str]:
    """Choose the fields of the ticks that fall on a date (year, month, day) in a zone, however long that day is."""
    return [field for field in fields if (t := _tick_of(field)) is not None and local_date(zone, t) == date]


def ticks_of_day(schedule: Schedule, zone: Zone, date: tuple[int, int, int]) -> list[int]:
    """Answer the ticks that fall on a date in a zone."""
    begin = day_number(*date) * 86400
    around = tick.ticks_between(schedule, zone, begin - 2 * 86400, begin + 3 * 86400)
    return [instant for instant in around if local_date(zone, instant) == date]


def local_date(zone: Zone, instant: int) -> tuple[int, int, int]:
    """Answer year, month and day of an instant (epoch seconds) in a zone."""
    return civil((instant + zone.offset_at(instant)) // 86400)


def job_status(job: Job, missed: Missed, succeeded: str | None) -> JobStatus:
    """Sum up a job from its last runs.

    Args:
        job: what was read of it.
        missed: see `missed_window` and what follows it.
        succeeded: field of the last success when it is older than the runs that were read.
    """
    definition = job.definition
    by_age = newest_fields(job.records.runs, len(job.records.runs))
    newest = takewhile(lambda field: _tick_of(field) == _tick_of(by_age[0]), by_age)
    last = [run for field in newest if (run := job.run(field)) is not None]
    last_run = max(last, key=lambda run: (run.attempt or 0, run.claimed_at_ms or 0), default=None)
    alive = [f for f in by_age if _letter(job.records.runs[f], "s") == "running"]
    running = tuple(run for f in alive if (run := job.run(f)) is not None and run.outcome == "running")
    successes = (f for f in by_age if _letter(job.records.runs[f], "s") == "succeeded")
    faults = list(job.faults())
    if last_run is not None:
        faults += [f"last run: {fault}" for fault in last_run.faults]
    next_tick = None
    if definition is not None and definition.schedule is not None and definition.zone is not None:
        next_tick = tick.next_tick(definition.schedule, definition.zone, job.now_ms // 1000)
    return JobStatus(
        job=job.name,
        schedule=definition.schedule_text if definition else None,
        tz=definition.zone_name if definition else None,
        zone=definition.zone if definition else None,
        last_run=last_run,
        last_success=_tick_of(next(successes, succeeded or "")),
        next_tick=next_tick,
        missed=missed,
        running=running,
        effective_interval_seconds=_effective_interval(job.records.runs[field] for field in by_age),
        faults=tuple(faults),
    )


def _effective_interval(records: Iterable[str]) -> int | None:
    """Answer the median gap between starts, in whole seconds; retries of a tick are no starts of their own."""
    starts: list[int] = []
    for record in records:
        began_ms = _whole(_letter(record, "b") or "")
        if began_ms is not None and began_ms < _MOST_TICK * 1000 and (_letter(record, "a") or "1") == "1":
            starts.append(began_ms)
            if len(starts) > _INTERVALS:
                break
    starts.sort()
    gaps = sorted(later - earlier for earlier, later in pairwise(starts))
    middle = len(gaps) // 2
    return (gaps[middle] + gaps[-1 - middle]) // 2000 if gaps else None


def missed_window(job: Job, late_ms: int, grace_s: int | None) -> Window | None:
    """Say which ticks of a job can be missed; None when none can.

    It begins when the job became known, or where its records begin, and ends with the ticks that a fire could still
    claim by Redis's clock.

    Args:
        job: what was read of it.
        late_ms: how much longer than its grace a tick can be claimed, where the job's state does not say how long in
            all: splay, max skew and store timeout.
        grace_s: the grace then, None for that of the schedule.
    """
    definition = job.definition
    known_ms = _whole(job.records.state.get("known", ""))
    if definition is None or definition.schedule is None or known_ms is None or known_ms >= _MOST_TICK * 1000:
        return None
    grace = tick.default_grace(definition.schedule) if grace_s is None else grace_s
    max_age_ms = _whole(job.records.state.get("max_age", ""))
    if max_age_ms is None:
        max_age_ms = late_ms + grace * 1000
    begin = known_ms // 1000
    floor, deep = _records_begin(job.records)
    if floor is not None and floor > begin:
        begin = floor
    else:
        deep = deep and floor is not None
    end = (job.now_ms - max_age_ms) // 1000
    expected = sum(count_ticks(d.schedule, d.zone, b, e) for d, b, e in _segments(job.definitions, begin, end))
    return Window(begin, end, expected, deep)


def _records_begin(records: JobRecords) -> tuple[int | None, bool]:
    """Answer the instant from which every taken tick is still known, None for always; and whether records say so.

    Old records are deleted in the order of their claims, and the list of taken ticks has a length.
    """
    if records.taken_count < _KEPT_TICKS or records.first_taken is None:
        return None, False
    claimed_ms = _whole(_letter(records.oldest or "", "c") or "")
    if records.run_count <= _MOST_RECORDS and claimed_ms is not None and claimed_ms // 1000 < records.first_taken:
        return claimed_ms // 1000, True
    return records.first_taken, False


def is_complete(job: Job, window: Window, taken: int) -> bool:
    """Whether a window's taken ticks, just counted, prove that nothing was missed.

    Where nodes disagreed about the schedule, a tick too many could hide one too few.
    """
    agreed = not job.records.state.get("differed")
    return agreed and not window.deep and taken == window.expected and not _ticks_not_run(job, window)


def asks_records(job: Job, window: Window) -> bool:
    """Whether the fields of a job's records say more about a window than its list of taken ticks."""
    records = job.records
    return window.deep or (not records.taken_count and 0 < records.run_count <= _MOST_RECORDS)


def find_missed(job: Job, window: Window, taken: AbstractSet[int]) -> Missed:
    """Find the ticks of a window that are not among those taken, or were taken and never run."""
    run = taken - _ticks_not_run(job, window)
    listed: list[int] = []
    total = 0
    for definition, begin, end in reversed(_fair_segments(job.definitions, window, taken)):
        schedule, zone = definition.schedule, definition.zone
        if schedule is None or zone is None:
            continue
        have = sum(1 for instant in run if begin <= instant < end and tick.is_tick(schedule, zone, instant))
        gaps = count_ticks(schedule, zone, begin, end) - have
        total += gaps
        instant = tick.previous_tick(schedule, zone, end)
        while gaps and len(listed) < MISSED_LISTED and instant is not None and instant >= begin:
            if instant not in run:
                listed.append(instant)
                gaps -= 1
            instant = tick.previous_tick(schedule, zone, instant)
    return Missed(tuple(reversed(listed)), total, window.begin)


def _ticks_not_run(job: Job, window: Window) -> set[int]:
    """Answer the taken ticks whose attempt ended, or lapsed, before anything was executed."""
    found = set()
    run_without_claim = set()
    for field, record in job.records.runs.items():
        state = _letter(record, "s")
        instant = _tick_of(field)
        if instant is None or not window.begin <= instant < window.end:
            continue
        if state == "unclaimed":
            run_without_claim.add(instant)
        if state not in _NOT_RUN or "." in field:
            continue
        over = (_whole(_letter(record, "l") or "") or 0) < job.now_ms
        if over or state == "abandoned":
            found.add(instant)
    return found - run_without_claim


def _segments(definitions: Sequence[Definition], begin: int, end: int) -> list[tuple[Definition, int, int]]:
    """Cut a time (from, and before) into the parts in which each definition held."""
    answer: list[tuple[Definition, int, int]] = []
    bound = 0
    bounds = [bound := max(bound, definition.begin) for definition in definitions]
    for definition, low, high in zip(definitions, bounds, [*bounds[1:], end], strict=True):
        if max(begin, low) < min(end, high):
            answer.append((definition, max(begin, low), min(end, high)))
    return answer


def _fair_segments(
    definitions: Sequence[Definition], window: Window, taken: AbstractSet[int]
) -> list[tuple[Definition, int, int]]:
    """Cut a window as `_segments` does, but for the time between an old schedule's last run and a new one's first.

    A crontab changes somewhere in between. Whichever of the two schedules has fewer ticks there counts: the other one's
    would be a false alarm for a change that was made in good order.
    """
    parts = _segments(definitions, window.begin, window.end)
    for index in range(1, len(parts)):
        old, begin, change = parts[index - 1]
        new, _, end = parts[index]
        last = max((instant + 1 for instant in taken if begin <= instant < change), default=begin)
        if count_ticks(new.schedule, new.zone, last, change) < count_ticks(old.schedule, old.zone, last, change):
            parts[index - 1] = (old, begin, last)
            parts[index] = (new, last, end)
    return parts


def count_ticks(schedule: Schedule | None, zone: Zone | None, begin: int, end: int) -> int:
    """Count the ticks from `begin` on, before `end` (epoch seconds), without visiting each; 0 without a schedule.

    It is the number of what `tick.ticks_between` yields. Inside a span of one offset local time is linear, so days are
    counted by the month.
    """
    if schedule is None or zone is None:
        return 0
    total = 0
    minute, last = -(-begin // 60), -(-end // 60)
    while minute < last:
        start, span_end, offset, passed, _ = zone.span(minute)
        until = min(span_end, last)
        local = minute + offset if schedule.wildcard else max(minute + offset, passed)
        total += _count_matches(schedule, local, until + offset)
        if minute == start and local <= start + offset and tick.is_tick(schedule, zone, start * 60):
            # A tick at the change itself is no match where the clocks skipped what matches.
            total += 1 - _count_matches(schedule, start + offset, start + offset + 1)
        minute = until
    return total


def _count_matches(schedule: Schedule, begin: int, end: int) -> int:
    """Count the matching local minutes from `begin` on, before `end` (minutes from 1970 in local time)."""
    if begin >= end:
        return 0
    a_day = len(schedule.minutes) * len(schedule.hours)
    first, before = divmod(begin, 1440)
    last, after = divmod(end, 1440)
    return (
        _count_days(schedule, first, last) * a_day
        - _count_until(schedule, first, before)
        + _count_until(schedule, last, after)
    )


def _count_days(schedule: Schedule, first: int, last: int) -> int:
    """Count the matching days from `first` on, before `last` (days from 1970)."""
    total = 0
    day = first
    while day < last:
        year, month, day_of_month = civil(day)
        length = 29 if month == 2 and is_leap(year) else (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month - 1]
        here = min(length - day_of_month + 1, last - day)
        days = _days_in(schedule, day, month, day_of_month, length) >> day_of_month
        total += (days & ((1 << here) - 1)).bit_count()
        day += here
    return total


def _days_in(schedule: Schedule, day: int, month: int, day_of_month: int, length: int) -> int:
    if month not in schedule.months:
        return 0
    # 1970-01-01 was a Thursday.
    return schedule.days_in((day + 5 - day_of_month) % 7, length)


def _count_until(schedule: Schedule, day: int, minute_of_day: int) -> int:
    """Count the matching minutes of a day before a minute of it."""
    if not minute_of_day or not _count_days(schedule, day, day + 1):
        return 0
    hour, minute = divmod(minute_of_day, 60)
    hours = sum(1 for h in schedule.hours if h < hour)
    minutes = sum(1 for m in schedule.minutes if m < minute) if hour in schedule.hours else 0
    return hours * len(schedule.minutes) + minutes


@dataclass(frozen=True)
class ComingTick:
    """A tick to come; `note` says what a change of the clocks has to do with it."""

    tick: int
    local: str
    note: str | None


def coming_ticks(schedule: Schedule, zone: Zone, begin: int, end: int | None, count: int) -> Iterator[ComingTick]:
    """Yield the ticks from `begin` on, before `end` if there is one (epoch seconds), at most `count`."""
    instant = tick.next_tick(schedule, zone, begin - 1)
    while instant is not None and count > 0 and (end is None or instant < end):
        yield ComingTick(instant, tick.local_text(zone, instant), tick.note(schedule, zone, instant))
        instant = tick.next_tick(schedule, zone, instant)
        count -= 1


@dataclass(frozen=True)
class Explanation:
    """Which tick a fire serves, and why, or why none.

    Attributes:
        decision: "run", "too-late", "not-due" or "zone-mismatch".
        tick: the tick it belongs to, None for the last two.
        late_seconds: whole seconds from the tick to the fire, never below 0.
        previous: the latest tick not after the fire.
        next: the one after that.
        reason: one or two sentences.
    """

    decision: str
    tick: int | None
    late_seconds: int | None
    previous: int | None
    next: int | None
    reason: str


def explain(
    schedule: Schedule, zone: Zone, daemon_zone: Zone, fired_at_ms: int, grace_s: int, *, poll: bool
) -> Explanation:
    """Say what `run` would decide of a fire.

    Args:
        schedule: of the line.
        zone: in which the schedule is read.
        daemon_zone: in which cron runs on the node.
        fired_at_ms: when cron fires it, milliseconds since the epoch.
        grace_s: how late it may be, seconds.
        poll: the line fires more often than the schedule.
    """
    decision = tick.tick_for(schedule, zone, fired_at_ms, grace_s, daemon_zone=daemon_zone, poll=poll)
    reason = _reason(decision, schedule, zone, daemon_zone, fired_at_ms, grace_s, poll)
    late_seconds = None if decision.late_ms is None else max(0, decision.late_ms // 1000)
    return Explanation(decision.kind, decision.tick, late_seconds, decision.previous, decision.next, reason)


def _reason(
    decision: tick.Decision,
    schedule: Schedule,
    zone: Zone,
    daemon_zone: Zone,
    fired_at_ms: int,
    grace_s: int,
    poll: bool,
) -> str:
    fired = schema.utc_ms(fired_at_ms) if fired_at_ms % 1000 else tick.utc_text(fired_at_ms // 1000)
    if decision.kind == "zone-mismatch":
        minute = (fired_at_ms + tick.EARLY_MS) // 60_000 * 60
        return (
            f"A fire at {fired} serves no tick: it is {tick.local_text(daemon_zone, minute)} in cron's zone "
            f"{daemon_zone.name}, which is {schedule.text!r} there, but {tick.local_text(zone, minute)} in the "
            f"schedule's zone {zone.name}, which is not. Give --tz {daemon_zone.name}, or write the line's five fields "
            "in cron's zone and add --poll."
        )
    if decision.tick is None or decision.late_ms is None:
        before = tick.utc_text(decision.previous) if decision.previous is not None else "none"
        after = tick.utc_text(decision.next) if decision.next is not None else "none"
        rest = (
            "With --poll there is nothing to do." if poll else "The line fires at times that --schedule does not name."
        )
        return (
            f"A fire at {fired} serves no tick of {schedule.text!r} in {zone.name}: the tick before is {before}, the "
            f"next {after}. {rest}"
        )
    what = f"{tick.utc_text(decision.tick)} ({tick.local_text(zone, decision.tick)} in {zone.name})"
    if decision.late_ms < 0:
        late = f"{-decision.late_ms / 1000:g} s before it, close enough to count"
    else:
        late = f"{spell_seconds(decision.late_ms // 1000)} after it"
    special = tick.note(schedule, zone, decision.tick)
    noted = f" This tick is special: {special}." if special else ""
    if decision.kind == "run":
        return (
            f"A fire at {fired} serves {what}, the latest tick by then: it is {late}, within the grace of "
            f"{spell_seconds(grace_s)}.{noted}"
        )
    rest = (
        "With --poll there is nothing to do." if poll else "Nothing is run, unless the tick is taken: then it is lost."
    )
    return (
        f"A fire at {fired} is too late for {what}: it is {late}, and the grace is {spell_seconds(grace_s)}. "
        f"{rest}{noted}"
    )


def spell_seconds(seconds: int) -> str:
    """Write a length of time in its two largest units, as `3 h 15 min`."""
    parts: list[str] = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        number, seconds = divmod(seconds, size)
        if number or (unit == "s" and not parts):
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2])


def _read_definitions(text: str, load_zone: LoadZone) -> Iterator[Definition]:
    """Read the lines `TICK|SCHEDULE|ZONE`, oldest first; what is no such line is passed over."""
    for line in text[:_MOST_RECORD].split("\n")[-_MOST_DEFINITIONS:]:
        first, _, rest = line.partition("|")
        schedule_text, bar, zone_name = rest.rpartition("|")
        begin = _tick_of(first)
        if begin is None or not bar:
            continue
        schedule = zone = fault = None
        try:
            schedule = schedules.parse(schedule_text, extended=True)
            zone = load_zone(zone_name)
        except (BadSchedule, BadZone) as exc:
            schedule, fault = None, _shortened(exc.message)
        yield Definition(begin, schedule_text, zone_name, schedule, zone, fault)


def _node_numbers(nodes: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, about in nodes.items():
        number = _letter(about, "i")
        if number:
            found[number] = name[:_MOST_TEXT]
    return found


def _letter(record: str, letter: str) -> str | None:
    """Answer one value of a record, still quoted, without reading the rest."""
    at = 0 if record.startswith(f"{letter}=") else record.find(f" {letter}=") + 1
    if not at and not record.startswith(f"{letter}="):
        return None
    end = record.find(" ", at)
    return record[at + 2 : end if end >= 0 else None]


def _tick_of(field: str) -> int | None:
    instant = _whole(field.partition(".")[0])
    return instant if instant is not None and instant < _MOST_TICK else None


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else None


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
