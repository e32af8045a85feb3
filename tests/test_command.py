"""The command: found as execvp would find it, and missing or broken on one node without costing the fleet its tick."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clustercron.command import find
from clustercron.errors import CommandNotExecutable, CommandNotFound
from tests.rig import Fleet, Server, lines

if TYPE_CHECKING:
    import subprocess

TICK = "2026-01-05T02:00:00Z"
RUN = ("--job", "cmd", "--schedule", "* * * * *", "--tick", TICK)


def run(fleet: Fleet, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return fleet.run(*RUN, "--", *command, **options)


def script(path: Path, text: str, mode: int = 0o755) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def untouched(server: Server) -> bool:
    return not server.client().keys("*")


BROKEN = {
    "missing path": ("{here}/none", 127, "no such file"),
    "missing name": ("no-such-command", 127, "not found on PATH /usr/bin:/bin"),
    "empty name": ("", 127, "no such command"),
    "below a file": ("/etc/passwd/x", 127, "no such file"),
    "directory": ("/tmp", 126, "/tmp: is a directory"),
    "not executable": ("{here}/plain", 126, "permission denied"),
    "no interpreter": ("{here}/lost", 126, "its interpreter '/no/such/python' does not exist"),
    "carriage return": ("{here}/windows", 126, r"its interpreter '/bin/sh\r' does not exist"),
    "interpreter is a directory": ("{here}/folder", 126, "its interpreter '/tmp' cannot be executed"),
    "broken link": ("{here}/dangling", 127, "no such file"),
}


@pytest.mark.parametrize(("command", "code", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_command_is_said_before_anything_is_claimed(
    fleet: Fleet, server: Server, command: str, code: int, reason: str
) -> None:
    here = fleet.folder / "bin"
    script(here / "plain", "#!/bin/sh\n", 0o644)
    script(here / "lost", "#!/no/such/python -I\n")
    script(here / "windows", "#!/bin/sh\r\n")
    script(here / "folder", "#!/tmp\n")
    (here / "dangling").symlink_to("/no/such/file")
    command = command.format(here=here)
    end = run(fleet, command)
    assert (end.returncode, end.stdout) == (code, "")
    first, *hints = end.stderr.splitlines()
    assert first.startswith(f"clustercron: cmd: cannot run {command or repr('')}: ")
    assert first.endswith(reason)
    assert all(hint.startswith("clustercron: hint: ") for hint in hints)
    assert len(hints) <= 1
    assert untouched(server)
    job, path = fleet.append_job()
    assert run(fleet, *job, node="node-2").returncode == 0
    assert len(lines(path)) == 1


@pytest.mark.parametrize(
    "text", ["echo ran $0 $1; exit 5\n", "#!\necho ran $0 $1; exit 5\n", "# one\necho ran $0 $1; exit 5"]
)
def test_a_script_without_an_interpreter_is_read_by_sh(fleet: Fleet, text: str) -> None:
    path = script(fleet.folder / "bare", text)
    end = run(fleet, path, "a b")
    assert (end.returncode, end.stdout, end.stderr) == (5, f"ran {path} a b\n", "")


@pytest.mark.parametrize(
    "line", ["#!/bin/sh", "#! /bin/sh -e", "#!\t/bin/sh\t-e", "#!/usr/bin/env sh", "#!  /bin/sh  "], ids=repr
)
def test_an_interpreter_is_read_as_the_kernel_reads_it(fleet: Fleet, line: str) -> None:
    path = script(fleet.folder / "script", f"{line}\necho ran\n")
    end = run(fleet, path)
    assert (end.returncode, end.stdout, end.stderr) == (0, "ran\n", "")


def test_the_interpreter_may_be_a_script_itself(fleet: Fleet) -> None:
    interpreter = script(fleet.folder / "interpreter", '#!/bin/sh\necho "$@"\n')
    path = script(fleet.folder / "script", f"#!{interpreter}\n")
    assert run(fleet, path, "x").stdout == f"{path} x\n"


def test_the_path_is_searched_in_its_order(fleet: Fleet) -> None:
    script(fleet.folder / "one" / "tool", "#!/bin/sh\necho one\n", 0o644)
    (fleet.folder / "two" / "tool").mkdir(parents=True)
    script(fleet.folder / "three" / "tool", '#!/bin/sh\necho three "$0"\n')
    script(fleet.folder / "four" / "tool", "#!/bin/sh\necho four\n")
    path = ":".join(str(fleet.folder / n) for n in ("none", "one", "two", "three", "four"))
    end = run(fleet, "tool", env={"PATH": path})
    assert (end.returncode, end.stdout) == (0, f"three {fleet.folder}/three/tool\n")


@pytest.mark.parametrize("path", [":/usr/bin", "/usr/bin:", "/usr/bin::/bin", ""], ids=repr)
def test_an_empty_path_entry_is_the_working_directory(fleet: Fleet, path: str) -> None:
    script(fleet.folder / "here" / "local-tool", "#!/bin/sh\necho here\n")
    end = run(fleet, "local-tool", env={"PATH": path}, cwd=fleet.folder / "here")
    assert (end.returncode, end.stdout, end.stderr) == (0, "here\n", "")


def test_without_a_path_the_default_is_crons(fleet: Fleet) -> None:
    end = run(fleet, "sh", "-c", "echo ran", env={"PATH": None})
    assert (end.returncode, end.stdout) == (0, "ran\n")


def test_a_name_with_a_slash_is_not_searched(fleet: Fleet) -> None:
    script(fleet.folder / "here" / "tool", "#!/bin/sh\necho here\n")
    end = run(fleet, "./tool", cwd=fleet.folder / "here")
    assert (end.returncode, end.stdout) == (0, "here\n")
    assert run(fleet, "bin/sh", cwd=fleet.folder).returncode == 127


def test_the_job_sees_the_name_it_was_given(fleet: Fleet) -> None:
    end = run(fleet, "sh", "-c", "tr '\\0' ' ' < /proc/$$/cmdline")
    assert end.stdout.startswith("sh -c ")


def test_one_node_without_the_command_leaves_the_tick_to_another(fleet: Fleet) -> None:
    tool = fleet.folder / "tool"
    assert run(fleet, str(tool), node="node-1").returncode == 127
    script(tool, "#!/bin/sh\necho ran\n", 0o644)
    assert run(fleet, str(tool), node="node-2").returncode == 126
    tool.chmod(0o755)
    assert run(fleet, str(tool), node="node-3").stdout == "ran\n"
    assert run(fleet, str(tool), node="node-1").stdout == ""


def test_what_only_exec_can_see_is_126_and_another_fire_may_try_again(fleet: Fleet, server: Server) -> None:
    # Its loader is missing, as for a program of another C library.
    loaderless = fleet.folder / "loaderless"
    loaderless.write_bytes(Path("/bin/true").read_bytes().replace(b"/lib64/ld-linux", b"/lib64/xx-linux", 1))
    loaderless.chmod(0o755)
    end = run(fleet, str(loaderless))
    if end.returncode == 0:
        pytest.skip("the programs of this machine have another loader")
    assert (end.returncode, end.stdout) == (126, "")
    assert end.stderr == f"clustercron: cmd: cannot execute {loaderless}: no such file or directory\n"
    assert "s=start-failed" in str(server.client().hget("clustercron:{cmd}:runs", "1767578400"))
    again = run(fleet, "/bin/sh", "-c", "echo $CLUSTERCRON_ATTEMPT", node="node-2")
    assert (again.returncode, again.stdout) == (0, "2\n")


def test_arguments_too_long_to_execute_are_126(fleet: Fleet) -> None:
    # One argument of the wrapper that fits, in an environment that the facts of the run push over the limit of a string.
    end = run(fleet, "/bin/sh", "-c", ":", *["x" * 120_000] * 17, env={"A": "y" * 3_000})
    assert end.returncode in (0, 126)
    assert "Traceback" not in end.stderr


@pytest.mark.root
def test_a_file_system_mounted_noexec_is_seen_before_the_claim(fleet: Fleet, server: Server) -> None:
    mount = fleet.folder / "noexec"
    mount.mkdir()
    setup = f'mount -t tmpfs -o noexec none {mount} && printf "#!/bin/sh\\n" > {mount}/x && chmod 755 {mount}/x && exec "$@"'
    command = ["unshare", "-m", "/bin/sh", "-c", setup, "sh", sys.executable, "-I", "-m", "clustercron"]
    end = run(fleet, f"{mount}/x", command=command)
    assert end.returncode == 126
    assert untouched(server)


def test_find_answers_the_file_and_names_the_trouble(tmp_path: Path) -> None:
    tool = script(tmp_path / "tool", "#!/bin/sh\n")
    assert find("tool", str(tmp_path)) == tool
    assert find(tool, "") == tool
    assert find("sh", None) in ("/usr/bin/sh", "/bin/sh")
    with pytest.raises(CommandNotFound):
        find("tool", "/usr/bin")
    os.chmod(tool, 0o600)
    with pytest.raises(CommandNotExecutable):
        find("tool", str(tmp_path))
