"""Ticks: the rules of transition days in tables, the tick a fire serves, and how instants are written."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clustercron.errors import UsageError
from clustercron.schedule import parse
from clustercron.tick import (
    default_grace,
    is_tick,
    latest_tick,
    local_text,
    next_tick,
    note,
    parse_instant,
    parse_instant_ms,
    period,
    previous_tick,
    tick_for,
    ticks_between,
    utc_text,
)
from clustercron.zone import daemon_zone, load

CASES = [json.loads(line) for line in Path(__file__).with_name("cron-cases.jsonl").read_text().splitlines()]
AMSTERDAM = "Europe/Amsterdam"


def ticks(text: str, zone: str, begin: str, end: str, *, extended: bool = False) -> list[str]:
    """Return the local texts of the ticks between two UTC instants."""
    rules = load(zone)
    found = ticks_between(parse(text, extended=extended), rules, parse_instant(begin), parse_instant(end))
    return [local_text(rules, tick) for tick in found]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case['schedule']} {case['tz']} {case['fired_at_utc']} {case['daemon']}"
)
def test_fire_serves_the_tick_that_cron_meant(case):
    schedule, zone = parse(case["schedule"]), load(case["tz"])
    grace = int(case["grace"].removesuffix("m")) * 60
    assert grace == default_grace(schedule)
    decision = tick_for(schedule, zone, parse_instant_ms(case["fired_at_utc"]), grace)
    if case["expected_tick_utc"] == "off-schedule":
        assert decision.kind == "not-due"
        assert decision.tick is None
    else:
        assert decision.kind == "run"
        assert utc_text(decision.tick) == case["expected_tick_utc"]


@pytest.mark.parametrize(
    ("text", "zone", "begin", "end", "local"),
    [
        # A fixed time that is skipped runs at the change, one that is repeated runs in the first pass.
        ("30 2 * * *", AMSTERDAM, "2026-03-29T00:00Z", "2026-03-30T00:00Z", ["2026-03-29T03:00:00+02:00"]),
        ("30 2 * * *", AMSTERDAM, "2026-10-24T22:00Z", "2026-10-25T23:00Z", ["2026-10-25T02:30:00+02:00"]),
        ("0,30 2 * * *", AMSTERDAM, "2026-03-29T00:00Z", "2026-03-30T00:00Z", ["2026-03-29T03:00:00+02:00"]),
        ("30 2,3 * * *", AMSTERDAM, "2026-03-29T00:00Z", "2026-03-29T12:00Z", ["2026-03-29T03:00:00+02:00", "2026-03-29T03:30:00+02:00"]),
        # A skipped match and one at the change itself are one tick.
        ("0 2,3 * * *", AMSTERDAM, "2026-03-29T00:00Z", "2026-03-29T12:00Z", ["2026-03-29T03:00:00+02:00"]),
        # A wildcard schedule is not run for what is skipped, and runs in both passes.
        ("*/30 2 * * *", AMSTERDAM, "2026-03-28T23:00Z", "2026-03-29T22:00Z", []),
        ("*/30 2 * * *", AMSTERDAM, "2026-10-24T22:00Z", "2026-10-25T23:00Z",
         ["2026-10-25T02:00:00+02:00", "2026-10-25T02:30:00+02:00", "2026-10-25T02:00:00+01:00", "2026-10-25T02:30:00+01:00"]),
        # Gaps at midnight.
        ("0 0 * * *", "Asia/Beirut", "2026-03-28T20:00Z", "2026-03-29T20:00Z", ["2026-03-29T01:00:00+03:00"]),
        ("0 0 * * *", "Africa/Cairo", "2026-04-23T20:00Z", "2026-04-24T20:00Z", ["2026-04-24T01:00:00+03:00"]),
        ("0 0 * * *", "America/Havana", "2026-03-08T02:00Z", "2026-03-09T02:00Z", ["2026-03-08T01:00:00-04:00"]),
        ("0 0 * * *", "America/Santiago", "2026-09-05T12:00Z", "2026-09-06T12:00Z", ["2026-09-06T01:00:00-03:00"]),
        ("30 23 * * *", "America/Santiago", "2026-04-04T12:00Z", "2026-04-05T12:00Z", ["2026-04-04T23:30:00-03:00"]),
        # The skipped day decides, not the day of the change.
        ("30 0 24 4 *", "Africa/Cairo", "2026-04-22T00:00Z", "2026-04-26T00:00Z", ["2026-04-24T01:00:00+03:00"]),
        # Changes of 30 minutes, of 2 hours, off the full hour, and backwards in summer.
        ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00Z", "2026-10-04T12:00Z", ["2026-10-04T02:30:00+11:00"]),
        ("45 1 * * *", "Australia/Lord_Howe", "2026-04-04T12:00Z", "2026-04-05T12:00Z", ["2026-04-05T01:45:00+11:00"]),
        ("30 2 * * *", "Antarctica/Troll", "2026-03-29T00:00Z", "2026-03-29T12:00Z", ["2026-03-29T03:00:00+02:00"]),
        ("30 1,2 * * *", "Antarctica/Troll", "2026-10-24T12:00Z", "2026-10-25T12:00Z", ["2026-10-25T01:30:00+02:00", "2026-10-25T02:30:00+02:00"]),
        ("15 3 * * *", "Pacific/Chatham", "2026-09-26T00:00Z", "2026-09-27T00:00Z", ["2026-09-27T03:45:00+13:45"]),
        ("0 3 * * *", "Pacific/Chatham", "2026-04-04T00:00Z", "2026-04-05T00:00Z", ["2026-04-05T03:00:00+13:45"]),
        ("30 2 * * *", "Africa/Casablanca", "2025-02-22T12:00Z", "2025-02-23T12:00Z", ["2025-02-23T02:30:00+01:00"]),
        ("30 2 * * *", "Africa/Casablanca", "2025-04-05T12:00Z", "2025-04-06T12:00Z", ["2025-04-06T03:00:00+01:00"]),
        # A day that a zone left out is a jump too long to make good.
        ("0 12 * * *", "Pacific/Apia", "2011-12-29T12:00Z", "2011-12-31T12:00Z", ["2011-12-29T12:00:00-10:00", "2011-12-31T12:00:00+14:00"]),
        ("0 12 30 12 *", "Pacific/Apia", "2011-01-01T00:00Z", "2012-06-01T00:00Z", []),
        # A change of the offset without a season.
        ("30 23 29 2 *", "Asia/Almaty", "2024-02-28T00:00Z", "2024-03-02T00:00Z", ["2024-02-29T23:30:00+06:00"]),
        ("30 23 29 2 *", "Asia/Almaty", "2025-02-28T00:00Z", "2028-03-02T00:00Z", ["2028-02-29T23:30:00+05:00"]),
        # Beyond every table.
        ("30 2 * * *", AMSTERDAM, "2199-03-30T12:00Z", "2199-03-31T12:00Z", ["2199-03-31T03:00:00+02:00"]),
        ("0 0 29 2 *", "UTC", "2096-03-01T00:00Z", "2105-01-01T00:00Z", ["2104-02-29T00:00:00+00:00"]),
        ("0 0 29 2 */7", "UTC", "2061-01-01T00:00Z", "2130-01-01T00:00Z", ["2088-02-29T00:00:00+00:00", "2128-02-29T00:00:00+00:00"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_ticks_of_a_transition_day(text, zone, begin, end, local):
    assert ticks(text, zone, begin, end) == local


def test_fixed_time_in_every_hour_has_23_ticks_in_spring_and_24_in_autumn():
    assert len(ticks("0 0-23 * * *", AMSTERDAM, "2026-03-28T23:00Z", "2026-03-29T22:00Z")) == 23
    assert len(ticks("0 0-23 * * *", AMSTERDAM, "2026-10-24T22:00Z", "2026-10-25T23:00Z")) == 24
    assert len(ticks("0 * * * *", AMSTERDAM, "2026-10-24T22:00Z", "2026-10-25T23:00Z")) == 25


@pytest.mark.parametrize(
    ("text", "begin", "end", "local"),
    [
        ("0 2 * * L5", "2026-09-01T00:00Z", "2026-11-01T00:00Z", ["2026-09-25T02:00:00+02:00", "2026-10-30T02:00:00+01:00"]),
        ("0 0 L * *", "2026-02-01T00:00Z", "2026-03-30T00:00Z", ["2026-02-28T00:00:00+01:00"]),
        ("0 6 * * 5#2", "2026-09-01T00:00Z", "2026-10-01T00:00Z", ["2026-09-11T06:00:00+02:00"]),
        # The last Sunday is the day of the change: the rules of transition days hold for these too.
        ("30 2 * * L7", "2026-03-01T00:00Z", "2026-04-01T00:00Z", ["2026-03-29T03:00:00+02:00"]),
        ("30 2 * * L0", "2026-10-01T00:00Z", "2026-11-01T00:00Z", ["2026-10-25T02:30:00+02:00"]),
        ("*/30 2 * * L7", "2026-03-01T00:00Z", "2026-04-01T00:00Z", []),
        ("*/30 2 * * L7", "2026-10-01T00:00Z", "2026-11-01T00:00Z",
         ["2026-10-25T02:00:00+02:00", "2026-10-25T02:30:00+02:00", "2026-10-25T02:00:00+01:00", "2026-10-25T02:30:00+01:00"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_ticks_of_extended_day_fields(text, begin, end, local):
    assert ticks(text, AMSTERDAM, begin, end, extended=True) == local


def test_next_and_previous_are_strict_and_latest_is_not():
    schedule, zone = parse("30 2 * * *"), load("UTC")
    tick = parse_instant("2026-09-17T02:30Z")
    day = 86400
    assert next_tick(schedule, zone, tick) == tick + day
    assert next_tick(schedule, zone, tick - 1) == tick
    assert previous_tick(schedule, zone, tick) == tick - day
    assert previous_tick(schedule, zone, tick + 1) == tick
    assert latest_tick(schedule, zone, tick) == tick
    assert latest_tick(schedule, zone, tick - 1) == tick - day
    assert is_tick(schedule, zone, tick)
    assert not is_tick(schedule, zone, tick + 1)
    assert not is_tick(schedule, zone, tick + 60)
    assert list(ticks_between(schedule, zone, tick, tick + day)) == [tick]
    assert list(ticks_between(schedule, zone, tick + 1, tick + day)) == []


def test_schedule_that_a_zone_always_skips_has_no_tick_within_the_horizon():
    schedule, zone = parse("*/30 2 25-31 3 */7"), load(AMSTERDAM)
    now = parse_instant("2026-09-17T00:00Z")
    assert next_tick(schedule, zone, now) is None
    assert list(ticks_between(schedule, zone, now, now + 10**9)) == []
    assert next_tick(schedule, load("UTC"), now) is not None
    # Before 1981 the zone's clocks changed on other days.
    last = previous_tick(schedule, zone, now)
    assert utc_text(last) == "1980-03-30T01:30:00Z"
    assert period(schedule, zone, now) == now - last
    assert previous_tick(schedule, zone, last + 51 * 366 * 86400) is None
    assert next_tick(schedule, zone, last - 49 * 365 * 86400) is not None


def test_period_is_the_larger_gap():
    zone = load("UTC")
    friday = parse_instant("2026-09-18T09:00Z")
    assert period(parse("0 9 * * 1-5"), zone, friday) == 3 * 86400
    assert period(parse("*/5 * * * *"), zone, friday) == 300


def test_default_grace_is_what_cron_replays():
    assert default_grace(parse("*/5 * * * *")) == 360
    assert default_grace(parse("@hourly")) == 360
    assert default_grace(parse("5 * * * *")) == 360
    assert default_grace(parse("5 0-23 * * *")) == 11700
    assert default_grace(parse("@daily"), random_delay_minutes=7) == 11700 + 420


class TestWhichTickAFireServes:
    """In the order of the rules: another zone, in time, too late, not due."""

    DAILY = parse("0 2 * * *")
    UTC_ZONE = load("UTC")
    TICK = parse_instant("2026-09-17T02:00Z")

    def decide(self, fired: str, grace: int = 11700, **options):
        return tick_for(self.DAILY, self.UTC_ZONE, parse_instant_ms(fired), grace, **options)

    @pytest.mark.parametrize(
        ("fired", "kind", "late_ms"),
        [
            ("2026-09-17T01:59:57.999Z", "not-due", None),
            ("2026-09-17T01:59:58Z", "run", -2000),
            ("2026-09-17T01:59:59.990Z", "run", -10),
            ("2026-09-17T02:00:01.5Z", "run", 1500),
            ("2026-09-17T02:10:00Z", "run", 600_000),
            ("2026-09-17T02:10:00.001Z", "too-late", 600_001),
            ("2026-09-17T05:15:00Z", "too-late", 11_700_000),
            ("2026-09-17T05:15:00.001Z", "not-due", None),
        ],
    )
    def test_grace_and_then_cron_s_replay_window_decide(self, fired, kind, late_ms):
        decision = self.decide(fired, grace=600)
        assert (decision.kind, decision.late_ms) == (kind, late_ms)
        assert decision.tick == (self.TICK if kind in ("run", "too-late") else None)

    def test_previous_and_next_are_those_around_the_fire(self):
        decision = self.decide("2026-09-17T12:00Z")
        assert (decision.previous, decision.next) == (self.TICK, self.TICK + 86400)
        early = self.decide("2026-09-17T01:59:59Z")
        assert (early.previous, early.next) == (self.TICK, self.TICK + 86400)

    def test_grace_above_the_replay_window_still_runs(self):
        assert self.decide("2026-09-17T12:00Z", grace=43200).kind == "run"

    def test_random_delay_widens_the_replay_window(self):
        assert self.decide("2026-09-17T05:20Z", grace=60).kind == "not-due"
        assert self.decide("2026-09-17T05:20Z", grace=60, random_delay_minutes=10).kind == "too-late"

    def test_fire_that_only_cron_s_zone_explains_is_a_mismatch_and_not_a_late_one(self):
        new_york = load("America/New_York")
        decision = self.decide("2026-09-17T06:00:01.5Z", grace=43200, daemon_zone=new_york)
        assert (decision.kind, decision.tick, decision.previous) == ("zone-mismatch", None, self.TICK)
        # Without the zone, or when the line fires more often than its schedule, it is an ordinary late fire.
        assert self.decide("2026-09-17T06:00:01.5Z", grace=43200).kind == "run"
        assert self.decide("2026-09-17T06:00:01.5Z", grace=43200, daemon_zone=new_york, poll=True).kind == "run"
        # A minute that is no tick in cron's zone either is a late fire.
        assert self.decide("2026-09-17T06:01:01.5Z", grace=43200, daemon_zone=new_york).kind == "run"

    def test_daemon_in_utc_with_a_schedule_in_amsterdam_is_a_mismatch_all_year(self):
        zone, utc = load(AMSTERDAM), load("UTC")
        for day in ("2026-01-17", "2026-07-17", "2026-03-29", "2026-10-25"):
            fired = parse_instant_ms(f"{day}T02:00:01.2Z")
            assert tick_for(self.DAILY, zone, fired, 11700).kind == "run"
            assert tick_for(self.DAILY, zone, fired, 11700, daemon_zone=utc).kind == "zone-mismatch"

    def test_mismatch_needs_a_fire_later_than_a_minute(self):
        schedule, zone, utc = parse("0 2 * * *"), load(AMSTERDAM), load("UTC")
        # cron runs in UTC too, but this is the tick itself by --tz.
        fired = parse_instant_ms("2026-09-17T00:00:59Z")
        assert tick_for(schedule, zone, fired, 11700, daemon_zone=utc).kind == "run"

    def test_mismatch_begins_a_minute_after_the_tick(self):
        # A zone a minute west: its own 02:00 is the schedule's 02:01.
        behind = daemon_zone("AAA0:01")
        assert self.decide("2026-09-17T02:01:00Z", daemon_zone=behind).kind == "run"
        assert self.decide("2026-09-17T02:01:00.001Z", daemon_zone=behind).kind == "zone-mismatch"

    def test_zones_with_the_same_offsets_never_mismatch(self):
        schedule, zone, berlin = parse("0 2 * * *"), load(AMSTERDAM), load("Europe/Berlin")
        for late in range(0, 300, 7):
            fired = parse_instant_ms("2026-09-17T00:00:01Z") + late * 60_000
            assert tick_for(schedule, zone, fired, 11700, daemon_zone=berlin).kind != "zone-mismatch"

    def test_replay_after_a_pause_that_hits_a_tick_of_both_zones_is_no_mismatch(self):
        schedule, zone, utc = parse("0 0-4 * * *"), load(AMSTERDAM), load("UTC")
        fired = parse_instant_ms("2026-09-17T02:00:01Z")
        assert tick_for(schedule, zone, fired, 11700, daemon_zone=utc).kind == "run"

    def test_mismatch_is_seen_for_a_schedule_whose_ticks_are_far_away(self):
        schedule, zone = parse("*/30 2 25-31 3 */7"), load(AMSTERDAM)
        fired = parse_instant_ms("2031-03-30T02:30:01Z")
        assert tick_for(schedule, zone, fired, 360).previous is None
        assert tick_for(schedule, zone, fired, 360, daemon_zone=load("UTC")).kind == "zone-mismatch"
        assert tick_for(schedule, zone, fired, 360).kind == "not-due"

    def test_two_candidates_in_utc_with_poll_run_an_amsterdam_schedule_once_a_day(self):
        schedule, zone, utc = parse("30 2 * * *"), load(AMSTERDAM), load("UTC")
        for day in range(366):
            begin = parse_instant("2026-01-01T00:00Z") + day * 86400
            served = set()
            for fired in (begin + 1800, begin + 5400):
                decision = tick_for(schedule, zone, fired * 1000 + 1200, 3000, daemon_zone=utc, poll=True)
                if decision.kind == "run":
                    served.add(decision.tick)
            assert len(served) == 1


@pytest.mark.parametrize(
    ("text", "zone", "tick", "says"),
    [
        ("30 2 * * *", AMSTERDAM, "2026-03-29T01:00Z", "02:30 is skipped on this day: runs at the change, 03:00"),
        ("0,30 2 * * *", AMSTERDAM, "2026-03-29T01:00Z", "02:00 and 02:30 are skipped on this day: runs at the change, 03:00"),
        ("0-59 2 * * *", AMSTERDAM, "2026-03-29T01:00Z", "02:00 to 02:59 (60 times) are skipped on this day: runs at the change, 03:00"),
        ("30 2 * * *", AMSTERDAM, "2026-10-25T00:30Z", "first of two 02:30 on this day: the second does not run"),
        ("*/30 2 * * *", AMSTERDAM, "2026-10-25T00:30Z", "first of two 02:30 on this day"),
        ("*/30 2 * * *", AMSTERDAM, "2026-10-25T01:30Z", "second of two 02:30 on this day"),
        ("*/30 * * * *", AMSTERDAM, "2026-03-29T01:00Z", "before it, 02:00 and 02:30 are skipped on this day: no run for that"),
        ("*/30 * * * *", AMSTERDAM, "2026-03-29T01:30Z", None),
        ("30 3 * * *", AMSTERDAM, "2026-03-29T01:30Z", None),
        ("30 1 * * *", AMSTERDAM, "2026-10-24T23:30Z", None),
        ("30 3 * * *", AMSTERDAM, "2026-10-25T02:30Z", None),
        ("30 2 * * *", AMSTERDAM, "2026-09-17T00:30Z", None),
        ("30 2 * * *", "UTC", "2026-09-17T02:30Z", None),
        ("0 12 * * *", "Pacific/Apia", "2011-12-30T22:00Z", "before it, 12:00 is skipped on this day: no run for that"),
    ],
    ids=repr,
)  # fmt: skip
def test_note_says_why_a_tick_is_special(text, zone, tick, says):
    schedule, rules, instant = parse(text), load(zone), parse_instant(tick)
    assert is_tick(schedule, rules, instant)
    assert note(schedule, rules, instant) == says


@pytest.mark.parametrize(
    ("text", "epoch_ms"),
    [
        ("2026-09-17T02:00:00Z", 1789610400000),
        ("2026-09-17T04:00:00+02:00", 1789610400000),
        ("2026-09-17T04:00+0200", 1789610400000),
        ("2026-09-17 04:00+02", 1789610400000),
        ("2026-09-16t22:30:00.25-03:30", 1789610400250),
        ("2026-09-17T02:00:00.1239z", 1789610400123),
        ("@1789610400", 1789610400000),
        ("@1789610400.5", 1789610400500),
        ("@-60", -60000),
        ("0001-01-01T00:00Z", -62135596800000),
        ("2024-02-29T00:00Z", 1709164800000),
    ],
)
def test_instant_is_read(text, epoch_ms):
    assert parse_instant_ms(text) == epoch_ms
    assert parse_instant(text) == epoch_ms // 1000


@pytest.mark.parametrize(
    "text",
    ["", "now", "@", "@x", "@1_0", "2026-09-17", "2026-09-17T02:00:00", "2026-02-29T00:00Z", "2026-13-01T00:00Z", "2026-00-01T00:00Z",
     "2026-04-31T00:00Z", "2026-09-17T24:00Z", "2026-09-17T02:60Z", "2026-09-17T02:00:60Z", "2026-09-17T2:00Z", "2026-09-17T02:00:0Z",
     "2026-09-17T02:00+24:00", "2026-09-17T02:00+1:00", "2026-09-17T02:00 Z", "0000-01-01T00:00Z", "２026-09-17T02:00Z", "2026-09-17T02:00.5Z",
     "2026-09-17T02:00:00.Z", "2026-09-17T02:00:00.xZ", "20260917T020000Z", "2026-9-17T02:00Z", "2026-09-17T+02:00", "\n"],
    ids=ascii,
)  # fmt: skip
def test_text_that_is_no_instant_is_refused_by_name(text):
    with pytest.raises(UsageError) as refusal:
        parse_instant(text)
    assert repr(text) in refusal.value.message
    assert "write 2026-09-17T02:00:00Z" in refusal.value.message


def test_instant_is_written_as_it_is_read():
    zone = load("America/St_Johns")
    for epoch in range(-(10**9), 4 * 10**9, 123_456_789):
        assert utc_text(epoch) == datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        assert parse_instant(utc_text(epoch)) == epoch
        if epoch > 0:
            assert parse_instant(local_text(zone, epoch)) == epoch
    assert local_text(load("Asia/Kathmandu"), 1789610400) == "2026-09-17T07:45:00+05:45"
    assert local_text(load("Africa/Monrovia"), 0) == "1969-12-31T23:15:30-00:44:30"
    assert local_text(load("UTC"), 0) == "1970-01-01T00:00:00+00:00"
