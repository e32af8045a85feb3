"""The real Debian cron fires exactly the ticks, around changes of the clocks and on ordinary days, in both directions."""

from __future__ import annotations

import subprocess
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tzdata

from clustercron.schedule import parse
from clustercron.tick import default_grace, is_tick, tick_for, ticks_between
from clustercron.zone import load, parse_tzif
from tests.cronlab import made_up_zones, virtual_cron
from tests.cronlab.schedules import random_schedule, seeded

if TYPE_CHECKING:
    import random

    from clustercron.zone import Zone

pytestmark = pytest.mark.root

RULES = Path(tzdata.__path__[0]) / "zoneinfo"
BEGIN = int(datetime(2020, 1, 1, tzinfo=UTC).timestamp())
END = int(datetime(2038, 1, 1, tzinfo=UTC).timestamp())
DAY = 86400
ZONES = [
    "Europe/Amsterdam", "America/New_York", "Europe/Dublin", "Asia/Beirut", "Africa/Cairo", "America/Havana", "America/Santiago",
    "Australia/Lord_Howe", "Antarctica/Troll", "Pacific/Chatham", "Africa/Casablanca", "Asia/Gaza", "America/St_Johns", "Asia/Kolkata",
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def nothing_is_missing() -> None:
    assert virtual_cron.missing() is None, virtual_cron.missing()


@pytest.fixture
def cron(tmp_path):
    return virtual_cron.VirtualCron(tmp_path)


def catch_ups(zone: Zone, fired: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Find when cron was making good what a change skipped: (the change, until when).

    It rests ten seconds after each skipped minute that has lines, so these fires are off the second of the others.
    """
    if not fired:
        return []
    second = Counter(instant % 60 for instant, _ in fired).most_common(1)[0][0]
    found = []
    for change, _ in zone.changes(begin, end):
        if zone.span(change // 60)[4] > 0:
            until = change + 60
            for instant, _ in fired:
                if change <= instant < until and instant % 60 != second:
                    until = instant - instant % 60 + 120
            found.append((change, until))
    return found


def light_schedule(rng: random.Random, zone: Zone, begin: int, end: int) -> str:
    """Write a schedule of few ticks: every fire costs two forks."""
    while True:
        text = random_schedule(rng)
        if len(list(ticks_between(parse(text), zone, begin, end))) <= 120:
            return text


def compare(cron: virtual_cron.VirtualCron, zone: Zone, rules: Path, texts: list[str], begin: int, end: int) -> int:
    """Hold every fire against our ticks, and every tick against the fires; return the number of fires."""
    zone_name = zone.name
    schedules = [parse(text) for text in texts]
    # Lines for skipped times are fired ten seconds apart: the daemon gets an hour more than is compared.
    fired = cron.fires(texts, rules, begin, end + 3600)
    catching_up = catch_ups(zone, fired, begin, end + 3600)
    served: list[Counter[int]] = [Counter() for _ in schedules]
    for instant, index in fired:
        schedule = schedules[index]
        told = (texts[index], zone_name, datetime.fromtimestamp(instant, UTC))
        decision = tick_for(schedule, zone, instant * 1000 + 350, default_grace(schedule), daemon_zone=zone)
        if any(change <= instant <= until for change, until in catching_up):
            # A daemon that still has less than six skipped minutes to go takes them for a short pause of its own, and
            # fires wildcard lines for them too: a second fire for the tick before, or one for no tick at all.
            assert decision.kind == "run" or schedule.wildcard, told
        else:
            assert decision.kind == "run", told
            assert decision.late_ms < 60_000, told
        if decision.kind == "run":
            assert is_tick(schedule, zone, decision.tick), told
            served[index][decision.tick] += 1
    for text, schedule, ticks in zip(texts, schedules, served, strict=True):
        told = (text, zone_name, begin)
        # The daemon does not fire the minute in which it starts.
        ours = set(ticks_between(schedule, zone, begin + 1, end))
        assert {tick for tick in ticks if tick < end} <= ours, told
        for tick, times in ticks.items():
            assert times == 1 or any(change - 360 <= tick <= until for change, until in catching_up), told
        for change, until in catching_up:
            # What falls due meanwhile is fired late, at times after the line's next tick: then that one has two fires.
            due = {tick for tick in ours if change <= tick <= until}
            assert max(due, default=0) in {0, *ticks}, told
            assert sum(ticks[tick] for tick in due) >= len(due), told
            ours -= due
        assert ours <= set(ticks), told
    return len(fired)


def compare_randomly(cron: virtual_cron.VirtualCron, zone_name: str, rng: random.Random, rounds: int) -> int:
    zone = load(zone_name)
    changes = [instant for instant, _ in zone.changes(BEGIN, END)]
    fires = 0
    for _ in range(rounds):
        for middle in (*rng.sample(changes, min(2, len(changes))), rng.randrange(BEGIN, END, 60)):
            begin = middle - rng.randrange(2, 20) * 3600
            end = begin + DAY + DAY // 4
            texts = [light_schedule(rng, zone, begin, end) for _ in range(25)]
            fires += compare(cron, load(zone_name), RULES / zone_name, texts, begin, end)
    return fires


@pytest.mark.parametrize("zone_name", ZONES)
def test_debian_cron_fires_exactly_the_ticks(cron, zone_name):
    assert compare_randomly(cron, zone_name, seeded(zone_name), 1) > 100


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("zone_name", ZONES)
def test_debian_cron_fires_exactly_the_ticks_for_long(cron, zone_name):
    assert compare_randomly(cron, zone_name, seeded(f"long {zone_name}"), 60) > 2000


@pytest.mark.parametrize(
    ("zone_name", "day"),
    [
        ("Europe/Amsterdam", "2026-03-29"),
        ("Europe/Amsterdam", "2026-10-25"),
        ("Pacific/Chatham", "2026-09-27"),
        ("Antarctica/Troll", "2026-03-29"),
        ("Asia/Beirut", "2026-03-29"),
        ("Asia/Almaty", "2024-03-01"),
        ("Pacific/Apia", "2011-12-30"),
        ("UTC", "2026-06-15"),
    ],
)
def test_debian_cron_fires_exactly_the_ticks_of_well_known_lines(cron, zone_name, day):
    texts = [
        "30 2 * * *", "*/30 2 * * *", "0 * * * *", "0 0-23 * * *", "@hourly", "@daily", "@weekly", "@monthly", "0 0 * * *", "0,30 0-3 * * *",
        "*/5 * * * *", "59 23 * * *", "15 3 * * *", "45 2 * * 0", "5 1 1-7,25-31 * */7", "7 */2 * * *", "* 2 * * *", "0-59/20 2,3 * * *",
    ]  # fmt: skip
    begin = int(datetime.fromisoformat(f"{day}T00:00Z").timestamp()) - 20 * 3600
    assert compare(cron, load(zone_name), RULES / zone_name, texts, begin, begin + 2 * DAY) > 100


@pytest.mark.parametrize("kind", made_up_zones.CLOSE_CHANGES)
def test_debian_cron_fires_exactly_the_ticks_where_changes_follow_each_other(cron, tmp_path, kind):
    rng = seeded(kind)
    first = int(datetime(2026, 6, 15, 2, tzinfo=UTC).timestamp())
    rules = tmp_path / "made-up"
    rules.write_bytes(made_up_zones.close_changes(kind, first))
    zone = parse_tzif("made up", rules.read_bytes(), "test")
    begin, end = first - 6 * 3600, first + 8 * 3600
    lines = [f"{minute} {hour} * * *" for hour in range(6) for minute in (0, 5, 20, 35, 50)]
    # One line at a time: what makes a busy daemon late would hide what is looked for.
    for text in (*lines, "*/10 * * * *", "0 0-23 * * *", "10,40 1-4 * * *", light_schedule(rng, zone, begin, end)):
        compare(cron, zone, rules, [text], begin, end)


def test_comparison_sees_a_fire_too_many_and_a_tick_too_few(cron):
    begin = int(datetime(2026, 6, 15, tzinfo=UTC).timestamp())
    fired = cron.fires(["30 2 * * *"], RULES / "UTC", begin, begin + DAY)
    assert [(instant - begin) // 60 for instant, _ in fired] == [150]
    honest = cron.fires
    cron.fires = lambda texts, *stretch: [*honest(texts, *stretch), (begin + 9005, 0)]
    with pytest.raises(AssertionError):
        compare(cron, load("UTC"), RULES / "UTC", ["*/30 2 * * *"], begin, begin + DAY)
    cron.fires = lambda texts, *stretch: honest(texts, *stretch)[1:]
    with pytest.raises(AssertionError):
        compare(cron, load("UTC"), RULES / "UTC", ["30 2 * * *"], begin, begin + DAY)


@pytest.mark.parametrize("zone_name", ["Europe/Amsterdam", "America/New_York", "Australia/Lord_Howe", "UTC"])
def test_fires_after_a_pause_serve_a_tick_within_the_default_grace(cron, zone_name):
    rng = seeded(f"pause {zone_name}")
    zone = load(zone_name)
    changes = [instant for instant, _ in zone.changes(BEGIN, END)] or [BEGIN]
    replayed = 0
    for _ in range(4):
        begin = rng.choice(changes) + rng.randrange(2, 40) * DAY
        begin -= begin % 60
        texts = [light_schedule(rng, zone, begin, begin + DAY) for _ in range(25)]
        pauses = [
            (begin + hour * 3600 + rng.randrange(3600), rng.choice([95, 200, 280, 1500, 7000, 10500]))
            for hour in (3, 9, 15)
        ]
        for instant, index in cron.fires(texts, RULES / zone_name, begin, begin + DAY, tuple(pauses)):
            schedule = parse(texts[index])
            decision = tick_for(schedule, zone, instant * 1000 + 350, default_grace(schedule), daemon_zone=zone)
            assert decision.kind == "run", (texts[index], zone_name, datetime.fromtimestamp(instant, UTC), decision)
            replayed += decision.late_ms > 60_000
    assert replayed > 0


def test_debian_cron_reads_what_we_accept(tmp_path):
    rng = seeded("language")
    for size in range(20):
        texts = [random_schedule(rng) for _ in range(50)]
        crontab = tmp_path / f"crontab{size}"
        crontab.write_text("".join(f"{text} true\n" for text in texts))
        read = subprocess.run(["crontab", "-n", crontab], capture_output=True, text=True, check=False)
        assert read.returncode == 0, read.stderr
