"""When cron fired this process: the decision on made-up process trees, and the reading of this machine's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from clustercron.fired import Fire, find_fire

HERTZ = os.sysconf("SC_CLK_TCK")
BOOT_MS = 1_790_000_000_000
MINUTE = 60
linux = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no Linux /proc here")


class ProcTree:
    """A directory that looks like /proc. Starts are seconds after the machine's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self,
        pid: int,
        parent: int,
        comm: str,
        start: float,
        *,
        group: int | None = None,
        argv: tuple[str, ...] | None = None,
        exe: str | None = None,
    ) -> ProcTree:
        directory = self.root / str(pid)
        directory.mkdir()
        rest = ["0"] * 15 + [str(int(start * HERTZ))] + ["0"] * 30
        stat = f"{pid} ({comm}) S {parent} {pid if group is None else group} 1 {' '.join(rest)}\n"
        (directory / "stat").write_text(stat)
        (directory / "cmdline").write_bytes(b"".join(os.fsencode(word) + b"\0" for word in argv or (comm,)))
        if exe:
            (directory / "exe").symlink_to(exe)
        return self

    def remove(self, pid: int) -> None:
        for path in (self.root / str(pid)).iterdir():
            path.unlink()
        (self.root / str(pid)).rmdir()

    def fire(self, pid: int, **environ: str) -> Fire:
        (self.root / "self").symlink_to(str(pid))
        return find_fire(environ, str(self.root), BOOT_MS)


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path)


def at(seconds: float) -> int:
    return BOOT_MS + int(seconds * 1000)


def debian(tree: ProcTree) -> ProcTree:
    """A line of Debian's cron, fired 50 000 s after boot; 20 is the shell, the wrapper comes below it."""
    tree.add(1, 0, "systemd", 0)
    tree.add(5, 1, "cron", 7, argv=("/usr/sbin/cron", "-f"))
    tree.add(10, 5, "cron", 50_000, group=5, argv=("/usr/sbin/CRON", "-f"))
    return tree.add(20, 10, "sh", 50_000.01, argv=("/bin/sh", "-c", "wrapper"))


def test_the_fork_of_debian_cron_counts_and_not_what_stands_between(tree: ProcTree) -> None:
    debian(tree).add(21, 20, "flock", 50_003, group=20).add(22, 21, "python3", 50_007, group=20)
    fire = tree.fire(22)
    assert (fire.fired_at_ms, fire.source, fire.own_start_ms) == (at(50_000), "daemon-child", at(50_007))
    assert "cron (pid 10)" in fire.detail


def test_an_ancestor_may_put_blanks_and_parentheses_into_its_name(tree: ProcTree) -> None:
    debian(tree).add(21, 20, "a) S 1 1 (b) c)", 50_001, group=20).add(22, 21, "x) R 9 9", 50_007, group=20)
    fire = tree.fire(22)
    assert (fire.fired_at_ms, fire.source, fire.own_start_ms) == (at(50_000), "daemon-child", at(50_007))


def test_a_script_named_cron_is_no_daemon(tree: ProcTree) -> None:
    debian(tree).add(21, 20, "cron", 50_001, group=20, argv=("/bin/sh", "/opt/cron")).add(22, 21, "python3", 50_007)
    fire = tree.fire(22)
    assert (fire.fired_at_ms, fire.source) == (at(50_000), "daemon-child")


def test_a_busybox_that_is_a_shell_is_no_daemon(tree: ProcTree) -> None:
    tree.add(1, 0, "busybox", 0, argv=("busybox", "sh", "-c", "crond -f"))
    tree.add(7, 1, "busybox", 60, argv=("busybox", "crond", "-f"))
    tree.add(8, 7, "sh", 600).add(9, 8, "python3", 605, group=8)
    fire = tree.fire(9)
    assert (fire.fired_at_ms, fire.source, fire.daemon) == (at(600), "daemon-child", "busybox")


def test_a_daemon_that_a_cron_job_started_fires_lines_of_its_own(tree: ProcTree) -> None:
    debian(tree).add(21, 20, "supercronic", 50_001, argv=("supercronic", "/etc/tab"))
    tree.add(22, 21, "sh", 50_600).add(23, 22, "python3", 50_601, group=22)
    fire = tree.fire(23)
    assert (fire.fired_at_ms, fire.source, fire.daemon) == (at(50_600), "daemon-child", "supercronic")


def test_a_fork_that_a_restarted_daemon_left_behind_counts_itself(tree: ProcTree) -> None:
    tree.add(1, 0, "systemd", 0)
    tree.add(10, 1, "crond", 50_000, group=5, argv=("/usr/sbin/CROND", "-n"))
    tree.add(20, 10, "sh", 50_004).add(21, 20, "python3", 50_005, group=20)
    fire = tree.fire(21)
    assert (fire.fired_at_ms, fire.source, fire.daemon) == (at(50_000), "daemon-child", "cronie")


def test_the_session_of_a_busybox_line_is_the_daemons_and_does_not_count(tree: ProcTree) -> None:
    tree.add(1, 0, "crond", 0, argv=("crond", "-f"), exe="/bin/busybox")
    tree.add(8, 1, "sh", 50_000).add(9, 8, "python3", 50_001, group=8)
    fire = tree.fire(9)
    assert (fire.fired_at_ms, fire.source, fire.daemon) == (at(50_000), "daemon-child", "busybox")


@pytest.mark.parametrize(
    ("comm", "argv", "fork_argv", "exe", "daemon"),
    [
        pytest.param("crond", ("/usr/sbin/crond", "-n"), ("/usr/sbin/CROND", "-n"), None, "cronie", id="cronie"),
        pytest.param("crond", ("crond", "-f"), None, "/bin/busybox", "busybox", id="busybox by its link"),
        pytest.param("crond", ("crond", "-f"), None, None, None, id="a crond whose program cannot be seen"),
        pytest.param("crond", ("crond", "-f"), None, "/usr/sbin/crond", None, id="dcron"),
        pytest.param("busybox", ("busybox", "crond"), None, "/bin/busybox", "busybox", id="busybox by its name"),
        pytest.param("supercronic", ("/bin/supercronic", "t"), None, None, "supercronic", id="supercronic"),
        pytest.param("fcron", ("/usr/sbin/fcron",), ("/usr/sbin/fcron",), None, "fcron", id="fcron"),
        pytest.param("cron", ("/usr/sbin/cron",), None, None, None, id="a cron without a CRON"),
    ],
)
def test_a_daemon_is_named_only_when_it_is_certain(
    tree: ProcTree,
    comm: str,
    argv: tuple[str, ...],
    fork_argv: tuple[str, ...] | None,
    exe: str | None,
    daemon: str | None,
) -> None:
    tree.add(1, 0, "init", 0).add(5, 1, comm, 7, argv=argv, exe=exe)
    parent = 5
    if fork_argv:
        tree.add(10, 5, comm, 50_000, group=5, argv=fork_argv)
        parent = 10
    tree.add(20, parent, "sh", 50_000.25).add(21, 20, "python3", 50_001, group=20)
    fire = tree.fire(21)
    assert (fire.daemon, fire.source) == (daemon, "daemon-child")
    assert fire.fired_at_ms == at(50_000 if fork_argv else 50_000.25)


@pytest.mark.skipif(not os.path.exists("/etc/debian_version"), reason="not a Debian")
def test_debian_cron_is_named_by_its_fork(tree: ProcTree) -> None:
    assert debian(tree).fire(20).daemon == "debian-cron"


def test_systemd_says_when_its_timer_elapsed(tree: ProcTree) -> None:
    tree.add(1, 0, "systemd", 0).add(20, 1, "python3", 50_001)
    fire = tree.fire(20, INVOCATION_ID="4f", TRIGGER_TIMER_REALTIME_USEC=str(at(50_000.25) * 1000 + 999))
    assert (fire.fired_at_ms, fire.source, fire.daemon) == (at(50_000.25), "systemd-timer", None)


@pytest.mark.parametrize(
    ("usec", "invocation"),
    [
        pytest.param(str(at(50_000) * 1000), "", id="not from systemd"),
        pytest.param(str(at(50_001.5) * 1000), "4f", id="later than the own start"),
        pytest.param(str(at(50_001 - 60 * MINUTE - 1) * 1000), "4f", id="more than 60 minutes old"),
        pytest.param("", "4f", id="empty"),
        pytest.param("soon", "4f", id="no number"),
        pytest.param("-5", "4f", id="negative"),
        pytest.param("9" * 5000, "4f", id="endless"),
        pytest.param("٣", "4f", id="digits of another script"),
    ],
)
def test_a_trigger_time_that_cannot_be_true_falls_back(tree: ProcTree, usec: str, invocation: str) -> None:
    tree.add(1, 0, "systemd", 0).add(20, 1, "python3", 50_001)
    fire = tree.fire(20, INVOCATION_ID=invocation, TRIGGER_TIMER_REALTIME_USEC=usec)
    assert (fire.fired_at_ms, fire.source) == (at(50_001), "own-start")


def test_a_trigger_time_just_60_minutes_old_counts(tree: ProcTree) -> None:
    tree.add(1, 0, "systemd", 0).add(20, 1, "python3", 50_001)
    usec = str(at(50_001 - 60 * MINUTE) * 1000)
    assert tree.fire(20, INVOCATION_ID="4f", TRIGGER_TIMER_REALTIME_USEC=usec).source == "systemd-timer"


@pytest.mark.parametrize("hierarchy", ["0::", "1:name=systemd:"], ids=["cgroup v2", "cgroup v1"])
def test_a_unit_of_systemd_cron_is_known_by_its_name(tree: ProcTree, hierarchy: str) -> None:
    tree.add(1, 0, "systemd", 0).add(20, 1, "sh", 50_000).add(21, 20, "python3", 50_004, group=20)
    (tree.root / "21" / "cgroup").write_text(f"{hierarchy}/system.slice/cron-billing-root-0.service\n")
    fire = tree.fire(21, INVOCATION_ID="4f")
    assert (fire.fired_at_ms, fire.source, fire.daemon) == (at(50_000), "process-group", "systemd-cron")


def test_the_unit_of_debian_cron_is_not_systemd_crons(tree: ProcTree) -> None:
    tree.add(1, 0, "systemd", 0).add(20, 1, "python3", 50_000)
    (tree.root / "20" / "cgroup").write_text("0::/system.slice/cron.service\n")
    assert tree.fire(20, INVOCATION_ID="4f").daemon is None


def test_a_service_that_loops_is_not_fired_when_it_began(tree: ProcTree) -> None:
    tree.add(20, 1, "loop", 50_000).add(21, 20, "python3", 50_300, group=20)
    fire = tree.fire(21, INVOCATION_ID="4f")
    assert (fire.fired_at_ms, fire.source) == (at(50_300), "own-start")


def test_with_hidden_parents_the_leader_of_the_process_group_counts(tree: ProcTree) -> None:
    tree.add(20, 10, "sh", 50_000).add(21, 20, "python3", 50_007, group=20)
    fire = tree.fire(21)
    assert (fire.fired_at_ms, fire.source, fire.daemon) == (at(50_000), "process-group", None)
    assert "hidden" in fire.detail


def test_a_leader_that_is_no_ancestor_counts_too(tree: ProcTree) -> None:
    tree.add(20, 10, "sh", 50_000).add(21, 1, "python3", 50_002, group=20)
    fire = tree.fire(21)
    assert (fire.fired_at_ms, fire.source) == (at(50_000), "process-group")


def test_with_hidden_parents_and_a_leader_that_ended_the_own_start_counts(tree: ProcTree) -> None:
    tree.add(21, 1, "python3", 50_007, group=20)
    fire = tree.fire(21)
    assert (fire.fired_at_ms, fire.source) == (at(50_007), "own-start")


def test_a_script_that_calls_run_in_a_loop_is_not_when_its_calls_were_fired(tree: ProcTree) -> None:
    tree.add(1, 0, "init", 0).add(15, 1, "bash", 49_000)
    tree.add(20, 15, "loop", 50_000).add(21, 20, "python3", 50_300, group=20)
    fire = tree.fire(21)
    assert (fire.fired_at_ms, fire.source) == (at(50_300), "own-start")
    assert "no cron daemon" in fire.detail


def test_a_script_in_a_terminal_with_hidden_parents_is_not_when_its_calls_were_fired(tree: ProcTree) -> None:
    tree.add(15, 9, "bash", 49_000)
    tree.add(20, 15, "loop", 50_000).add(21, 20, "python3", 50_300, group=20)
    assert tree.fire(21).source == "own-start"


def test_a_pid_namespace_ends_the_chain(tree: ProcTree) -> None:
    tree.add(1, 0, "sh", 50_000, group=0).add(2, 1, "python3", 50_003, group=0)
    fire = tree.fire(2)
    assert (fire.fired_at_ms, fire.source) == (at(50_003), "own-start")


def test_a_line_that_began_more_than_an_hour_ago_falls_back_to_the_own_start(tree: ProcTree) -> None:
    debian(tree).add(21, 20, "python3", 50_000 + 61 * MINUTE, group=20)
    fire = tree.fire(21)
    assert (fire.fired_at_ms, fire.source) == (fire.own_start_ms, "own-start")
    assert "more than 60 minutes older" in fire.detail


def test_a_line_that_began_59_minutes_ago_is_still_believed(tree: ProcTree) -> None:
    debian(tree).add(21, 20, "python3", 50_000 + 59 * MINUTE, group=20)
    assert tree.fire(21).source == "daemon-child"


def test_a_job_that_calls_run_takes_its_own_start(tree: ProcTree) -> None:
    debian(tree).add(21, 20, "python3", 50_040, group=20)
    trigger = {"INVOCATION_ID": "4f", "TRIGGER_TIMER_REALTIME_USEC": str(at(50_000) * 1000)}
    fire = tree.fire(21, CLUSTERCRON_RUN_ID="billing@2026-09-17T02:00:00Z", **trigger)
    assert (fire.fired_at_ms, fire.source) == (at(50_040), "own-start")
    assert "billing@2026-09-17T02:00:00Z" in fire.detail


def test_a_number_taken_by_a_younger_process_is_no_parent(tree: ProcTree) -> None:
    tree.add(5, 1, "crond", 50_009, argv=("crond",)).add(21, 5, "python3", 50_007, group=3)
    fire = tree.fire(21)
    assert (fire.fired_at_ms, fire.source, fire.daemon) == (at(50_007), "own-start", None)


def test_a_parent_that_ends_while_it_is_looked_at_is_not_hidden(tree: ProcTree) -> None:
    tree.add(1, 0, "init", 0).add(5, 1, "supercronic", 7).add(12, 5, "sh", 50_000)
    tree.add(21, 10, "python3", 50_007, group=12)
    (tree.root / "10").mkdir()
    os.mkfifo(tree.root / "10" / "stat")

    def end_the_parent() -> None:
        # Opening waits for the finder to look; it reads nothing once this closes, as of a process that has ended.
        with (tree.root / "10" / "stat").open("wb"):
            tree.remove(10)
            tree.remove(21)
            tree.add(21, 12, "python3", 50_007, group=12)

    thread = threading.Thread(target=end_the_parent)
    thread.start()
    fire = tree.fire(21)
    thread.join()
    assert (fire.fired_at_ms, fire.source) == (at(50_000), "daemon-child")


def test_a_process_file_system_of_another_kind_is_survived(tree: ProcTree) -> None:
    tree.add(21, 1, "python3", 50_007)
    (tree.root / "21" / "stat").write_text("python3 21 1 21 21 5,0 ctty 1790000000,5\n")
    fire = tree.fire(21)
    assert fire.source == "own-start"
    assert "/proc" in fire.detail


def test_without_a_process_file_system_the_own_start_is_estimated(tmp_path: Path) -> None:
    used_ms = time.process_time() * 1000
    before = time.time_ns() // 1_000_000
    fire = find_fire({"CLUSTERCRON_RUN_ID": ""}, str(tmp_path / "absent"))
    assert (fire.source, fire.daemon) == ("own-start", None)
    assert before - time.process_time() * 1000 - 1 <= fire.fired_at_ms
    assert fire.fired_at_ms <= time.time_ns() // 1_000_000 - used_ms + 1


REPORT = f"""
import json, os, sys, time
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from clustercron.fired import find_fire
fire = find_fire(os.environ)
print(json.dumps([fire.fired_at_ms, fire.source, fire.own_start_ms, fire.daemon]), flush=True)
"""


@linux
def test_the_own_start_is_the_fork_and_not_the_first_line_of_python() -> None:
    waiting = "import sys; print('up', flush=True); sys.stdin.readline()\n"
    before = time.time_ns() // 1_000_000
    with subprocess.Popen(
        [sys.executable, "-I", "-c", waiting + REPORT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin
        assert child.stdout
        assert child.stdout.readline() == "up\n"
        after = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 < after + 300:
            os.sched_yield()
        child.stdin.write("\n")
        child.stdin.flush()
        fired_at_ms, source, own_start_ms, _ = json.loads(child.stdout.readline())
    assert source == "own-start"
    assert fired_at_ms == own_start_ms
    # Cut to hundredths of a second, so it may read early by as much; the clocks themselves move by a millisecond.
    assert before - 11 <= own_start_ms <= after + 1


@linux
def test_a_loop_outside_cron_serves_the_start_of_each_call() -> None:
    script = "for i in 1 2 3; do {python} -I -c '{report}'; done".format(
        python=sys.executable, report=REPORT.replace("'", "'\\''")
    )
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, start_new_session=True)
    calls = [json.loads(line) for line in done.stdout.splitlines()]
    assert [call[1] for call in calls] == ["own-start"] * 3
    assert calls[0][0] < calls[1][0] < calls[2][0]


@linux
def test_a_parent_that_names_itself_to_confuse_does_not() -> None:
    # The name the kernel shows is set by the process itself, here one that looks like the rest of a line of stat.
    renames = (
        "import ctypes, subprocess, sys\n"
        "ctypes.CDLL(None).prctl(15, b') R 1 1 1 (9', 0, 0, 0)\n"
        "print(open('/proc/self/comm').read(), end='')\n"
        "sys.stdout.flush()\n"
        f"subprocess.run([sys.executable, '-I', '-c', {REPORT!r}], check=True)\n"
    )
    before = time.time_ns() // 1_000_000
    done = subprocess.run([sys.executable, "-I", "-c", renames], capture_output=True, text=True, check=True)
    name, answer = done.stdout.splitlines()
    assert name == ") R 1 1 1 (9"
    assert json.loads(answer)[1] == "own-start"
    assert json.loads(answer)[0] >= before - 11


@linux
def test_the_variable_of_a_run_reaches_the_decision_through_the_real_environment() -> None:
    trigger = str((time.time_ns() // 1000) - 1_000_000)
    environ = {"INVOCATION_ID": "4f", "TRIGGER_TIMER_REALTIME_USEC": trigger}
    command = [sys.executable, "-I", "-c", REPORT]
    timer = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert json.loads(timer.stdout)[:2] == [int(trigger) // 1000, "systemd-timer"]
    nested = subprocess.run(
        command, env={**environ, "CLUSTERCRON_RUN_ID": "a@b"}, capture_output=True, text=True, check=True
    )
    assert json.loads(nested.stdout)[1] == "own-start"


def test_the_module_imports_nothing_that_costs_start_up() -> None:
    show = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r}); before = set(sys.modules)\n"
        "import clustercron.fired\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", show], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__future__", "clustercron", "clustercron.fired"]


@linux
@pytest.mark.benchmark
def test_finding_the_fire_costs_well_below_a_millisecond() -> None:
    find_fire(os.environ)
    rounds = []
    for _ in range(50):
        began = time.perf_counter()
        find_fire(os.environ)
        rounds.append(time.perf_counter() - began)
    assert sorted(rounds)[25] < 0.0005
