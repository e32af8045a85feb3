"""Processes and signals: start the command in a process group of its own and watch it to its end.

One loop waits on one pipe for signals, on the job's pipes where its output is handled, and on the clock; nothing in it
blocks, so that a timeout and a TERM are heeded whatever the job, Redis or the reader of the output does. Renewals run in
a thread with a connection of their own.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType
    from typing import TypeVar

    T = TypeVar("T")

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
NEWS = 0  # what the renewal writes among the signal numbers
_GROUP_LOOK_S = 0.02
_DYING_S = 1.0
_LONGEST_WAIT_S = 86_400.0  # poll() takes no more than 24 days
_CHUNK = 1 << 16
_FOR_TERMINAL = (signal.SIGTTIN, signal.SIGTTOU)


class Interrupted(BaseException):
    """A stopping signal ended what was being done; `Signals.take` still answers it."""


class Signals:
    """Catches the signals to forward, and SIGCHLD, from before the child exists.

    A caught signal becomes a byte in a pipe, so none is lost between two looks. Signals that were ignored when the wrapper
    began (nohup) stay ignored. `mask` is what was blocked then, for the child: the wrapper itself hears everything.
    """

    __slots__ = ("_ahead", "_before", "_interrupting", "_telling", "_write_fd", "mask", "read_fd")

    def __init__(self) -> None:
        import _thread

        self.read_fd, self._write_fd = os.pipe()
        for fd in (self.read_fd, self._write_fd):
            os.set_blocking(fd, False)
        self._ahead: list[int] = []
        self._interrupting = False
        self._telling = _thread.allocate_lock()
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        # Who ignores or blocks SIGCHLD never hears of an exit code.
        caught = [signal.SIGCHLD, *(n for n in FORWARDED if signal.getsignal(n) != signal.SIG_IGN)]
        self._before = {number: signal.signal(number, self._caught) for number in caught}
        self.mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, caught)

    def close(self) -> None:
        """Give the dispositions back."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        with self._telling:
            os.close(self.read_fd)
            os.close(self._write_fd)
            self._write_fd = -1

    def take(self) -> list[int]:
        """Answer the numbers that came since the last call; `NEWS` stands for news of the renewal."""
        numbers, self._ahead = self._ahead + self._read(), []
        return numbers

    @property
    def stop(self) -> int | None:
        """The last stopping signal that came and was not taken yet."""
        self._ahead += self._read()
        stops = [number for number in self._ahead if number in STOPPING]
        return stops[-1] if stops else None

    def tell_news(self) -> None:
        """Wake the loop from another thread; after `close` nobody listens any more."""
        with self._telling:
            if self._write_fd >= 0:
                os.write(self._write_fd, bytes([NEWS]))

    def interruptible(self, action: Callable[[], T]) -> T:
        """Do something that a stopping signal is to end early; whether it was done is not known then.

        Raises:
            Interrupted: such a signal came, now or since the last `take`.
        """
        self._interrupting = True
        try:
            if self.stop is not None:
                raise Interrupted
            return action()
        finally:
            self._interrupting = False

    def _caught(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's arguments
        # The byte in the pipe says it already.
        if self._interrupting and number in STOPPING:
            self._interrupting = False
            raise Interrupted

    def _read(self) -> list[int]:
        try:
            return list(os.read(self.read_fd, 4096))
        except BlockingIOError:
            return []


def act_as_any_process() -> None:
    """Have PID 1 of a container end by the signals that end any other process: the kernel spares it."""
    for number in FORWARDED:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda caught, _: os._exit(128 + caught))


def die_of(number: int) -> int:
    """End this process by a signal, as if it had never been caught; answers 128 + n should it survive."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


class Output:
    """What becomes of the job's stdout and stderr where they are pipes of ours.

    A piece is passed on or held back before the next one is read: a slow reader slows the job down as it would without
    us, and nothing grows in memory.

    Args:
        mode: `pass`, `on-failure` or `discard`.
        keep_bytes: how much of the end of both is kept.
    """

    __slots__ = ("_after", "_held", "_keep_bytes", "_left", "_mode", "_pipes", "_replays", "_rest", "_target", "kept")

    def __init__(self, mode: str, keep_bytes: int) -> None:
        self._mode = mode
        self._keep_bytes = keep_bytes
        self.kept = bytearray()
        self._pipes: dict[int, int] = {}  # our end of a pipe to the descriptor it stands for
        self._left: dict[int, int] | None = None  # when the job has ended: what of its own is still in each pipe
        self._target = 1
        self._rest = memoryview(b"")  # what the target has not taken yet
        self._after: tuple[int, bytes] | None = None  # what comes when all that was held is printed
        self._held: int | None = None  # a file of records: target, four bytes of size, data
        self._replays = False

    @property
    def is_done(self) -> bool:
        """Whether everything was read and found its place."""
        return not (self._pipes or self._rest or self._after or self._held is not None)

    def actions(self) -> tuple[list[tuple[int, ...]], list[int]]:
        """Answer the file actions for the child, and the descriptors to close here once it exists."""
        if self._mode == "pass" and not self._keep_bytes:
            return [], []
        if self._mode == "discard" and not self._keep_bytes:
            null = os.open(os.devnull, os.O_WRONLY)
            return [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)], [null]
        if self._mode == "on-failure":
            self._held = _unnamed_file()
            self._mode = self._mode if self._held is not None else "pass"
        actions: list[tuple[int, ...]] = []
        ends = []
        # Under cron both are one pipe. So they stay here, and what was written first is read first.
        for targets in ((1, 2),) if _are_one(1, 2) else ((1,), (2,)):
            read_fd, write_fd = os.pipe()
            os.set_blocking(read_fd, False)
            self._pipes[read_fd] = targets[0]
            actions += [(os.POSIX_SPAWN_DUP2, write_fd, target) for target in targets]
            ends.append(write_fd)
        return actions, ends

    def register(self, poll: select.poll) -> None:
        """Say what to wait for."""
        if self._rest:
            poll.register(self._target, select.POLLOUT)
        else:
            for read_fd in self._pipes:
                poll.register(read_fd, select.POLLIN)

    def pump(self, ready_fd: int) -> None:
        """Move one piece: to the target, or from a pipe."""
        if self._rest:
            if ready_fd == self._target:
                self._write()
        elif ready_fd in self._pipes:
            self._read(ready_fd)
        self._advance()

    def end(self, failed: bool) -> None:
        """Take only what is in the pipes now, since a grandchild may keep them open; print what was held if it failed."""
        import fcntl
        import termios

        if self._mode == "on-failure" and not failed:
            self._mode = "discard"
            self._drop_held()
        self._left = {}
        for read_fd in list(self._pipes):
            size = fcntl.ioctl(read_fd, termios.FIONREAD, bytes(4))
            self._left[read_fd] = int.from_bytes(size, sys.byteorder)
            if not self._left[read_fd]:
                self._close(read_fd)
        self._advance()

    def abandon(self) -> None:
        """Give up what nobody takes."""
        self._rest, self._after = memoryview(b""), None
        self._drop_held()
        for read_fd in list(self._pipes):
            self._close(read_fd)

    def _advance(self) -> None:
        """Have the next piece at hand, where there is one that waits for no pipe."""
        if self._rest:
            return
        if self._held is not None and self._left is not None and not self._pipes:
            self._replay()
        if self._held is not None and self._replays:
            head = os.read(self._held, 5)
            if head:
                self._target = head[0]
                self._rest = memoryview(os.read(self._held, int.from_bytes(head[1:], "big")))
                return
            self._drop_held()
        if self._after is not None:
            (self._target, data), self._after = self._after, None
            self._rest = memoryview(data)

    def _read(self, read_fd: int) -> None:
        target = self._pipes[read_fd]
        size = _CHUNK if self._left is None else min(_CHUNK, self._left[read_fd])
        try:
            data = os.read(read_fd, size)
        except BlockingIOError:
            return
        if self._left is not None:
            self._left[read_fd] -= len(data)
        if not data or (self._left is not None and not self._left[read_fd]):
            self._close(read_fd)
        if self._keep_bytes:
            self.kept += data
            del self.kept[: -self._keep_bytes]
        if not data or self._mode == "discard" or self._hold(target, data):
            return
        self._after = target, data

    def _hold(self, target: int, data: bytes) -> bool:
        """Hold a piece back. Where there is no room all is printed, now and from now on: nothing is lost."""
        if self._held is None:
            return False
        size = os.lseek(self._held, 0, os.SEEK_CUR)
        view = memoryview(bytes([target]) + len(data).to_bytes(4, "big") + data)
        try:
            while view:
                view = view[os.write(self._held, view) :]
        except OSError:
            os.ftruncate(self._held, size)
            self._mode = "pass"
            self._replay()
            return False
        return True

    def _replay(self) -> None:
        if self._held is not None and not self._replays:
            os.lseek(self._held, 0, os.SEEK_SET)
            self._replays = True

    def _drop_held(self) -> None:
        if self._held is not None:
            os.close(self._held)
        self._held, self._replays = None, False

    def _write(self) -> None:
        try:
            # A pipe that is ready takes as much as this without blocking.
            self._rest = self._rest[os.write(self._target, self._rest[: select.PIPE_BUF]) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            # Nobody reads any more: the job learns it as it would have without us.
            if self._replays:
                self.abandon()
            self._rest = memoryview(b"")
            for read_fd in [fd for fd, target in self._pipes.items() if target == self._target]:
                self._close(read_fd)
        except OSError:
            self._rest = memoryview(b"")  # a full disk, a terminal that hung up: no reason to end the job

    def _close(self, read_fd: int) -> None:
        del self._pipes[read_fd]
        os.close(read_fd)


def _are_one(fd: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(fd, other)
    except OSError:
        return False


def _unnamed_file() -> int | None:
    """Open a file without a name; None where there is no place for one."""
    for folder in (os.environ.get("TMPDIR") or "/tmp", "/var/tmp"):  # noqa: S108 - the name is random, the file is new
        path = os.path.join(folder, "clustercron-" + os.urandom(16).hex())
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError:
            continue
        os.unlink(path)
        return fd
    return None


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

    def hand_over(self, holder: int, group: int) -> bool:
        """Make a process group the foreground if `holder` is it now; answers whether the group is it then."""
        try:
            if self._fd is None or (foreground := os.tcgetpgrp(self._fd)) not in (holder, group):
                return False
            if foreground == holder:
                self._set_foreground(self._fd, group)
        except OSError:
            return False  # it hung up, or the group is gone
        return True

    @staticmethod
    def _set_foreground(fd: int, group: int) -> None:
        # Who is in the background is stopped for this, unless he ignores it.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            os.tcsetpgrp(fd, group)
        finally:
            signal.signal(signal.SIGTTOU, before)


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

    def spawn(self, actions: Sequence[tuple[int, ...]], mask: set[signal.Signals] | set[int]) -> int:
        """Execute it in a new process group; answers its pid, which is the group's id too.

        Raises:
            OSError: exec failed; no process is left.
        """
        try:
            return self._exec(self.file, self.argv, actions, mask)
        except OSError as exc:
            if exc.errno != errno.ENOEXEC:
                raise
        # A script without `#!`: cron's shell would have read it.
        return self._exec("/bin/sh", ["sh", self.file, *self.argv[1:]], actions, mask)

    def _exec(
        self, file: str, argv: list[str], actions: Sequence[tuple[int, ...]], mask: set[signal.Signals] | set[int]
    ) -> int:
        # Python ignores these two; a program expects them as they are by default.
        default = [signal.SIGPIPE, signal.SIGXFSZ]
        return os.posix_spawn(
            file, argv, self.environ, file_actions=actions, setpgroup=0, setsigdef=default, setsigmask=mask
        )


def spawn_detached(argv: list[str], environ: Mapping[str, str], stdin: int | None = None) -> None:
    """Start a program that nobody waits for, in a group of its own, without our stdout and with another stdin.

    Raises:
        OSError: exec failed.
    """
    null = os.open(os.devnull, os.O_RDWR)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null if stdin is None else stdin, 0), (os.POSIX_SPAWN_DUP2, null, 1)]
        os.posix_spawn(argv[0], argv, environ, file_actions=actions, setpgroup=0)
    finally:
        os.close(null)


class End:
    """How a child ended: `exit_code`, or the number of the `signal` it died of; and what ended it.

    `cause` is None, `timeout` or `lease`; `stopped_by` the last of TERM, INT, HUP, QUIT that came for it.
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
    """Start the job and stay until it has ended and its output is where it belongs.

    Args:
        job: what to execute.
        output: what becomes of its stdout and stderr; for this job alone.
        signals: heard since before the job existed.
        timeout_ms: TERM to the group after it; None for never.
        kill_after_ms: KILL to the group as long after a TERM of ours.
        lease_lost: asked when the renewal has news; true ends the job as a timeout would.

    Raises:
        OSError: exec failed.
    """
    terminal = Terminal()
    actions, ends = output.actions()
    try:
        pid = job.spawn(actions, signals.mask)
    finally:
        for fd in ends:
            os.close(fd)
    terminal.hand_over(os.getpgrp(), pid)
    try:
        return _Watch(pid, terminal, output, signals, timeout_ms, kill_after_ms, lease_lost).until_end()
    finally:
        terminal.hand_over(pid, os.getpgrp())


class _Watch:
    __slots__ = (
        "act_at",
        "cause",
        "is_over",
        "is_past_help",
        "kill_after_s",
        "lease_lost",
        "output",
        "pid",
        "signals",
        "status",
        "stopped_by",
        "terminal",
        "was_killed",
    )

    def __init__(
        self,
        pid: int,
        terminal: Terminal,
        output: Output,
        signals: Signals,
        timeout_ms: int | None,
        kill_after_ms: int,
        lease_lost: Callable[[], bool],
    ) -> None:
        self.pid = pid
        self.terminal = terminal
        self.output = output
        self.signals = signals
        self.act_at = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        self.kill_after_s = kill_after_ms / 1000
        self.lease_lost = lease_lost
        self.status: int | None = None
        self.cause: str | None = None
        self.stopped_by: int | None = None
        self.was_killed = False
        self.is_past_help = False
        self.is_over = False  # the job, but perhaps not yet its output

    def until_end(self) -> End:
        while True:
            self._reap()
            if self.status is not None:
                self._look_for_the_end(self.status)
                if self.is_over and self.output.is_done:
                    return End(self.status, self.cause, self.stopped_by)
            self._wait()
            for number in self.signals.take():
                if number == NEWS:
                    if self.status is None and self.cause is None and self.lease_lost():
                        self._stop("lease")
                elif number != signal.SIGCHLD:
                    self._forward(number)
            if self.act_at is not None and time.monotonic() >= self.act_at:
                self._act()

    def _look_for_the_end(self, status: int) -> None:
        # Stopped by us, the whole group has to go; ended by itself, what it left behind is its own affair.
        if not self.is_over and (self.cause is None or self.is_past_help or not self._group_exists()):
            self.is_over = True
            self.output.end(failed=status != 0 or self.cause is not None)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self.signals.read_fd, select.POLLIN)
        self.output.register(poll)
        wait_s = _LONGEST_WAIT_S
        if self.act_at is not None:
            wait_s = min(wait_s, max(0.0, self.act_at - time.monotonic()))
        if self.status is not None and not self.is_over:
            wait_s = min(wait_s, _GROUP_LOOK_S)
        for fd, _ in poll.poll(int(wait_s * 1000) + 1):
            if fd != self.signals.read_fd:
                self.output.pump(fd)

    def _reap(self) -> None:
        """Take in every child that ended: with detached ones, and as PID 1 with orphans, there are more than the job."""
        flags = os.WNOHANG | (os.WUNTRACED if self.terminal else 0)
        while True:
            try:
                pid, status = os.waitpid(-1, flags)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid != self.pid:
                continue
            if not os.WIFSTOPPED(status):
                self.status = status
            elif os.WSTOPSIG(status) in _FOR_TERMINAL and self.terminal.hand_over(os.getpgrp(), self.pid):
                self._send(signal.SIGCONT)  # it asked before it had the terminal
            else:
                self._suspend()

    def _suspend(self) -> None:
        """Stop with the job, as the shell expects of a foreground command, and go on with it."""
        self.terminal.hand_over(self.pid, os.getpgrp())
        os.kill(0, signal.SIGTSTP)
        self.terminal.hand_over(os.getpgrp(), self.pid)
        self._send(signal.SIGCONT)

    def _act(self) -> None:
        """Do what is due: TERM at the timeout, KILL when that was in vain, and at last no more waiting for a reader."""
        if self.is_over:
            self.output.abandon()
            self.act_at = None
        elif self.cause is None:
            self._stop("timeout")
        else:
            self.is_past_help = self.was_killed  # nobody takes in its dead, or it belongs to another user
            self._send(signal.SIGKILL)
            self.was_killed = True
            self.act_at = time.monotonic() + _DYING_S

    def _stop(self, cause: str) -> None:
        self.cause = cause
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        self.act_at = time.monotonic() + self.kill_after_s

    def _forward(self, number: int) -> None:
        if number in STOPPING:
            self.stopped_by = number
        if not self.is_over:
            self._send(number)
        elif number in STOPPING:
            self.output.abandon()

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
    time. With a margin the lease counts as lost early enough to end the job before it runs out for others, and is then
    renewed no more. A clock that goes on while the node sleeps decides.

    Args:
        renew: one try within a time in seconds; answers whether the lease is ours.
        trouble: what `renew` raises when that is not known.
        lease_ms: how long a renewal holds.
        margin_ms: how long before its end an unconfirmed lease counts as lost; 0 only to say so and to go on trying.
        held_since_ms: an instant before the request that began the lease, by `boot_ms`.
    """

    __slots__ = ("_boot_ms", "_lease_ms", "_margin_ms", "_renew", "_signals", "_stop", "_trouble", "_until_ms", "lost")

    def __init__(
        self,
        renew: Callable[[float], bool],
        trouble: tuple[type[Exception], ...],
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
        self._signals = signals
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
            left_ms = self._left_ms()
            if self._margin_ms and left_ms <= 0:
                self._say("expired")
                return
            try:
                ours = self._renew(min(period_ms, max(left_ms, 500.0)) / 1000)
            except self._trouble:
                left_ms = self._left_ms()
                if left_ms <= 0 and self.lost is None:
                    self._say("expired")
                pause_ms = min(period_ms / 4, 5_000.0)
                if self.lost is None:
                    pause_ms = min(pause_ms, max(left_ms, 50.0))
                continue
            if not ours:
                self._say("taken")
                return
            self._until_ms = before_ms + self._lease_ms
            self.lost = None
            pause_ms = period_ms

    def _left_ms(self) -> int:
        return self._until_ms - self._margin_ms - self._boot_ms()

    def _say(self, lost: str) -> None:
        self.lost = lost
        self._signals.tell_news()
