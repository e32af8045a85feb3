"""When cron fired this process, asked by lines of real daemons: Debian's cron and busybox's crond, on the real clock.

The daemons run in private mount namespaces with crontabs of their own; the machine's are never seen. All of them run
side by side, so that one minute's boundary serves every test here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.root, pytest.mark.timeout(200)]

PACKAGE = Path(__file__).parent.parent / "clustercron"
CRON = "/usr/sbin/cron"
# The kernel cuts starts to hundredths of a second, so they read early by up to 10 ms.
EARLY_MS = 11
# Debian's cron fires 1 to 2 s after the minute, busybox's within the first second.
LATE_MS = 2500

REPORT = """
import json, os, sys, time
sys.path.insert(0, os.environ["FIRED_LAB"])
from clustercron import fired
fire = fired.find_fire(os.environ)
leader = fired._read_process("/proc", str(os.getsid(0)))
report = {
    "fired_at_ms": fire.fired_at_ms, "source": fire.source, "daemon": fire.daemon, "detail": fire.detail,
    "own_start_ms": fire.own_start_ms, "reported_ms": time.time_ns() // 1000000,
    "session_ms": leader and fired._measure_boot_ms() + leader.start_ticks * 10,
}
name = os.path.join(os.environ["FIRED_LAB"], "reports", sys.argv[1])
if len(sys.argv) > 2:
    name += f".{os.getpid()}"
with open(f"{name}.{os.getpid()}.part", "x") as file:
    json.dump(report, file)
try:
    os.link(file.name, name + ".json")  # the daemon fires again each minute: the first report stays
except FileExistsError:
    pass
os.unlink(file.name)
"""

# What stands between Debian's cron and the finder. $R reports under the name that follows.
DEBIAN_LINES = {
    "plain": "$R plain",
    "sh -c": 'sh -c "$R sh\\ -c; true"',
    "bash -c": 'bash -c "$R bash\\ -c"',
    "flock": "flock $FIRED_LAB/lock $R flock",
    "timeout": "timeout 60 $R timeout",
    "su": 'su root -c "$R su"',
    "setsid": "setsid -w $R setsid",
    # Without the `true` some shells become the last command instead of forking it, and its own start is theirs.
    "sleep": "sleep 7; $R sleep; true",
    "sleep, then exec": "sleep 7; exec $R 'sleep, then exec'",
    "sleep, then su": "sleep 7; su root -c \"$R 'sleep, then su'\"",
    "sleep, then setsid": "sleep 7; setsid -w $R 'sleep, then setsid'",
    "cd and true": "cd / && $R 'cd and true'; true",
    "pipe": "echo text | $R pipe | cat",
    "script named cron": "$FIRED_LAB/cron 'script named cron'",
    "script with an odd name": "\"$FIRED_LAB/o) S 1 1 (\" 'script with an odd name'",
    "pid namespace, old proc": "unshare -pf $R 'pid namespace, old proc'",
}
OTHER_DEBIAN_LINES = {
    "orphan": "nohup $R orphan >/dev/null 2>&1 &",
    "pid namespace": "unshare -pf --mount-proc $R 'pid namespace'",
    "pid namespace, later": "sleep 4; unshare -pf --mount-proc $R 'pid namespace, later'",
}
NESTED = ("nested 1", "nested 2", "nested 3")
NESTED_LINE = (
    "CLUSTERCRON_RUN_ID=a@2026-09-17T02:00:00Z sh -c \"$R 'nested 1'; sleep 2; $R 'nested 2'; sleep 2; $R 'nested 3'\""
)
BUSYBOX_LINES = (
    "plain",
    "sh -c",
    "bash -c",
    "flock",
    "timeout",
    "su",
    "setsid",
    "sleep",
    "sleep, then exec",
    "sleep, then setsid",
)
HIDDEN_LINES = {
    "plain": "$R plain",
    "sleep": "sleep 3; $R sleep; true",
    "pipe": "sleep 3; echo text | $R pipe | cat",
    "setsid": "sleep 3; setsid -w $R setsid",
}


class Report(NamedTuple):
    fired_at_ms: int
    source: str
    daemon: str | None
    detail: str
    own_start_ms: int
    reported_ms: int
    session_ms: int | None


class Lab:
    """A directory with the finder, a python that anybody may run, and crontabs; and the daemon that runs there."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fired-"))
        self.path.chmod(0o755)
        for name in ("python", "spool", "cron.d", "clustercron", "reports", "bin"):
            (self.path / name).mkdir()
        (self.path / "reports").chmod(0o777)
        for name in ("__init__.py", "fired.py"):
            shutil.copy(PACKAGE / name, self.path / "clustercron" / name)
        (self.path / "report.py").write_text(REPORT)
        # This python itself may stand where only root may look: the namespace shows it here.
        interpreter = (
            self.path / "python" / os.path.relpath(os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix))
        )
        self.environ = {
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "FIRED_LAB": str(self.path),
            "R": f"{interpreter} -I {self.path}/report.py",
        }
        for name in ("cron", "o) S 1 1 ("):
            script = self.path / name
            script.write_text('#!/bin/sh\n$R "$1"\ntrue\n')
            script.chmod(0o755)
        self.daemon: subprocess.Popen[bytes] | None = None

    def start(self, command: str, *, mounts: str = "", namespaces: tuple[str, ...] = ()) -> None:
        setup = f'mount --bind "{sys.base_prefix}" "$FIRED_LAB/python"\n{mounts}\nexec {command}'
        self.daemon = subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", *namespaces, "sh", "-ec", setup],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start_debian_cron(
        self, lines: dict[str, str], user: str, *, mounts: str = "", namespaces: tuple[str, ...] = ()
    ) -> None:
        (self.path / "spool" / "crontabs").mkdir(mode=0o700)
        variables = "".join(f"{name}={value}\n" for name, value in self.environ.items())
        crontab = self.path / "crontab"
        crontab.write_text(variables + "".join(f"* * * * * {user} {line}\n" for line in lines.values()))
        binds = (
            'mount -t tmpfs tmpfs /run\nmount --bind "$FIRED_LAB/spool" /var/spool/cron\n'
            'mount --bind "$FIRED_LAB/crontab" /etc/crontab\nmount --bind "$FIRED_LAB/cron.d" /etc/cron.d\n'
        )
        self.start(f"{CRON} -f", mounts=mounts + binds, namespaces=namespaces)

    def start_busybox(self, lines: dict[str, str], command: str) -> None:
        (self.path / "spool" / "root").write_text("".join(f"* * * * * {line}\n" for line in lines.values()))
        self.start(f"{command} -f -L /dev/null -c {self.path}/spool")

    def reports(self) -> dict[str, Report]:
        return {
            path.name.removesuffix(".json"): Report(**json.loads(path.read_text()))
            for path in (self.path / "reports").glob("*.json")
        }

    def processes(self) -> list[int]:
        """Those that a line of ours started, known by their environment."""
        mark = b"FIRED_LAB=" + os.fsencode(self.path) + b"\0"
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes() + b"\0":
                    found.append(int(path.parent.name))
        return found

    def close(self) -> None:
        if self.daemon is not None:
            self.daemon.send_signal(signal.SIGCONT)
            self.daemon.kill()
            self.daemon.wait()
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os.sched_yield()
        shutil.rmtree(self.path)


@contextlib.contextmanager
def labs(count: int) -> Iterator[list[Lab]]:
    with contextlib.ExitStack() as stack:
        made = [Lab() for _ in range(count)]
        for lab in made:
            stack.callback(lab.close)
        yield made


def await_that(happened: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.05)


def need(*programs: str) -> None:
    if not os.path.exists("/etc/debian_version"):
        pytest.skip("not a Debian")
    for program in programs:
        if not shutil.which(program):
            pytest.fail(f"no {program} here; tests/run installs it")


class Minute(NamedTuple):
    """What the lines of one minute found out, by daemon."""

    begin_ms: int
    debian: dict[str, Report]
    busybox: dict[str, Report]
    crond: dict[str, Report]
    hidden: dict[str, dict[str, Report]]


def find_busybox_with_crond(cache: Path) -> str:
    """The machine's, if it has the applet; Debian's has not, but the one in busybox-static, which is only unpacked."""
    unpacked = cache / "bin" / "busybox"
    for candidate in (shutil.which("busybox"), str(unpacked)):
        if candidate and os.access(candidate, os.X_OK):
            listed = subprocess.run([candidate, "--list"], capture_output=True, text=True, check=True)
            if "crond" in listed.stdout.split():
                return candidate
    need("apt-get", "dpkg-deb")
    for command in (["apt-get", "download", "-qq", "busybox-static"], ["apt-get", "update", "-qq"]) * 2:
        subprocess.run(command, cwd=cache, capture_output=True, check=False)
        for package in cache.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, cache], check=True)
            return str(unpacked)
    pytest.fail("no busybox with crond here, and apt-get did not bring busybox-static")


@pytest.fixture(scope="module")
def minute(request: pytest.FixtureRequest) -> Iterator[Minute]:
    need(CRON, "unshare", "bash", "flock", "setsid", "su")
    assert request.config.cache is not None
    busybox_program = find_busybox_with_crond(request.config.cache.mkdir("busybox"))
    with labs(5) as (debian, busybox, crond, hidden, no_access):
        # A daemon never runs the minute in which it starts; one that starts just before a boundary may start after it.
        await_that(lambda: time.time() % 60 < 56, 10, "the next minute")
        debian.start_debian_cron({**DEBIAN_LINES, **OTHER_DEBIAN_LINES, "nested": NESTED_LINE}, "root")
        busybox_lines = {name: DEBIAN_LINES[name] for name in BUSYBOX_LINES}
        busybox.start_busybox(busybox_lines, f"{busybox_program} crond")
        (crond.path / "bin" / "crond").symlink_to(busybox_program)
        crond.start_busybox(busybox_lines, f"{crond.path}/bin/crond")
        # A process namespace too: the option would otherwise be that of the whole machine's /proc on old kernels.
        for lab, option in ((hidden, "2"), (no_access, "1")):
            lab.start_debian_cron(
                HIDDEN_LINES,
                "nobody",
                mounts=f"mount -t proc -o hidepid={option} proc /proc\n",
                namespaces=("-p", "-f", "--kill-child"),
            )
        begin_ms = (int(time.time()) // 60 + 1) * 60_000
        expected = (
            (debian, {*DEBIAN_LINES, *OTHER_DEBIAN_LINES, *NESTED}),
            (busybox, set(BUSYBOX_LINES)),
            (crond, set(BUSYBOX_LINES)),
            (hidden, set(HIDDEN_LINES)),
            (no_access, set(HIDDEN_LINES)),
        )

        def all_reported() -> bool:
            return time.time() * 1000 > begin_ms and all(names <= lab.reports().keys() for lab, names in expected)

        with contextlib.suppress(pytest.fail.Exception):
            # What is missing then is for the tests to say, each for its own line.
            await_that(all_reported, 57 + 35, "a report of every line")
        yield Minute(
            begin_ms,
            debian.reports(),
            busybox.reports(),
            crond.reports(),
            {"invisible": hidden.reports(), "no access": no_access.reports()},
        )


def is_fired_in(minute: Minute, report: Report) -> bool:
    return minute.begin_ms - EARLY_MS <= report.fired_at_ms <= minute.begin_ms + LATE_MS


@pytest.mark.parametrize("line", DEBIAN_LINES)
def test_debian_cron_forked_this_line_at_the_minute(minute: Minute, line: str) -> None:
    report = minute.debian[line]
    assert is_fired_in(minute, report), report
    assert (report.source, report.daemon) == ("daemon-child", "debian-cron")
    if line.startswith("sleep"):
        assert report.reported_ms >= report.fired_at_ms + 6900
    if line == "sleep":
        assert report.own_start_ms >= report.fired_at_ms + 6900


def test_an_orphan_of_debian_cron_knows_its_minute(minute: Minute) -> None:
    assert is_fired_in(minute, minute.debian["orphan"]), minute.debian["orphan"]


def test_in_a_pid_namespace_the_own_start_counts(minute: Minute) -> None:
    report = minute.debian["pid namespace"]
    assert is_fired_in(minute, report), report
    assert (report.source, report.daemon, report.fired_at_ms) == ("own-start", None, report.own_start_ms)
    # It cannot know of the 4 s before; it must not make up something else.
    later = minute.debian["pid namespace, later"]
    assert (later.source, later.fired_at_ms) == ("own-start", later.own_start_ms)
    assert minute.begin_ms + 4000 <= later.fired_at_ms <= later.reported_ms


def test_each_call_of_a_job_takes_its_own_start(minute: Minute) -> None:
    calls = [minute.debian[name] for name in NESTED]
    assert [call.source for call in calls] == ["own-start"] * 3
    assert all(call.fired_at_ms == call.own_start_ms for call in calls)
    assert is_fired_in(minute, calls[0])
    assert calls[1].fired_at_ms >= calls[0].fired_at_ms + 2000
    assert calls[2].fired_at_ms >= calls[1].fired_at_ms + 2000
    # The zone may depend on the daemon, and that is above a job's calls too.
    assert {call.daemon for call in calls} == {"debian-cron"}


@pytest.mark.parametrize("line", BUSYBOX_LINES)
@pytest.mark.parametrize("called", ["busybox", "crond"])
def test_busybox_forked_this_line_at_the_minute(minute: Minute, line: str, called: str) -> None:
    report = (minute.busybox if called == "busybox" else minute.crond)[line]
    assert is_fired_in(minute, report), report
    assert (report.source, report.daemon) == ("daemon-child", "busybox")
    if line.startswith("sleep"):
        assert report.reported_ms >= report.fired_at_ms + 6900
    if line == "sleep":
        assert report.own_start_ms >= report.fired_at_ms + 6900


def test_the_session_of_a_busybox_line_is_as_old_as_the_daemon(minute: Minute) -> None:
    session_ms = minute.busybox["plain"].session_ms
    assert session_ms is not None
    assert session_ms < minute.begin_ms - 1000


@pytest.mark.parametrize("how", ["invisible", "no access"])
@pytest.mark.parametrize("line", ["plain", "sleep", "pipe"])
def test_with_hidden_parents_the_process_group_tells_the_minute(minute: Minute, how: str, line: str) -> None:
    report = minute.hidden[how][line]
    assert is_fired_in(minute, report), report
    assert (report.source, report.daemon) == ("process-group", None)
    if line != "plain":
        assert report.own_start_ms >= report.fired_at_ms + 2900


@pytest.mark.parametrize("how", ["invisible", "no access"])
def test_with_hidden_parents_and_a_group_of_its_own_the_own_start_counts(minute: Minute, how: str) -> None:
    report = minute.hidden[how]["setsid"]
    assert (report.source, report.fired_at_ms) == ("own-start", report.own_start_ms)


@pytest.mark.soak
@pytest.mark.timeout(420)
def test_lines_that_a_stopped_daemon_makes_up_for_are_fired_when_it_goes_on() -> None:
    need(CRON, "unshare")
    with labs(1) as (lab,):
        # Well inside a minute, so that just three boundaries pass meanwhile and the next is still far when it goes on.
        await_that(lambda: 2 < time.time() % 60 < 25, 40, "the next minute")
        lab.start_debian_cron({"replay": "$R replay each", "late": "sleep 7; $R late each"}, "root")
        assert lab.daemon
        daemon = Path(f"/proc/{lab.daemon.pid}")
        await_that(lambda: "hrtimer" in (daemon / "wchan").read_text(), 20, "cron asleep until the next minute")
        lab.daemon.send_signal(signal.SIGSTOP)
        stopped_until = time.monotonic() + 180
        await_that(lambda: time.monotonic() > stopped_until, 190, "three minutes")
        went_on_ms = time.time_ns() // 1_000_000
        lab.daemon.send_signal(signal.SIGCONT)
        await_that(lambda: len(lab.reports()) >= 6, 50, "three reports of each line")
        reports = lab.reports()
    assert sorted(name.split(".")[0] for name in reports) == ["late"] * 3 + ["replay"] * 3
    assert {report.source for report in reports.values()} == {"daemon-child"}
    for name, report in reports.items():
        assert went_on_ms - EARLY_MS <= report.fired_at_ms, name
        # Between two minutes that it makes up for cron sleeps up to 10 s.
        assert report.fired_at_ms <= went_on_ms + 35_000, name
        assert report.reported_ms - report.fired_at_ms >= (6900 if name.startswith("late") else 0), name
