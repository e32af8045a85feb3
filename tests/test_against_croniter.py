"""Our ticks beside croniter's: where they differ, it is for a reason that is known."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import pytest
import tzdata
from croniter import CroniterBadDateError, croniter

from clustercron.schedule import parse
from clustercron.tick import ticks_between
from clustercron.zone import load
from tests.cronlab.schedules import random_schedule, seeded

if TYPE_CHECKING:
    import random

    from clustercron.schedule import Schedule
    from clustercron.zone import Zone

BEGIN = int(datetime(2020, 1, 1, tzinfo=UTC).timestamp())
END = int(datetime(2038, 1, 1, tzinfo=UTC).timestamp())
DAY = 86400
MOST_TICKS = 150
ZONES = [
    "Europe/Amsterdam", "America/New_York", "Africa/Cairo", "Asia/Beirut", "America/Havana", "America/Santiago",
    "Australia/Lord_Howe", "Antarctica/Troll", "Pacific/Chatham", "Africa/Casablanca", "Asia/Kolkata", "UTC",
]  # fmt: skip

# Why the two differ. A difference that is none of these is a fault of ours, or something new in croniter.
KINDS = {
    "second pass of a fixed time": "croniter runs `30 2 * * *` in both passes of a repeated hour",
    "skipped wildcard time is moved": "croniter runs `*/30 2 * * *` at the end of the gap; cron not at all",
    "a pass of a wildcard time is lost": "croniter misses one where the change is not of a whole hour",
    "equal range is the whole field": "croniter reads 3-3 as *",
    "full list is a star": "croniter takes 0-6 or 5,* for *, which turns the day rule",
}


def croniter_ticks(text: str, zone_name: str, begin: int, end: int) -> set[int]:
    with (Path(tzdata.__path__[0]) / "zoneinfo" / zone_name).open("rb") as file:
        rules = ZoneInfo.from_file(file, key=zone_name)
    # Alone with this is the day rule that of cron.
    dates = croniter(text, datetime.fromtimestamp(begin - 1, rules), ret_type=float, implement_cron_bug=True)
    found: set[int] = set()
    try:
        while (instant := int(dates.get_next())) < end:
            found.add(instant)
    except CroniterBadDateError:
        pass  # nothing in fifty years
    return found


def kind_of(schedule: Schedule, zone: Zone, instant: int, ours: bool) -> str | None:
    """Say why only one of the two has an instant; None if there is no known reason."""
    minute = instant // 60
    start, end, offset, passed, jump = zone.span(minute)
    local = minute + offset
    if not schedule.wildcard:
        return "second pass of a fixed time" if not ours and local < passed else None
    if jump > 0 and minute - start <= jump and not ours:
        return "skipped wildcard time is moved"
    following = zone.span(end)
    repeated = local < passed or (end - minute <= -following[4] and local >= end + following[2])
    if ours and repeated:
        return "a pass of a wildcard time is lost"
    return None


def kind_of_text(text: str) -> str | None:
    """Say what croniter reads differently in the fields themselves, on every day; None if nothing."""
    for field, low, high in zip(text.lower().split(), (0, 0, 1, 1, 0), (59, 23, 31, 12, 6), strict=True):
        for item in field.split(","):
            first, dash, last = item.partition("/")[0].partition("-")
            if dash and values_of(first, low, high) == values_of(last, low, high):
                return "equal range is the whole field"
        full = len(values_of(field, low, high)) == high - low + 1
        if full and field != "*":
            return "full list is a star"
    return None


def values_of(field: str, low: int, high: int) -> set[int]:
    column = {(0, 59): 0, (0, 23): 1, (1, 31): 2, (1, 12): 3, (0, 6): 4}[low, high]
    fields = ["*"] * 5
    fields[column] = field
    schedule = parse(" ".join(fields))
    return set((schedule.minutes, schedule.hours, schedule.days, schedule.months, schedule.weekdays)[column])


def compare(zone_name: str, rng: random.Random, count: int) -> Counter[str]:
    zone = load(zone_name)
    changes = [instant for instant, _ in zone.changes(BEGIN, END)]
    kinds: Counter[str] = Counter()
    done = 0
    while done < count:
        middle = rng.choice(changes) if changes and rng.random() < 0.7 else rng.randrange(BEGIN, END, 60)
        begin, end = middle - DAY // 2, middle + DAY // 2
        text = random_schedule(rng)
        schedule = parse(text)
        ours = set(ticks_between(schedule, zone, begin, end))
        reading = kind_of_text(text)
        if not ours or len(ours) > MOST_TICKS or (reading is not None and rng.random() < 0.8):
            continue
        done += 1
        theirs = croniter_ticks(text, zone_name, begin, end)
        for instant in ours ^ theirs:
            kind = reading or kind_of(schedule, zone, instant, instant in ours)
            assert kind is not None, (text, zone_name, datetime.fromtimestamp(instant, UTC), instant in ours)
            kinds[kind] += 1
    return kinds


@pytest.mark.parametrize("zone_name", ZONES)
def test_croniter_differs_for_known_reasons_only(zone_name, record_property):
    kinds = compare(zone_name, seeded(zone_name), 250)
    record_property("kinds", dict(kinds))
    print(dict(kinds))
    assert set(kinds) <= set(KINDS)
    if zone_name == "UTC":
        assert not set(kinds) - {"equal range is the whole field", "full list is a star"}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("zone_name", ZONES)
def test_croniter_differs_for_known_reasons_only_for_long(zone_name):
    print(dict(compare(zone_name, seeded(f"long {zone_name}"), 3000)))


@pytest.mark.parametrize(
    ("text", "zone_name", "day", "kinds"),
    [
        ("30 2 * * *", "Europe/Amsterdam", "2026-10-25", {"second pass of a fixed time"}),
        ("30 2 * * *", "Europe/Amsterdam", "2026-03-29", set()),
        ("10,30 2 * * *", "Europe/Amsterdam", "2026-03-29", set()),
        ("*/30 2 * * *", "Europe/Amsterdam", "2026-03-29", {"skipped wildcard time is moved"}),
        ("*/30 2 * * *", "Europe/Amsterdam", "2026-10-25", set()),
        ("30 2 * * *", "Europe/Amsterdam", "2026-07-01", set()),
        ("0 6 */2 * 5", "UTC", "2026-07-03", set()),
    ],
)
def test_each_difference_is_what_we_take_it_for(text, zone_name, day, kinds):
    schedule, zone = parse(text), load(zone_name)
    begin = int(datetime.fromisoformat(f"{day}T00:00Z").timestamp()) - DAY // 2
    ours = set(ticks_between(schedule, zone, begin, begin + 2 * DAY))
    theirs = croniter_ticks(text, zone_name, begin, begin + 2 * DAY)
    assert {kind_of(schedule, zone, instant, instant in ours) for instant in ours ^ theirs} == kinds
