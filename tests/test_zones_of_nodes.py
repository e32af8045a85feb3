"""Nodes whose cron runs in another zone than the schedule: refused, told apart from late starts, or polled."""

from __future__ import annotations

import calendar
import time
from typing import TYPE_CHECKING

import pytest

from tests.rig import Fleet, lines

if TYPE_CHECKING:
    from tests.world import World

AMSTERDAM = ["--tz", "Europe/Amsterdam"]


def at(text: str) -> float:
    """The second in which cron fires the lines of a minute."""
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%MZ")) + 1


@pytest.mark.root
def test_node_in_new_york_is_refused_and_the_one_in_utc_runs(world: World) -> None:
    job, path = world.fleet.append_job()
    line = ["--job", "billing", "--schedule", "0 2 * * *", "--", *job]
    world.set_all(at("2026-01-05T02:00Z"))
    assert world.run(*line, node="node-utc").returncode == 0
    world.set_all(at("2026-01-05T07:00Z"))
    end = world.run(*line, node="node-ny", env={"CLUSTERCRON_DAEMON_TZ": "America/New_York"})
    assert end.returncode == 125
    trouble, hint = end.stderr.splitlines()
    assert trouble == (
        "clustercron: billing: zone mismatch: cron fired this at 2026-01-05T02:00:00-05:00, which is '0 2 * * *' in cron's "
        "zone America/New_York; in the schedule's zone UTC it is 2026-01-05T07:00:00+00:00, which is not"
    )
    assert "--tz America/New_York" in hint
    assert [entry.split()[1] for entry in lines(path)] == ["node-utc"]


@pytest.mark.root
@pytest.mark.parametrize("day", ["2026-01-05", "2026-07-06"], ids=["one hour late", "two hours late"])
def test_daemon_in_utc_with_a_local_schedule_is_no_late_start(world: World, day: str) -> None:
    job, path = world.fleet.append_job()
    world.set_all(at(f"{day}T02:00Z"))
    end = world.run("--job", "billing", "--schedule", "0 2 * * *", *AMSTERDAM, "--", *job)
    assert end.returncode == 125
    assert "zone mismatch" in end.stderr
    assert "UTC" in end.stderr
    assert "Europe/Amsterdam" in end.stderr
    assert lines(path) == []


@pytest.mark.root
def test_daemon_in_the_schedules_zone_by_another_name_is_no_mismatch(world: World) -> None:
    job, path = world.fleet.append_job()
    world.set_all(at("2026-01-05T01:00Z") + 90)
    env = {"CLUSTERCRON_DAEMON_TZ": "Europe/Brussels"}
    end = world.run("--job", "billing", "--schedule", "0 2 * * *", *AMSTERDAM, "--", *job, env=env)
    assert (end.returncode, end.stderr) == (0, "")
    assert len(lines(path)) == 1


@pytest.mark.root
def test_polled_local_schedule_runs_once_a_day_all_year_in_silence(world: World) -> None:
    job, path = world.fleet.append_job()
    line = ["--job", "billing", "--schedule", "30 2 * * *", *AMSTERDAM, "--poll", "--", *job]
    # Winter, the day clocks go forward (02:30 is skipped, and runs at the change), summer, the day they go back.
    days = [
        "2026-01-05",
        "2026-03-28",
        "2026-03-29",
        "2026-03-30",
        "2026-07-06",
        "2026-10-24",
        "2026-10-25",
        "2026-10-26",
    ]
    for day in days:
        for minute in ("00:30", "01:30"):
            world.set_all(at(f"{day}T{minute}Z"))
            for node in ("node-1", "node-2"):
                end = world.run(*line, node=node)
                assert (end.returncode, end.stdout, end.stderr) == (0, "", "")
    assert [entry.split()[0][:10] for entry in lines(path)] == days


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        (["--tz", "Mars/Phobos"], {}, ["zone 'Mars/Phobos': unknown time zone"]),
        (["--tz", "Europe/Amsterdm"], {}, ["unknown time zone", "Europe/Amsterdam"]),
        (["--tz", "../../etc/passwd"], {}, ["unknown time zone"]),
        ([], {"CRON_TZ": "Europe/Amsterdam"}, ["CRON_TZ", "give --tz Europe/Amsterdam"]),
        ([], {"CLUSTERCRON_DAEMON_TZ": "Nowhere/Land"}, ["zone of cron", "Nowhere/Land"]),
        ([], {"CLUSTERCRON_TZDATA": "hearsay"}, ["CLUSTERCRON_TZDATA", "package, system"]),
    ],
    ids=["unknown", "misspelt", "path", "CRON_TZ of an unknown cron", "unknown daemon zone", "unknown source"],
)
def test_unknown_zone_is_an_error_and_never_utc(
    fleet: Fleet, arguments: list[str], env: dict[str, str], words: list[str]
) -> None:
    job, path = fleet.append_job()
    end = fleet.run("--job", "billing", "--schedule", "* * * * *", *arguments, "--", *job, env=env)
    assert end.returncode == 125
    assert len(end.stderr.splitlines()) <= 2
    assert all(word in end.stderr for word in words), end.stderr
    assert lines(path) == []
