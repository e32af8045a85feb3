"""Find out when cron started this process: `fired at`.

The first line of Python may run seconds after cron forked, and a line such as `sleep 7; clustercron run ...` later
still, so the clock is not asked for the answer. The kernel keeps the start of every process; the best of four sources
counts, each used only if it is plausible:

1. systemd-timer: the instant at which systemd's timer elapsed, which systemd (252 and later) gives to its unit.
2. daemon-child: the start of the process that the cron daemon forked for this line. It is the ancestor directly below
   the daemon, so what the line puts in between (a shell, flock, su, setsid, a slow PAM) does not count.
3. process-group: the start of the process group's leader, where the kernel hides other users' processes (hidepid).
   Every daemon gives a line its own group. The session would not do: busybox and supercronic leave their lines in
   their own session, whose leader is as old as the daemon.
4. own-start: the start of this very process.

Reading /proc and deciding are separate: `read_ancestry` looks, `decide` is pure.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEMD_TIMER = "systemd-timer"
DAEMON_CHILD = "daemon-child"
PROCESS_GROUP = "process-group"
OWN_START = "own-start"

DEBIAN_CRON = "debian-cron"
CRONIE = "cronie"
SYSTEMD_CRON = "systemd-cron"
BUSYBOX = "busybox"
SUPERCRONIC = "supercronic"
FCRON = "fcron"

# Older than this before the own start, a source tells when a loop or a session began, not when a line was fired.
PLAUSIBLE_AGE_MS = 60 * 60 * 1000
# Starts are cut to hundredths of a second: two that are equal may be told apart by this much.
ROUNDING_MS = 20

# What a daemon's comm may be, and the names under which its processes may show themselves in argv[0]. The second keeps
# a script called `cron` from passing for a daemon: its argv[0] is the interpreter.
_DAEMON_NAMES = {
    b"cron": (b"cron", b"CRON"),
    b"crond": (b"crond", b"CROND"),
    b"busybox": (b"crond",),
    b"supercronic": (b"supercronic",),
    b"fcron": (b"fcron",),
}

_WALK_TRIES = 4
_STAT_BYTES = 1024


class Fire:
    """One start of `clustercron run`.

    Attributes:
        fired_at_ms: when cron started the line, epoch milliseconds. It reads up to 10 ms early.
        source: "systemd-timer", "daemon-child", "process-group" or "own-start".
        daemon: "debian-cron", "cronie", "systemd-cron", "busybox", "supercronic", "fcron", or None when it is not
            certain which one it was (which is not the same as: no daemon).
        detail: why this source, for people.
        own_start_ms: when this process started, epoch milliseconds.
    """

    __slots__ = ("fired_at_ms", "source", "daemon", "detail", "own_start_ms")

    def __init__(self, fired_at_ms: int, source: str, daemon: str | None, detail: str, own_start_ms: int) -> None:
        self.fired_at_ms = fired_at_ms
        self.source = source
        self.daemon = daemon
        self.detail = detail
        self.own_start_ms = own_start_ms

    def __repr__(self) -> str:
        return f"Fire({self.fired_at_ms}, {self.source!r}, {self.daemon!r}, {self.detail!r}, {self.own_start_ms})"


class Process:
    """What the kernel says of one process. Its start is in clock ticks since the machine's."""

    __slots__ = ("pid", "parent", "group", "comm", "start_ticks")

    def __init__(self, pid: int, parent: int, group: int, comm: bytes, start_ticks: int) -> None:
        self.pid = pid
        self.parent = parent
        self.group = group
        self.comm = comm
        self.start_ticks = start_ticks

    def __str__(self) -> str:
        return f"{self.comm.decode('ascii', 'backslashreplace')} (pid {self.pid})"


class Ancestry:
    """What was seen of this process and those above it.

    Attributes:
        own_start_ms: epoch milliseconds, from the kernel where it keeps it.
        forked: the ancestor that a cron daemon forked, or None if no daemon was seen.
        forked_ms: its start.
        daemon: which daemon that is, or "systemd-cron" if a unit of it holds this process; None if not certain.
        leader: the leader of the own process group if it exists and its parent is hidden; else None.
        leader_ms: its start.
        trouble: why the ancestors could not be read, or "".
    """

    __slots__ = ("own_start_ms", "forked", "forked_ms", "daemon", "leader", "leader_ms", "trouble")

    def __init__(self, own_start_ms: int) -> None:
        self.own_start_ms = own_start_ms
        self.forked: Process | None = None
        self.forked_ms = 0
        self.daemon: str | None = None
        self.leader: Process | None = None
        self.leader_ms = 0
        self.trouble = ""


def find_fire(environ: Mapping[str, str], proc: str = "/proc", boot_ms: int | None = None) -> Fire:
    """Say when and by whom this process was fired. Never raises: the own start is always known well enough.

    Args:
        environ: the environment as cron gave it, before anything was added.
        proc: where the process file system is.
        boot_ms: the epoch milliseconds at which the machine's start clock was 0; None measures it.
    """
    return decide(environ, read_ancestry(environ, proc, boot_ms))


def decide(environ: Mapping[str, str], seen: Ancestry) -> Fire:
    """Choose the best plausible source. Pure."""
    own = seen.own_start_ms

    def fire(fired_at_ms: int, source: str, *why: str) -> Fire:
        return Fire(fired_at_ms, source, seen.daemon, "; ".join(filter(None, why)), own)

    if environ.get("CLUSTERCRON_RUN_ID"):
        # The job of another run calls us, perhaps in a loop: everything above us tells when that run was fired.
        return fire(own, OWN_START, f"called by the run {environ['CLUSTERCRON_RUN_ID']}")

    doubts = []
    trigger_ms = _timer_trigger_ms(environ)
    if trigger_ms is not None:
        doubt = _doubt(trigger_ms, own)
        if not doubt:
            return fire(trigger_ms, SYSTEMD_TIMER, "TRIGGER_TIMER_REALTIME_USEC")
        doubts.append(f"TRIGGER_TIMER_REALTIME_USEC is {doubt}")

    if seen.forked is not None:
        doubt = _doubt(seen.forked_ms, own)
        if not doubt:
            return fire(seen.forked_ms, DAEMON_CHILD, *doubts, f"the cron daemon forked {seen.forked}")
        doubts.append(f"{seen.forked}, which the cron daemon forked, is {doubt}")
    else:
        doubts.append(seen.trouble or "no cron daemon among the parents that can be seen")

    if seen.leader is not None:
        doubt = _doubt(seen.leader_ms, own)
        if not doubt:
            return fire(seen.leader_ms, PROCESS_GROUP, *doubts, f"{seen.leader} leads the process group")
        doubts.append(f"the process group's leader {seen.leader} is {doubt}")
    return fire(own, OWN_START, *doubts)


def _doubt(start_ms: int, own_start_ms: int) -> str:
    """Say what is wrong with a source's instant, or ""."""
    if start_ms > own_start_ms + ROUNDING_MS:
        return "later than the own start"
    if start_ms < own_start_ms - PLAUSIBLE_AGE_MS:
        return "more than 60 minutes older than the own start"
    return ""


def _timer_trigger_ms(environ: Mapping[str, str]) -> int | None:
    """Read the instant at which systemd's timer elapsed. Without INVOCATION_ID it is not systemd that says so."""
    text = environ.get("TRIGGER_TIMER_REALTIME_USEC", "")
    if not environ.get("INVOCATION_ID") or not (text.isascii() and text.isdigit() and len(text) <= 20):
        return None
    return int(text) // 1000


def read_ancestry(environ: Mapping[str, str], proc: str, boot_ms: int | None) -> Ancestry:
    """Look at this process, its parents, and its process group's leader."""
    own = _read_process(proc, "self")
    if boot_ms is None:
        boot_ms = _measure_boot_ms()
    if own is None or boot_ms is None:
        return _without_proc()
    hertz = os.sysconf("SC_CLK_TCK")
    seen = Ancestry(boot_ms + own.start_ticks * 1000 // hertz)

    chain, hidden = _walk(proc, own)
    daemon_at = _find_daemon(proc, chain)
    if daemon_at:
        daemon = chain[daemon_at]
        # A daemon that was restarted leaves its forks behind; such a one is then the topmost itself.
        left_behind = _argv_name(proc, daemon) in (b"CRON", b"CROND")
        seen.forked = daemon if left_behind else chain[daemon_at - 1]
        seen.forked_ms = boot_ms + seen.forked.start_ticks * 1000 // hertz
        seen.daemon = _name_daemon(proc, daemon, seen.forked)
    elif environ.get("INVOCATION_ID"):
        # A unit of systemd. Only systemd-cron's are known to be started once for each fire: the main process of any
        # other may be a loop.
        if _in_systemd_cron_unit(proc):
            seen.daemon = SYSTEMD_CRON
            seen.leader = _read_process(proc, str(own.group))
    else:
        seen.leader = _hidden_starter(proc, own, chain, hidden)
    if hidden and not daemon_at:
        seen.trouble = f"the parent of {chain[-1]} is hidden from this user"
    if seen.leader is not None:
        seen.leader_ms = boot_ms + seen.leader.start_ticks * 1000 // hertz
    return seen


def _without_proc() -> Ancestry:
    """Make do without a Linux /proc (macOS, a bare chroot).

    The own start is then the clock less the CPU time used: right on an idle machine, late by the time that this
    process was kept waiting on a busy one.
    """
    seen = Ancestry((time.time_ns() - time.process_time_ns()) // 1_000_000)
    seen.trouble = "no /proc to read process starts from"
    return seen


def _measure_boot_ms() -> int | None:
    """Measure the epoch milliseconds at which CLOCK_BOOTTIME was 0, or None where there is no such clock.

    /proc/stat's btime will not do: it is in whole seconds, and a tenth of a second off even then.
    """
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    best_gap_ns, boot_ns = 1 << 62, 0
    for _ in range(5):
        before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        now = time.time_ns()
        gap = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - before
        if gap < best_gap_ns:
            best_gap_ns, boot_ns = gap, now - before
        # A larger gap means that the process was interrupted between the two clocks.
        if gap < 100_000:
            break
    return boot_ns // 1_000_000


def _walk(proc: str, own: Process) -> tuple[list[Process], bool]:
    """List this process and its ancestors, nearest first; and whether the last one has a parent that is hidden.

    An ancestor may end while it is looked for: its children then get another parent, so the walk begins again. Its
    number may even be taken by a new process, which gives itself away by being younger than its supposed child.
    """
    for _ in range(_WALK_TRIES):
        chain = [own]
        while True:
            child = chain[-1]
            if child.parent == 0:
                return chain, False
            parent = _read_process(proc, str(child.parent))
            if parent is not None and parent.start_ticks <= child.start_ticks:
                chain.append(parent)
                continue
            again = _read_process(proc, str(child.pid))
            if parent is None and again is not None and again.parent == child.parent:
                return chain, True
            break
        own = _read_process(proc, "self") or own
    return chain, False


def _find_daemon(proc: str, chain: list[Process]) -> int:
    """Find the nearest ancestor that is a cron daemon; 0 if there is none.

    A daemon's own forks (Debian's CRON below cron) count as one with it, so the topmost of a row is taken. Not the
    topmost of all: a daemon that a cron job once started fires lines of its own.
    """
    at = 1
    while at < len(chain) and not _is_daemon(proc, chain[at]):
        at += 1
    if at == len(chain):
        return 0
    while at + 1 < len(chain) and chain[at + 1].comm == chain[at].comm and _is_daemon(proc, chain[at + 1]):
        at += 1
    return at


def _is_daemon(proc: str, process: Process) -> bool:
    names = _DAEMON_NAMES.get(process.comm)
    if names is None:
        return False
    name = _argv_name(proc, process)
    # Nothing to read means that the kernel or the process keeps it to itself; its comm must do then.
    return not name or name in names


def _name_daemon(proc: str, daemon: Process, forked: Process) -> str | None:
    """Tell the daemons apart by what they call themselves and their forks; None when two are possible."""
    forked_as = _argv_name(proc, forked) if forked.comm == daemon.comm else b""
    if daemon.comm == b"cron":
        # Some distributions install cronie under this name, which then shows itself just as Debian's cron does.
        return DEBIAN_CRON if forked_as == b"CRON" and os.path.exists("/etc/debian_version") else None
    if daemon.comm == b"crond":
        if forked_as == b"CROND":
            return CRONIE
        return BUSYBOX if _executable(proc, daemon) == "busybox" else None
    return {b"busybox": BUSYBOX, b"supercronic": SUPERCRONIC, b"fcron": FCRON}[daemon.comm]


def _hidden_starter(proc: str, own: Process, chain: list[Process], hidden: bool) -> Process | None:
    """Return the leader of the own process group if whoever started it is hidden.

    Where its parent can be seen and is no daemon, the leader is a script, a terminal's command or a supervisor, and
    what it calls in a loop was not fired when it began.
    """
    for at, process in enumerate(chain):
        if process.pid == own.group:
            return process if hidden and at == len(chain) - 1 else None
    leader = _read_process(proc, str(own.group)) if own.group else None
    if leader is None or not leader.parent or _read_process(proc, str(leader.parent)) is not None:
        return None
    return leader


def _in_systemd_cron_unit(proc: str) -> bool:
    """Say whether this process lives in a unit as systemd-cron names them: cron-NAME-USER-N.service."""
    for line in _read(f"{proc}/self/cgroup", 4096).split(b"\n"):
        for unit in line.split(b"/"):
            if unit.startswith(b"cron-") and unit.endswith(b".service"):
                return True
    return False


def _read_process(proc: str, pid: str) -> Process | None:
    """Read /proc/PID/stat; None if it is gone, hidden, or not Linux's."""
    stat = _read(f"{proc}/{pid}/stat", _STAT_BYTES)
    # The name in parentheses is the process's own choice: it may hold blanks and `)`, so only the last one ends it.
    end = stat.rfind(b")")
    fields = stat[end + 1 :].split(None, 20)
    try:
        return Process(
            int(stat[: stat.index(b" (")]),
            int(fields[1]),
            int(fields[2]),
            stat[stat.index(b"(") + 1 : end],
            int(fields[19]),
        )
    except (ValueError, IndexError):
        return None


def _argv_name(proc: str, process: Process) -> bytes:
    """Return the base name of a process's argv[0] as it shows it now, of a busybox the applet's; nothing if unread."""
    argv = _read(f"{proc}/{process.pid}/cmdline", 4096).split(b"\0")
    name = argv[0].rpartition(b"/")[2]
    return argv[1] if name == b"busybox" and len(argv) > 1 else name


def _executable(proc: str, process: Process) -> str:
    """Return the base name of a process's program; "" for those of others, which only root may see."""
    try:
        return os.path.basename(os.readlink(f"{proc}/{process.pid}/exe"))
    except OSError:
        return ""


def _read(path: str, size: int) -> bytes:
    """Read the beginning of a small file; nothing if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, size)
    except OSError:
        # The process ended between the two calls.
        return b""
    finally:
        os.close(descriptor)
