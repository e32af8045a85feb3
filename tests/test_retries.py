"""Retries: further attempts of the tick by the winner, each with a rising fencing token, one run for everybody else."""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.proxy import Proxy
from tests.rig import Fire, Fleet, Server, lines, wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

TICK = "2026-01-05T02:00:00Z"
FIELD = "1767578400"
RUN = ("run", "--job", "retry", "--schedule", "* * * * *", "--tick", TICK)
REPORT = 'echo "$CLUSTERCRON_ATTEMPT $CLUSTERCRON_FENCING_TOKEN"; '


def start(fleet: Fleet, options: str, script: str, **popen: Any) -> Fire:
    return fleet.start(*RUN, *options.split(), "--", "/bin/sh", "-c", REPORT + script, **popen)


def run(fleet: Fleet, options: str, script: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    return start(fleet, options, script, **popen).end()


def runs(server: Server) -> dict[str, dict[str, str]]:
    """The records of the tick, by the number of their attempt."""
    texts = server.client().hgetall("clustercron:{retry}:runs").values()
    records = [dict(pair.split("=", 1) for pair in text.split()) for text in texts]
    return {record["a"]: record for record in sorted(records, key=lambda record: record["a"])}


def test_each_attempt_has_its_own_number_token_and_record(fleet: Fleet, server: Server) -> None:
    end = run(fleet, "--retries 3 --retry-delay 50ms", 'exit "$((3 - CLUSTERCRON_ATTEMPT))"')
    assert (end.returncode, end.stderr) == (0, "")
    attempts, tokens = zip(*(map(int, line.split()) for line in end.stdout.splitlines()), strict=True)
    assert attempts == (1, 2, 3)
    assert list(tokens) == sorted(set(tokens))
    records = runs(server)
    assert [(a, r["s"], r["x"]) for a, r in records.items()] == [
        ("1", "failed", "2"),
        ("2", "failed", "1"),
        ("3", "succeeded", "0"),
    ]
    assert [int(r["k"]) for r in records.values()] == list(tokens)
    assert all(int(r["b"]) <= int(r["e"]) for r in records.values())


def test_the_last_attempts_exit_code_counts(fleet: Fleet, server: Server) -> None:
    end = run(fleet, "--retries 2 --retry-delay 0", 'exit "$((10 + CLUSTERCRON_ATTEMPT))"')
    assert (end.returncode, len(end.stdout.splitlines())) == (13, 3)
    assert [r["s"] for r in runs(server).values()] == ["failed"] * 3


def test_success_is_not_tried_again(fleet: Fleet) -> None:
    assert len(run(fleet, "--retries 5", "exit 0").stdout.splitlines()) == 1


def test_a_job_that_died_of_a_signal_is_tried_again(fleet: Fleet, server: Server) -> None:
    end = run(fleet, "--retries 1 --retry-delay 0", "kill -KILL $$")
    assert (end.returncode, len(end.stdout.splitlines())) == (137, 2)
    assert [r["s"] for r in runs(server).values()] == ["killed"] * 2


def test_the_timeout_is_of_each_attempt(fleet: Fleet, server: Server) -> None:
    script = 'test "$CLUSTERCRON_ATTEMPT" = 3 || exec sleep 99'
    end = run(fleet, "--retries 3 --retry-delay 0 --timeout 400ms --kill-after 200ms", script)
    assert end.returncode == 0
    assert end.stderr.splitlines() == [f"clustercron: retry: stopped the run of {TICK}: --timeout 0.4s"] * 2
    assert [r["s"] for r in runs(server).values()] == ["timed-out", "timed-out", "succeeded"]


def test_between_attempts_the_run_counts_as_alive(fleet: Fleet, server: Server) -> None:
    fire = start(fleet, "--retries 1 --retry-delay 2500ms --lease 1s", "exit 3")
    wait_for(lambda: int(runs(server).get("1", {}).get("r", 0)) >= 3, "the lease is renewed in the delay")
    assert fire.process.poll() is None
    assert fleet.run(*RUN[1:], "--", "/bin/echo", "twice", node="node-2").stdout == ""
    record = runs(server)["1"]
    assert (record["s"], int(record["l"]) > int(record["b"]) + 1_000) == ("running", True)
    assert fire.end().returncode == 3
    assert [r["s"] for r in runs(server).values()] == ["failed", "failed"]


def test_the_lease_of_a_later_attempt_is_renewed_under_its_own_token(fleet: Fleet, server: Server) -> None:
    script = f'test "$CLUSTERCRON_ATTEMPT" = 1 && exit 3; until test -e {fleet.folder}/go; do sleep 0.05; done'
    fire = start(fleet, "--retries 1 --retry-delay 0 --lease 1s", script)
    wait_for(lambda: int(runs(server).get("2", {}).get("r", 0)) >= 4, "the second attempt renews")
    (fleet.folder / "go").touch()
    end = fire.end()
    assert (end.returncode, end.stderr) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_delay_ends_the_retries(fleet: Fleet, server: Server, number: int) -> None:
    fire = start(fleet, "--retries 5 --retry-delay 50s -v", "exit 3")
    wait_for(lambda: "tries again" in _log(fire), "it waits to try again")
    began = time.monotonic()
    fire.process.send_signal(number)
    end = fire.end()
    assert (end.returncode, len(end.stdout.splitlines())) == (3, 1)
    assert time.monotonic() - began < 10
    assert {a: r["s"] for a, r in runs(server).items()} == {"1": "failed"}


def _spool(fleet: Fleet) -> Iterator[Path]:
    return (fleet.folder / "state" / "spool").iterdir()


_seen: dict[int, str] = {}


def _log(fire: Fire) -> str:
    """What it has written to stderr so far."""
    assert fire.process.stderr is not None
    fd = fire.process.stderr.fileno()
    if select.select([fd], [], [], 0)[0]:
        _seen[fire.process.pid] = _seen.get(fire.process.pid, "") + os.read(fd, 65536).decode()
    return _seen.get(fire.process.pid, "")


def test_a_job_ended_by_term_is_not_tried_again(fleet: Fleet, server: Server) -> None:
    fire = start(fleet, "--retries 5 --retry-delay 0", f"echo up > {fleet.folder}/up; exec sleep 99")
    wait_for(lambda: lines(fleet.folder / "up"), "it runs")
    fire.process.terminate()
    end = fire.end()
    assert (end.returncode, len(end.stdout.splitlines())) == (143, 1)


def test_a_delay_of_months_can_be_waited_for(fleet: Fleet, server: Server) -> None:
    fire = start(fleet, "--retries 1 --retry-delay 300d --lease 1s", "exit 3")
    wait_for(lambda: int(runs(server).get("1", {}).get("r", 0)) >= 1, "it waits")
    fire.process.terminate()
    end = fire.end()
    assert (end.returncode, end.stderr) == (3, "")


@pytest.mark.parametrize("part", ["request", "reply"])
def test_a_retry_whose_message_was_lost_is_one_attempt_more(fleet: Fleet, server: Server, part: Any) -> None:
    with Proxy(server.socket) as proxy:
        fleet.set_url(proxy.url)
        proxy.lose("finish", part, "reset", times=2)
        end = run(fleet, "--retries 1 --retry-delay 0", "exit 3")
        assert proxy.count("finish") == 4
    assert (end.returncode, end.stderr) == (3, "")
    assert [line.split()[0] for line in end.stdout.splitlines()] == ["1", "2"]
    assert [line.split()[1] for line in end.stdout.splitlines()] == [r["k"] for r in runs(server).values()]
    assert {a: r["s"] for a, r in runs(server).items()} == {"1": "failed", "2": "failed"}


@pytest.mark.parametrize("delivered", ["by itself", "by the next fire"])
def test_a_retry_whose_request_was_too_long_on_its_way_leaves_no_attempt(
    fleet: Fleet, tmp_path: Path, delivered: str
) -> None:
    with Server(tmp_path / "own") as server:
        fleet.set_url(server.url)
        fire = start(fleet, "--retries 2 --retry-delay 0 --store-timeout 1s", f"kill -STOP {server.pid}; exit 3")
        wait_for(lambda: f"cannot try {TICK} again" in _log(fire), "it gives the retry up")
        if delivered == "by the next fire":
            wait_for(lambda: "this node's next fire records it" in _log(fire), "the end is kept")
        os.kill(server.pid, signal.SIGCONT)
        end = fire.end()
        said = _seen[fire.process.pid] + end.stderr
        assert (end.returncode, len(end.stdout.splitlines())) == (3, 1)
        assert said.count("cannot try") == 1
        assert said.count("cannot record the end of") == int(delivered == "by the next fire")
        assert "another attempt" not in said
        fleet.run(*RUN[1:], "--job", "other", "--", "true")
        assert server.client().hkeys("clustercron:{retry}:runs") == [FIELD]
        assert {a: r["s"] for a, r in runs(server).items()} == {"1": "failed"}


def test_a_retry_whose_reply_never_comes_leaves_no_attempt(fleet: Fleet, server: Server) -> None:
    with Proxy(server.socket) as proxy:
        fleet.set_url(proxy.url)
        proxy.lose("finish", "reply", "reset", times=1000)
        fire = start(fleet, "--retries 2 --retry-delay 0 --store-timeout 1s", "exit 3")
        wait_for(lambda: f"cannot try {TICK} again" in _log(fire), "it gives the retry up")
        proxy.heal()
        end = fire.end()
    assert (end.returncode, len(end.stdout.splitlines())) == (3, 1)
    assert "another attempt" not in end.stderr
    assert {a: r["s"] for a, r in runs(server).items()} == {"1": "failed"}


def test_term_while_a_retry_is_asked_for_leaves_no_attempt(fleet: Fleet, server: Server) -> None:
    with Proxy(server.socket) as proxy:
        fleet.set_url(proxy.url)
        hold = proxy.hold("finish")
        fire = start(fleet, "--retries 2 --retry-delay 0", "exit 3")
        hold.wait_until_reached()
        fire.process.terminate()
        wait_for(lambda: proxy.count("finish") > 1, "it tells its end")
        hold.release()
        end = fire.end()
        assert (end.returncode, len(end.stdout.splitlines())) == (3, 1)
        fleet.run(*RUN[1:], "--job", "other", "--", "true")
    assert {a: r["s"] for a, r in runs(server).items()} == {"1": "failed"}


def test_without_the_store_there_is_no_retry_and_the_end_is_kept(fleet: Fleet, server: Server) -> None:
    with Proxy(server.socket) as proxy:
        fleet.set_url(proxy.url)
        proxy.lose("finish", "request", "reset", times=1000)
        end = run(fleet, "--retries 3 --retry-delay 0 --store-timeout 1s", "exit 3")
        assert (end.returncode, len(end.stdout.splitlines())) == (3, 1)
        assert [line.split(": redis at")[0] for line in end.stderr.splitlines() if "TLS" not in line] == [
            f"clustercron: retry: cannot try {TICK} again",
            f"clustercron: retry: cannot record the end of {TICK}",
            f"clustercron: hint: this node's next fire records it (failed), from {next(_spool(fleet))}",
        ]
        assert len(list(_spool(fleet))) == 1
        proxy.heal()
        assert fleet.run(*RUN[1:], "--", "/bin/echo", "twice").stdout == ""
    assert {a: r["s"] for a, r in runs(server).items()} == {"1": "failed"}


def test_a_command_that_cannot_be_executed_is_not_tried_again(fleet: Fleet, server: Server) -> None:
    script = fleet.folder / "script"
    script.write_text(f"#!/bin/sh\nrm {script}\nexit 3\n")
    script.chmod(0o755)
    end = fleet.run(*RUN[1:], "--retries", "5", "--retry-delay", "0", "--", str(script))
    assert (end.returncode, end.stderr) == (
        126,
        f"clustercron: retry: cannot execute {script}: no such file or directory\n",
    )
    assert [r["s"] for r in runs(server).values()] == ["failed", "start-failed"]
