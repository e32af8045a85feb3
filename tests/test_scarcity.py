"""A node that has run out of threads, descriptors or room: no traceback, no tick used up, no end of a run forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.rig import COMMAND, Fleet, Server, lines

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

TICK = "2026-01-05T02:00:00Z"
FIELD = "1767578400"
RUN = ("--job", "scarce", "--schedule", "* * * * *", "--tick", TICK, "--store-timeout", "1s")
# A thread takes as much room for its stack as the first limit says; the second says how much there is.
NO_THREADS = "ulimit -s 8388608; ulimit -v 2097152; "
LARGE_THREADS = "ulimit -s 1048576; "
# From here on the wrapper has room for everything but another thread.
TAKE_THREADS = 'prlimit --pid $PPID --as=$(($(cut -d" " -f1 /proc/$PPID/statm) * 4096 + 200000000)); '


def run(fleet: Fleet, limits: str, *arguments: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    # A shell hands on only what it takes for variables.
    command = ["/bin/sh", "-c", f'{limits}exec "$@"', "sh", *COMMAND] if limits else COMMAND
    end = fleet.run(*RUN, *arguments, command=command, **popen)
    assert "Traceback" not in end.stderr, end.stderr
    return end


def states(server: Server) -> dict[str, str]:
    """The state of each attempt at the tick, by its number."""
    texts = server.client().hgetall("clustercron:{scarce}:runs").values()
    records = [dict(pair.split("=", 1) for pair in text.split()) for text in texts]
    return {record["a"]: record["s"] for record in sorted(records, key=lambda record: record["a"])}


@pytest.fixture
def named_server(tmp_path: Path) -> Iterator[Server]:
    """A server that is found by a name, which takes a thread."""
    with Server(tmp_path / "named", port=True) as server:
        yield server


def test_a_node_without_threads_leaves_the_tick_to_another(fleet: Fleet, server: Server) -> None:
    job, path = fleet.append_job()
    end = run(fleet, NO_THREADS, "--", *job)
    assert (end.returncode, end.stderr) == (125, "clustercron: scarce: cannot go on: can't start new thread\n")
    assert states(server) == {"1": "abandoned"}
    assert fleet.run(*RUN, "--", *job, node="node-2").returncode == 0
    assert [line.split()[1] for line in lines(path)] == ["node-2"]


@pytest.mark.parametrize("options", ["", "--output on-failure --ping http://127.0.0.1:9/", "--keep-output 1K"])
@pytest.mark.parametrize("count", range(5, 12))  # with fewer the interpreter itself does not begin
def test_a_node_without_descriptors_runs_the_tick_or_leaves_it(
    fleet: Fleet, server: Server, count: int, options: str
) -> None:
    job = ("--", "/bin/echo", "ran")
    end = run(fleet, f"ulimit -n {count}; ", *options.split(), *job)
    assert (end.returncode, end.stdout) in ((0, "ran\n"), (0, ""), (125, ""), (126, "")), end.stderr
    ran = end.returncode == 0
    assert states(server).get("1") in (("succeeded",) if ran else (None, "claimed", "abandoned", "start-failed"))
    if not ran:
        # A claim that nobody starts lapses.
        assert fleet.run(*RUN, *job, node="node-2").stdout == "ran\n"
    assert fleet.run(*RUN, *job, node="node-3").stdout == ""


def test_an_entry_without_a_name_is_not_handed_on(fleet: Fleet, server: Server) -> None:
    options = ("--on-failure", "env", "--ping", "http://127.0.0.1:9/")
    end = run(fleet, "", *options, "--", "sh", "-c", "env; exit 3", env={"": "odd=1", "EVEN": "2"})
    assert end.returncode == 3
    assert "failed" in states(server).values()
    assert (end.stdout.count("EVEN=2"), end.stdout.count("odd")) == (2, 0)
    assert "illegal" not in end.stderr


def test_a_name_that_cannot_be_looked_up_for_want_of_a_thread_is_store_trouble(
    fleet: Fleet, named_server: Server
) -> None:
    fleet.set_url(f"redis://localhost:{named_server.port}")
    end = run(fleet, NO_THREADS, "--", "echo", "ran")
    assert (end.returncode, end.stdout) == (75, "")
    assert "its name cannot be looked up: no thread can be started" in end.stderr


@pytest.mark.root
@pytest.mark.parametrize("code", [0, 3])
def test_an_end_that_cannot_be_told_for_want_of_a_thread_is_kept(fleet: Fleet, named_server: Server, code: int) -> None:
    fleet.set_url(f"redis://localhost:{named_server.port}")
    capability = "-all,+dac_override"
    user = ["setpriv", "--reuid=4242", f"--inh-caps={capability}", f"--ambient-caps={capability}"]
    full = f"prlimit --pid $PPID --nproc=0; exit {code}"  # which counts for no root
    end = fleet.run(*RUN, "--", "sh", "-c", full, command=[*user, *COMMAND])
    first, hint = end.stderr.splitlines()
    assert (end.returncode, end.stdout) == (code, "")
    assert first.startswith(f"clustercron: scarce: cannot record the end of {TICK}: ")
    assert hint.startswith("clustercron: hint: this node's next fire records it")
    fleet.run(*RUN, "--job", "other", "--", "true", command=[*user, *COMMAND])
    assert states(named_server) == {"1": "failed" if code else "succeeded"}


def test_a_retry_for_which_there_is_no_thread_is_none(fleet: Fleet, server: Server) -> None:
    options = ("--retries", "3", "--retry-delay", "0")
    end = run(fleet, LARGE_THREADS, *options, "--", "sh", "-c", f"{TAKE_THREADS}exit 3")
    assert (end.returncode, end.stderr) == (
        3,
        f"clustercron: scarce: cannot try {TICK} again: can't start new thread\n",
    )
    assert states(server) == {"1": "failed"}
