"""Figures that a promise was made about, each against another command in the same run: `tests/run -m benchmark -s`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.rig import Fleet, Server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PAIRS = 41
MOST_TIMES_A_BARE_INTERPRETER = 3.0
PLAIN_SCRIPT = """
import sys, click, croniter, redis
@click.command()
@click.argument("url")
def main(url):
    tick = int(croniter.croniter("0 0 * * *", 1767571201, ret_type=float).get_prev())
    if not redis.Redis.from_url(url).set(f"plain:{tick}", "me", nx=True, ex=86400):
        sys.exit(0)
main()
"""


def measure(command: Sequence[str], env: Mapping[str, str]) -> tuple[float, float]:
    """CPU and wall seconds of one process, as the kernel accounts for them."""
    begin = time.perf_counter()
    pid = os.posix_spawn(
        command[0], list(command), dict(env), file_actions=[(os.POSIX_SPAWN_OPEN, 0, "/dev/null", 0, 0)]
    )
    _, status, usage = os.wait4(pid, 0)
    wall = time.perf_counter() - begin
    assert status == 0
    return usage.ru_utime + usage.ru_stime, wall


def ratios(command: Sequence[str], other: Sequence[str], env: Mapping[str, str]) -> tuple[float, float]:
    """Medians of CPU and wall of one command over those of another, run in turn."""
    measure(command, env), measure(other, env)
    pairs = [(measure(command, env), measure(other, env)) for _ in range(PAIRS)]
    cpu, wall = (
        statistics.median(one[i] for one, _ in pairs) / statistics.median(two[i] for _, two in pairs) for i in (0, 1)
    )
    return cpu, wall


@pytest.mark.benchmark
def test_lost_claim_costs_little_more_than_an_interpreter(tmp_path: Path) -> None:
    with Server(tmp_path / "redis", port=True) as server:
        fleet = Fleet(server.tcp_url, tmp_path)
        launcher = tmp_path / "clustercron"
        launcher.write_text("import sys\nfrom clustercron.__main__ import main\nsys.exit(main())\n")
        lost = [sys.executable, "-I", str(launcher), "run", "--job", "billing", "--schedule", "0 0 * * *"]
        lost += ["--tick", "2026-01-05T00:00:00Z", "--", "/bin/true"]
        measure(lost, fleet.env)
        cpu, wall = ratios(lost, [sys.executable, "-I", "-c", "pass"], fleet.env)
        print(f"\nlost claim over loopback TCP against python3 -I -c pass: cpu {cpu:.2f}, wall {wall:.2f}")
        plain = [sys.executable, "-I", "-c", PLAIN_SCRIPT, server.tcp_url]
        plain_cpu, plain_wall = ratios(plain, [sys.executable, "-I", "-c", "pass"], fleet.env)
        print(
            f"a plain click + croniter + redis-py script against the same: cpu {plain_cpu:.2f}, wall {plain_wall:.2f}"
        )
        assert cpu <= MOST_TIMES_A_BARE_INTERPRETER
        assert wall <= MOST_TIMES_A_BARE_INTERPRETER
        fleet.close()


@pytest.mark.benchmark
def test_kept_run_and_known_node_cost_little_memory(tmp_path: Path) -> None:
    runs, nodes = 128, 50
    with Server(tmp_path / "redis") as server, server.client() as client:
        fleet = Fleet(server.url, tmp_path)

        def fire(tick: int, node: str) -> None:
            instant = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1_767_614_400 + 60 * tick))
            line = ["--job", "billing", "--schedule", "* * * * *", "--tick", instant, "--", "/bin/true"]
            assert fleet.run(*line, node=node).returncode == 0

        def size() -> int:
            return sum(client.memory_usage(key, samples=0) for key in client.keys("*"))

        fire(0, "node-0001")
        before = size()
        for number in range(1, runs + 1):
            fire(number, "node-0001")
        between = size()
        for number in range(2, nodes + 2):
            fire(1, f"node-{number:04}")
        after = size()
        print({key: client.memory_usage(key, samples=0) for key in client.keys("*") if ":claim:" not in key})
        fleet.close()
    print(
        f"bytes for each kept run: {(between - before) / runs:.0f}; for each known node: {(after - between) / nodes:.0f}"
    )
    assert (between - before) / runs <= 400
    assert (after - between) / nodes <= 200


def test_measuring_tells_a_slow_command_from_a_fast_one() -> None:
    slow = [sys.executable, "-I", "-c", "sum(range(3_000_000))"]
    assert subprocess.run(slow, check=True).returncode == 0
    cpu, _ = measure(slow, os.environ)
    bare, _ = measure([sys.executable, "-I", "-c", "pass"], os.environ)
    assert cpu > bare
