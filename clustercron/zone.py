"""Time zones: when a zone's UTC offset changes, read from TZif files, with their rule for the years after the table.

A zone is seen as spans of whole minutes with one offset each. Inside a span local time is linear, which is all that
the engine in `tick` needs. Nothing here falls back to UTC, to the node's own zone or to another source of rules.
"""

from __future__ import annotations

import os

from clustercron.errors import BadZone
from clustercron.files import read_regular

SYSTEM_DIRS = ("/usr/share/zoneinfo", "/usr/lib/zoneinfo", "/usr/share/lib/zoneinfo", "/etc/zoneinfo")
# In a system's directory these mean the node's own zone, which a schedule must never depend on.
_NODE_DEPENDENT = ("localtime", "posixrules")
_ALWAYS = 1 << 60
_NAME_CHARS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_+-/")
_DAYS_BEFORE = (0, 0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)


def day_number(year: int, month: int, day: int) -> int:
    """Return the days from 1970-01-01 to a date of the Gregorian calendar."""
    before = year - 1
    leap_day = month > 2 and is_leap(year)
    return 365 * before + before // 4 - before // 100 + before // 400 + _DAYS_BEFORE[month] + leap_day + day - 719163


def civil(day: int) -> tuple[int, int, int]:
    """Return the year, month and day of the month of a day counted from 1970-01-01."""
    shifted = day + 719468  # from 0000-03-01: a leap day ends its year
    era, of_era = divmod(shifted, 146097)
    year_of_era = (of_era - of_era // 1460 + of_era // 36524 - of_era // 146096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted_month = (5 * of_year + 2) // 153
    month = shifted_month + 3 if shifted_month < 10 else shifted_month - 9
    return year_of_era + 400 * era + (month <= 2), month, of_year - (153 * shifted_month + 2) // 5 + 1


def is_leap(year: int) -> bool:
    """Whether a year of the Gregorian calendar has a 29 February."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


class Zone:
    """The UTC offsets of a zone over all time, a value that depends on its rules alone.

    `rules_version` says where the rules come from ("2026f", "system 2024a", "file", ...). `lowest` and `highest` bound
    its offsets, in minutes. Offsets count as positive east of Greenwich.
    """

    __slots__ = (
        "_footer",
        "_last_span",
        "_offsets",
        "_starts",
        "_windows",
        "highest",
        "lowest",
        "name",
        "rules_version",
    )

    def __init__(
        self, name: str, rules_version: str, starts: list[int], offsets: list[int], footer: _Footer | None
    ) -> None:
        """Take the table: `starts` in minutes of UTC, `offsets` in seconds, the first one from before the first start."""
        self.name = name
        self.rules_version = rules_version
        self._starts = starts
        self._offsets = offsets
        self._footer = footer if footer is not None and footer.start is not None else None
        self._windows: dict[int, tuple[list[int], list[int]]] = {}
        self._last_span = (0, 0, 0, 0, 0)
        known = [*offsets, footer.standard, footer.summer] if footer is not None else offsets
        self.lowest = min(known) // 60
        self.highest = max(known) // 60

    def __repr__(self) -> str:
        return f"Zone({self.name!r}, {self.rules_version!r})"

    def offset_at(self, utc: int) -> int:
        """Return the offset from UTC, in seconds, at an instant in epoch seconds."""
        starts, offsets = self._table_at(utc // 60)
        return offsets[_count_until(starts, utc // 60)]

    def span(self, minute: int) -> tuple[int, int, int, int, int]:
        """Return the span of one offset that holds a minute of UTC: (start, end, offset, passed, jump), all in minutes.

        The span is `start <= minute < end`. `passed` is the local time that the zone had reached before the span: local
        times below it are repeated, and those from it up to the span's first one are skipped. `jump` is how far the
        clocks were set forward at `start`, negative for back, 0 where the zone's history begins.
        """
        span = self._last_span
        if span[0] <= minute < span[1]:
            return span
        starts, offsets = self._table_at(minute)
        index = _count_until(starts, minute)
        offset = offsets[index] // 60
        end = starts[index] if index < len(starts) else _ALWAYS
        if index == 0:
            span = (-_ALWAYS, end, offset, -_ALWAYS, 0)
        else:
            start = starts[index - 1]
            before = offsets[index - 1] // 60
            passed = start + before
            # Changes that follow each other closely: the local time passed may be that of an earlier one.
            earlier = index - 2
            while earlier >= 0 and starts[earlier] > start - (self.highest - self.lowest):
                passed = max(passed, starts[earlier] + offsets[earlier] // 60)
                earlier -= 1
            span = (start, end, offset, passed, offset - before)
        self._last_span = span
        return span

    def changes(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return (instant in epoch seconds, new offset in seconds) of each change from `begin` up to before `end`."""
        found = []
        minute = self.span(-(-begin // 60) - 1)[1]
        while minute * 60 < end:
            found.append((minute * 60, self.offset_at(minute * 60)))
            minute = self.span(minute)[1]
        return found

    def _table_at(self, minute: int) -> tuple[list[int], list[int]]:
        """Return starts and offsets that are right from a year before the minute's year to a year after it."""
        if self._footer is None or (self._starts and minute < self._starts[-1]):
            return self._starts, self._offsets
        year = civil(minute // 1440)[0]
        window = self._windows.get(year)
        if window is None:
            window = self._windows[year] = self._extend_table(self._footer, year)
        return window

    def _extend_table(self, footer: _Footer, year: int) -> tuple[list[int], list[int]]:
        # The table's own end is kept, so that a span does not start where the footer's rule takes over.
        table_end = self._starts[-1] if self._starts else -_ALWAYS
        starts = self._starts[-4:]
        offsets = self._offsets[-1 - len(starts) :]
        coming = footer.changes_near(year, table_end)
        if civil(table_end // 1440)[0] < year - 1 and coming:
            starts, offsets = [], [footer.changes(year - 2)[-1][1]]
        for start, offset in coming:
            _append_change(starts, offsets, start, offset)
        return starts, offsets


class _Footer:
    """The rule of a POSIX TZ text such as `CET-1CEST,M3.5.0,M10.5.0/3`; offsets in seconds."""

    __slots__ = ("end", "standard", "start", "summer")

    def __init__(self, text: str) -> None:
        """Read the text; ValueError if it is not one."""
        rest = _skip_abbreviation(text)
        west, rest = _read_clock(rest, 24)
        self.standard = self.summer = -west
        self.start: tuple[str, int, int, int, int] | None = None
        self.end: tuple[str, int, int, int, int] | None = None
        if not rest:
            return
        rest = _skip_abbreviation(rest)
        self.summer = self.standard + 3600
        if rest and rest[0] != ",":
            west, rest = _read_clock(rest, 24)
            self.summer = -west
        # POSIX leaves the dates open where none are given; libc reads those of the United States.
        dates = rest[1:].split(",") if rest else ["M3.2.0", "M11.1.0"]
        if len(dates) != 2:
            raise ValueError(text)
        self.start, self.end = _read_date(dates[0]), _read_date(dates[1])
        if self.changes(2001)[-1][0] == self.changes(2002)[0][0]:
            # Each summer begins as the last one ends: this is how permanent summer time is written.
            self.standard, self.start, self.end = self.summer, None, None

    def changes(self, year: int) -> list[tuple[int, int]]:
        """Return (minute of UTC, new offset) of the two changes of a year, in order."""
        if self.start is None or self.end is None:
            return []
        to_summer = (_instant_of(self.start, year) - self.standard, self.summer)
        to_standard = (_instant_of(self.end, year) - self.summer, self.standard)
        return [(-(-instant // 60), offset) for instant, offset in sorted((to_summer, to_standard))]

    def changes_near(self, year: int, after: int) -> list[tuple[int, int]]:
        """Return the changes of a year and its neighbours that come after a minute of UTC."""
        return [change for near in (year - 1, year, year + 1) for change in self.changes(near) if change[0] > after]


def _skip_abbreviation(text: str) -> str:
    if text[:1] == "<":
        name, _, rest = text[1:].partition(">")
        letters = name.replace("+", "").replace("-", "")
        if not letters.isalnum():
            raise ValueError(text)
        return rest
    length = 0
    while length < len(text) and text[length].isascii() and text[length].isalpha():
        length += 1
    if length < 3:
        raise ValueError(text)
    return text[length:]


def _read_clock(text: str, most_hours: int) -> tuple[int, str]:
    """Read `[+-]h[h[h]][:mm[:ss]]` at the front; return seconds and the rest of the text."""
    sign = -1 if text[:1] == "-" else 1
    index = 1 if text[:1] in ("+", "-") else 0
    seconds = 0
    for unit, most in ((3600, most_hours), (60, 59), (1, 59)):
        begin = index
        while index < len(text) and text[index].isascii() and text[index].isdigit():
            index += 1
        if not begin < index <= begin + 3 or int(text[begin:index]) > most:
            raise ValueError(text)
        seconds += unit * int(text[begin:index])
        if text[index : index + 1] != ":" or unit == 1:
            break
        index += 1
    return sign * seconds, text[index:]


def _read_date(text: str) -> tuple[str, int, int, int, int]:
    """Read `Mm.w.d`, `Jn` or `n`, with or without `/time`; return (kind, three numbers, seconds of the day)."""
    date, slash, clock = text.partition("/")
    seconds, rest = _read_clock(clock, 167) if slash else (7200, "")
    if rest:
        raise ValueError(text)
    if date[:1] == "M":
        month, week, weekday = (int(part) for part in date[1:].split("."))
        if not (1 <= month <= 12 and 1 <= week <= 5 and 0 <= weekday <= 6):
            raise ValueError(text)
        return "M", month, week, weekday, seconds
    kind, day = ("J", int(date[1:])) if date[:1] == "J" else ("n", int(date))
    if not (kind == "J") <= day <= 365:
        raise ValueError(text)
    return kind, day, 0, 0, seconds


def _instant_of(date: tuple[str, int, int, int, int], year: int) -> int:
    """Return the seconds of a rule's date and time in a year, as if local time were UTC."""
    kind, first, week, weekday, seconds = date
    if kind == "M":
        day = day_number(year, first, 1)
        day += (weekday - (day + 4)) % 7 + 7 * (week - 1)
        end = day_number(year + first // 12, first % 12 + 1, 1)
        while day >= end:
            day -= 7
    elif kind == "J":  # counts without 29 February
        day = day_number(year, 1, 1) + first - 1 + (is_leap(year) and first > 59)
    else:
        day = day_number(year, 1, 1) + first
    return day * 86400 + seconds


def _append_change(starts: list[int], offsets: list[int], start: int, offset: int) -> None:
    """Add a change to a table, unless it changes the abbreviation or the season's name only."""
    if starts and start == starts[-1]:
        starts.pop()
        offsets.pop()
    if offset != offsets[-1]:
        starts.append(start)
        offsets.append(offset)


def _count_until(starts: list[int], minute: int) -> int:
    """Return how many starts are not after the minute."""
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        if starts[middle] <= minute:
            low = middle + 1
        else:
            high = middle
    return low


def parse_tzif(name: str, data: bytes, rules_version: str) -> Zone:
    """Read a TZif file (RFC 8536): version 2 or newer with its footer, or version 1 for the years it holds.

    Raises:
        BadZone: it is no TZif file, is cut off, or counts leap seconds (then its instants are not POSIX time).
    """
    try:
        return _parse_tzif(name, data, rules_version)
    except (ValueError, IndexError):
        raise BadZone(f"zone {name!r}: its rules cannot be read: damaged TZif data") from None


def _parse_tzif(name: str, data: bytes, rules_version: str) -> Zone:
    if data[:4] != b"TZif":
        raise BadZone(f"zone {name!r}: its rules cannot be read: not a TZif file")
    width, begin = 4, 0
    if data[4:5] >= b"2":
        width, begin = 8, 44 + _block_length(data, 0, 4)
    leaps, count, kinds = _numbers(data, begin + 28, 3, 4)
    if leaps:
        raise BadZone(f"zone {name!r}: its rules count leap seconds, which neither cron nor Redis does")
    times_at = begin + 44
    index_at = times_at + width * count
    kinds_at = index_at + count
    end = begin + 44 + _block_length(data, begin, width)
    if not kinds or len(data) < end:
        raise ValueError(name)
    kind_offsets = [
        int.from_bytes(data[at : at + 4], "big", signed=True) for at in range(kinds_at, kinds_at + 6 * kinds, 6)
    ]
    starts: list[int] = []
    offsets = [kind_offsets[0]]
    times = _numbers(data, times_at, count, width)
    for time, kind in zip(times, data[index_at:kinds_at], strict=True):
        _append_change(starts, offsets, -(-time // 60), kind_offsets[kind])
    footer = None
    if width == 8:
        text = data[end:].decode("ascii")
        if len(text) < 2 or text[0] != "\n" or text[-1] != "\n":
            raise ValueError(name)
        text = text[1:-1]
        footer = _Footer(text) if text else None
    if footer is not None and footer.start is None and footer.standard != offsets[-1]:
        raise ValueError(name)
    if footer is not None and times:
        # The last entries may keep the offset, and hold the rule off all the same. With the rule's next changes the table
        # ends where it seems to.
        end = -(-times[-1] // 60)
        for start, offset in footer.changes_near(civil(end // 1440)[0], end):
            _append_change(starts, offsets, start, offset)
    return Zone(name, rules_version, starts, offsets, footer)


def _numbers(data: bytes, at: int, count: int, width: int) -> list[int]:
    from_bytes = int.from_bytes
    end = at + count * width
    if end > len(data):
        raise ValueError("cut off")
    return [from_bytes(data[here : here + width], "big", signed=True) for here in range(at, end, width)]


def _block_length(data: bytes, begin: int, width: int) -> int:
    utc_marks, standard_marks, leaps, times, kinds, letters = _numbers(data, begin + 20, 6, 4)
    if min(utc_marks, standard_marks, leaps, times, kinds, letters) < 0:
        raise ValueError("negative count")
    return times * (width + 1) + kinds * 6 + letters + leaps * (width + 4) + standard_marks + utc_marks


def load(name: str, source: str = "package") -> Zone:
    """Load a zone by its IANA name, from the tzdata package or, with source "system", from the machine's own files.

    Raises:
        BadZone: no such zone in that source; the nearest names are in the hint. Never another source instead.
    """
    directory, version = _rules_directory(name, source)
    path = f"{directory}/{name}"
    data = _read_file(path) if _is_name(name) else None
    if data is None and _is_name(name) and os.path.isfile(path):
        raise BadZone(f"zone {name!r}: its rules cannot be read: {path}: not readable for this user")
    if data is None or data[:4] != b"TZif":
        raise BadZone(f"zone {name!r}: unknown time zone", _nearest_names(name, directory))
    return parse_tzif(name, data, version)


def _rules_directory(name: str, source: str) -> tuple[str, str]:
    """Return the directory of a source's rules and their version."""
    if source == "package":
        try:
            import tzdata  # type: ignore[import-untyped]
        except ImportError:
            raise BadZone(
                f"zone {name!r}: no zone rules: the Python package tzdata is not installed",
                "install it, or set CLUSTERCRON_TZDATA=system on every node",
            ) from None
        return f"{tzdata.__path__[0]}/zoneinfo", tzdata.IANA_VERSION
    if source != "system":
        raise BadZone(f"zone {name!r}: {source!r} is no source of zone rules: write package or system")
    directory = next((path for path in SYSTEM_DIRS if os.path.isdir(path)), None)
    if directory is None:
        raise BadZone(
            f"zone {name!r}: no zone rules on this machine: none of {' '.join(SYSTEM_DIRS)}",
            "install the system's tzdata package, or leave CLUSTERCRON_TZDATA unset",
        )
    return directory, f"system {_system_version(directory)}"


def _is_name(name: str) -> bool:
    """Whether a text can name a zone at all: relative, without dots, and not the node's own zone."""
    return (
        _NAME_CHARS.issuperset(name)
        and "" not in name.split("/")
        and name not in _NODE_DEPENDENT
        and not name.startswith(("right/", "posix/"))
    )


def _read_file(path: str, most: int = 1 << 20) -> bytes | None:
    """Return a file's bytes, the first `most` of them; None where there is no readable file."""
    try:
        return read_regular(path, most)
    except (OSError, ValueError):
        return None


def _system_version(directory: str) -> str:
    first_line = (_read_file(f"{directory}/tzdata.zi", 100) or b"").partition(b"\n")[0].split()
    if len(first_line) == 3 and first_line[1] == b"version":
        return first_line[2].decode("ascii", "replace")
    return (_read_file(f"{directory}/+VERSION") or b"unknown").decode("ascii", "replace").strip()


def _nearest_names(name: str, directory: str) -> str:
    """Return a hint with the known names nearest to a wrong one."""
    from difflib import get_close_matches

    known = {}
    for root, _, files in os.walk(directory):
        for file in files:
            path = os.path.relpath(os.path.join(root, file), directory)
            if _is_name(path):
                known[path.lower()] = path
    wanted = name.lower().replace(" ", "_")
    cities = {path.rpartition("/")[2]: path for path in known}
    if exact := known.get(wanted) or known.get(cities.get(wanted.rpartition("/")[2], "")):
        return f"did you mean {exact}?"
    near = [known[path] for path in get_close_matches(wanted, known, 3, 0.75)]
    near += [known[cities[city]] for city in get_close_matches(wanted.rpartition("/")[2], cities, 3, 0.75)]
    unique = list(dict.fromkeys(near))[:3]
    if not unique:
        return "write an IANA name such as Europe/Amsterdam, or UTC"
    return f"did you mean {' or '.join(unique)}?"


def daemon_zone(spec: str | None, localtime_path: str = "/etc/localtime") -> Zone:
    """Find the zone in which this node's cron runs, read as libc reads it.

    Args:
        spec: what CLUSTERCRON_DAEMON_TZ, or cronie's CRON_TZ, says: an IANA name, a path or a POSIX rule, with or
            without a colon before it. None, or empty: the machine's own zone.
        localtime_path: the machine's own zone, read as a file (it may be a copy and have no name). A missing file is
            UTC, as for libc.

    Raises:
        BadZone: `spec` is none of these, or the file cannot be read.
    """
    if not spec:
        data = _read_file(localtime_path)
        if data is not None:
            return parse_tzif(_localtime_name(localtime_path), data, "file")
        if os.path.exists(localtime_path):
            raise BadZone(f"zone of cron: {localtime_path}: it cannot be read")
        return _fixed_zone("UTC", "UTC0")
    wanted = spec[1:] if spec[0] == ":" else spec
    if wanted[:1] == "/":
        data = _read_file(wanted)
        if data is None:
            raise BadZone(f"zone of cron: {wanted}: no such readable file")
        return parse_tzif(wanted, data, "file")
    # The daemon reads the system's rules; a slim image may have none, and then its libc knows UTC alone.
    for source in ("system", "package"):
        try:
            return load(wanted, source)
        except BadZone as exc:
            fault = exc
    try:
        return _fixed_zone(wanted, wanted)
    except ValueError:
        raise BadZone(f"zone of cron: {fault.message}", fault.hint) from None


def _fixed_zone(name: str, rule: str) -> Zone:
    footer = _Footer(rule)
    return Zone(name, "rule", [], [footer.standard], footer)


def _localtime_name(path: str) -> str:
    """Return the name that a link to a zone file shows, else the path itself."""
    target = os.path.realpath(path)
    name = target.partition("/zoneinfo/")[2]
    return name if name and _is_name(name) else path


def offsets_fingerprint(zone: Zone, tick: int) -> str:
    """Return a short text that is the same on two nodes exactly if their zone rules agree around a tick.

    It names the tick's calendar year in UTC and covers the offsets from the year before to the year after, so that
    nodes with different versions of the rules differ only where the versions do.
    """
    from binascii import crc32

    year = civil(tick // 86400)[0]
    begin, end = day_number(year - 1, 1, 1) * 86400, day_number(year + 2, 1, 1) * 86400
    parts = [f"{zone.offset_at(begin)}"]
    parts += [f"{instant}:{offset}" for instant, offset in zone.changes(begin + 1, end)]
    return f"{year}:{crc32(' '.join(parts).encode()):08x}"
