"""The schedule language: five cron fields or an alias, read as Debian cron and cronie both read them.

What only one of them accepts, what they read differently, and what never fires is rejected with the field, the fault
and what to write instead. A field is kept as a bit set: the engine in `tick` looks for the next or previous set bit.
"""

from __future__ import annotations

from clustercron.errors import BadSchedule

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_LONGEST = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EVERY_DAY = (2 << 31) - 2
_EVERY_WEEKDAY = 0b1111111
_EVERY_SEVENTH = 1 | 1 << 7 | 1 << 14 | 1 << 21 | 1 << 28
# cron holds a step in a C int and adds it to a value: what does not fit is read differently by each of them.
_LONGEST_NUMBER = 9


class _Field:
    """One of the five columns: its name in messages, its bounds, and the names it knows."""

    __slots__ = ("high", "low", "name", "names")

    def __init__(self, name: str, low: int, high: int, names: tuple[str, ...] = ()) -> None:
        self.name = name
        self.low = low
        self.high = high
        self.names = names


_MINUTE = _Field("minute", 0, 59)
_HOUR = _Field("hour", 0, 23)
_DAY = _Field("day-of-month", 1, 31)
_MONTH = _Field("month", 1, 12, _MONTHS)
_WEEKDAY = _Field("day-of-week", 0, 7, _WEEKDAYS)


class Schedule:
    """A parsed schedule. It never changes after `parse`, and knows nothing of dates or zones.

    `text` is the schedule as given. `wildcard` says that the minute or hour text begins with `*`, which changes what
    happens when the clocks change. `day_rule` is "and" if a day field begins with `*`, else "or". `extended` is None,
    or what only `--poll` allows: the items with L or # of (day of month, day of week).
    """

    __slots__ = (
        "_days_in",
        "day_bits",
        "day_rule",
        "extended",
        "hour_bits",
        "minute_bits",
        "month_bits",
        "text",
        "weekday_bits",
        "wildcard",
    )

    def __init__(
        self,
        text: str,
        bits: tuple[int, int, int, int, int],
        *,
        wildcard: bool,
        day_rule: str,
        extended: tuple[tuple[str, ...], tuple[str, ...]] | None,
    ) -> None:
        self.text = text
        self.minute_bits, self.hour_bits, self.day_bits, self.month_bits, self.weekday_bits = bits
        self.wildcard = wildcard
        self.day_rule = day_rule
        self.extended = extended
        self._days_in: dict[tuple[int, int], int] = {}

    def __repr__(self) -> str:
        return f"Schedule({self.text!r})"

    @property
    def minutes(self) -> tuple[int, ...]:
        """Return the minutes, in order."""
        return _members(self.minute_bits)

    @property
    def hours(self) -> tuple[int, ...]:
        """Return the hours, in order."""
        return _members(self.hour_bits)

    @property
    def days(self) -> tuple[int, ...]:
        """Return the plain days of the month; those of L are in `extended`."""
        return _members(self.day_bits)

    @property
    def months(self) -> tuple[int, ...]:
        """Return the months, January is 1."""
        return _members(self.month_bits)

    @property
    def weekdays(self) -> tuple[int, ...]:
        """Return the plain weekdays, Sunday is 0; those of L and # are in `extended`."""
        return _members(self.weekday_bits)

    def days_in(self, first_weekday: int, length: int) -> int:
        """Return the matching days of a month as a bit set (bit 1 is the 1st), whatever month it is.

        Args:
            first_weekday: the weekday of the 1st, Sunday is 0.
            length: the number of days in the month.
        """
        # There are only 28 kinds of month, so even what croniter has to read is read a few times at most.
        known = self._days_in.get((first_weekday, length))
        if known is None:
            known = self._days_in[first_weekday, length] = self._match_days(first_weekday, length)
        return known

    def _match_days(self, first_weekday: int, length: int) -> int:
        days = self.day_bits
        if self.weekday_bits == _EVERY_WEEKDAY:
            by_weekday = _EVERY_DAY
        else:
            by_weekday = 0
            for weekday in _members(self.weekday_bits):
                by_weekday |= _EVERY_SEVENTH << (1 + (weekday - first_weekday) % 7)
        if self.extended is not None:
            for item in self.extended[0]:
                days |= _days_by_croniter(f"0 0 {item} * *", first_weekday, length)
            for item in self.extended[1]:
                by_weekday |= _days_by_croniter(f"0 0 * * {item}", first_weekday, length)
        both = days & by_weekday if self.day_rule == "and" else days | by_weekday
        return both & ((2 << length) - 2)


def parse(text: str, *, extended: bool = False) -> Schedule:
    """Read a schedule: five fields or an alias.

    Args:
        text: as it stands in the crontab line.
        extended: also take L and # in the day fields, as `--poll` allows.

    Raises:
        BadSchedule: it is not of the language; the message names the field, the fault and what to write.
    """
    columns = _columns(text)
    minute, hour, day, month, weekday = columns
    day_items = _special_items(text, _DAY, day, extended)
    weekday_items = _special_items(text, _WEEKDAY, weekday, extended)
    weekday_bits = _parse_field(text, _WEEKDAY, weekday, weekday_items)
    schedule = Schedule(
        text,
        (
            _parse_field(text, _MINUTE, minute),
            _parse_field(text, _HOUR, hour),
            _parse_field(text, _DAY, day, day_items),
            _parse_field(text, _MONTH, month),
            (weekday_bits | weekday_bits >> 7) & _EVERY_WEEKDAY,
        ),
        wildcard=minute[0] == "*" or hour[0] == "*",
        day_rule="and" if day[0] == "*" or weekday[0] == "*" else "or",
        extended=(day_items, weekday_items) if day_items or weekday_items else None,
    )
    _refuse_impossible_days(schedule)
    return schedule


def _refuse(text: str, reason: str) -> BadSchedule:
    return BadSchedule(f"schedule {text!r}: {reason}")


def _columns(text: str) -> list[str]:
    """Split into five texts, at blanks and tabs only: cron knows no other space."""
    for char in text:
        if not char.isprintable() and char != "\t":
            raise _refuse(text, f"holds {char!r}, which cron takes for no blank: write one line with blanks only")
    columns = [column for column in text.replace("\t", " ").split(" ") if column]
    if not columns:
        raise _refuse(text, "is empty: write five fields, such as 0 2 * * *")
    if columns[0][0] == "@":
        fields = ALIASES.get(columns[0]) if len(columns) == 1 else None
        if fields is None:
            raise _refuse(text, _alias_fault(" ".join(columns)))
        return fields.split(" ")
    if len(columns) != 5:
        count = "1 field" if len(columns) == 1 else f"{len(columns)} fields"
        raise _refuse(
            text, f"{count}, not 5: write minute, hour, day of month, month and day of week, such as 0 2 * * *"
        )
    return columns


def _alias_fault(alias: str) -> str:
    if alias == "@reboot":
        return "@reboot names no time, so no tick to agree on: write five fields"
    if alias.startswith("@every"):
        return "cron does not know @every: write a step, such as */10 * * * *"
    if alias.lower() in ALIASES:
        return f"cron knows aliases in lower case only: write {alias.lower()}"
    return f"{alias} is no alias that every cron knows: write one of {' '.join(ALIASES)}, or five fields"


def _parse_field(text: str, field: _Field, column: str, special: tuple[str, ...] = ()) -> int:
    """Return the bit set of a column, without the items that croniter reads."""
    if column == "*":
        return (2 << field.high) - (1 << field.low)
    bits = 0
    for item in column.split(","):
        if item not in special:
            try:
                bits |= _parse_item(field, item)
            except ValueError as exc:
                raise _refuse(text, f"{field.name}: {exc}") from None
    return bits


def _parse_item(field: _Field, item: str) -> int:
    """Return the bit set of `*`, `N` or `N-M`, the first and last with or without `/S`; ValueError says what is wrong."""
    span, slash, step_text = item.partition("/")
    if span == "*":
        low, high = field.low, field.high
    else:
        first, dash, last = span.partition("-")
        if not first or (dash and not last):
            raise ValueError(_shape_fault(field, item))
        low = high = _parse_value(field, first, item)
        if dash:
            high = _parse_value(field, last, item)
        elif slash:
            raise ValueError(f"a step needs a range: write {low}-{field.high}/{step_text or 'S'}, not {item}")
        if low > high:
            raise ValueError(_backwards_fault(field, low, high, item))
    step = 1
    if slash:
        if not _is_number(step_text):
            raise ValueError(_shape_fault(field, item))
        step = int(step_text.lstrip("0") or "0")
        if step == 0:
            raise ValueError(f"the step of {item} is 0: write 1 or more")
    bits = 0
    for value in range(low, high + 1, step):
        bits |= 1 << value
    return bits


def _is_number(digits: str) -> bool:
    return digits.isascii() and digits.isdigit() and len(digits.lstrip("0")) <= _LONGEST_NUMBER


def _parse_value(field: _Field, word: str, item: str) -> int:
    if _is_number(word):
        value = int(word.lstrip("0") or "0")
        if not field.low <= value <= field.high:
            raise ValueError(f"{value} is not in {field.low}-{field.high}")
        return value
    lowered = word.lower()
    if lowered in field.names:
        return field.names.index(lowered) + field.low
    if lowered.isalpha() and len(lowered) > 3 and lowered[:3] in field.names:
        raise ValueError(f"cron knows {word} by its first three letters only: write {lowered[:3]}")
    raise ValueError(_shape_fault(field, item))


def _shape_fault(field: _Field, item: str) -> str:
    if not item:
        return "nothing between two commas, or at an end: write the values with one comma between them"
    if item == "?":
        return "cron does not know ?: write *"
    if "~" in item:
        return f"{item} would be another time on each node: write a fixed value"
    lowered = item.lower()
    if field in (_DAY, _WEEKDAY) and ("#" in lowered or lowered.strip("0123456789") == "l"):
        return f"cron cannot say {item}: it needs --poll, with a line that fires on every day it may fall on"
    names = f" or a name such as {field.names[0]}" if field.names else ""
    return f"{item!r} is no value, range or step that every cron reads: write *, N, N-M, */S or N-M/S, N in {field.low}-{field.high}{names}"


def _backwards_fault(field: _Field, low: int, high: int, item: str) -> str:
    if "/" in item:
        return f"{item} runs backwards, so cron would never fire it: write two ranges"
    top = 6 if field is _WEEKDAY else field.high
    if field is _WEEKDAY and high == 0:
        instead = f"{low}-7"
    else:
        until_top = f"{low}-{top}" if low < top else f"{top}"
        from_low = f"{field.low}-{high}" if high > field.low else f"{high}"
        instead = f"{field.low}-{high}" if low > top else f"{until_top},{from_low}"
    return f"{item} runs backwards, so cron would never fire it: write {instead}"


def _refuse_impossible_days(schedule: Schedule) -> None:
    """Refuse what no calendar has, such as 30 February, in every year alike."""
    for month in schedule.months:
        longest = _LONGEST[month - 1]
        for length in (28, 29) if month == 2 else (longest,):
            for first_weekday in range(7):
                if schedule.days_in(first_weekday, length):
                    return
    raise _refuse(schedule.text, "day-of-month: no month of this schedule has such a day, so cron would never fire it")


def _special_items(text: str, field: _Field, column: str, extended: bool) -> tuple[str, ...]:
    """Return the items with L or #, checked by croniter; none unless `extended`."""
    if not extended:
        return ()
    items = tuple(item for item in column.split(",") if "#" in item or "l" in item.lower())
    for item in items:
        expression = f"0 0 {item} * *" if field is _DAY else f"0 0 * * {item}"
        if not item.isascii() or not _croniter_reads(expression):
            example = "L" if field is _DAY else "L5 (the last Friday) or 5#2 (the second)"
            raise _refuse(text, f"{field.name}: {item!r} is not readable even with --poll: write {example}")
    return items


def _croniter_reads(expression: str) -> bool:
    from croniter import croniter

    return bool(croniter.is_valid(expression))


def _days_by_croniter(expression: str, first_weekday: int, length: int) -> int:
    """Ask croniter for the days of a month of this kind, in naive local time: the zone's rules are `tick`'s."""
    from datetime import datetime, timedelta

    from croniter import croniter

    year, month = _month_like(first_weekday, length)
    begin = datetime(year, month, 1)  # noqa: DTZ001 - local time; croniter is asked for dates only
    dates = croniter(expression, begin - timedelta(seconds=1), ret_type=datetime)
    bits = 0
    while True:
        date = dates.get_next()
        if (date.year, date.month) != (year, month):
            return bits
        bits |= 1 << date.day


def _month_like(first_weekday: int, length: int) -> tuple[int, int]:
    """Find a month with this length and weekday of the 1st; 28 years hold every kind."""
    from datetime import date, timedelta

    for year in range(2001, 2029):
        for month in range(1, 13):
            begin = date(year, month, 1)
            days = ((begin + timedelta(days=31)).replace(day=1) - begin).days
            if days == length and begin.isoweekday() % 7 == first_weekday:
                return year, month
    raise ValueError(f"no month has {length} days")


def _members(bits: int) -> tuple[int, ...]:
    return tuple(value for value in range(bits.bit_length()) if bits >> value & 1)
