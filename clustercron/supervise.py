"""Processes and signals: start the command in a process group of its own and watch it to its end.

One loop waits on one pipe for signals, on the job's pipes where its output is handled, and on the clock. Renewals run in
a thread with a connection of its own, so that a slow Redis never delays the end of the job.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
_GROUP_LOOK_S = 0.02
_CHUNK = 1 << 16
_MAX_DRAIN = 1 << 20
NEWS = 0  # what the renewal writes among the signal numbers


class Signals:
    """Catches the signals to forward, and SIGCHLD, from before the child exists.

    A caught signal becomes a byte in a pipe, so none is lost between two looks. Signals that were ignored when the wrapper
    began (nohup) stay ignored.
    """

    __slots__ = ("_before", "read_fd", "write_fd")

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        for fd in (self.read_fd, self.write_fd):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self.write_fd, warn_on_full_buffer=False)
        # Who ignores SIGCHLD never hears of an exit code.
        self._before = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, _caught)}
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, _caught)

    def close(self) -> None:
        """Give the dispositions back."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(self.read_fd)
        os.close(self.write_fd)

    def take(self) -> list[int]:
        """Answer the numbers that came since the last call; `NEWS` stands for news of the renewal."""
        try:
            return list(os.read(self.read_fd, 4096))
        except BlockingIOError:
            return []


def _caught(number: int, frame: FrameType | None) -> None:
    """Do nothing: the byte in the pipe says it."""


def die_of(number: int) -> int:
    """End this process by a signal, as if it had never been caught; answers 128 + n should it survive."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


class Output:
    """What becomes of the job's stdout and stderr.

    Args:
        mode: `pass`, `on-failure` or `discard`.
        keep_bytes: how much of the end of both is kept.
    """

    __slots__ = ("_chunks", "_held", "_keep_bytes", "_mode", "_pipes", "kept")

    def __init__(self, mode: str, keep_bytes: int) -> None:
        self._mode = mode
        self._keep_bytes = keep_bytes
        self.kept = bytearray()
        self._pipes: dict[int, int] = {}  # our end of a pipe to the descriptor it stands for
        self._chunks: list[tuple[int, int]] = []
        self._held: int | None = None

    @property
    def reads(self) -> list[int]:
        """Descriptors to wait for."""
        return list(self._pipes)

    def actions(self) -> tuple[list[tuple[int, ...]], list[int]]:
        """Answer the file actions for the child, and the descriptors to close here once it exists."""
        if self._mode == "pass" and not self._keep_bytes:
            return [], []
        if self._mode == "discard" and not self._keep_bytes:
            null = os.open(os.devnull, os.O_WRONLY)
            return [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)], [null]
        actions: list[tuple[int, ...]] = []
        ends = []
        for target in (1, 2):
            read_fd, write_fd = os.pipe()
            os.set_blocking(read_fd, False)
            self._pipes[read_fd] = target
            actions.append((os.POSIX_SPAWN_DUP2, write_fd, target))
            ends.append(write_fd)
        if self._mode == "on-failure":
            import tempfile

            self._held, name = tempfile.mkstemp(prefix="clustercron-")
            os.unlink(name)
        return actions, ends

    def pump(self, read_fd: int) -> int:
        """Move what a pipe has; answers how much. At its end, or when nobody reads ours, the pipe is closed."""
        try:
            data = os.read(read_fd, _CHUNK)
        except BlockingIOError:
            return 0
        target = self._pipes[read_fd]
        if not data or not self._pass_on(target, data):
            # Nobody reads our output any more: the job learns it as it would have without us.
            del self._pipes[read_fd]
            os.close(read_fd)
            return 0
        if self._keep_bytes:
            self.kept += data
            del self.kept[: -self._keep_bytes]
        return len(data)

    def drain(self) -> None:
        """Take what the job left in its pipes when it ended; a grandchild may keep them open for ever."""
        for read_fd in self.reads:
            taken = 0
            while taken < _MAX_DRAIN and (size := self.pump(read_fd)):
                taken += size
        for read_fd in self.reads:
            os.close(read_fd)
        self._pipes.clear()

    def release(self, failed: bool) -> None:
        """Print what was held back, if the job failed."""
        if self._held is None:
            return
        held, self._held = self._held, None
        try:
            if failed:
                os.lseek(held, 0, os.SEEK_SET)
                for target, size in self._chunks:
                    while size and (data := os.read(held, min(size, _CHUNK))):
                        size -= len(data)
                        _write_all(target, data)
        finally:
            os.close(held)
            self._chunks.clear()

    def _pass_on(self, target: int, data: bytes) -> bool:
        if self._mode == "discard":
            return True
        if self._held is None:
            return _write_all(target, data)
        if not _write_all(self._held, data):
            # No room to hold it back: nothing is lost, so it is printed, and so is all that follows.
            os.ftruncate(self._held, sum(size for _, size in self._chunks))
            self.release(failed=True)
            return _write_all(target, data)
        self._chunks.append((target, len(data)))
        return True


def _write_all(fd: int, data: bytes) -> bool:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
        except OSError:
            return False
    return True


class Terminal:
    """The terminal, when there is one: in the foreground the job gets it, and we take it back."""

    __slots__ = ("_fd",)

    def __init__(self) -> None:
        self._fd: int | None = None
        for fd in (0, 1, 2):
            try:
                if os.isatty(fd) and os.tcgetpgrp(fd):
                    self._fd = fd
                    break
            except OSError:
                continue

    def __bool__(self) -> bool:
        return self._fd is not None

    def hand_over(self, holder: int, group: int) -> None:
        """Make a process group the foreground if another one is it now; harmless without a terminal."""
        if self._fd is None or self.foreground() != holder:
            return
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            os.tcsetpgrp(self._fd, group)
        except OSError:
            pass  # it hung up, or the group is gone
        finally:
            signal.signal(signal.SIGTTOU, before)

    def foreground(self) -> int | None:
        """Answer the process group in the foreground, or None."""
        try:
            return None if self._fd is None else os.tcgetpgrp(self._fd)
        except OSError:
            return None


class Job:
    """A command to execute.

    Args:
        file: what `command.find` answered.
        argv: its arguments, the name first.
        environ: its whole environment.
    """

    __slots__ = ("argv", "environ", "file")

    def __init__(self, file: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self.file = file
        self.argv = list(argv)
        self.environ = environ

    def spawn(self, actions: Sequence[tuple[int, ...]] = ()) -> int:
        """Execute it in a new process group; answers its pid, which is the group's id too.

        Raises:
            OSError: exec failed; no process is left.
        """
        # Python ignores these two; a program expects them as they are by default.
        default = [signal.SIGPIPE, signal.SIGXFSZ]
        try:
            return os.posix_spawn(
                self.file, self.argv, self.environ, file_actions=actions, setpgroup=0, setsigdef=default, setsigmask=[]
            )
        except OSError as exc:
            if exc.errno != errno.ENOEXEC:
                raise
        # A script without `#!`: cron's shell would have read it.
        argv = ["sh", self.file, *self.argv[1:]]
        return os.posix_spawn(
            "/bin/sh", argv, self.environ, file_actions=actions, setpgroup=0, setsigdef=default, setsigmask=[]
        )


def spawn_detached(argv: list[str]) -> None:
    """Start a program that nobody waits for, in a group of its own and without our stdin and stdout.

    Raises:
        OSError: exec failed.
    """
    null = os.open(os.devnull, os.O_RDWR)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null, 0), (os.POSIX_SPAWN_DUP2, null, 1)]
        os.posix_spawn(argv[0], argv, os.environ, file_actions=actions, setpgroup=0)
    finally:
        os.close(null)


class End:
    """How a child ended: `exit_code`, or the number of the `signal` it died of; and what ended it.

    `cause` is None, `timeout` or `lease`; `stopped_by` the last of TERM, INT, HUP, QUIT that was forwarded.
    """

    __slots__ = ("cause", "exit_code", "signal", "stopped_by")

    def __init__(self, status: int, cause: str | None, stopped_by: int | None) -> None:
        code = os.waitstatus_to_exitcode(status)
        self.exit_code: int | None = code if code >= 0 else None
        self.signal: int | None = -code if code < 0 else None
        self.cause = cause
        self.stopped_by = stopped_by


def watch(
    job: Job,
    output: Output,
    signals: Signals,
    timeout_ms: int | None,
    kill_after_ms: int,
    lease_lost: Callable[[], bool],
) -> End:
    """Start the job and stay until it ends.

    Args:
        timeout_ms: TERM to the group after it, None for never; KILL `kill_after_ms` later.
        lease_lost: asked when the renewal has news; true ends the job as a timeout would.

    Raises:
        OSError: exec failed.
    """
    terminal = Terminal()
    actions, ends = output.actions()
    try:
        pid = job.spawn(actions)
    finally:
        for fd in ends:
            os.close(fd)
    terminal.hand_over(os.getpgrp(), pid)
    try:
        return _Watch(pid, terminal, output, signals, kill_after_ms / 1000).until_end(timeout_ms, lease_lost)
    finally:
        terminal.hand_over(pid, os.getpgrp())


class _Watch:
    __slots__ = ("cause", "kill_after_s", "output", "pid", "signals", "status", "stopped_by", "terminal")

    def __init__(self, pid: int, terminal: Terminal, output: Output, signals: Signals, kill_after_s: float) -> None:
        self.pid = pid
        self.terminal = terminal
        self.output = output
        self.signals = signals
        self.kill_after_s = kill_after_s
        self.status: int | None = None
        self.cause: str | None = None
        self.stopped_by: int | None = None

    def until_end(self, timeout_ms: int | None, lease_lost: Callable[[], bool]) -> End:
        act_at = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        killed = False
        while not self._over(killed):
            self._wait(act_at)
            for number in self.signals.take():
                if number == NEWS:
                    if self.cause is None and lease_lost():
                        act_at = self._stop("lease")
                elif number != signal.SIGCHLD:
                    self._forward(number)
            if act_at is not None and time.monotonic() >= act_at:
                if self.cause is None:
                    act_at = self._stop("timeout")
                else:
                    self._send(signal.SIGKILL)
                    act_at, killed = None, True
        self.output.drain()
        assert self.status is not None
        return End(self.status, self.cause, self.stopped_by)

    def _over(self, killed: bool) -> bool:
        self._reap()
        if self.status is None:
            return False
        # Stopped by us, the whole group has to go; ended by itself, what it left behind is its own affair.
        return self.cause is None or killed or not self._group_exists()

    def _wait(self, act_at: float | None) -> None:
        poll = select.poll()
        for fd in (self.signals.read_fd, *self.output.reads):
            poll.register(fd, select.POLLIN)
        wait_s = None if act_at is None else max(0.0, act_at - time.monotonic())
        if self.status is not None:
            wait_s = _GROUP_LOOK_S if wait_s is None else min(wait_s, _GROUP_LOOK_S)
        for fd, _ in poll.poll(None if wait_s is None else int(wait_s * 1000) + 1):
            if fd != self.signals.read_fd:
                self.output.pump(fd)

    def _reap(self) -> None:
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | (os.WUNTRACED if self.terminal else 0))
            if pid == 0:
                return
            if not os.WIFSTOPPED(status):
                self.status = status
            elif os.WSTOPSIG(status) in (signal.SIGTTIN, signal.SIGTTOU) and self.terminal.foreground() == self.pid:
                self._send(signal.SIGCONT)  # it asked before it had the terminal
            else:
                self._suspend()

    def _suspend(self) -> None:
        """Stop with the job, as the shell expects of a foreground command, and go on with it."""
        self.terminal.hand_over(self.pid, os.getpgrp())
        os.kill(0, signal.SIGTSTP)
        self.terminal.hand_over(os.getpgrp(), self.pid)
        self._send(signal.SIGCONT)

    def _stop(self, cause: str) -> float:
        self.cause = cause
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        return time.monotonic() + self.kill_after_s

    def _forward(self, number: int) -> None:
        if number in STOPPING:
            self.stopped_by = number
        self._send(number)

    def _send(self, number: int) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # nobody is left to hear it
        except PermissionError:
            pass  # the job changed its user; it hears its own master only

    def _group_exists(self) -> bool:
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class Renewal:
    """Keeps a lease alive from a thread, and says when it is lost.

    `lost` is None while all is well, `taken` when another attempt has the tick, `expired` when no renewal was confirmed in
    time. With `kill` the lease counts as lost early enough to end the job before it runs out for others; the same clock
    that goes on while the node sleeps decides.

    Args:
        renew: one try within a time in seconds; answers whether the lease is ours, raises OSError-like trouble as
            `trouble` when it is not known.
        lease_ms: how long a renewal holds.
        margin_ms: how long before its end an unconfirmed lease counts as lost.
    """

    __slots__ = ("_boot_ms", "_lease_ms", "_margin_ms", "_renew", "_stop", "_trouble", "_until_ms", "_write_fd", "lost")

    def __init__(
        self,
        renew: Callable[[float], bool],
        trouble: type[Exception],
        lease_ms: int,
        margin_ms: int,
        held_since_ms: int,
        boot_ms: Callable[[], int],
        signals: Signals,
    ) -> None:
        import _thread

        self._renew = renew
        self._trouble = trouble
        self._lease_ms = lease_ms
        self._margin_ms = margin_ms
        self._boot_ms = boot_ms
        self._until_ms = held_since_ms + lease_ms
        self._write_fd = signals.write_fd
        self.lost: str | None = None
        self._stop = _thread.allocate_lock()
        self._stop.acquire()
        _thread.start_new_thread(self._run, ())

    def stop(self) -> None:
        """Renew no more. A renewal under way may still be answered; nobody waits for it."""
        if self._stop.locked():
            self._stop.release()

    def _run(self) -> None:
        period_ms = self._lease_ms / 3
        pause_ms = period_ms
        while not self._stop.acquire(timeout=max(0.0, pause_ms) / 1000):
            before_ms = self._boot_ms()
            left_ms = self._until_ms - self._margin_ms - before_ms
            if left_ms <= 0 and self.lost is None and self._margin_ms:
                self._say("expired")
                return
            try:
                ours = self._renew(min(period_ms, max(left_ms, 500.0)) / 1000)
            except self._trouble:
                left_ms = self._until_ms - self._margin_ms - self._boot_ms()
                if left_ms <= 0 and self.lost is None:
                    self._say("expired")
                pause_ms = min(period_ms / 4, 5_000.0, max(left_ms, 50.0) if self.lost is None else 5_000.0)
                continue
            if not ours:
                self._say("taken")
                return
            self._until_ms = before_ms + self._lease_ms
            self.lost = None
            pause_ms = period_ms

    def _say(self, lost: str) -> None:
        self.lost = lost
        try:
            os.write(self._write_fd, bytes([NEWS]))
        except OSError:
            pass  # the job has ended meanwhile
