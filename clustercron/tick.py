"""Ticks: the instants that a schedule names in a zone, and which of them a fire serves.

Ticks are UTC epoch seconds on a whole minute; observed instants are epoch milliseconds. Everything is a pure function
of its arguments. The rules are those of Vixie cron's descendants, to the minute:

1. Every real minute whose local time matches is a tick.
2. A wildcard schedule has no others: a skipped local time gives none, a repeated one gives two.
3. A fixed-time schedule: of a repeated local time only the first pass is a tick.
4. A fixed-time schedule: if any skipped local minute matches, the instant of the change is a tick, for changes of at
   most three hours.

Where changes follow each other within hours, 3 and 4 count from the latest local time reached before: cron counts local
minutes and never goes back.

The engine works on the zone's spans of one offset: inside one, the next match is found field by field, so an answer
takes a bounded number of steps however far away it is.
"""

from __future__ import annotations

from clustercron.errors import UsageError
from clustercron.zone import civil, day_number, is_leap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from clustercron.schedule import Schedule
    from clustercron.zone import Zone

# The calendar's rarest date, a 29 February on a given weekday, comes at least every 40 years.
HORIZON_YEARS = 50
_HORIZON = HORIZON_YEARS * 366 * 1440
# What cron treats as a change of the clock and makes good; beyond it, cron takes the new time and forgets the old.
_LONGEST_SKIP = 180
# A process's start is told in hundredths of a second and cron may wake a little early.
EARLY_MS = 2000
_ON_TIME_MS = 60_000
_WILDCARD_GRACE = 6 * 60
_FIXED_TIME_GRACE = 195 * 60
_LENGTHS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def next_tick(schedule: Schedule, zone: Zone, after: int) -> int | None:
    """Return the first tick later than `after` (epoch seconds); None if there is none within 50 years."""
    minute = after // 60 + 1
    limit = minute + _HORIZON
    while minute <= limit:
        _, end, offset, passed, _ = span = zone.span(minute)
        local = minute + offset
        if not schedule.wildcard:
            if minute == span[0] and _runs_at_change(schedule, span):
                return minute * 60
            local = max(local, passed)
        found = _next_match(schedule, local)
        if found is None:
            return None
        if found - offset < end:
            return (found - offset) * 60 if found - offset <= limit else None
        # No local time from `local` up to `found` matches. Once the clocks can no longer fall back below `local`, go
        # on where they can first reach `found`, past all changes in between.
        minute = max(end, found - zone.highest) if end - minute >= zone.highest - zone.lowest else end
    return None


def previous_tick(schedule: Schedule, zone: Zone, before: int) -> int | None:
    """Return the last tick earlier than `before` (epoch seconds); None if there is none within 50 years."""
    minute = (before - 1) // 60
    limit = minute - _HORIZON
    while minute >= limit:
        start, _, offset, passed, _ = span = zone.span(minute)
        local = minute + offset
        first = start + offset if schedule.wildcard else max(start + offset, passed)
        found = _previous_match(schedule, local)
        if found is None:
            return None
        if found >= first:
            return (found - offset) * 60 if found - offset >= limit else None
        if not schedule.wildcard and _runs_at_change(schedule, span):
            return start * 60
        # The mirror image of the step in `next_tick`.
        far = minute - start >= zone.highest - zone.lowest
        minute = min(start - 1, found - zone.lowest) if far else start - 1
    return None


def latest_tick(schedule: Schedule, zone: Zone, at: int) -> int | None:
    """Return the last tick that is not later than `at` (epoch seconds); None if there is none within 50 years."""
    return previous_tick(schedule, zone, at + 1)


def is_tick(schedule: Schedule, zone: Zone, instant: int) -> bool:
    """Whether an instant (epoch seconds) is a tick; one that is not on a whole minute never is."""
    minute, seconds = divmod(instant, 60)
    if seconds:
        return False
    start, _, offset, passed, _ = span = zone.span(minute)
    local = minute + offset
    if not schedule.wildcard:
        if minute == start and _runs_at_change(schedule, span):
            return True
        if local < passed:
            return False
    return _next_match(schedule, local) == local


def ticks_between(schedule: Schedule, zone: Zone, start: int, end: int) -> Iterator[int]:
    """Yield the ticks from `start` on, before `end` (epoch seconds), in order."""
    tick = next_tick(schedule, zone, start - 1)
    while tick is not None and tick < end:
        yield tick
        tick = next_tick(schedule, zone, tick)


def period(schedule: Schedule, zone: Zone, tick: int) -> int:
    """Return the larger of the gaps to the tick before and the tick after, in seconds; 0 if there is neither."""
    before = previous_tick(schedule, zone, tick)
    after = next_tick(schedule, zone, tick)
    return max(0 if before is None else tick - before, 0 if after is None else after - tick)


def default_grace(schedule: Schedule, random_delay_minutes: int = 0) -> int:
    """Return, in seconds, how late cron itself may start the schedule after a pause.

    Args:
        schedule: a wildcard one is replayed for five minutes, a fixed-time one for three hours; both take a while.
        random_delay_minutes: cronie's RANDOM_DELAY.
    """
    return (_WILDCARD_GRACE if schedule.wildcard else _FIXED_TIME_GRACE) + 60 * random_delay_minutes


class Decision:
    """What a fire is for.

    `kind` is "run", "too-late", "not-due" or "zone-mismatch". `tick` and `late_ms` (negative for a fire that is a
    little early) are the tick it belongs to, None for the last two kinds. `previous` is the latest tick not after the
    fire, `next` the one after that; each is None if there is none within 50 years.
    """

    __slots__ = ("kind", "late_ms", "next", "previous", "tick")

    def __init__(self, kind: str, late_ms: int | None, previous: int | None, following: int | None) -> None:
        self.kind = kind
        belongs = kind in ("run", "too-late")
        self.tick = previous if belongs else None
        self.late_ms = late_ms if belongs else None
        self.previous = previous
        self.next = following

    def __repr__(self) -> str:
        return f"Decision({self.kind}, tick={self.tick}, late_ms={self.late_ms}, next={self.next})"


def tick_for(
    schedule: Schedule,
    zone: Zone,
    fired_at_ms: int,
    grace: int,
    *,
    daemon_zone: Zone | None = None,
    poll: bool = False,
    random_delay_minutes: int = 0,
) -> Decision:
    """Decide which tick a fire serves: the latest one not after it, if the fire is not too late for it.

    Args:
        schedule: the line's schedule.
        zone: the zone of the schedule.
        fired_at_ms: when cron started the line, epoch milliseconds; up to two seconds early still counts.
        grace: how late the fire may be, in seconds.
        daemon_zone: the zone that cron runs in, to tell a line in the wrong zone from a late one. None: not asked.
        poll: the line fires more often than the schedule, so a fire that only cron's own zone explains is no fault.
        random_delay_minutes: cronie's RANDOM_DELAY, which widens the time in which a fire is too late and not astray.
    """
    at = (fired_at_ms + EARLY_MS) // 1000
    tick = latest_tick(schedule, zone, at)
    following = next_tick(schedule, zone, at)
    late_ms = None if tick is None else fired_at_ms - tick * 1000
    if not poll and daemon_zone is not None and (late_ms is None or late_ms > _ON_TIME_MS):
        minute = at - at % 60
        if is_tick(schedule, daemon_zone, minute) and not is_tick(schedule, zone, minute):
            return Decision("zone-mismatch", late_ms, tick, following)
    if late_ms is None:
        kind = "not-due"
    elif late_ms <= grace * 1000:
        kind = "run"
    elif late_ms <= default_grace(schedule, random_delay_minutes) * 1000:
        kind = "too-late"
    else:
        kind = "not-due"
    return Decision(kind, late_ms, tick, following)


def note(schedule: Schedule, zone: Zone, tick: int) -> str | None:
    """Say in a few words what a change of the clocks has to do with a tick; None for an ordinary one."""
    minute = tick // 60
    span = zone.span(minute)
    start, end, offset, passed, jump = span
    local = minute + offset
    if jump > 0:
        skipped = _skipped_matches(schedule, passed, start + offset)
        if skipped and minute == start and not schedule.wildcard and jump <= _LONGEST_SKIP:
            return f"{_clock_list(skipped)} skipped on this day: runs at the change, {_clock(local)}"
        if skipped and (previous_tick(schedule, zone, tick) or tick - 1) < start * 60 <= tick:
            return f"before it, {_clock_list(skipped)} skipped on this day: no run for that"
    if local < passed:
        return f"second of two {_clock(local)} on this day"
    if end - minute < zone.highest - zone.lowest:
        following = zone.span(end)
        if end + following[2] <= local < following[3] and local - following[2] < following[1]:
            second = "" if schedule.wildcard else ": the second does not run"
            return f"first of two {_clock(local)} on this day{second}"
    return None


def utc_text(epoch: int) -> str:
    """Write an instant as `2026-09-17T02:00:00Z`."""
    return f"{_date_time(epoch)}Z"


def local_text(zone: Zone, epoch: int) -> str:
    """Write an instant in a zone's local time with its offset, as `2026-09-17T04:00:00+02:00`."""
    offset = zone.offset_at(epoch)
    minutes, seconds = divmod(abs(offset), 60)
    sign = "-" if offset < 0 else "+"
    odd_seconds = f":{seconds:02}" if seconds else ""
    return f"{_date_time(epoch + offset)}{sign}{minutes // 60:02}:{minutes % 60:02}{odd_seconds}"


def parse_instant(text: str) -> int:
    """Read an instant and return epoch seconds, a fraction cut off. See `parse_instant_ms`."""
    return parse_instant_ms(text) // 1000


def parse_instant_ms(text: str) -> int:
    """Read an instant and return epoch milliseconds.

    Args:
        text: `2026-09-17T02:00:00Z`, the same with `+02:00` for Z, seconds and their fraction optional, a blank for T;
            or `@` and epoch seconds. An instant without Z or offset is refused: its zone would be a guess.

    Raises:
        UsageError: it is none of these, there is no such date, or its year in UTC is not one of 1 to 9999.
    """
    try:
        instant_ms = _parse_instant_ms(text)
    except ValueError:
        raise UsageError(
            f"instant {text!r}: not an instant with its offset from UTC: "
            "write 2026-09-17T02:00:00Z, 2026-09-17T04:00+02:00 or @1789610400"
        ) from None
    if not 1 <= civil(instant_ms // 86_400_000)[0] <= 9999:
        raise UsageError(f"instant {text!r}: not in the years 1 to 9999")
    return instant_ms


def _parse_instant_ms(text: str) -> int:
    if text[:1] == "@":
        negative = text[1:2] == "-"
        seconds, fraction_ms = _read_seconds(text[2:] if negative else text[1:])
        return -(seconds * 1000 + fraction_ms) if negative else seconds * 1000 + fraction_ms
    date, clock = text[:10], text[11:]
    if text[10:11] not in ("T", "t", " ") or date[4] != "-" or date[7] != "-":
        raise ValueError(text)
    year, month, day = _digits(date[:4]), _digits(date[5:7]), _digits(date[8:])
    if not (year and 1 <= month <= 12 and 1 <= day <= _length_of(year, month)):
        raise ValueError(text)
    offset = 0
    if clock[-1:] in ("Z", "z"):
        clock = clock[:-1]
    else:
        at = max(clock.rfind("+"), clock.rfind("-"))
        zone = clock[at + 1 :].replace(":", "", 1)
        if at < 0 or len(zone) not in (2, 4):
            raise ValueError(text)
        hours, minutes = _digits(zone[:2]), _digits(zone[2:] or "00")
        if hours > 23 or minutes > 59:
            raise ValueError(text)
        offset = (hours * 60 + minutes) * (-60 if clock[at] == "-" else 60)
        clock = clock[:at]
    parts = clock.split(":")
    if len(parts) not in (2, 3) or len(parts[0]) != 2 or len(parts[1]) != 2:
        raise ValueError(text)
    hour, minute = _digits(parts[0]), _digits(parts[1])
    second, fraction_ms = _read_seconds(parts[2]) if len(parts) == 3 else (0, 0)
    if hour > 23 or minute > 59 or second > 59 or (len(parts) == 3 and len(parts[2].partition(".")[0]) != 2):
        raise ValueError(text)
    epoch = day_number(year, month, day) * 86400 + hour * 3600 + minute * 60 + second - offset
    return epoch * 1000 + fraction_ms


def _digits(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 12):
        raise ValueError(text)
    return int(text)


def _read_seconds(text: str) -> tuple[int, int]:
    seconds, point, fraction = text.partition(".")
    if point:
        _digits(fraction)
    return _digits(seconds), _digits(f"{fraction}000"[:3])


def _date_time(epoch: int) -> str:
    day, second = divmod(epoch, 86400)
    year, month, day_of_month = civil(day)
    return f"{year:04}-{month:02}-{day_of_month:02}T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"


def _clock(local: int) -> str:
    return f"{local % 1440 // 60:02}:{local % 60:02}"


def _clock_list(locals_: list[int]) -> str:
    """Write local times for a sentence, with the verb: `02:10 and 02:30 are`."""
    clocks = [_clock(local) for local in locals_]
    if len(clocks) == 1:
        return f"{clocks[0]} is"
    if len(clocks) > 3:
        return f"{clocks[0]} to {clocks[-1]} ({len(clocks)} times) are"
    return f"{', '.join(clocks[:-1])} and {clocks[-1]} are"


def _skipped_matches(schedule: Schedule, first: int, end: int) -> list[int]:
    matches = []
    match = _next_match(schedule, first)
    while match is not None and match < end:
        matches.append(match)
        match = _next_match(schedule, match + 1)
    return matches


def _runs_at_change(schedule: Schedule, span: tuple[int, int, int, int, int]) -> bool:
    """Whether rule 4 makes the start of a span a tick of a fixed-time schedule."""
    start, _, offset, passed, jump = span
    if not 0 < jump <= _LONGEST_SKIP:
        return False
    match = _next_match(schedule, passed)
    return match is not None and match < start + offset


def _length_of(year: int, month: int) -> int:
    return 29 if month == 2 and is_leap(year) else _LENGTHS[month]


def _next_match(schedule: Schedule, local: int) -> int | None:
    """Return the first matching local minute not before `local` (minutes from 1970 in local time)."""
    day, minute_of_day = divmod(local, 1440)
    year, month, day_of_month = civil(day)
    if schedule.month_bits >> month & 1:
        # 1970-01-01 was a Thursday.
        days = schedule.days_in((day + 5 - day_of_month) % 7, _length_of(year, month)) >> day_of_month
        if days & 1:
            hour, minute = divmod(minute_of_day, 60)
            hours = schedule.hour_bits >> hour
            if hours & 1:
                minutes = schedule.minute_bits >> minute
                if minutes:
                    return local + _lowest(minutes)
            hours >>= 1
            if hours:
                return day * 1440 + (hour + 1 + _lowest(hours)) * 60 + _lowest(schedule.minute_bits)
        days >>= 1
        if days:
            return (day + 1 + _lowest(days)) * 1440 + _first_time(schedule)
    last_year = year + HORIZON_YEARS + 1
    while True:
        later = schedule.month_bits >> month + 1
        if later:
            month += 1 + _lowest(later)
        else:
            month = _lowest(schedule.month_bits)
            year += 1
            if year > last_year:
                return None
        first = day_number(year, month, 1)
        days = schedule.days_in((first + 4) % 7, _length_of(year, month))
        if days:
            return (first - 1 + _lowest(days)) * 1440 + _first_time(schedule)


def _previous_match(schedule: Schedule, local: int) -> int | None:
    """Return the last matching local minute not after `local` (minutes from 1970 in local time)."""
    day, minute_of_day = divmod(local, 1440)
    year, month, day_of_month = civil(day)
    if schedule.month_bits >> month & 1:
        days = schedule.days_in((day + 5 - day_of_month) % 7, _length_of(year, month))
        if days >> day_of_month & 1:
            hour, minute = divmod(minute_of_day, 60)
            if schedule.hour_bits >> hour & 1:
                minutes = schedule.minute_bits & (2 << minute) - 1
                if minutes:
                    return local - minute + _highest(minutes)
            hours = schedule.hour_bits & (1 << hour) - 1
            if hours:
                return day * 1440 + _highest(hours) * 60 + _highest(schedule.minute_bits)
        days &= (1 << day_of_month) - 1
        if days:
            return (day - day_of_month + _highest(days)) * 1440 + _last_time(schedule)
    last_year = year - HORIZON_YEARS - 1
    while True:
        earlier = schedule.month_bits & (1 << month) - 1
        if earlier:
            month = _highest(earlier)
        else:
            month = _highest(schedule.month_bits)
            year -= 1
            if year < last_year:
                return None
        first = day_number(year, month, 1)
        days = schedule.days_in((first + 4) % 7, _length_of(year, month))
        if days:
            return (first - 1 + _highest(days)) * 1440 + _last_time(schedule)


def _first_time(schedule: Schedule) -> int:
    return _lowest(schedule.hour_bits) * 60 + _lowest(schedule.minute_bits)


def _last_time(schedule: Schedule) -> int:
    return _highest(schedule.hour_bits) * 60 + _highest(schedule.minute_bits)


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _highest(bits: int) -> int:
    return bits.bit_length() - 1
