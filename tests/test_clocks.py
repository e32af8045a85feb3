"""Clocks that are wrong: of nodes, of Redis, in mid-life; and what a fire serves that got round to looking late."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import TYPE_CHECKING

import pytest

from tests.rig import COMMAND, Fleet, lines, wait_for

if TYPE_CHECKING:
    from tests.world import World

NOON = 1_767_614_400  # 2026-01-05T12:00:00Z
INSTANT = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
# A node whose wall clock is off, for everybody: libfaketime needs root to be installed.
SHIFTED = (
    "import os, sys; from clustercron.clock import Clock; from clustercron.options import read_run; "
    "from clustercron.run import main; sys.exit(main(read_run(sys.argv[2:]), os.environ, Clock(int(sys.argv[1]))))"
)


def shifted(hours: float) -> list[str]:
    return [sys.executable, "-I", "-c", SHIFTED, str(int(hours * 3_600_000))]


@pytest.mark.parametrize("hours", [1, -1], ids=["fast", "slow"])
@pytest.mark.parametrize("taken", [False, True], ids=["free tick", "taken tick"])
def test_node_an_hour_off_is_refused_with_both_clocks(fleet: Fleet, hours: int, taken: bool) -> None:
    job, path = fleet.append_job()
    line = ["--job", "billing", "--schedule", "0 0 * * *", "--tick", "2026-01-05T00:00:00Z", "--", *job]
    if taken:
        assert fleet.run(*line).returncode == 0
    end = fleet.start(*line, node="node-2", command=shifted(hours)).end()
    assert end.returncode == 125
    assert re.fullmatch(
        rf"clustercron: billing: cannot claim 2026-01-05T00:00:00Z: the clocks differ by more than --max-skew 30s: "
        rf"node {INSTANT}, redis at \S+ {INSTANT}\nclustercron: hint: .*\n",
        end.stderr,
    )
    assert len(lines(path)) == taken


def test_node_two_seconds_off_takes_part(fleet: Fleet) -> None:
    job, path = fleet.append_job()
    line = ["--job", "billing", "--schedule", "0 0 * * *", "--tick", "2026-01-05T00:00:00Z", "--", *job]
    ends = [fleet.start(*line, node=f"node{o}", command=shifted(o / 3600)).end() for o in (2, -2)]
    assert [(end.returncode, end.stderr) for end in ends] == [(0, "")] * 2
    assert len(lines(path)) == 1


@pytest.mark.root
def test_node_ten_seconds_fast_waits_for_redis_to_reach_the_tick(world: World) -> None:
    job, path = world.fleet.append_job()
    world.store_clock.set_to(NOON - 9.5)
    world.node_clock.set_to(NOON + 0.5)
    end = world.run("-v", "--job", "billing", "--schedule", "0 12 * * *", "--", *job)
    assert end.returncode == 0, end.stderr
    assert [line.split()[0] for line in lines(path)] == ["2026-01-05T12:00:00Z"]
    assert world.store_clock.now() >= NOON
    history = json.loads(world.fleet.call("history", "billing", "--json", env=world.node_clock.env).stdout)
    assert history["runs"][0]["claimed_at"][:19] >= "2026-01-05T12:00:00"


@pytest.mark.root
@pytest.mark.parametrize("hours", [2, -1], ids=["two hours ahead", "one hour behind"])
def test_step_of_the_servers_clock_gives_no_second_run_of_a_taken_tick(world: World, hours: int) -> None:
    job, path = world.fleet.append_job()
    world.set_all(NOON + 1)
    env = {"CLUSTERCRON_RETENTION": "30m", "CLUSTERCRON_LEASE": "2s"}
    line = ["--job", "billing", "--schedule", "0 12 * * *", "--max-skew", "3h", "--grace", "5h"]
    sleeper = world.start(*line, "--", "/bin/sh", "-c", f"{job[2]}; exec sleep 600", env=env)
    wait_for(lambda: lines(path), "the run begins")
    world.store_clock.shift(hours * 3600)
    with world.server.client() as client:
        seconds, _ = client.time()
        assert abs(seconds - NOON - hours * 3600) < 60
    for node in ("node-2", "node-3"):
        end = world.run(*line, "--", *job, node=node, env=env)
        assert (end.returncode, end.stderr) == (0, "")
    sleeper.process.send_signal(signal.SIGTERM)
    assert sleeper.end().returncode == 128 + signal.SIGTERM
    end = world.run(*line, "--", *job, node="node-4", env=env)
    assert (end.returncode, end.stderr) == (0, "")
    assert len(lines(path)) == 1


@pytest.mark.root
def test_step_of_the_servers_clock_is_refused_within_the_usual_skew(world: World) -> None:
    job, path = world.fleet.append_job()
    world.set_all(NOON + 1)
    line = ["--job", "billing", "--schedule", "0 12 * * *", "--", *job]
    assert world.run(*line).returncode == 0
    for step in (2, -3):
        world.store_clock.shift(step * 3600)
        end = world.run(*line, node="node-2")
        assert end.returncode == 125
        assert "the clocks differ by more than --max-skew 30s" in end.stderr
    assert len(lines(path)) == 1


@pytest.mark.root
def test_fire_later_than_the_grace_is_refused_while_nobody_has_the_tick(world: World) -> None:
    job, path = world.fleet.append_job()
    world.set_all(NOON + 71)
    line = ["--job", "billing", "--schedule", "0 12 * * *", "--grace", "60s", "--", *job]
    end = world.run(*line)
    assert end.returncode == 125
    assert end.stderr.startswith("clustercron: billing: too late for 2026-01-05T12:00:00Z: fired at 2026-01-05T12:01:1")
    assert "--tick 2026-01-05T12:00:00Z" in end.stderr
    assert lines(path) == []


@pytest.mark.root
def test_late_fire_for_a_taken_tick_stands_aside_in_silence(world: World) -> None:
    job, path = world.fleet.append_job()
    line = ["--job", "billing", "--schedule", "0 12 * * *", "--grace", "60s", "--", *job]
    world.set_all(NOON + 1)
    assert world.run(*line).returncode == 0
    world.set_all(NOON + 70)
    end = world.run("--skip-exit-code", "9", *line, node="node-2")
    assert (end.returncode, end.stderr) == (9, "")
    assert len(lines(path)) == 1


@pytest.mark.root
def test_fire_far_from_any_tick_is_not_due_and_with_poll_silent(world: World) -> None:
    job, path = world.fleet.append_job()
    world.set_all(NOON + 6 * 3600)
    line = ["--job", "billing", "--schedule", "0 12 * * *"]
    end = world.run(*line, "--", *job)
    assert end.returncode == 125
    assert "not due" in end.stderr
    assert "2026-01-05T12:00:00Z" in end.stderr
    assert "2026-01-06T12:00:00Z" in end.stderr
    end = world.run("--poll", *line, "--", *job)
    assert (end.returncode, end.stderr) == (0, "")
    assert lines(path) == []


@pytest.mark.root
def test_tick_too_old_by_rediss_clock_is_refused_whatever_the_node_says(world: World) -> None:
    # The node looked in time and was then stopped: only Redis can tell that it is late by now.
    job, path = world.fleet.append_job()
    world.set_all(NOON + 1)
    line = [
        "--job",
        "billing",
        "--schedule",
        "0 12 * * *",
        "--grace",
        "5s",
        "--max-skew",
        "5s",
        "--store-timeout",
        "5s",
    ]
    with world.server.stopped():
        fire = world.start(*line, "--", *job)
        wait_for(lambda: _waits_on_a_socket(fire.process.pid), "the node asks")
        os.kill(fire.process.pid, signal.SIGSTOP)
        world.store_clock.shift(60)
        world.node_clock.shift(60)
    os.kill(fire.process.pid, signal.SIGCONT)
    end = fire.end()
    assert end.returncode == 125
    assert end.stderr.startswith("clustercron: billing: too late for 2026-01-05T12:00:00Z: by Redis's clock it is ")
    assert lines(path) == []


def _waits_on_a_socket(pid: int) -> bool:
    folder = f"/proc/{pid}/fd"
    return _state(pid) == "S" and any(os.readlink(f"{folder}/{fd}").startswith("socket:") for fd in os.listdir(folder))


@pytest.mark.root
def test_fire_that_gets_the_cpu_late_serves_the_minute_it_was_fired_for(world: World) -> None:
    job, path = world.fleet.append_job()
    world.set_all(NOON + 57)
    line = ["run", "--job", "billing", "--schedule", "* * * * *", "--", *job]
    # The process is there, as cron forked it, and stopped before it executes anything of ours.
    command = ["/bin/sh", "-c", 'kill -STOP $$; exec "$@"', "sh", *COMMAND]
    fire = world.fleet.start(*line, command=command, env=world.node_clock.env)
    wait_for(lambda: _state(fire.process.pid) == "T", "the process is stopped")
    wait_for(lambda: world.node_clock.now() > NOON + 62.5, "the next minute has begun")
    os.kill(fire.process.pid, signal.SIGCONT)
    assert fire.end().returncode == 0
    world.run(*line[1:], node="node-2")
    assert [entry.split()[0] for entry in lines(path)] == ["2026-01-05T12:00:00Z", "2026-01-05T12:01:00Z"]


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
