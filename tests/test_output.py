"""What becomes of the job's output: passed on, held back until it fails, discarded, and its end kept with the run."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis

from clustercron.schema import JobKeys
from tests.rig import COMMAND, Fire, Fleet, Server, lines, wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

TICK = "2026-01-05T02:00:00Z"
RUN = ("run", "--job", "output", "--schedule", "* * * * *", "--tick", TICK)
PYTHON = (sys.executable, "-I", "-c")
PIECES = "import os, sys\nfor n in range(200):\n    os.write(1, b'out %d\\n' % n); os.write(2, b'err %d\\n' % n)\n"
IN_ORDER = "".join(f"out {n}\nerr {n}\n" for n in range(200))


def start(fleet: Fleet, options: str, *command: str, **popen: Any) -> Fire:
    return fleet.start(*RUN, *options.split(), "--", *command, **popen)


def run(fleet: Fleet, options: str, *command: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    return start(fleet, options, *command, **popen).end()


def into(path: Path) -> Sequence[str]:
    """The node as cron starts it: stdout and stderr are one descriptor."""
    return ["/bin/sh", "-c", f'exec "$@" > {path} 2>&1', "sh", *COMMAND]


def kept(server: Server, attempt: int = 1) -> bytes | None:
    client = redis.Redis(unix_socket_path=str(server.socket))
    value = client.get(JobKeys("clustercron", "output").output(TICK, str(attempt)))
    assert value is None or isinstance(value, bytes)
    return value


@pytest.mark.parametrize(
    ("mode", "code", "out", "err"),
    [
        ("pass", 0, "out\n", "err\n"),
        ("pass", 3, "out\n", "err\n"),
        ("on-failure", 0, "", ""),
        ("on-failure", 3, "out\n", "err\n"),
        ("discard", 0, "", ""),
        ("discard", 3, "", ""),
    ],
)
@pytest.mark.parametrize("size", [None, "100"])
def test_each_way_with_each_end(
    fleet: Fleet, server: Server, mode: str, code: int, out: str, err: str, size: str | None
) -> None:
    keeping = f"--keep-output {size}" if size else ""
    end = run(fleet, f"--output {mode} {keeping}", "/bin/sh", "-c", f"echo out; echo err >&2; exit {code}")
    assert (end.returncode, end.stdout, end.stderr) == (code, out, err)
    if size is None:
        assert kept(server) is None
    else:
        assert sorted((kept(server) or b"").split()) == [b"err", b"out"]


def test_only_the_last_bytes_are_kept(fleet: Fleet, server: Server) -> None:
    end = run(fleet, "--keep-output 1K", *PYTHON, "print('x' * 100_000 + 'end', end='')")
    assert end.returncode == 0
    assert len(end.stdout) == 100_003
    assert kept(server) == b"x" * 1021 + b"end"


def test_the_kept_output_expires_with_the_retention(fleet: Fleet, server: Server) -> None:
    run(fleet, "--keep-output 1K", "/bin/echo", "hello", env={"CLUSTERCRON_RETENTION": "3h"})
    life_ms = server.client().pttl(JobKeys("clustercron", "output").output(TICK, "1"))
    assert 3 * 3_600_000 - 60_000 < life_ms <= 3 * 3_600_000


def test_each_attempt_keeps_its_own(fleet: Fleet, server: Server) -> None:
    script = 'echo "attempt $CLUSTERCRON_ATTEMPT"; test "$CLUSTERCRON_ATTEMPT" = 2'
    end = run(fleet, "--keep-output 1K --retries 3 --retry-delay 0", "/bin/sh", "-c", script)
    assert (end.returncode, end.stdout) == (0, "attempt 1\nattempt 2\n")
    assert [kept(server, n) for n in (1, 2, 3)] == [b"attempt 1\n", b"attempt 2\n", None]


@pytest.mark.parametrize(
    "options", ["--keep-output 64K", "--output on-failure", "--keep-output 1K --output on-failure"]
)
def test_bytes_of_any_kind_pass_unchanged(fleet: Fleet, server: Server, options: str) -> None:
    data = bytes(range(256)) * 5
    end = start(fleet, options, *PYTHON, f"import os; os.write(1, {data!r}); os.write(2, {data[::-1]!r}); os._exit(1)")
    out, err = end.process.communicate(timeout=20)
    assert (end.process.returncode, out, err) == (1, data, data[::-1])
    if "64K" in options:
        assert kept(server) in (data + data[::-1], data[::-1] + data)


@pytest.mark.parametrize("options", ["--keep-output 1M", "--output on-failure", "--output on-failure --keep-output 1M"])
def test_under_cron_lines_of_both_streams_stay_in_order(fleet: Fleet, server: Server, options: str) -> None:
    path = fleet.folder / "mail"
    end = run(fleet, options, *PYTHON, PIECES + "sys.exit(1)", command=into(path))
    assert end.returncode == 1
    assert path.read_text() == IN_ORDER
    if "1M" in options:
        assert (kept(server) or b"").decode() == IN_ORDER


@pytest.mark.parametrize("options", ["--keep-output 1K", "--output on-failure", "--output discard --keep-output 1K"])
def test_huge_output_arrives_whole_and_takes_no_memory(fleet: Fleet, options: str) -> None:
    size = 40 << 20
    script = f"head -c {size} /dev/zero; echo x >&2; touch {fleet.folder}/written; until test -e {fleet.folder}/go; do sleep 0.02; done; exit 1"
    path = fleet.folder / "out"
    fire = start(
        fleet, options, "/bin/sh", "-c", script, command=["/bin/sh", "-c", f'exec "$@" > {path}', "sh", *COMMAND]
    )
    wait_for((fleet.folder / "written").exists, "all is written")
    peak_kib = int(Path(f"/proc/{fire.process.pid}/status").read_text().split("VmHWM:")[1].split()[0])
    (fleet.folder / "go").touch()
    end = fire.end()
    expected = ("", 0) if "discard" in options else ("x\n", size)
    assert (end.returncode, end.stderr, path.stat().st_size) == (1, *expected)
    assert peak_kib <= 15 * 1024


def test_many_small_pieces_held_back_take_no_memory(fleet: Fleet) -> None:
    script = """
import os, time
for n in range(30_000):
    os.write(1 + n % 2, b"x")
open(f"{os.environ['HOME']}/written", "w").close()
while not os.path.exists(f"{os.environ['HOME']}/go"):
    time.sleep(0.02)
os._exit(1)
"""
    fire = start(fleet, "--output on-failure", *PYTHON, script)
    wait_for((fleet.folder / "written").exists, "all is written")
    peak_kib = int(Path(f"/proc/{fire.process.pid}/status").read_text().split("VmHWM:")[1].split()[0])
    (fleet.folder / "go").touch()
    end = fire.end()
    assert (end.returncode, len(end.stdout), len(end.stderr)) == (1, 15_000, 15_000)
    assert peak_kib <= 14 * 1024


def test_a_closed_stdout_ends_the_job_as_it_would_without_us(fleet: Fleet, server: Server) -> None:
    fire = start(fleet, "--keep-output 1K", "/bin/sh", "-c", "while echo x; do :; done; sleep 99")
    assert fire.process.stdout is not None
    fire.process.stdout.close()
    assert fire.process.wait(15) == 128 + signal.SIGPIPE


def test_a_full_device_behind_stdout_does_not_end_the_job(fleet: Fleet, server: Server) -> None:
    command = ["/bin/sh", "-c", 'exec "$@" > /dev/full', "sh", *COMMAND]
    end = run(fleet, "--keep-output 1K", "/bin/sh", "-c", "echo one; sleep 0.1; echo two; exit 3", command=command)
    assert end.returncode == 3
    assert kept(server) == b"one\ntwo\n"


def test_a_reader_that_does_not_read_delays_no_timeout(fleet: Fleet) -> None:
    fire = start(fleet, "--keep-output 1K --timeout 500ms --kill-after 200ms", "/usr/bin/yes")
    assert fire.process.wait(15) == 124


def test_a_reader_that_does_not_read_delays_no_term(fleet: Fleet) -> None:
    fire = start(fleet, "--keep-output 1K", "/bin/sh", "-c", f"echo up > {fleet.folder}/up; exec yes")
    wait_for(lambda: lines(fleet.folder / "up"), "it runs")
    assert fire.process.stdout is not None
    wait_for(lambda: _is_full(fire), "the pipe is full")
    fire.process.terminate()
    # The job has ended; its last words still wait for the reader, until a second TERM.
    wait_for(lambda: Path(f"/proc/{fire.process.pid}/task/{fire.process.pid}/children").read_text() == "", "it ended")
    fire.process.terminate()
    assert fire.process.wait(15) == 143


def _is_full(fire: Fire) -> bool:
    import fcntl
    import termios

    assert fire.process.stdout is not None
    size = fcntl.ioctl(fire.process.stdout.fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(size, sys.byteorder) >= 60_000


@pytest.mark.parametrize("options", ["--keep-output 1K", "--output on-failure"])
def test_a_slow_reader_gets_everything(fleet: Fleet, options: str) -> None:
    fire = start(fleet, options, *PYTHON, "import sys; sys.stdout.write('y' * 1_000_000); sys.exit(1)")
    assert fire.process.stdout is not None
    got = 0
    while data := os.read(fire.process.stdout.fileno(), 5_000):
        got += len(data)
    assert (fire.end().returncode, got) == (1, 1_000_000)


def test_output_appears_while_the_job_runs(fleet: Fleet) -> None:
    go = fleet.folder / "go"
    fire = start(fleet, "--keep-output 1K", "/bin/sh", "-c", f"echo first; until test -e {go}; do sleep 0.02; done")
    assert fire.process.stdout is not None
    ready, _, _ = select.select([fire.process.stdout], [], [], 15)
    assert ready
    go.touch()
    assert fire.end().stdout == "first\n"


def test_a_grandchild_that_writes_on_does_not_hold_the_run(fleet: Fleet, server: Server) -> None:
    began = time.monotonic()
    fire = start(fleet, "--keep-output 1K", "/bin/sh", "-c", "yes & echo $! >&2; sleep 0.1; exit 3")
    assert fire.process.stdout is not None
    while os.read(fire.process.stdout.fileno(), 1 << 16):
        assert time.monotonic() - began < 20
    assert fire.end().returncode == 3


@pytest.mark.parametrize("where", [{"TMPDIR": "/proc"}, {"TMPDIR": "/nowhere/at/all"}], ids=["unwritable", "missing"])
def test_a_bad_tmpdir_is_no_reason_to_fail(fleet: Fleet, where: dict[str, str]) -> None:
    end = run(fleet, "--output on-failure", "/bin/sh", "-c", "echo out; exit 3", env=where)
    assert (end.returncode, end.stdout, end.stderr) == (3, "out\n", "")


def test_no_file_is_left_in_tmpdir(fleet: Fleet) -> None:
    (fleet.folder / "tmp").mkdir()
    env = {"TMPDIR": str(fleet.folder / "tmp")}
    end = run(fleet, "--output on-failure", "/bin/sh", "-c", f"echo out; ls {fleet.folder}/tmp >&2; exit 3", env=env)
    assert (end.returncode, end.stdout, end.stderr) == (3, "out\n", "")


@pytest.mark.root
@pytest.mark.parametrize("code", [0, 3])
def test_a_full_disk_prints_what_it_cannot_hold_back(fleet: Fleet, code: int) -> None:
    small = fleet.folder / "small"
    small.mkdir()
    shell = f'mount -t tmpfs -o size=256k none {small} && exec "$@" 2>&1'
    command = ["unshare", "-m", "/bin/sh", "-c", shell, "sh", *COMMAND]
    script = PIECES.replace("200", "40_000") + f"sys.exit({code})"
    end = run(fleet, "--output on-failure", *PYTHON, script, command=command, env={"TMPDIR": str(small)})
    assert end.returncode == code
    assert end.stdout == "".join(f"out {n}\nerr {n}\n" for n in range(40_000))


@pytest.mark.root
@pytest.mark.parametrize("code", [0, 3])
def test_without_any_place_to_hold_it_back_output_is_printed(fleet: Fleet, code: int) -> None:
    shell = 'mount -t tmpfs -o ro none /var/tmp && exec "$@"'
    command = ["unshare", "-m", "/bin/sh", "-c", shell, "sh", *COMMAND]
    script = ("/bin/sh", "-c", f"echo out; echo err >&2; exit {code}")
    end = run(fleet, "--output on-failure", *script, command=command, env={"TMPDIR": "/proc"})
    assert (end.returncode, end.stdout, end.stderr) == (code, "out\n", "err\n")
