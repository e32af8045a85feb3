"""The schedule language: what is accepted, what it means, and what a rejection says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustercron.errors import BadSchedule
from clustercron.schedule import ALIASES, Schedule, parse

CASES = [json.loads(line) for line in Path(__file__).with_name("schedule-cases.jsonl").read_text().splitlines()]
ACCEPTED = [case for case in CASES if case["accept"]]
REJECTED = [case for case in CASES if not case["accept"]]
FIELDS = ("minute", "hour", "day-of-month", "month", "day-of-week")


def by_text(case: dict[str, object]) -> str:
    return ascii(case["schedule"])


def members(bits: int) -> set[int]:
    return {value for value in range(bits.bit_length()) if bits >> value & 1}


def month_days(schedule: Schedule, first_weekday: int, length: int) -> set[int]:
    return members(schedule.days_in(first_weekday, length))


@pytest.mark.parametrize("case", ACCEPTED, ids=by_text)
def test_accepted_schedule_has_the_sets_that_cron_reads(case):
    schedule = parse(case["schedule"])
    assert schedule.text == case["schedule"]
    assert list(schedule.minutes) == case["minute"]
    assert list(schedule.hours) == case["hour"]
    assert list(schedule.days) == case["day_of_month"]
    assert list(schedule.months) == case["month"]
    assert list(schedule.weekdays) == case["day_of_week"]
    assert schedule.wildcard == case["wildcard"]
    assert schedule.day_rule == case["day_rule"]
    assert schedule.extended is None


@pytest.mark.parametrize("case", REJECTED, ids=by_text)
def test_rejected_schedule_is_refused_with_its_text(case):
    with pytest.raises(BadSchedule) as refusal:
        parse(case["schedule"])
    assert refusal.value.message.startswith(f"schedule {case['schedule']!r}: ")
    assert refusal.value.exit_code == 125
    assert refusal.value.message.isprintable()
    field = case["why"].partition(":")[0]
    if field in FIELDS:
        assert f": {field}: " in refusal.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("61 * * * *", "minute: 61 is not in 0-59"),
        ("0 24 * * *", "hour: 24 is not in 0-23"),
        ("0 0 32 * *", "day-of-month: 32 is not in 1-31"),
        ("0 0 * 0 *", "month: 0 is not in 1-12"),
        ("0 0 * * 8", "day-of-week: 8 is not in 0-7"),
        ("5/15 * * * *", "minute: a step needs a range: write 5-59/15, not 5/15"),
        ("0 22-4 * * *", "hour: 22-4 runs backwards, so cron would never fire it: write 22-23,0-4"),
        ("0 0 * * sat-sun", "write 6-7"),
        ("0 0 * * fri-mon", "write 5-6,0-1"),
        ("0 0 * nov-jan *", "write 11-12,1"),
        ("0 23-4/2 * * *", "write two ranges"),
        ("*/0 * * * *", "the step of */0 is 0: write 1 or more"),
        ("0 0 1 january *", "write jan"),
        ("0 0 * * Friday", "write fri"),
        ("0 0 ? * *", "write *"),
        ("0~10 * * * *", "write a fixed value"),
        ("0 0 * * L5", "day-of-week: cron cannot say L5: it needs --poll"),
        ("0 0 L * *", "day-of-month: cron cannot say L: it needs --poll"),
        ("0 0 * * fri#2", "day-of-week: cron cannot say fri#2: it needs --poll"),
        ("@reboot", "write five fields"),
        ("@every 5m", "write a step"),
        ("@Daily", "write @daily"),
        ("@fortnightly", "write one of @yearly"),
        ("@daily 0", "write one of @yearly"),
        ("", "is empty: write five fields"),
        ("0 2 * *", "4 fields, not 5: write minute, hour"),
        ("0 2 * * * /bin/true", "6 fields, not 5"),
        ("0 2 * *\n*", r"holds '\n', which cron takes for no blank"),
        ("0 0 30 2 *", "cron would never fire it"),
        ("0 0 31 4,6,9,11 *", "cron would never fire it"),
        ("0 0 30 2 */2", "cron would never fire it"),
        ("0 0 */30 feb *", None),
        ("0 0 29 2 */7", None),
        ("*/999999999 * * * *", None),
        ("*/4294967297 * * * *", "minute: '*/4294967297' is no value"),
        ("0 0 * * %", "day-of-week: '%' is no value"),
    ],
    ids=repr,
)
def test_rejection_names_the_field_the_fault_and_what_to_write(text, says):
    if says is None:
        assert parse(text).text == text
        return
    with pytest.raises(BadSchedule) as refusal:
        parse(text)
    assert says in refusal.value.message


@pytest.mark.parametrize(
    ("text", "field", "written"),
    [
        ("5/15 * * * *", 0, "5-59/15"),
        ("0 22-4 * * *", 1, "22-23,0-4"),
        ("0 0 20-1 * *", 2, "20-31,1"),
        ("0 0 * oct-jan *", 3, "10-12,1"),
        ("0 0 * * sat-sun", 4, "6-7"),
        ("0 0 * * 6-1", 4, "6,0-1"),
        ("0 0 * * 7-1", 4, "0-1"),
    ],
)
def test_what_a_rejection_says_to_write_is_accepted(text, field, written):
    with pytest.raises(BadSchedule, match=f"write {written}(,|$)"):
        parse(text)
    columns = text.split()
    columns[field] = written
    parse(" ".join(columns))


@given(st.text(alphabet="0123456789*/-,#LlWw?@~% \t\nabcdefghijmnopqrstuvyéx５", max_size=30), st.booleans())
def test_any_text_is_either_read_or_refused_in_one_printable_line(text, extended):
    try:
        schedule = parse(text, extended=extended)
    except BadSchedule as exc:
        refusal = exc
    else:
        assert schedule.minutes
        assert schedule.hours
        assert schedule.months
        assert schedule.days or schedule.weekdays or schedule.extended
        return
    assert refusal.message.isprintable()
    assert ": " in refusal.message


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_alias_means_its_five_fields(alias):
    named, written = parse(alias), parse(ALIASES[alias])
    assert named.text == alias
    for part in ("minutes", "hours", "days", "months", "weekdays", "wildcard", "day_rule"):
        assert getattr(named, part) == getattr(written, part)


def test_day_rule_is_and_only_if_a_day_field_begins_with_a_star():
    # A month of 30 days that begins on a Wednesday.
    assert month_days(parse("0 6 */2 * 1"), 3, 30) == {13, 27}
    assert month_days(parse("0 6 1-31/2 * 1"), 3, 30) == set(range(1, 31, 2)) | {6, 13, 20, 27}
    assert month_days(parse("0 6 13 * 5"), 3, 30) == {3, 10, 13, 17, 24}
    assert month_days(parse("0 6 5,* * 5"), 3, 30) == set(range(1, 31))
    assert month_days(parse("0 6 *,5 * 5"), 3, 30) == {3, 10, 17, 24}
    assert month_days(parse("0 6 31 * *"), 3, 30) == set()


@pytest.mark.parametrize(
    ("text", "first_weekday", "length", "days"),
    [
        ("0 2 * * L5", 3, 30, {24}),
        ("0 2 * * L7", 3, 30, {26}),
        ("0 0 L * *", 3, 30, {30}),
        ("0 0 L * *", 0, 28, {28}),
        ("0 0 1,L * *", 6, 29, {1, 29}),
        ("0 6 * * 5#2", 3, 30, {10}),
        ("0 6 * * fri#2", 3, 30, {10}),
        ("0 6 * * 5#2,5#4", 3, 30, {10, 24}),
        ("0 6 * * 1#5", 3, 30, set()),
        ("0 6 * * 1#5", 6, 31, {31}),
        ("0 6 * * 3,L5", 3, 30, {1, 8, 15, 22, 29, 24}),
        ("0 6 15 * L5", 3, 30, {15, 24}),
        ("0 6 */2 * L5", 5, 31, {29}),
        ("0 6 */2 * L5", 3, 30, set()),
        ("0 6 L * 5#1", 3, 30, {3, 30}),
    ],
)
def test_extended_day_fields_mean_what_croniter_reads(text, first_weekday, length, days):
    schedule = parse(text, extended=True)
    assert schedule.extended is not None
    assert month_days(schedule, first_weekday, length) == days


@pytest.mark.parametrize("text", ["0 0 L9 * *", "0 0 * * L9", "0 0 * * 5#6", "0 0 LW * *", "0 0 * * L", "0 0 é#L * *"])
def test_extended_items_that_croniter_does_not_read_are_refused(text):
    with pytest.raises(BadSchedule, match="not readable even with --poll: write L"):
        parse(text, extended=True)


@pytest.mark.parametrize(
    "text", ["L * * * *", "0 5#2 * * *", "0 0 * L *", "0 0 15W * *", "0 0 ? * L5", "5/15 0 * * L5", "0 0 */31 feb L5"]
)
def test_extended_keeps_cron_s_own_rules_for_everything_else(text):
    with pytest.raises(BadSchedule):
        parse(text, extended=True)


@pytest.mark.parametrize("text", ["0 0 */31 * L1", "0 0 */31 1 1#2", "0 0 */30 2 5#5"])
def test_extended_impossible_day_is_refused(text):
    with pytest.raises(BadSchedule, match="cron would never fire it"):
        parse(text, extended=True)


def test_extended_day_that_only_some_years_have_is_accepted():
    assert parse("0 0 * 2 5#5", extended=True).months == (2,)


def test_plain_schedule_never_loads_croniter():
    code = (
        "import sys; from clustercron.schedule import parse; parse('*/5 2 1-7 * mon', extended=True).days_in(0, 31);"
        "assert 'croniter' not in sys.modules and 'datetime' not in sys.modules;"
        "parse('0 2 * * L5', extended=True); assert 'croniter' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
