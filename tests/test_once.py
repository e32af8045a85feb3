"""One tick, one run: many real processes, one line for each tick."""

from __future__ import annotations

import pytest

from tests.rig import Fleet, lines


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
