"""A terminal: the job has it in the foreground, and the shell gets it back. Driven through a real pty and a real shell."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING, Self

import pytest

from tests.rig import COMMAND, WAIT_S, Fleet, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

BASH = "/bin/bash"
# In the background of a shell INT and QUIT are ignored, and nobody below could undo that.
_TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
TAKE_TERMINAL = [sys.executable, "-I", "-c", _TAKE_TERMINAL]
pytestmark = pytest.mark.skipif(not os.path.exists(BASH), reason="no bash")


class Shell:
    """An interactive bash with job control on a pty of its own."""

    def __init__(self, fleet: Fleet) -> None:
        self.master, slave = os.openpty()

        # What is typed is not echoed, so that it is never taken for an answer.
        settings = termios.tcgetattr(slave)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        self.process = subprocess.Popen(
            [*TAKE_TERMINAL, BASH, "--norc", "--noprofile", "--noediting", "-i"],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**fleet.env, "PS1": "prompt> ", "CLUSTERCRON_NODE": "node-1"},
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""
        self.minute = 0
        self.await_text("prompt> ")

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def run(self, *command: str, options: str = "", after: str = "") -> None:
        """Type a line that runs a command for another tick."""
        self.minute += 1
        tick = f"2026-01-05T00:{self.minute:02}:00Z"
        line = [*COMMAND, "run", "--job", "tty", "--schedule", "* * * * *", "--tick", tick, *options.split(), "--"]
        self.type(f"{shlex.join([*line, *command])}{after}\n")

    def await_text(self, pattern: str) -> str:
        """Read until a pattern is there; answer everything up to its end, and forget it."""
        deadline = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self.master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"waited in vain for {pattern!r}: {self.seen!r}"
            self.seen += os.read(self.master, 4096).decode(errors="replace")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def exit_code(self) -> int:
        self.type("echo code=$?.\n")
        return int(self.await_text(r"code=\d+\.").rpartition("=")[2].rstrip("."))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self.master)
        self.process.wait()


@pytest.fixture
def shell(fleet: Fleet) -> Iterator[Shell]:
    with Shell(fleet) as shell:
        yield shell


@pytest.mark.parametrize("options", ["", "--keep-output 1K"], ids=["pass", "keep"])
def test_a_script_can_read_the_terminal(shell: Shell, options: str) -> None:
    shell.run("/bin/sh", "-c", 'echo name?; read name </dev/tty; echo "hello $name"; exit 4', options=options)
    shell.await_text(r"name\?")
    shell.type("you\n")
    shell.await_text("hello you")
    shell.await_text("prompt> ")
    assert shell.exit_code() == 4


def test_a_script_can_set_the_terminal(shell: Shell) -> None:
    # From the background this would stop it.
    shell.run("/bin/sh", "-c", "stty -echo; stty echo; stty -echo; echo was set")
    shell.await_text("was set")
    shell.await_text("prompt> ")
    assert shell.exit_code() == 0


def test_ctrl_c_ends_the_job_and_gives_the_terminal_back(shell: Shell) -> None:
    shell.run("/bin/sh", "-c", "echo up; exec sleep 99")
    shell.await_text("up")
    shell.type("\x03")
    shell.await_text("prompt> ")
    assert shell.exit_code() == 130


def test_a_job_can_heed_ctrl_c(shell: Shell) -> None:
    shell.run("/bin/sh", "-c", 'trap "echo heard; exit 6" INT; echo up; while :; do sleep 0.05; done')
    shell.await_text("up")
    shell.type("\x03")
    shell.await_text("heard")
    shell.await_text("prompt> ")
    assert shell.exit_code() == 6


def test_ctrl_z_stops_and_fg_goes_on(shell: Shell) -> None:
    shell.run("/bin/sh", "-c", "echo group=$$.; read line </dev/tty; echo got $line; exit 5")
    group = int(shell.await_text(r"group=\d+\.").rpartition("=")[2].rstrip("."))
    for _ in range(2):
        wait_for(lambda: os.tcgetpgrp(shell.master) == group, "the job is in the foreground")
        shell.type("\x1a")
        shell.await_text("Stopped")
        shell.await_text("prompt> ")
        assert shell.exit_code() == 148
        shell.type("fg\n")
    shell.await_text("run --job tty")
    shell.type("this\n")
    shell.await_text("got this")
    shell.await_text("prompt> ")
    assert shell.exit_code() == 5


def test_a_background_run_waits_for_fg_to_read(shell: Shell) -> None:
    shell.run("/bin/sh", "-c", "echo up; read line </dev/tty; echo got $line", after=" &")
    shell.await_text("up")
    # The shell says it before its next prompt.
    for _ in range(100):
        shell.type("jobs\n")
        if "Stopped" in shell.await_text("(Stopped|Running).*\n"):
            break
    shell.type("fg\n")
    shell.await_text("run --job tty")
    shell.type("this\n")
    shell.await_text("got this")


def test_a_stopped_wrapper_gives_the_terminal_when_it_goes_on(shell: Shell, fleet: Fleet) -> None:
    go_on = fleet.folder / "go-on"
    script = f'kill -STOP "$PPID"; until test -e {go_on}; do sleep 0.05; done; read line </dev/tty; echo got $line'
    shell.run("/bin/sh", "-c", script)
    shell.await_text("Stopped")
    shell.type("fg\n")
    shell.await_text("run --job tty")
    go_on.touch()
    shell.type("this\n")
    shell.await_text("got this")
    shell.await_text("prompt> ")
    assert shell.exit_code() == 0


def test_the_job_is_the_foreground_group_only_while_it_runs(shell: Shell, fleet: Fleet) -> None:
    foreground = (
        "import os; print('group', os.tcgetpgrp(0) == os.getpgrp() == os.getpid(), os.getpgrp() != os.getsid(0))"
    )
    shell.run("/usr/bin/env", COMMAND[0], "-I", "-c", foreground)
    shell.await_text("group True True")
    shell.await_text("prompt> ")
    assert os.tcgetpgrp(shell.master) == shell.process.pid


def test_after_a_pipeline_the_terminal_is_the_shells(shell: Shell) -> None:
    shell.run("/bin/sh", "-c", "echo one", after=" | cat")
    shell.await_text("one")
    shell.await_text("prompt> ")
    assert shell.exit_code() == 0
