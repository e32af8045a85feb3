"""Facts from records: outcomes, damage, days, and above all what was missed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clustercron import report, schema, tick
from clustercron.report import Job, Missed, Run
from clustercron.schedule import parse
from clustercron.store import JobRecords
from clustercron.zone import load

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NOW = tick.parse_instant("2026-09-17T12:00:00Z")
NOW_MS = NOW * 1000
LATE_MS = 45_000
HOUR, DAY = 3600, 86_400
NODES = {"node-1": "i=1 t=1", "node-2": "i=2 t=1"}


def epoch(text: str) -> int:
    return tick.parse_instant(text)


def records(
    runs: Mapping[str, str] | None = None,
    *,
    definitions: str = "0|0 * * * *|UTC",
    known: int | None = None,
    taken: Iterable[int] | None = None,
    state: Mapping[str, str] | None = None,
    oldest: str | None = None,
) -> JobRecords:
    found = {"layout": "1", "definitions": definitions, **(state or {})}
    if known is not None:
        found["known"] = str(known * 1000)
    taken = list(taken or ())
    return JobRecords(
        name="billing",
        state=found,
        runs=runs or {},
        fields=(),
        nodes=NODES,
        run_count=len(runs or {}),
        taken_count=len(taken),
        first_taken=min(taken, default=None),
        oldest=oldest,
        faults=(),
    )


def job_of(found: JobRecords, now_ms: int = NOW_MS) -> Job:
    return Job(found, now_ms, load)


def run_of(record: str, field: str = str(NOW - HOUR), now_ms: int = NOW_MS) -> Run:
    run = report.read_run("billing", field, record, {"1": "node-1", "2": "node-2"}, now_ms)
    assert run is not None
    return run


def missed_of(found: JobRecords, taken: Iterable[int], grace_s: int | None = None, now_ms: int = NOW_MS) -> Missed:
    """What a view answers: the number of taken ticks first, the ticks where it is off."""
    job = job_of(found, now_ms)
    window = report.missed_window(job, LATE_MS, grace_s)
    assert window is not None
    inside = frozenset(t for t in taken if window.begin <= t < window.end)
    exact = report.find_missed(job, window, inside)
    if report.is_complete(job, window, len(inside)):
        assert exact.total == 0
    return exact


@pytest.mark.parametrize(
    ("record", "outcome", "lapsed"),
    [
        (f"a=1 s=running b=1 l={NOW_MS + 1}", "running", False),
        (f"a=1 s=running b=1 l={NOW_MS - 1}", "lost", False),
        ("a=1 s=running b=1", "lost", False),
        (f"a=1 s=claimed l={NOW_MS + 1}", "claimed", False),
        (f"a=1 s=claimed l={NOW_MS - 1}", "claimed", True),
        ("a=1 s=succeeded", "succeeded", False),
        ("a=1 s=unclaimed", "unclaimed", False),
        ("a=1 s=a-word-of-tomorrow", "a-word-of-tomorrow", False),
    ],
)
def test_an_attempt_is_alive_while_its_lease_lasts(record: str, outcome: str, lapsed: bool) -> None:
    run = run_of(record)
    assert (run.outcome, run.lapsed, run.faults) == (outcome, lapsed, ())


def test_lateness_counts_to_the_start_else_to_the_fire_and_never_below_zero() -> None:
    at = (NOW - HOUR) * 1000
    assert run_of(f"s=succeeded f={at + 1000} b={at + 61_999}").late_seconds == 61
    assert run_of(f"s=claimed f={at + 5_000}").late_seconds == 5
    assert run_of(f"s=succeeded f={at} b={at - 1_500}").late_seconds == 0
    assert run_of("s=claimed").late_seconds is None


def test_who_tried_is_named_and_a_forgotten_node_keeps_its_number() -> None:
    assert run_of("s=succeeded t=2,9,1").tried == ("node-2", "#9", "node-1")


def test_a_field_tells_the_attempt_where_the_record_does_not() -> None:
    assert run_of("s=failed", f"{NOW}.3").attempt == 3
    assert run_of("a=1 s=unclaimed", f"{NOW}.{'ab' * 16}").attempt == 1
    assert run_of("s=unclaimed", f"{NOW}.{'12' * 16}").attempt is None


def test_runs_stand_newest_tick_first_and_of_one_tick_the_latest_attempt_first() -> None:
    fields = {f"{NOW}.1": "a=1 s=failed", str(NOW - DAY): "a=1 s=failed", str(NOW): "a=2 s=failed", "x": "s=failed"}
    runs = job_of(records(fields)).runs()
    assert [(run.tick, run.attempt) for run in runs] == [(NOW, 2), (NOW, 1), (NOW - DAY, 1)]
    assert report.newest_fields(fields, 2) == [str(NOW), f"{NOW}.1"]


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ("", "no state"),
        ("a=one s=succeeded", "attempt is 'one'"),
        ("a=1 s=succeeded k=-7", "fencing_token is '-7'"),
        ("a=1 s=succeeded x=²", "exit_code is '²'"),
        ("a=1 s=succeeded b=99999999999999999", "started_at_ms is '99999999999999999'"),
        ("a=1 s=succeeded n=" + "x" * 5_000, "node: 5000 characters long"),
        ("a=1 s=succeeded n=" + "x" * 500_000, "the record is 500018 characters long"),
    ],
)
def test_a_damaged_record_is_read_as_far_as_it_goes_and_says_what_is_wrong(record: str, fault: str) -> None:
    run = run_of(record)
    assert any(fault in said for said in run.faults)
    assert len(run.node or "") <= 1_000


@settings(max_examples=300)
@given(
    st.text(max_size=60),
    st.lists(st.tuples(st.sampled_from([*schema.RECORD_LETTERS, "?", ""]), st.text(max_size=30))).map(
        lambda pairs: " ".join(f"{letter}={value}" for letter, value in pairs)
    ),
)
@example("9" * 30, "s=running l=9")
def test_no_record_is_bad_enough_to_raise(field: str, record: str) -> None:
    for name in (field, str(NOW)):
        job = job_of(records({name: record}, state={"live": record, "known": field, "layout": record}))
        status = report.job_status(job, Missed(), None)
        assert len(job.runs()) <= 1
        assert status.job == "billing"


@given(st.text(max_size=80))
@example("1|61 * * * *|UTC")
@example("1|0 * * * *|Nowhere/At_All")
@example("1|0 * * * *|../../etc/passwd")
@example("||||")
def test_no_definition_is_bad_enough_to_raise(text: str) -> None:
    job = job_of(records(definitions=text, known=NOW - DAY))
    status = report.job_status(job, Missed(), None)
    assert status.next_tick is None or not status.faults


def test_a_definition_that_cannot_be_read_is_a_fault_with_its_reason() -> None:
    job = job_of(records(definitions="1|61 * * * *|UTC"))
    assert any("minute: 61 is not in 0-59" in fault for fault in job.faults())


@pytest.mark.parametrize(
    ("zone_name", "date", "hours"),
    [
        ("Europe/Amsterdam", (2026, 3, 29), 23),
        ("Europe/Amsterdam", (2026, 10, 25), 25),
        ("Europe/Amsterdam", (2026, 9, 16), 24),
        ("Africa/Cairo", (2026, 4, 24), 23),
        ("America/Santiago", (2026, 9, 6), 23),
        ("America/Santiago", (2026, 4, 4), 25),
        ("Pacific/Kiritimati", (2026, 9, 16), 24),
    ],
)
def test_a_day_is_the_zones_own_however_long(zone_name: str, date: tuple[int, int, int], hours: int) -> None:
    zone = load(zone_name)
    near = range(epoch("2026-01-01T00:00:00Z"), epoch("2027-01-01T00:00:00Z"), HOUR)
    found = report.fields_of_day(map(str, near), zone, date)
    ticks = report.ticks_of_day(parse("0 * * * *"), zone, date)
    assert len(found) == hours
    assert {tick.local_text(zone, int(field))[:10] for field in found} == {"{:04}-{:02}-{:02}".format(*date)}
    assert len(ticks) == hours


ZONES = ["UTC", "Europe/Amsterdam", "America/Santiago", "Australia/Lord_Howe", "Africa/Cairo", "Pacific/Apia"]
SCHEDULES = [
    "* * * * *",
    "*/7 * * * *",
    "30 2 * * *",
    "0 0 * * *",
    "15,45 1-3 * * *",
    "0 * * * 1-5",
    "0 12 29 2 *",
    "0 3 1,15 * 0",
    "59 23 31 * *",
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from(ZONES),
    st.integers(epoch("2011-01-01T00:00:00Z"), epoch("2040-01-01T00:00:00Z")),
    st.integers(0, 20 * DAY),
)
@example("30 2 * * *", "Europe/Amsterdam", epoch("2026-03-28T12:00:00Z"), 2 * DAY)
@example("0 0 * * *", "America/Santiago", epoch("2026-09-05T12:00:00Z"), 2 * DAY)
@example("*/7 * * * *", "Australia/Lord_Howe", epoch("2026-04-04T12:00:00Z"), DAY)
@example("30 2 * * *", "Pacific/Apia", epoch("2011-12-28T12:00:00Z"), 4 * DAY)
def test_the_count_of_ticks_is_the_number_of_ticks(text: str, zone_name: str, begin: int, length: int) -> None:
    schedule, zone = parse(text), load(zone_name)
    for end in (begin, begin + 1, begin + length):
        assert report.count_ticks(schedule, zone, begin, end) == len(
            list(tick.ticks_between(schedule, zone, begin, end))
        )


@pytest.mark.parametrize("zone_name", ZONES)
def test_the_count_of_ticks_is_right_around_each_change_of_a_decade(zone_name: str) -> None:
    zone = load(zone_name)
    for instant, _ in zone.changes(epoch("2022-01-01T00:00:00Z"), epoch("2032-01-01T00:00:00Z")):
        for text in ("30 2 * * *", "*/30 0-4 * * *", "0,30 0 * * *", "* * * * *"):
            schedule = parse(text)
            for begin in range(instant - 90 * 60, instant + 91 * 60, 30 * 60):
                ticks = list(tick.ticks_between(schedule, zone, begin, instant + DAY))
                assert report.count_ticks(schedule, zone, begin, instant + DAY) == len(ticks)


def hourly(first: int, last: int) -> list[int]:
    return list(range(first, last + 1, HOUR))


def test_three_hours_without_a_run_are_three_missed_ticks() -> None:
    begin = NOW - 20 * HOUR
    gone = {NOW - 9 * HOUR, NOW - 8 * HOUR, NOW - 7 * HOUR}
    taken = [t for t in hourly(begin, NOW) if t not in gone]
    missed = missed_of(records(known=begin, taken=taken), taken)
    assert (missed.ticks, missed.total, missed.since) == (tuple(sorted(gone)), 3, begin)


def test_a_tick_is_not_missed_before_a_fire_can_no_longer_claim_it() -> None:
    last = NOW - 195 * 60  # the grace of a fixed-time schedule
    due = last + LATE_MS // 1000
    found = records(definitions=f"0|{last // 60 % 60} {last // HOUR % 24} * * *|UTC", known=last - HOUR)
    assert missed_of(found, [], now_ms=(due - 45) * 1000).total == 0
    assert missed_of(found, [], now_ms=(NOW + 45) * 1000).total == 0
    assert missed_of(found, [], now_ms=(NOW + 46) * 1000).ticks == (last,)


def test_a_configured_grace_counts() -> None:
    found = records(definitions="0|0 * * * *|UTC", known=NOW - HOUR - 1)
    assert missed_of(found, [], grace_s=60, now_ms=NOW_MS + 60_000).total == 1
    assert missed_of(found, [], grace_s=4 * HOUR, now_ms=NOW_MS + 60_000).total == 0


@pytest.mark.parametrize(
    ("record", "missed"),
    [
        ("a=1 s=abandoned", 1),
        ("a=1 s=claimed l=1", 1),
        (f"a=1 s=claimed l={NOW_MS + 1000}", 0),
        ("a=1 s=running l=1", 0),
        ("a=1 s=failed", 0),
        ("a=1 s=skipped-overlap", 0),
    ],
    ids=["given back", "lapsed claim", "claim alive", "lost", "failed", "skipped"],
)
def test_a_taken_tick_is_missed_only_when_no_attempt_reached_running(record: str, missed: int) -> None:
    at = NOW - 10 * HOUR
    taken = hourly(NOW - 20 * HOUR, NOW)
    assert missed_of(records({str(at): record}, known=taken[0], taken=taken), taken).total == missed


def test_a_minutely_job_that_nobody_saw_for_a_year_is_counted_at_once_and_listed_in_part() -> None:
    begin = NOW - 365 * DAY
    found = records(definitions="0|* * * * *|Europe/Amsterdam", known=begin - 1, taken=[begin])
    started = time.process_time()
    missed = missed_of(found, [begin])
    assert time.process_time() - started < 0.5
    end = NOW - 6 * 60 - LATE_MS // 1000
    assert missed.total == -(-end // 60) - begin // 60 - 1
    assert len(missed.ticks) == report.MISSED_LISTED
    assert missed.ticks[-1] == (end - 1) // 60 * 60


def test_what_the_list_of_taken_ticks_has_forgotten_is_not_counted_as_missed() -> None:
    taken = hourly(NOW - 1023 * HOUR, NOW)
    found = records(known=NOW - 9000 * HOUR, taken=taken)
    missed = missed_of(found, taken)
    assert (missed.total, missed.since) == (0, taken[0])


def test_records_that_reach_further_back_than_the_list_count() -> None:
    taken = hourly(NOW - 1023 * HOUR, NOW)
    older = NOW - 1200 * HOUR
    found = records(known=NOW - 9000 * HOUR, taken=taken, oldest=f"a=1 s=succeeded c={older * 1000 + 400}")
    window = report.missed_window(job_of(found), LATE_MS, None)
    assert window is not None
    assert window.deep
    assert not report.is_complete(job_of(found), window, window.expected)
    kept = [*hourly(older, taken[0] - 3 * HOUR), *taken]
    missed = missed_of(found, kept)
    assert missed.ticks == (taken[0] - 2 * HOUR, taken[0] - HOUR)


@pytest.mark.parametrize(
    ("old", "new"), [("0 * * * *", "0 2 * * *"), ("0 2 * * *", "0 * * * *")], ids=["to fewer", "to more"]
)
def test_a_schedule_that_was_changed_in_good_order_is_no_alarm(old: str, new: str) -> None:
    changed = epoch("2026-09-15T10:30:00Z")
    zone = load("UTC")
    begin = changed - 3 * DAY
    taken = [*tick.ticks_between(parse(old), zone, begin, changed), *tick.ticks_between(parse(new), zone, changed, NOW)]
    first = next(t for t in taken if t > changed)
    found = records(definitions=f"{taken[0]}|{old}|UTC\n{first}|{new}|UTC", known=begin, taken=taken)
    assert missed_of(found, taken).total == 0


def test_each_schedule_is_counted_while_it_was_in_force() -> None:
    changed = NOW - 10 * DAY
    found = records(definitions=f"{NOW - 20 * DAY}|0 12 * * *|UTC\n{changed}|0 */6 * * *|UTC", known=NOW - 20 * DAY)
    taken = [NOW - 20 * DAY, changed - DAY, changed]
    assert missed_of(found, taken).total == 8 + (4 * 10 - 1)


def test_nodes_that_disagreed_are_not_taken_at_their_number() -> None:
    taken = hourly(NOW - 20 * HOUR, NOW)
    wrong = [t for t in taken if t != NOW - 9 * HOUR] + [NOW - 9 * HOUR + 60]
    found = records(known=taken[0], taken=wrong, state={"differed": "1"})
    job = job_of(found)
    window = report.missed_window(job, LATE_MS, None)
    assert window is not None
    assert not report.is_complete(job, window, window.expected)
    assert missed_of(found, wrong).ticks == (NOW - 9 * HOUR,)


@pytest.mark.parametrize("zone_name", ["Europe/London", "America/Santiago", "Australia/Lord_Howe", "Africa/Cairo"])
@pytest.mark.parametrize("text", ["30 2 * * *", "0 0 * * *", "*/10 * * * *", "15 * * * *"])
def test_a_change_of_the_clocks_is_no_false_alarm(zone_name: str, text: str) -> None:
    zone, schedule = load(zone_name), parse(text)
    for instant, _ in zone.changes(epoch("2026-01-01T00:00:00Z"), epoch("2027-01-01T00:00:00Z")):
        begin, end = instant - DAY, instant + DAY
        taken = list(tick.ticks_between(schedule, zone, begin, end))
        found = records(definitions=f"0|{text}|{zone_name}", known=begin, taken=taken)
        for now in range(begin + HOUR, end, 20 * 60):
            assert missed_of(found, [t for t in taken if t <= now], now_ms=now * 1000).total == 0
        assert missed_of(found, taken[1:], now_ms=(end + 4 * HOUR) * 1000).ticks[0] == taken[0]


def test_backfills_alone_make_no_job_known_and_nothing_missed() -> None:
    assert report.missed_window(job_of(records({str(NOW - DAY): "a=1 s=succeeded"})), LATE_MS, None) is None


def test_a_status_sums_up_the_last_runs() -> None:
    at = NOW - HOUR
    runs = {
        str(at - 2 * HOUR): f"a=1 s=succeeded b={(at - 2 * HOUR) * 1000 + 500}",
        f"{at - HOUR}.1": f"a=1 s=failed b={(at - HOUR) * 1000 + 100}",
        str(at - HOUR): f"a=2 s=failed x=1 b={(at - HOUR) * 1000 + 60_000}",
        str(at): f"a=1 s=running n=node-2 b={at * 1000 + 100} l={NOW_MS + 1}",
    }
    status = report.job_status(job_of(records(runs)), Missed(), None)
    assert status.last_run is not None
    assert (status.last_run.tick, status.last_run.outcome) == (at, "running")
    assert status.last_success == at - 2 * HOUR
    assert [run.tick for run in status.running] == [at]
    assert status.next_tick == NOW + HOUR
    assert status.effective_interval_seconds == HOUR - 1
    lapsed = report.job_status(job_of(records(runs), NOW_MS + 2), Missed(), None)
    assert not lapsed.running


def test_a_success_older_than_the_runs_that_were_read_counts() -> None:
    status = report.job_status(job_of(records({str(NOW): "a=1 s=failed"})), Missed(), str(NOW - DAY))
    assert status.last_success == NOW - DAY


def test_an_interval_needs_two_starts() -> None:
    one = report.job_status(job_of(records({str(NOW): f"a=1 s=failed b={NOW_MS}"})), Missed(), None)
    assert one.effective_interval_seconds is None


def _explain(fired_at: str, *, text: str = "0 2 * * *", tz: str = "Europe/Amsterdam", daemon: str = "UTC") -> str:
    schedule = parse(text)
    answer = report.explain(
        schedule,
        load(tz),
        load(daemon),
        tick.parse_instant_ms(fired_at),
        600,
        poll=False,
    )
    return f"{answer.decision}: {answer.reason}"


@pytest.mark.parametrize(
    ("fired_at", "options", "parts"),
    [
        ("2026-09-17T00:00:30Z", {}, ("run:", "serves 2026-09-17T00:00:00Z", "30 s after", "grace of 10 min")),
        ("2026-09-16T23:59:58.5Z", {}, ("run:", "1.5 s before it")),
        ("2026-09-17T00:20:00Z", {}, ("too-late:", "20 min after", "the grace is 10 min")),
        ("2026-09-17T09:10:00Z", {}, ("not-due:", "2026-09-17T00:00:00Z", "2026-09-18T00:00:00Z")),
        (
            "2026-09-17T02:00:00Z",
            {},
            (
                "zone-mismatch:",
                "02:00:00+00:00 in cron's zone UTC",
                "04:00:00+02:00 in the schedule's zone",
                "--tz UTC",
            ),
        ),
        ("2026-03-29T01:00:05Z", {"text": "30 2 * * *"}, ("run:", "02:30 is skipped on this day")),
    ],
    ids=["run", "early", "too late", "not due", "zone", "transition"],
)
def test_an_explanation_says_which_tick_and_why(fired_at: str, options: dict[str, str], parts: tuple[str, ...]) -> None:
    said = _explain(fired_at, **options)
    assert all(part in said for part in parts), said
    assert said.count(". ") <= 2


def test_records_are_not_changed_by_looking() -> None:
    found = records({str(NOW): "a=1 s=running"})
    before = replace(found, runs=dict(found.runs), state=dict(found.state))
    report.job_status(job_of(found), Missed(), None)
    assert found == before
