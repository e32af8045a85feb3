"""One tick, one run: many real processes, one line for each tick."""

from __future__ import annotations

import pytest

from tests.rig import Fleet, Server, lines, wait_for


def test_second_node_stands_aside_for_a_taken_tick(fleet: Fleet) -> None:
    job, path = fleet.append_job()
    first = fleet.run("--job", "billing", "--schedule", "* * * * *", "--tick", "2026-01-05T02:00:00Z", "--", *job)
    second = fleet.run(
        "--job", "billing", "--schedule", "* * * * *", "--tick", "2026-01-05T02:00:00Z", "--", *job, node="node-2"
    )
    assert (first.returncode, first.stdout, first.stderr) == (0, "", "")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert [line.split()[:2] for line in lines(path)] == [["2026-01-05T02:00:00Z", "node-1"]]


def _race(fleet: Fleet, ticks: int) -> None:
    job, path = fleet.append_job()
    for number in range(ticks):
        tick = f"2026-01-05T{number // 60:02}:{number % 60:02}:00Z"
        fires = [
            fleet.start(
                "run", "--job", "race", "--schedule", "* * * * *", "--tick", tick, "--", *job, node=f"node-{node}"
            )
            for node in range(50)
        ]
        ends = [fire.end() for fire in fires]
        assert {(end.returncode, end.stdout, end.stderr) for end in ends} == {(0, "", "")}
        assert len(lines(path)) == number + 1
    seen = [line.split() for line in lines(path)]
    assert len({tick for tick, _, _ in seen}) == ticks
    tokens = [int(token) for _, _, token in seen]
    assert tokens == sorted(set(tokens))


@pytest.mark.timeout(300)
def test_fifty_processes_on_one_tick_make_one_run(fleet: Fleet) -> None:
    _race(fleet, 20)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_fifty_processes_on_each_of_two_hundred_ticks(fleet: Fleet) -> None:
    _race(fleet, 200)


LINE = ["--job", "billing", "--schedule", "* * * * *", "--tick"]


def test_dry_run_says_what_a_fire_would_do_and_does_nothing(fleet: Fleet, server: Server) -> None:
    job, path = fleet.append_job()
    free = fleet.run(*LINE, "2026-01-05T02:00:00Z", "--dry-run", "--", *job)
    assert free.returncode == 0
    assert "state  free\nplan   claim it as node-1 and execute /bin/sh" in free.stdout
    with server.client() as client:
        assert client.keys("*") == []
    assert fleet.run(*LINE, "2026-01-05T02:00:00Z", "--", *job).returncode == 0
    taken = fleet.run(*LINE, "2026-01-05T02:00:00Z", "--dry-run", "--", *job)
    assert "state  succeeded\nplan   stand aside\n" in taken.stdout
    assert len(lines(path)) == 1


@pytest.mark.parametrize("extra", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_future_tick_is_refused_and_leaves_no_trace(fleet: Fleet, server: Server, extra: list[str]) -> None:
    end = fleet.run(*LINE, "2037-01-05T02:00:00Z", *extra, "--", "/bin/true")
    assert end.returncode == 125
    assert "it is in the future by Redis's clock" in end.stderr
    with server.client() as client:
        assert client.keys("*") == []


def test_run_whose_lease_ran_out_is_called_lost(fleet: Fleet) -> None:
    job = ("/bin/sh", "-c", f"echo up > {fleet.folder}/up; exec sleep 60")
    fire = fleet.start("run", *LINE, "2026-01-05T02:00:00Z", "--lease", "1s", "--", *job)
    wait_for(lambda: lines(fleet.folder / "up"), "it runs")
    assert "stands aside: running on node-1, since" in _aside(fleet)
    fire.kill()
    wait_for(lambda: "stands aside: lost on node-1, started at" in _aside(fleet), "its lease runs out")


def _aside(fleet: Fleet) -> str:
    return fleet.run("-v", *LINE, "2026-01-05T02:00:00Z", "--", "/bin/true", node="node-2").stderr
