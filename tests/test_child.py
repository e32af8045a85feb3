"""The child: exit codes, signals, arguments, descriptors, timeouts, and everything a job finds as it would without us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clustercron.supervise import Interrupted, Signals
from tests.proxy import Proxy
from tests.rig import COMMAND, Fire, Fleet, Server, lines, wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

TICK = "2026-01-05T02:00:00Z"
RUN = ("run", "--job", "child", "--schedule", "* * * * *", "--tick", TICK)
RUNS = "clustercron:{child}:runs"
TICK_FIELD = "1767578400"
PYTHON = (sys.executable, "-I", "-c")


def start(fleet: Fleet, options: Sequence[str], *command: str | bytes, **popen: Any) -> Fire:
    return fleet.start(*RUN, *options, "--", *command, **popen)


def run(fleet: Fleet, options: Sequence[str], *command: str | bytes, **popen: Any) -> subprocess.CompletedProcess[str]:
    return start(fleet, options, *command, **popen).end()


def state(server: Server) -> str:
    record = server.client().hget(RUNS, TICK_FIELD) or ""
    return dict(pair.split("=", 1) for pair in str(record).split()).get("s", "")


def stat_of(pid: int | str) -> list[str]:
    """The fields of a process after its name: state, parent, group; a dead one that nobody has taken in is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def group_is_gone(group: int) -> bool:
    return not any((fields := stat_of(pid)) and int(fields[2]) == group for pid in os.listdir("/proc") if pid.isdigit())


def process_is_gone(pid: int) -> bool:
    return not stat_of(pid)


def number_in(path: Path) -> int:
    return int(wait_for(lambda: [line for line in lines(path) if line], f"{path} is written")[0])


@pytest.mark.parametrize("code", [0, 2, 75, 124, 127, 254, 255])
def test_the_exit_code_of_the_job_passes_through(fleet: Fleet, code: int) -> None:
    end = run(fleet, [], "/bin/sh", "-c", f"exit {code}")
    assert (end.returncode, end.stdout, end.stderr) == (code, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE])
def test_death_by_a_signal_is_128_plus_its_number(fleet: Fleet, server: Server, number: int) -> None:
    end = run(fleet, [], "/bin/sh", "-c", f"ulimit -c 0; kill -{number} $$")
    assert (end.returncode, end.stderr) == (128 + number, "")
    assert state(server) == "killed"


@pytest.mark.parametrize(
    "options",
    [[], ["--keep-output", "1K"], ["--output", "on-failure"], ["--output", "discard", "--keep-output", "1K"]],
    ids=["pass", "keep", "on-failure", "discard and keep"],
)
def test_a_grandchild_that_keeps_stdout_open_does_not_hold_the_run(fleet: Fleet, options: list[str]) -> None:
    fire = start(fleet, options, "/bin/sh", "-c", f"sleep 30 & echo $! > {fleet.folder}/pid; echo done")
    try:
        assert fire.process.wait(15) == 0
        assert fire.process.stdout is not None
        expected = b"done\n" if options in ([], ["--keep-output", "1K"]) else b""
        os.set_blocking(fire.process.stdout.fileno(), False)
        assert (fire.process.stdout.read() or b"") == expected
        assert not process_is_gone(number_in(fleet.folder / "pid"))
    finally:
        os.kill(number_in(fleet.folder / "pid"), signal.SIGKILL)


def test_a_timeout_leaves_nothing_behind_of_a_job_that_ignores_term(fleet: Fleet, server: Server) -> None:
    script = f'trap "" TERM; echo $$ > {fleet.folder}/pid; sleep 999'
    end = run(fleet, ["--timeout", "400ms", "--kill-after", "200ms"], "/bin/sh", "-c", script)
    assert end.returncode == 124
    assert end.stderr == f"clustercron: child: stopped the run of {TICK}: --timeout 0.4s\n"
    assert group_is_gone(number_in(fleet.folder / "pid"))
    assert state(server) == "timed-out"


def test_a_timeout_leaves_nothing_behind_when_only_the_leader_dies_of_term(fleet: Fleet) -> None:
    inner = f'trap "" TERM; echo $$ > {fleet.folder}/inner; sleep 999'
    script = f"echo $$ > {fleet.folder}/pid; /bin/sh -c '{inner}' & wait"
    end = run(fleet, ["--timeout", "500ms", "--kill-after", "300ms"], "/bin/sh", "-c", script)
    assert end.returncode == 124
    assert group_is_gone(number_in(fleet.folder / "pid"))
    assert process_is_gone(number_in(fleet.folder / "inner"))


def test_a_job_that_heeds_term_at_its_timeout_is_not_waited_for(fleet: Fleet) -> None:
    began = time.monotonic()
    end = run(fleet, ["--timeout", "300ms", "--kill-after", "50s"], "/bin/sh", "-c", "sleep 999 & wait")
    assert end.returncode == 124
    assert time.monotonic() - began < 20


def test_a_stopped_job_is_ended_by_its_timeout(fleet: Fleet) -> None:
    began = time.monotonic()
    end = run(fleet, ["--timeout", "300ms", "--kill-after", "50s"], "/bin/sh", "-c", "kill -STOP $$; sleep 999")
    assert end.returncode == 124
    assert time.monotonic() - began < 20


def test_a_timeout_of_months_can_be_waited_for(fleet: Fleet) -> None:
    end = run(fleet, ["--timeout", "100d", "--keep-output", "1K"], "/bin/sh", "-c", "sleep 0.1; echo done")
    assert (end.returncode, end.stdout, end.stderr) == (0, "done\n", "")


def test_term_to_the_wrapper_ends_the_child(fleet: Fleet, server: Server) -> None:
    fire = start(fleet, [], "/bin/sh", "-c", f"echo $$ > {fleet.folder}/pid; exec sleep 999")
    pid = number_in(fleet.folder / "pid")
    fire.process.terminate()
    end = fire.end()
    assert (end.returncode, end.stdout, end.stderr) == (143, "", "")
    assert process_is_gone(pid)
    assert state(server) == "killed"


def test_the_signals_of_the_contract_reach_the_whole_group(fleet: Fleet) -> None:
    names = ["HUP", "INT", "QUIT", "USR1", "USR2", "TERM"]
    job = f"""
import os, signal, sys, time
who = "parent" if os.fork() else "child"
path = "{fleet.folder}/" + who
def heard(number, frame):
    with open(path, "a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number == signal.SIGTERM:
        os._exit(7)
for name in {names}:
    signal.signal(getattr(signal, "SIG" + name), heard)
open(path, "w").write("ready\\n")
while True:
    time.sleep(60)
"""
    fire = start(fleet, [], *PYTHON, job)
    heard = ["ready"]
    for name in ["", *names]:
        if name:
            fire.process.send_signal(getattr(signal, f"SIG{name}"))
            heard.append(f"SIG{name}")
        for who in ("parent", "child"):
            wait_for(lambda who=who: lines(fleet.folder / who) == heard, f"{who} hears {heard}")  # type: ignore[misc]
    assert fire.end().returncode == 7


def test_term_while_start_waits_for_redis_gives_the_tick_back(fleet: Fleet, server: Server) -> None:
    job, path = fleet.append_job()
    with Proxy(server.socket) as proxy:
        fleet.set_url(proxy.url)
        hold = proxy.hold("start")
        fire = start(fleet, ["--store-timeout", "30s"], *job)
        hold.wait_until_reached()
        fire.process.terminate()
        end = fire.end(15)
        hold.release()
    assert (end.returncode, end.stdout, end.stderr) == (-signal.SIGTERM, "", "")
    assert state(server) == "abandoned"
    fleet.set_url(server.url)
    assert run(fleet, [], *job, node="node-2").returncode == 0
    assert [line.split()[1] for line in lines(path)] == ["node-2"]


def test_a_signal_while_start_waits_for_redis_reaches_the_job(fleet: Fleet, server: Server) -> None:
    with Proxy(server.socket) as proxy:
        fleet.set_url(proxy.url)
        hold = proxy.hold("start")
        fire = start(fleet, [], "/bin/sleep", "60")
        hold.wait_until_reached()
        fire.process.send_signal(signal.SIGUSR1)
        hold.release()
        assert fire.end(15).returncode == 128 + signal.SIGUSR1
    assert state(server) == "killed"


def test_a_look_at_the_signals_takes_none_away() -> None:
    signals = Signals()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.stop is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop == signal.SIGTERM
        with pytest.raises(Interrupted):
            signals.interruptible(lambda: None)
        assert signals.take() == [signal.SIGUSR1, signal.SIGTERM]
        assert (signals.take(), signals.stop) == ([], None)
    finally:
        signals.close()


def test_term_while_the_claim_waits_for_redis_runs_nothing(fleet: Fleet, server: Server) -> None:
    job, path = fleet.append_job()
    with server.stopped():
        fire = start(fleet, ["--store-timeout", "3s"], *job)
        wait_for(lambda: "unix" in _sockets(fire.process.pid), "it is connected")
        fire.process.terminate()
        assert fire.end(15).returncode == -signal.SIGTERM
    assert lines(path) == []
    # Whatever the dead request did, the tick is free again within a short lease.
    assert run(fleet, [], *job, node="node-2").returncode == 0
    assert len(lines(path)) == 1


def _sockets(pid: int) -> str:
    folder = Path(f"/proc/{pid}/fd")
    try:
        return " ".join("unix" for fd in folder.iterdir() if os.readlink(fd).startswith("socket:"))
    except OSError:
        return ""


@pytest.mark.root
def test_term_between_start_and_spawn_ends_the_child(fleet: Fleet, server: Server) -> None:
    spawns = "vfork,clone,clone3"
    strace = ["strace", "-qq", "-o", str(fleet.folder / "trace"), "-e", f"trace={spawns}"]
    strace += ["-e", f"inject={spawns}:delay_enter=1500000"]
    fire = start(fleet, [], "/bin/sleep", "60", command=[*strace, *COMMAND])
    wait_for(lambda: state(server) == "running", "it has started")
    tracer = fire.process.pid
    wrapper = int(Path(f"/proc/{tracer}/task/{tracer}/children").read_text().split()[0])
    assert Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text() == ""
    os.kill(wrapper, signal.SIGTERM)
    assert fire.end(20).returncode == 143
    assert state(server) == "killed"


AWKWARD = ["two words", "", "'", '"', "new\nline", "*", "--", "-v", "$HOME", b"\xff\xfe", "ä€"]


@pytest.mark.parametrize("environment", [{}, {"LC_ALL": "C"}, {"LC_ALL": "POSIX", "LANG": "de_DE.ISO-8859-1"}])
def test_arguments_arrive_unchanged(fleet: Fleet, environment: dict[str, str]) -> None:
    show = "import os, sys; print([os.fsencode(a) for a in sys.argv[1:]])"
    end = run(fleet, [], *PYTHON, show, *AWKWARD, env=environment)
    assert (end.returncode, end.stderr) == (0, "")
    assert end.stdout == f"{[os.fsencode(a) for a in AWKWARD]}\n"


def test_a_command_whose_name_is_not_utf8_is_executed(fleet: Fleet) -> None:
    name = os.fsencode(fleet.folder) + b"/\xffjob"
    with open(name, "wb") as file:
        file.write(b'#!/bin/sh\necho "$0"\n')
    os.chmod(name, 0o755)
    end = start(fleet, [], name)
    out, err = end.process.communicate(timeout=20)
    assert (end.process.returncode, out, err) == (0, name + b"\n", b"")


@pytest.mark.parametrize("options", [[], ["--keep-output", "1K"]], ids=["pass", "keep"])
def test_stdin_is_the_wrappers_own(fleet: Fleet, options: list[str]) -> None:
    fire = start(fleet, options, "/bin/cat", stdin=subprocess.PIPE)
    out, err = fire.process.communicate(b"one\ntwo\n", timeout=20)
    assert (fire.process.returncode, out, err) == (0, b"one\ntwo\n", b"")


def _seen(fleet: Fleet, argv: Sequence[str], **popen: Any) -> str:
    """What a command prints without us, with the same environment and descriptors."""
    popen.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run(argv, env=fleet.env, capture_output=True, check=True, **popen)
    return done.stdout.decode()


def test_no_descriptor_of_ours_reaches_the_job_and_all_inherited_ones_do(fleet: Fleet) -> None:
    show = ["/bin/sh", "-c", "ls /proc/self/fd"]
    with (fleet.folder / "lock").open("w") as lock:
        bare = _seen(fleet, show, pass_fds=[lock.fileno()])
        assert str(lock.fileno()) in bare.split()
        for options in ([], ["--keep-output", "1K"], ["--output", "on-failure", "--log", "syslog"]):
            end = start(fleet, ["--tick", _another_tick(), *options], *show, pass_fds=[lock.fileno()]).end()
            assert end.returncode == 0
            assert end.stdout in (bare, "")
    assert "socket" not in run(fleet, [], "/bin/sh", "-c", "readlink /proc/self/fd/*").stdout


def _another_tick() -> str:
    _another_tick.minute += 1  # type: ignore[attr-defined]
    return f"2026-01-06T00:{_another_tick.minute:02}:00Z"  # type: ignore[attr-defined]


_another_tick.minute = 0  # type: ignore[attr-defined]

SIGNALS = ["/bin/grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status"]
PRELUDES = {
    "plain": "",
    "nohup": "signal.signal(signal.SIGHUP, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR2])",
}


@pytest.mark.parametrize("prelude", PRELUDES.values(), ids=PRELUDES.keys())
def test_ignored_and_blocked_signals_are_the_same_with_and_without_us(fleet: Fleet, prelude: str) -> None:
    default = "signal.signal(signal.SIGPIPE, signal.SIG_DFL); signal.signal(signal.SIGXFSZ, signal.SIG_DFL)"
    shell = [*PYTHON, f"import os, signal, sys\n{default}\n{prelude}\nos.execv(sys.argv[1], sys.argv[1:])"]
    bare = _seen(fleet, [*shell, *SIGNALS])
    end = start(fleet, [], *SIGNALS, command=[*shell, *COMMAND]).end()
    assert end.returncode == 0
    assert _signal_sets(end.stdout) == _signal_sets(bare)


def _signal_sets(status: str) -> list[int]:
    # 32 and 33 are the C library's own; its posix_spawn has the child ignore them.
    return [int(line.split()[1], 16) & ~(3 << 31) for line in status.splitlines()]


@pytest.mark.parametrize("how", ["signal(signal.SIGCHLD, signal.SIG_IGN)", "pthread_sigmask(0, [signal.SIGCHLD, 15])"])
def test_a_parent_that_ignores_or_blocks_sigchld_does_not_lose_the_exit_code(fleet: Fleet, how: str) -> None:
    shell = [*PYTHON, f"import os, signal, sys; signal.{how}; os.execv(sys.argv[1], sys.argv[1:])"]
    end = start(fleet, ["--keep-output", "1K"], "/bin/sh", "-c", "sleep 0.2; exit 9", command=[*shell, *COMMAND]).end(
        15
    )
    assert (end.returncode, end.stderr) == (9, "")


def test_sigpipe_is_default_in_the_job(fleet: Fleet) -> None:
    end = run(fleet, [], "/bin/sh", "-c", "yes | head -1; /bin/sh -c 'kill -PIPE $$'; echo $?")
    assert (end.returncode, end.stdout, end.stderr) == (0, "y\n141\n", "")


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("options", ["", "--keep-output 1K", "--output on-failure"])
def test_closed_standard_descriptors_harm_nothing(fleet: Fleet, closing: str, options: str) -> None:
    job = f"ls /proc/self/fd | tr '\\n' ' ' 2>/dev/null > {fleet.folder}/fds; echo out; echo err >&2; exit 3"
    shell = ["/bin/sh", "-c", f'exec "$@" {closing}', "sh"]
    end = start(fleet, options.split(), "/bin/sh", "-c", job, command=[*shell, *COMMAND]).end(15)
    assert end.returncode == 3
    assert "clustercron" not in end.stderr
    if not options:
        # What was closed is closed for the job too; the shell's own pipes may take the number.
        assert ("out" in end.stdout, "err" in end.stderr) == (">&-" not in closing.split(), "2>&-" not in closing)


def test_a_message_never_goes_to_redis_in_place_of_a_closed_stderr(fleet: Fleet, server: Server) -> None:
    client = server.client()
    client.config_resetstat()
    fire = start(fleet, ["-vv"], "/bin/true", command=["/bin/sh", "-c", 'exec "$@" 2>&- <&- >&-', "sh", *COMMAND])
    assert fire.end(15).returncode == 0
    assert client.info("errorstats") == {}


@pytest.mark.parametrize("options", [[], ["--keep-output", "1K", "--output", "on-failure"]], ids=["pass", "keep"])
def test_an_empty_environment_and_a_removed_directory_are_enough(fleet: Fleet, options: list[str]) -> None:
    gone = fleet.folder / "gone"
    gone.mkdir()
    keep = {k: fleet.env[k] for k in ("CLUSTERCRON_CONFIG", "CLUSTERCRON_STATE_DIR")}
    shell = ["/bin/sh", "-c", f'rmdir {gone}; exec "$@"', "sh", "env", "-i", "PATH=/usr/bin:/bin", "HOME=/"]
    shell += [f"{k}={v}" for k, v in keep.items()]
    job = ["/bin/sh", "-c", f"env > {fleet.folder}/env"]
    end = start(fleet, options, *job, command=[*shell, *COMMAND], cwd=gone).end()
    assert (end.returncode, end.stdout, "clustercron" in end.stderr) == (0, "", False)
    names = {line.split("=")[0] for line in lines(fleet.folder / "env")}
    assert {n for n in names if not n.startswith("CLUSTERCRON_")} - {"PWD", "OLDPWD", "_"} == {"PATH", "HOME"}


def test_an_lc_ctype_of_the_crontab_stays(fleet: Fleet) -> None:
    end = run(fleet, [], "/bin/sh", "-c", 'echo "$LC_CTYPE"', env={"LC_CTYPE": "C.UTF-8"})
    assert end.stdout == "C.UTF-8\n"


def test_the_waiting_wrapper_takes_little_memory(fleet: Fleet, server: Server) -> None:
    fire = start(fleet, ["--lease", "1s", "--keep-output", "64K"], "/bin/sh", "-c", "echo; exec sleep 999")

    def renewed() -> bool:
        return " r=2" in str(server.client().hget(RUNS, TICK_FIELD))

    wait_for(renewed, "it renews its lease")
    status = Path(f"/proc/{fire.process.pid}/status").read_text()
    peak_kib = int(status.split("VmHWM:")[1].split()[0])
    fire.process.terminate()
    assert fire.end().returncode == 143
    assert peak_kib <= 14 * 1024


# --- what only root can set up


@pytest.mark.root
@pytest.mark.parametrize("options", [[], ["--keep-output", "1K", "--output", "on-failure"]], ids=["pass", "keep"])
def test_a_read_only_file_system_is_enough(fleet: Fleet, options: list[str]) -> None:
    setup = "mount --bind /tmp /tmp && mount -o remount,ro,bind / && mount -t tmpfs none /var/tmp -o ro && "
    shell = ["unshare", "-m", "/bin/sh", "-c", setup + '! touch /root/x 2>/dev/null && exec "$@"', "sh"]
    end = start(fleet, options, "/bin/sh", "-c", "echo out; exit 3", command=[*shell, *COMMAND]).end()
    assert (end.returncode, end.stdout, end.stderr) == (3, "out\n", "")


@pytest.mark.root
def test_a_directory_that_cannot_be_read_is_enough() -> None:
    user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if subprocess.run([*user, *PYTHON, "import clustercron"], check=False, capture_output=True).returncode:
        pytest.skip("another user cannot read this installation")
    # Not in pytest's directory, which is its user's alone.
    with tempfile.TemporaryDirectory() as name, Server(Path(name) / "redis", "--unixsocketperm", "777") as server:
        folder, locked = Path(name), Path(name) / "locked"
        folder.chmod(0o755)
        server.folder.chmod(0o755)
        locked.mkdir(mode=0o000)
        fleet = Fleet(server.url, folder)
        end = start(fleet, [], "/bin/sh", "-c", "exit 3", command=[*user, *COMMAND], cwd=locked).end()
    assert (end.returncode, end.stderr) == (3, "")


CONTAINER = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.mark.root
@pytest.mark.parametrize("code", [0, 3])
def test_as_pid_1_it_passes_the_exit_code(fleet: Fleet, code: int) -> None:
    end = start(fleet, [], "/bin/sh", "-c", f"exit {code}", command=[*CONTAINER, *COMMAND]).end()
    assert (end.returncode, end.stdout, end.stderr) == (code, "", "")


@pytest.mark.root
def test_as_pid_1_it_takes_in_orphans(fleet: Fleet) -> None:
    # The sleeps lose their parent and become ours: who never waits for them sees the group for ever.
    began = time.monotonic()
    options = ["--timeout", "300ms", "--kill-after", "50s"]
    end = start(fleet, options, "/bin/sh", "-c", "sleep 99 & sleep 99 & wait", command=[*CONTAINER, *COMMAND]).end()
    assert end.returncode == 124
    assert time.monotonic() - began < 20


@pytest.mark.root
def test_as_pid_1_term_ends_the_job(fleet: Fleet) -> None:
    fire = start(
        fleet, [], "/bin/sh", "-c", f"echo x > {fleet.folder}/up; exec sleep 99", command=[*CONTAINER, *COMMAND]
    )
    wait_for(lambda: lines(fleet.folder / "up"), "the job runs")
    unshare = fire.process.pid
    wrapper = int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])
    os.kill(wrapper, signal.SIGTERM)
    assert fire.end(15).returncode == 143


@pytest.mark.root
def test_as_pid_1_term_while_the_claim_waits_for_redis_runs_nothing(fleet: Fleet, server: Server) -> None:
    job, path = fleet.append_job()
    with server.stopped():
        fire = start(fleet, [], *job, command=[*CONTAINER, *COMMAND])
        unshare = fire.process.pid
        children = Path(f"/proc/{unshare}/task/{unshare}/children")
        wrapper = int(wait_for(children.read_text, "there is a wrapper").split()[0])
        wait_for(lambda: "unix" in _sockets(wrapper), "it is connected")
        os.kill(wrapper, signal.SIGTERM)
        assert fire.end(10).returncode == 143
    assert lines(path) == []
