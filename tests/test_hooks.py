"""What a winner tells others: the dead man's switch, the command for a failure, and the log."""

from __future__ import annotations

import base64
import http.server
import os
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.rig import Fire, Fleet, Server, free_port, lines, wait_for

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

TICK = "2026-01-05T02:00:00Z"
RUN = ("run", "--job", "hooks", "--schedule", "* * * * *", "--tick", TICK)


def start(fleet: Fleet, options: list[str], script: str, **popen: Any) -> Fire:
    return fleet.start(*RUN, *options, "--", "/bin/sh", "-c", script, **popen)


def run(fleet: Fleet, options: list[str], script: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    return start(fleet, options, script, **popen).end()


class Switch:
    """An http server that notes what it is asked; the first requests may have to wait for the gate."""

    def __init__(self, code: int = 200, gated: int = 0) -> None:
        self.requests: list[tuple[str, str, str]] = []
        self.authorizations: list[str | None] = []
        self.gate = threading.Event()
        switch = self
        arrivals = iter(range(1_000))

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if next(arrivals) < gated:
                    switch.gate.wait(30)
                size = int(self.headers.get("Content-Length", 0))
                switch.authorizations.append(self.headers.get("Authorization"))
                switch.requests.append((self.command, self.path, self.rfile.read(size).decode()))
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_GET  # noqa: N815 - http.server's name

            def log_message(self, *unused: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/uuid"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def await_requests(self, count: int) -> list[tuple[str, str, str]]:
        wait_for(lambda: len(self.requests) >= count, f"{count} requests")
        return self.requests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.parametrize(
    ("code", "suffix", "body"), [(0, "", "succeeded, exit code 0"), (3, "/fail", "failed, exit code 3")]
)
def test_the_switch_hears_start_and_end(fleet: Fleet, code: int, suffix: str, body: str) -> None:
    with Switch() as switch:
        end = run(fleet, ["--ping", switch.url], f"exit {code}")
        assert (end.returncode, end.stdout, end.stderr) == (code, "", "")
        assert switch.await_requests(2) == [("GET", "/uuid/start", ""), ("POST", f"/uuid{suffix}", body)]


def test_only_the_winner_pings(fleet: Fleet) -> None:
    with Switch() as switch:
        run(fleet, ["--ping", switch.url], "exit 0")
        run(fleet, ["--ping", switch.url], "exit 0", node="node-2")
        assert len(switch.await_requests(2)) == 2


def test_a_query_a_slash_and_a_user_in_the_url_find_their_place(fleet: Fleet) -> None:
    with Switch() as switch:
        url = f"http://me:p%40ss@127.0.0.1:{switch.port}/uuid/?create=1"
        assert run(fleet, ["--ping", url], "exit 3").stderr == ""
        assert [path for _, path, _ in switch.await_requests(2)] == ["/uuid/start?create=1", "/uuid/fail?create=1"]
        assert set(switch.authorizations) == {"Basic " + base64.b64encode(b"me:p@ss").decode()}


def test_a_switch_that_hangs_delays_neither_job_nor_wrapper(fleet: Fleet) -> None:
    with Switch(gated=100) as switch:
        began = time.monotonic()
        fire = start(fleet, ["--ping", switch.url], "exit 3")
        assert fire.process.wait(30) == 3
        assert time.monotonic() - began < 5
        switch.gate.set()
        assert [path for _, path, _ in switch.await_requests(2)] == ["/uuid/start", "/uuid/fail"]


def test_the_end_is_not_told_before_the_start(fleet: Fleet) -> None:
    with Switch(gated=1) as switch:
        fire = start(fleet, ["--ping", switch.url], "exit 0")
        assert fire.process.wait(30) == 0
        assert switch.requests == []
        switch.gate.set()
        assert [path for _, path, _ in switch.await_requests(2)] == ["/uuid/start", "/uuid"]


def test_retries_are_one_start_and_one_end(fleet: Fleet) -> None:
    with Switch() as switch:
        run(fleet, ["--ping", switch.url, "--retries", "2", "--retry-delay", "0"], "exit 3")
        assert [path for _, path, _ in switch.await_requests(2)] == ["/uuid/start", "/uuid/fail"]


def test_a_switch_that_refuses_is_one_line_for_each_ping(fleet: Fleet) -> None:
    with Switch(code=404) as switch:
        url = switch.url.replace("http://", "http://me:secret@")
        end = run(fleet, ["--ping", url], "exit 0")
    assert end.returncode == 0
    assert end.stderr.splitlines() == [
        f"clustercron: hooks: cannot ping {switch.url}/start: HTTP 404",
        f"clustercron: hooks: cannot ping {switch.url}: HTTP 404",
    ]


def test_a_switch_that_is_not_there_is_one_line(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{free_port()}/uuid"
    end = run(fleet, ["--ping", url], "exit 4")
    assert end.returncode == 4
    assert end.stderr.splitlines() == [
        f"clustercron: hooks: cannot ping {url}/start: connection refused",
        f"clustercron: hooks: cannot ping {url}/fail: connection refused",
    ]


def test_a_switch_that_does_not_speak_http_is_one_line(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(4096)
                    peer.sendall(b"\x00what is it?\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        end = run(fleet, ["--ping", f"http://127.0.0.1:{listener.getsockname()[1]}/uuid"], "exit 4")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert end.returncode == 4
    said = end.stderr.splitlines()
    assert [line.rpartition(": ")[0].rpartition("/")[2] for line in said] == ["start", "fail"]
    assert all(line.startswith("clustercron: hooks: cannot ping http://127.0.0.1:") for line in said)


def test_a_url_that_only_the_ping_can_judge_is_one_line_without_its_password(fleet: Fleet) -> None:
    end = run(fleet, ["--ping", "http://me:SECRET@[abc]/uuid"], "exit 4")
    assert end.returncode == 4
    said = end.stderr.splitlines()
    assert len(said) == 2
    assert all(line.startswith("clustercron: hooks: cannot ping") and "SECRET" not in line for line in said)


def test_the_ping_leaves_no_descriptor_and_no_zombie_with_the_job(fleet: Fleet) -> None:
    with Switch() as switch:
        alone = 'test "$(wc -w < /proc/$PPID/task/$PPID/children)" = 1'
        script = f"ls /proc/self/fd; for n in $(seq 500); do {alone} && exit 0; sleep 0.02; done; exit 1"
        end = run(fleet, ["--ping", switch.url], script)
        switch.await_requests(2)
    bare = run(fleet, ["--tick", "2026-01-05T02:01:00Z"], script)
    assert (end.returncode, end.stdout) == (0, bare.stdout)


def test_a_failure_runs_the_hook_with_what_happened(fleet: Fleet) -> None:
    hook = 'echo "$CLUSTERCRON_JOB $CLUSTERCRON_TICK $CLUSTERCRON_OUTCOME $CLUSTERCRON_EXIT_CODE" | tr a-z A-Z'
    end = run(fleet, ["--on-failure", hook], "exit 3")
    assert (end.returncode, end.stdout, end.stderr) == (3, f"HOOKS {TICK} FAILED 3\n", "")


@pytest.mark.parametrize("script", ["exit 0", "test $CLUSTERCRON_ATTEMPT = 2"])
def test_a_success_runs_no_hook(fleet: Fleet, script: str) -> None:
    end = run(fleet, ["--on-failure", "echo hook", "--retries", "1", "--retry-delay", "0"], script)
    assert (end.returncode, end.stdout) == (0, "")


def test_a_loser_runs_no_hook(fleet: Fleet) -> None:
    run(fleet, [], "exit 3")
    assert run(fleet, ["--on-failure", "echo hook"], "exit 3").stdout == ""


def test_a_hook_that_fails_is_said_and_changes_no_exit_code(fleet: Fleet) -> None:
    end = run(fleet, ["--on-failure", "exit 9"], "exit 3")
    assert end.returncode == 3
    assert end.stderr == "clustercron: hooks: the --on-failure command failed: 'exit 9': exit code 9\n"


def test_term_ends_a_hook_that_hangs(fleet: Fleet, server: Server) -> None:
    fire = start(fleet, ["--on-failure", f"echo up > {fleet.folder}/up; exec sleep 99"], "exit 3")
    wait_for(lambda: lines(fleet.folder / "up"), "the hook runs")
    # The end of the run is recorded already.
    assert "s=failed" in str(server.client().hget("clustercron:{hooks}:runs", "1767578400"))
    fire.process.terminate()
    end = fire.end()
    assert (end.returncode, end.stderr.endswith("signal 15\n")) == (3, True)


def test_the_hook_runs_after_the_held_output(fleet: Fleet) -> None:
    end = run(fleet, ["--output", "on-failure", "--on-failure", "echo hook"], "echo job; exit 3")
    assert end.stdout == "job\nhook\n"


STAMPED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z clustercron\[\d+\]: hooks: (.*)")


def logged(path: Path) -> list[str]:
    return [found[1] for line in lines(path) if (found := STAMPED.fullmatch(line))]


def test_each_decision_of_a_node_is_a_line_of_the_log(fleet: Fleet) -> None:
    path = fleet.folder / "log"
    assert run(fleet, ["--log", str(path)], "exit 3").stderr == ""
    assert run(fleet, ["--log", str(path)], "exit 3", node="node-2").stderr == ""
    won, ended, aside = logged(path)
    assert re.fullmatch(rf"{TICK}: won attempt 1 with fencing token \d+", won)
    assert ended == f"{TICK}: failed, exit code 3"
    assert aside.startswith(f"{TICK}: stands aside: failed on node-1")
    assert len(lines(path)) == 3


def test_a_trouble_is_logged_too(fleet: Fleet) -> None:
    path = fleet.folder / "log"
    end = run(fleet, ["--log", str(path), "--timeout", "300ms"], "exec sleep 99")
    assert end.returncode == 124
    assert f"stopped the run of {TICK}: --timeout 0.3s" in logged(path)


@pytest.mark.parametrize("where", ["/nowhere/at/all", "/", "/dev/full"])
def test_a_log_that_cannot_be_written_is_one_line(fleet: Fleet, where: str) -> None:
    end = run(fleet, ["--log", where], "exit 3")
    assert end.returncode == 3
    assert len(end.stderr.splitlines()) == 1
    assert end.stderr.startswith(f"clustercron: hooks: cannot write the log: {where}: ")


def test_a_named_pipe_that_nobody_reads_holds_nothing_up(fleet: Fleet) -> None:
    path = fleet.folder / "fifo"
    os.mkfifo(path)
    end = start(fleet, ["--log", str(path)], "exit 3").end(15)
    assert end.returncode == 3
    assert "cannot write the log" in end.stderr


def test_syslog_without_a_syslog_harms_nothing(fleet: Fleet) -> None:
    end = run(fleet, ["--log", "syslog"], "exit 3")
    assert (end.returncode, end.stderr) == (3, "")


@pytest.mark.root
def test_syslog_gets_each_decision(fleet: Fleet) -> None:
    # A /dev of its own, in which /dev/log is ours.
    path = fleet.folder / "log.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(path))
        log.settimeout(20)
        mount = f'mount -t tmpfs none /mnt && ln -s {path} /mnt/log && mknod /mnt/null c 1 3 && mount --move /mnt /dev && exec "$@"'
        from tests.rig import COMMAND

        command = ["unshare", "-m", "/bin/sh", "-c", mount, "sh", *COMMAND]
        end = run(fleet, ["--log", "syslog"], "exit 3", command=command)
        assert (end.returncode, end.stderr) == (3, "")
        # Facility cron, severity info.
        assert re.match(rf"<78>.*clustercron\[\d+\]: hooks: {TICK}: won attempt 1 ", log.recv(4096).decode())
        assert log.recv(4096).decode().endswith(f"hooks: {TICK}: failed, exit code 3")
