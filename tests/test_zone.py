"""Zones: offsets as zoneinfo has them, rules beyond the table, and names that are none."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zoneinfo
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path

import pytest
import tzdata
from hypothesis import given
from hypothesis import strategies as st

from clustercron import zone as zone_module
from clustercron.errors import BadZone
from clustercron.zone import civil, daemon_zone, day_number, is_leap, load, offsets_fingerprint, parse_tzif
from tests.cronlab.made_up_zones import tzif

PACKAGE = Path(tzdata.__path__[0])
NAMES = (PACKAGE / "zones").read_text().split()
YEAR = 366 * 86400


def epoch(*fields: int) -> int:
    return int(datetime(*fields, tzinfo=UTC).timestamp())


def changes_by_zoneinfo(rules: zoneinfo.ZoneInfo, begin: int, end: int) -> list[int]:
    """Instants of all changes of the offset that do not take each other back within nine days."""
    found = []
    for day in range(begin, end, 9 * 86400):
        low, high = day, min(day + 9 * 86400, end)
        if offset_by_zoneinfo(rules, low) != (after := offset_by_zoneinfo(rules, high)):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if offset_by_zoneinfo(rules, middle) == after else (middle, high)
            found.append(high)
    return found


def offset_by_zoneinfo(rules: zoneinfo.ZoneInfo, instant: int) -> int:
    return int(datetime.fromtimestamp(instant, rules).utcoffset().total_seconds())


@pytest.mark.parametrize("name", NAMES)
def test_offsets_are_those_of_zoneinfo(name):
    data = (PACKAGE / "zoneinfo" / name).read_bytes()
    rules = zoneinfo.ZoneInfo.from_file(BytesIO(data))
    zone = load(name)
    assert (zone.name, zone.rules_version) == (name, tzdata.IANA_VERSION)
    instants = {random.Random(name).randrange(epoch(1972, 1, 1), epoch(2500, 1, 1)) for _ in range(200)}
    for begin, end in ((epoch(1970, 1, 1), epoch(2038, 1, 1)), (epoch(2099, 1, 1), epoch(2101, 1, 1))):
        changes = [instant for instant, _ in zone.changes(begin, end)]
        # Changes are seen at whole minutes.
        assert {-(-instant // 60) * 60 for instant in changes_by_zoneinfo(rules, begin, end)} <= set(changes)
        instants |= {minute for instant in changes for minute in (instant - 60, instant, instant + 1)}
    for instant in sorted(instants):
        assert zone.offset_at(instant) == offset_by_zoneinfo(rules, instant), datetime.fromtimestamp(instant, UTC)
        assert zone.lowest * 60 <= zone.offset_at(instant) < zone.highest * 60 + 60


@pytest.mark.parametrize(
    "name", ["Europe/Amsterdam", "Pacific/Chatham", "America/Santiago", "Africa/Casablanca", "UTC", "EST5EDT"]
)
def test_spans_follow_each_other_without_gap_or_overlap(name):
    zone = load(name)
    minute = epoch(2020, 1, 1) // 60
    while minute < epoch(2120, 1, 1) // 60:
        start, end, offset, passed, jump = zone.span(minute)
        assert start <= minute < end
        assert offset == zone.offset_at(minute * 60) // 60
        if start > 0:
            before = zone.span(start - 1)
            assert before[1] == start
            assert jump == offset - before[2] != 0
            assert passed == start + before[2]
        minute = end


@pytest.mark.parametrize(
    "footer",
    [
        "CET-1CEST,M3.5.0,M10.5.0/3",
        "EST5EDT",
        "<-03>3<-02>,M3.2.0/-1,M11.1.0/25",
        "EET-2EEST,M3.4.4/50,M10.4.4/50",
        "IST-1GMT0,M10.5.0,M3.5.0/1",
        "AAA4BBB,J60/2:30,J300/0",
        "AAA-5:30BBB-6,59/1:15:00,364/3",
        "NZST-12NZDT,M9.5.0,M4.1.0/3",
        "<+1245>-12:45<+1345>,M9.5.0/2:45,M4.1.0/3:45",
        "AAA1BBB,M12.1.6/26,M1.3.0/-30",
    ],
)
def test_rule_after_the_table_means_what_libc_reads(footer):
    first = zone_module._Footer(footer).standard
    zone = parse_tzif("made up", tzif(footer, offsets=(first,)), "test")
    instants = list(range(epoch(2011, 12, 20), epoch(2017, 1, 10), 5 * 3600 + 60))
    for instant, _ in zone.changes(instants[0], instants[-1]):
        instants += [instant - 60, instant]
    code = "import sys, time; print(*(time.localtime(int(word)).tm_gmtoff for word in sys.stdin.read().split()))"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        input=" ".join(map(str, instants)),
        env={"TZ": footer},
        capture_output=True,
        text=True,
        check=True,
    )
    for instant, offset in zip(instants, answer.stdout.split(), strict=True):
        assert zone.offset_at(instant) == int(offset), datetime.fromtimestamp(instant, UTC)


def test_permanent_summer_time_has_no_changes():
    zone = parse_tzif("made up", tzif("XXX3EDT4,0/0,J365/23", offsets=(-4 * 3600,)), "test")
    assert zone.changes(epoch(2020, 1, 1), epoch(2030, 1, 1)) == []
    assert zone.offset_at(epoch(2025, 1, 1, 3)) == -4 * 3600


def test_table_goes_over_into_the_rule_without_a_seam():
    last = epoch(2019, 3, 31, 1)
    data = tzif("CET-1CEST,M3.5.0,M10.5.0/3", ((epoch(2018, 10, 28, 1), 0), (last, 1)), (3600, 7200))
    zone = parse_tzif("made up", data, "test")
    found = zone.changes(epoch(2018, 1, 1), epoch(2021, 1, 1))
    assert [datetime.fromtimestamp(instant, UTC).date().isoformat() for instant, _ in found] == [
        "2019-03-31",
        "2019-10-27",
        "2020-03-29",
        "2020-10-25",
    ]
    assert zone.span(last // 60)[0] == last // 60
    assert zone.span(last // 60 + 200_000)[0] == last // 60


def test_change_of_the_abbreviation_alone_is_no_change():
    zone = parse_tzif("made up", tzif("", ((1_600_000_000, 1), (1_600_086_400, 0)), (3600, 3600)), "test")
    assert zone.changes(0, 2_000_000_000) == []


def test_version_one_file_is_read_for_the_years_it_holds():
    zone = parse_tzif("old", tzif("", ((1_600_000_020, 1),), (0, 3600), version=b"\0"), "test")
    assert zone.offset_at(1_600_000_019) == 0
    assert zone.offset_at(1_600_000_020) == 3600


def test_file_that_is_cut_off_anywhere_is_refused():
    data = (PACKAGE / "zoneinfo" / "Europe" / "Amsterdam").read_bytes()
    footer = len(data) - data[:-1].rfind(b"\n")
    for length in range(len(data) - footer + 1):
        with pytest.raises(BadZone, match="Europe/Amsterdam"):
            parse_tzif("Europe/Amsterdam", data[:length], "test")


@given(st.binary(max_size=120), st.integers(0, 400))
def test_damaged_file_is_read_or_refused_and_nothing_else(junk, at):
    data = (PACKAGE / "zoneinfo" / "Asia" / "Gaza").read_bytes()
    for damaged in (data[:at] + junk + data[at + len(junk) :], b"TZif2" + junk, junk):
        try:
            zone = parse_tzif("damaged", damaged, "test")
        except BadZone:
            continue
        zone.offset_at(1_800_000_000)


@pytest.mark.parametrize(
    "footer",
    [
        "CET",
        "CET-1CEST,M3.5.0",
        "C-1",
        "CET-25",
        "CET-1CEST,M13.1.0,M10.5.0",
        "CET-1CEST,M3.5.0,x",
        "<CET-1",
        "CET-1CEST,M3.5.0/168,M10.5.0",
        "CET-1 ",
    ],
)
def test_rule_that_is_none_is_refused(footer):
    with pytest.raises(BadZone):
        parse_tzif("made up", tzif(footer, offsets=(3600,)), "test")


def test_file_that_counts_leap_seconds_is_refused():
    data = bytearray(tzif("UTC0"))
    data[28:32] = data[44 + 10 + 28 : 44 + 10 + 32] = (0).to_bytes(4, "big")
    second = data.rindex(b"TZif")
    data[second + 28 : second + 32] = (1).to_bytes(4, "big")
    with pytest.raises(BadZone, match="leap seconds"):
        parse_tzif("right/UTC", bytes(data), "test")


@pytest.mark.parametrize("source", ["package", "system"])
@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "../zoneinfo/UTC", "/usr/share/zoneinfo/UTC", "Europe", "Europe/", "tzdata.zi", "zone.tab", "localtime",
     "posixrules", "right/UTC", "posix/UTC", "leapseconds", "Nowhere/At_All", "UTC\n", "UTC\0", "Ünterwegs", "Europe//Paris"],
    ids=repr,
)  # fmt: skip
def test_name_of_no_zone_is_refused(name, source):
    if source == "system" and not any(os.path.isdir(path) for path in zone_module.SYSTEM_DIRS):
        pytest.skip("no zone rules on this machine")
    with pytest.raises(BadZone) as refusal:
        load(name, source)
    assert refusal.value.message == f"zone {name!r}: unknown time zone"
    assert refusal.value.hint
    assert refusal.value.hint.isprintable()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("Europe/Amsterdm", "Europe/Amsterdam"), ("europe/amsterdam", "Europe/Amsterdam"), ("New York", "America/New_York"),
     ("amsterdam", "Europe/Amsterdam"), ("America/Bueno_Aires", "America/Buenos_Aires"), ("utc", "UTC")],
)  # fmt: skip
def test_wrong_name_gets_the_nearest_known_one(wrong, right):
    with pytest.raises(BadZone) as refusal:
        load(wrong)
    assert f"did you mean {right}" in refusal.value.hint


def test_zone_comes_from_the_named_source_or_not_at_all(monkeypatch, tmp_path):
    (tmp_path / "tzdata.zi").write_text("# version 2031x\nR foo\n")
    (tmp_path / "Made").mkdir()
    (tmp_path / "Made" / "Up").write_bytes(tzif("AAA-7", offsets=(25200,)))
    monkeypatch.setattr(zone_module, "SYSTEM_DIRS", (str(tmp_path / "absent"), str(tmp_path)))
    zone = load("Made/Up", "system")
    assert (zone.rules_version, zone.offset_at(0)) == ("system 2031x", 25200)
    with pytest.raises(BadZone):
        load("Europe/Amsterdam", "system")
    with pytest.raises(BadZone):
        load("Made/Up", "package")
    with pytest.raises(BadZone, match="no source"):
        load("UTC", "internet")
    monkeypatch.setattr(zone_module, "SYSTEM_DIRS", (str(tmp_path / "absent"),))
    with pytest.raises(BadZone, match="no zone rules on this machine"):
        load("UTC", "system")


def test_missing_package_of_rules_is_an_error_and_never_utc(monkeypatch):
    monkeypatch.setitem(sys.modules, "tzdata", None)
    with pytest.raises(BadZone, match="tzdata is not installed") as refusal:
        load("UTC")
    assert "CLUSTERCRON_TZDATA=system" in refusal.value.hint


def test_daemon_s_zone_is_the_localtime_file_whatever_its_name(tmp_path):
    copy = tmp_path / "localtime"
    copy.write_bytes((PACKAGE / "zoneinfo" / "America" / "New_York").read_bytes())
    zone = daemon_zone(None, str(copy))
    assert zone.rules_version == "file"
    assert zone.name == str(copy)
    assert zone.offset_at(epoch(2026, 7, 1)) == -4 * 3600
    (tmp_path / "zoneinfo" / "Asia").mkdir(parents=True)
    (tmp_path / "zoneinfo" / "Asia" / "Tokyo").write_bytes((PACKAGE / "zoneinfo" / "Asia" / "Tokyo").read_bytes())
    (tmp_path / "link").symlink_to(tmp_path / "zoneinfo" / "Asia" / "Tokyo")
    assert daemon_zone("", str(tmp_path / "link")).name == "Asia/Tokyo"


def test_daemon_without_a_localtime_file_runs_in_utc(tmp_path):
    zone = daemon_zone(None, str(tmp_path / "absent"))
    assert (zone.name, zone.offset_at(epoch(2026, 7, 1))) == ("UTC", 0)


def test_daemon_with_a_broken_localtime_file_is_an_error(tmp_path):
    (tmp_path / "localtime").write_bytes(b"TZif")
    with pytest.raises(BadZone):
        daemon_zone(None, str(tmp_path / "localtime"))
    with pytest.raises(BadZone, match="cannot be read"):
        daemon_zone(None, str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "july"),
    [("Europe/Amsterdam", 7200), (":Europe/Amsterdam", 7200), ("UTC", 0), ("CET-1CEST,M3.5.0,M10.5.0/3", 7200), ("UTC0", 0),
     ("<+0530>-5:30", 19800), (str(PACKAGE / "zoneinfo/Asia/Tokyo"), 32400), (f":{PACKAGE}/zoneinfo/Asia/Tokyo", 32400)],
    ids=lambda value: str(value).replace(str(PACKAGE), ""),
)  # fmt: skip
def test_daemon_s_zone_can_be_given_as_libc_takes_it(spec, july):
    assert daemon_zone(spec, "/nonexistent").offset_at(epoch(2026, 7, 1)) == july


@pytest.mark.parametrize("spec", ["Mars/Olympus", "/nonexistent/zone", "::", "CET-1CEST,what"])
def test_daemon_s_zone_that_is_none_is_an_error_and_never_utc(spec):
    with pytest.raises(BadZone, match="zone of cron"):
        daemon_zone(spec)


def test_fingerprint_tells_rules_apart_and_nothing_else():
    amsterdam, berlin, paris = load("Europe/Amsterdam"), load("Europe/Berlin"), load("Europe/Paris")
    tick = epoch(2026, 9, 17, 2)
    fingerprint = offsets_fingerprint(amsterdam, tick)
    year, _, digest = fingerprint.partition(":")
    assert (year, len(digest), int(digest, 16) >= 0) == ("2026", 8, True)
    assert offsets_fingerprint(berlin, tick) == offsets_fingerprint(paris, tick) == fingerprint
    assert offsets_fingerprint(load("Africa/Lagos"), tick) != fingerprint
    assert offsets_fingerprint(load("Europe/London"), tick) != fingerprint
    assert offsets_fingerprint(load("Africa/Algiers"), tick) != offsets_fingerprint(load("UTC"), tick)
    assert offsets_fingerprint(amsterdam, epoch(2026, 1, 1)) == fingerprint
    assert offsets_fingerprint(amsterdam, epoch(2026, 12, 31, 23, 59)) == fingerprint
    assert offsets_fingerprint(amsterdam, epoch(2027, 1, 1)).startswith("2027:")


def test_fingerprint_covers_a_year_either_side_and_no_more():
    def with_change(*date: int) -> str:
        changed = tzif("", ((epoch(*date), 1),), (0, 3600))
        return offsets_fingerprint(parse_tzif("x", changed, "test"), epoch(2026, 6, 1))

    unchanged = offsets_fingerprint(parse_tzif("x", tzif(""), "test"), epoch(2026, 6, 1))
    assert with_change(2028, 1, 1) == unchanged
    assert with_change(2027, 12, 31, 23, 59) != unchanged
    assert with_change(2025, 1, 1, 0, 1) != with_change(2025, 1, 1, 0, 2) != unchanged
    assert with_change(2025, 1, 1) == with_change(1990, 1, 1) != unchanged


def test_calendar_is_the_gregorian_one():
    for day in [*range(-1000, 40_000, 7), -719162, 146096, 2932896]:
        date = datetime.fromordinal(day + 719163).replace(tzinfo=UTC)
        assert civil(day) == (date.year, date.month, date.day)
        assert day_number(date.year, date.month, date.day) == day
    assert [year for year in (1900, 2000, 2024, 2026, 2100, 2400) if is_leap(year)] == [2000, 2024, 2400]
