"""Properties of ticks over all zones, a slow evaluation of the same rules beside them, and how much work an answer is."""

from __future__ import annotations

import random
import sys
import zoneinfo
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import tzdata

from clustercron.schedule import Schedule, parse
from clustercron.tick import _next_match, is_tick, latest_tick, next_tick, note, previous_tick, tick_for, ticks_between
from clustercron.zone import Zone, load, parse_tzif
from tests.cronlab import made_up_zones
from tests.cronlab.schedules import random_schedule, seeded

PACKAGE = Path(tzdata.__path__[0])
BEGIN = int(datetime(2020, 1, 1, tzinfo=UTC).timestamp())
END = int(datetime(2038, 1, 1, tzinfo=UTC).timestamp())
DAY = 86400


def distinct_zones() -> list[str]:
    """One name for each set of rules: the package has many links."""
    by_rules = {(PACKAGE / "zoneinfo" / name).read_bytes(): name for name in (PACKAGE / "zones").read_text().split()}
    return sorted(by_rules.values())


ZONES = distinct_zones()
CHANGING = [name for name in ZONES if load(name).changes(BEGIN, END)]
# One for every kind of change there is: an hour in the night, at midnight, half an hour, two hours, at a quarter to
# three, backwards for a month, without a season, and a whole day.
AWKWARD = [
    "Europe/Amsterdam", "America/New_York", "Asia/Beirut", "Africa/Cairo", "America/Havana", "America/Santiago", "Atlantic/Azores",
    "Australia/Lord_Howe", "Antarctica/Troll", "Pacific/Chatham", "Africa/Casablanca", "Africa/El_Aaiun", "Europe/Dublin",
    "Asia/Gaza", "America/Nuuk", "America/Scoresbysund", "Asia/Almaty", "Antarctica/Casey", "Asia/Tehran", "America/St_Johns",
    "Asia/Kathmandu", "UTC",
]  # fmt: skip


def local_minutes(name: str, begin: int, end: int) -> list[tuple[int, int]]:
    """List (instant, local minute since 1970) for every minute, by zoneinfo."""
    with (PACKAGE / "zoneinfo" / name).open("rb") as file:
        rules = zoneinfo.ZoneInfo.from_file(file)
    listed = []
    for instant in range(begin, end, 60):
        offset = datetime.fromtimestamp(instant, rules).utcoffset()
        assert offset is not None
        listed.append((instant, (instant + int(offset.total_seconds())) // 60))
    return listed


def slow_ticks(schedule: Schedule, listed: list[tuple[int, int]], begin: int) -> list[int]:
    """Evaluate the four rules minute by minute, as they are written."""
    minutes, hours, months = set(schedule.minutes), set(schedule.hours), set(schedule.months)
    days, weekdays = set(schedule.days), set(schedule.weekdays)

    def matches(local: int) -> bool:
        if local % 60 not in minutes or local // 60 % 24 not in hours:
            return False
        date = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=local // 1440)
        both = (date.day in days, date.isoweekday() % 7 in weekdays)
        return date.month in months and (all(both) if schedule.day_rule == "and" else any(both))

    ticks = []
    seen: set[int] = set()
    before = listed[0][1] - 1
    for instant, local in listed:
        due = matches(local)
        if not schedule.wildcard:
            skipped = range(before + 1, local)
            due = due and local not in seen
            due = due or (len(skipped) <= 180 and any(matches(minute) for minute in skipped))
            seen.add(local)
        if due and instant >= begin:
            ticks.append(instant)
        before = local
    return ticks


def windows(name: str, rng: random.Random, count: int) -> list[int]:
    """Choose instants at changes of the zone, and one on an ordinary day."""
    changes = [instant for instant, _ in load(name).changes(BEGIN, END)]
    chosen = rng.sample(changes, min(count, len(changes)))
    return [*chosen, rng.randrange(BEGIN, END, 60)]


@pytest.mark.parametrize("name", [*AWKWARD, "others"])
def test_engine_finds_what_a_minute_by_minute_evaluation_finds(name):
    rng = seeded(name)
    names = rng.sample([zone for zone in CHANGING if zone not in AWKWARD], 12) if name == "others" else [name]
    for zone_name in names:
        zone = load(zone_name)
        for middle in windows(zone_name, rng, 2 if name != "others" else 1):
            begin, end = middle - DAY // 2, middle + DAY
            listed = local_minutes(zone_name, begin - DAY // 4, end)
            for _ in range(40):
                text = random_schedule(rng)
                schedule = parse(text)
                expected = slow_ticks(schedule, listed, begin)
                assert list(ticks_between(schedule, zone, begin, end)) == expected, (text, zone_name, middle)


@pytest.mark.parametrize("kind", made_up_zones.CLOSE_CHANGES)
def test_fixed_times_never_go_back_behind_the_local_time_reached_where_changes_follow_each_other(kind):
    # The rules leave open what a time is that is skipped and then passed after all, or passed and then skipped. cron
    # counts local minutes and never goes back, and the test against it says the same.
    first = int(datetime(2026, 6, 15, 2, tzinfo=UTC).timestamp())
    zone = parse_tzif("made up", made_up_zones.close_changes(kind, first), "test")
    rng = seeded(kind)
    begin, end = first - DAY // 4, first + DAY // 4
    for text in ("30 2 * * *", "0 0-23 * * *", "*/10 * * * *", *(random_schedule(rng) for _ in range(100))):
        schedule = parse(text)
        due = {local for local in range(begin // 60, end // 60 + 180) if _next_match(schedule, local) == local}
        expected = []
        before = reached = begin // 60 + zone.offset_at(begin - 60) // 60
        for instant in range(begin, end, 60):
            local = (instant + zone.offset_at(instant)) // 60
            if schedule.wildcard:
                runs = local in due
            else:
                jump = local - before
                runs = local >= reached and not due.isdisjoint(range(reached if 1 < jump <= 181 else local, local + 1))
            if runs:
                expected.append(instant)
            before, reached = local, max(reached, local + 1)
        assert list(ticks_between(schedule, zone, begin, end)) == expected, text
        check_window(schedule, zone, begin, end)


def test_engine_leaves_out_the_day_that_a_zone_left_out():
    for zone_name, middle in (("Pacific/Apia", 1325239200), ("Pacific/Kwajalein", 745934400), ("Antarctica/Vostok", 760035600), ("Antarctica/Vostok", 783648000)):  # fmt: skip
        listed = local_minutes(zone_name, middle - 3 * DAY, middle + 2 * DAY)
        for text in ("0 12 * * *", "*/20 * * * *", "30 0-23 * * *", "0 0 * * *", "15 3 30-31 * *", "0 */5 30 * 6"):
            schedule = parse(text)
            expected = slow_ticks(schedule, listed, middle - DAY)
            assert list(ticks_between(schedule, load(zone_name), middle - DAY, middle + 2 * DAY)) == expected


def check_window(schedule: Schedule, zone: Zone, begin: int, end: int) -> None:
    forward = list(ticks_between(schedule, zone, begin, end))
    assert all(earlier < later for earlier, later in pairwise(forward))
    assert all(tick % 60 == 0 and begin <= tick < end for tick in forward)
    backward = []
    tick = previous_tick(schedule, zone, end)
    while tick is not None and tick >= begin:
        backward.append(tick)
        tick = previous_tick(schedule, zone, tick)
    assert backward == forward[::-1]
    for tick in forward:
        assert is_tick(schedule, zone, tick)
        assert latest_tick(schedule, zone, tick) == tick
    following = next_tick(schedule, zone, begin - 1)
    if following is not None:
        assert previous_tick(schedule, zone, following + 60) == following
        assert previous_tick(schedule, zone, next_tick(schedule, zone, following) or following + 1) == following


@pytest.mark.parametrize("part", range(4))
def test_ticks_rise_and_read_alike_in_both_directions_around_every_change_of_every_zone(part):
    rng = seeded(str(part))
    fixed = [parse(text) for text in ("30 2 * * *", "0 0 * * *", "*/20 0-4 * * *", "15,45 0-23 * * *")]
    for name in ZONES[part::4]:
        zone = load(name)
        for change, _ in zone.changes(BEGIN, END):
            for schedule in (rng.choice(fixed), parse(random_schedule(rng)), parse(random_schedule(rng))):
                check_window(schedule, zone, change - DAY // 2, change + DAY // 2)
        check_window(parse(random_schedule(rng)), zone, BEGIN, BEGIN + 3 * DAY)


def test_is_tick_agrees_with_the_enumeration_at_every_minute():
    rng = seeded("")
    for name in AWKWARD:
        zone = load(name)
        for middle in windows(name, rng, 1):
            schedule = parse(random_schedule(rng))
            enumerated = set(ticks_between(schedule, zone, middle - 18000, middle + 18000))
            asked = {
                instant for instant in range(middle - 18000, middle + 18000, 60) if is_tick(schedule, zone, instant)
            }
            assert asked == enumerated
            for tick in enumerated:
                said = note(schedule, zone, tick)
                assert said is None or said.isprintable()


def test_far_ticks_are_found_across_changes_in_both_directions():
    rng = seeded("")
    for name in rng.sample(CHANGING, 40):
        zone = load(name)
        for text in ("0 0 29 2 *", "30 2 31 3 *", "0 12 29 2 */7", "5 1 25-31 10 */7", "*/15 0-3 1-7 4 */7"):
            schedule = parse(text)
            start = rng.randrange(BEGIN, END)
            tick = next_tick(schedule, zone, start)
            if tick is None:
                continue
            assert previous_tick(schedule, zone, tick + 1) == tick
            assert (previous_tick(schedule, zone, tick) or 0) <= start
            assert not any(
                is_tick(schedule, zone, instant) for instant in range(tick - tick % DAY, tick, 60) if instant > start
            )


def count_lines(action, *arguments) -> int:
    """Count the lines of the project that a call runs: the same on every machine, unlike its time."""
    lines = 0
    package = str(Path(sys.modules[Schedule.__module__].__file__).parent)

    def trace(frame, event, argument):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(package):
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action(*arguments)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("* * * * *", 500),
        ("30 2 * * *", 500),
        ("0 0 1 1 *", 1000),
        ("59 23 31 12 *", 1000),
        ("0 12 1-7 * 1", 600),
        ("0 0 29 2 *", 1200),
        # A date of once in 28 or 40 years, and one that the zone leaves out every year.
        ("0 0 29 2 */7", 2000),
        ("*/30 2 25-31 3 */7", 30000),
    ],
)
def test_work_of_an_answer_is_bounded_wherever_it_is_asked(text, most):
    rng = random.Random(text)
    schedule = parse(text)
    for name in ("Europe/Amsterdam", "Pacific/Chatham", "Africa/Casablanca", "America/Santiago", "UTC"):
        zone = load(name)
        instants = [rng.randrange(0, 2 * END) for _ in range(5)]
        for change, _ in zone.changes(BEGIN, BEGIN + 3 * 365 * DAY):
            instants += [change - 3600, change - 1, change, change + 1, change + 3600]
        for instant in instants:
            assert count_lines(next_tick, schedule, zone, instant) <= most
            assert count_lines(previous_tick, schedule, zone, instant) <= most
            assert count_lines(is_tick, schedule, zone, instant - instant % 60) <= most
            assert count_lines(tick_for, schedule, zone, instant * 1000, 360) <= 2 * most + 50


def test_work_does_not_grow_with_the_number_of_changes_between():
    schedule, zone = parse("0 12 29 2 *"), load("Europe/Amsterdam")
    dates = ((2024, 3, 1), (2027, 1, 5), (2028, 2, 29))
    begin, middle, noon = (int(datetime(*date, 12, tzinfo=UTC).timestamp()) for date in dates)
    assert len(zone.changes(begin, noon)) == 8
    assert len(zone.changes(middle, noon)) == 2
    assert next_tick(schedule, zone, begin) == next_tick(schedule, zone, middle) == noon - 3600
    # What is left is to pass over the years without a 29 February.
    assert count_lines(next_tick, schedule, zone, begin) < 2 * count_lines(next_tick, schedule, zone, middle)
