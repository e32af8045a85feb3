"""Processes and signals: start the command in a process group of its own and watch it to its end.

One loop waits on one pipe for signals, on the job's pipes where its output is handled, and on the clock; nothing in it
blocks, so that a timeout and a TERM are heeded whatever the job, Redis or the reader of the output does.
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
    from typing import TypeVar

    from clustercron.output import Output

    T = TypeVar("T")

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
STOPPING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
NEWS = 0  # what the renewal writes among the signal numbers
_GROUP_LOOK_S = 0.02
_DYING_S = 1.0
_LONGEST_WAIT_S = 86_400.0  # poll() takes no more than 24 days
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
        environ: its whole environment; an entry without a name, which nobody can hand on, is left out.
    """

    __slots__ = ("argv", "environ", "file")

    def __init__(self, file: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self.file = file
        self.argv = list(argv)
        self.environ = _named(environ)

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


def _named(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name}


def spawn_detached(argv: list[str], environ: Mapping[str, str], stdin: int | None = None) -> None:
    """Start a program that nobody waits for, in a group of its own, without our stdout and with another stdin.

    Raises:
        OSError: exec failed.
    """
    null = os.open(os.devnull, os.O_RDWR)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null if stdin is None else stdin, 0), (os.POSIX_SPAWN_DUP2, null, 1)]
        os.posix_spawn(argv[0], argv, _named(environ), file_actions=actions, setpgroup=0)
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


class Watch:
    """A job that was started, and how it is watched: until it has ended and its output is where it belongs.

    Args:
        job: what to execute.
        output: what becomes of its stdout and stderr; for this job alone.
        signals: heard since before the job existed.
        timeout_ms: TERM to the group after it; None for never.
        kill_after_ms: KILL to the group as long after a TERM of ours.
        heed_news: asked when the renewal has news: None, or the job is ended as a timeout would, and has at most so many
            milliseconds between TERM and KILL.

    Raises:
        OSError: exec failed, or something it needs could not be had; nothing was executed.
    """

    __slots__ = (
        "act_at",
        "cause",
        "heed_news",
        "is_over",
        "is_past_help",
        "kill_after_ms",
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
        job: Job,
        output: Output,
        signals: Signals,
        timeout_ms: int | None,
        kill_after_ms: int,
        heed_news: Callable[[], int | None],
    ) -> None:
        self.output = output
        self.signals = signals
        self.kill_after_ms = kill_after_ms
        self.heed_news = heed_news
        self.status: int | None = None
        self.cause: str | None = None
        self.stopped_by: int | None = None
        self.was_killed = False
        self.is_past_help = False
        self.is_over = False  # the job, but perhaps not yet its output
        self.terminal = Terminal()
        actions, ends = output.actions()
        try:
            self.pid = job.spawn(actions, signals.mask)
        except BaseException:
            output.abandon()
            raise
        finally:
            for fd in ends:
                os.close(fd)
        self.act_at = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        self.terminal.hand_over(os.getpgrp(), self.pid)

    def until_end(self) -> End:
        """Stay until its end."""
        try:
            return self._until_end()
        finally:
            self.terminal.hand_over(self.pid, os.getpgrp())

    def _until_end(self) -> End:
        while True:
            self._reap()
            if self.status is not None:
                self._look_for_the_end(self.status)
                if self.is_over and self.output.is_done:
                    return End(self.status, self.cause, self.stopped_by)
            self._wait()
            for number in self.signals.take():
                if number == NEWS:
                    self._heed_news()
                elif number != signal.SIGCHLD:
                    self._forward(number)
            if self.act_at is not None and time.monotonic() >= self.act_at:
                self._act()

    def _heed_news(self) -> None:
        at_most_ms = None if self.is_over else self.heed_news()
        if at_most_ms is None:
            return
        if self.cause is None:
            self._stop("lease", min(self.kill_after_ms, at_most_ms))
        elif self.act_at is not None:  # it is being stopped already, perhaps too slowly
            self.act_at = min(self.act_at, time.monotonic() + at_most_ms / 1000)

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
            self._stop("timeout", self.kill_after_ms)
        else:
            self.is_past_help = self.was_killed  # nobody takes in its dead, or it belongs to another user
            self._send(signal.SIGKILL)
            self.was_killed = True
            self.act_at = time.monotonic() + _DYING_S

    def _stop(self, cause: str, kill_after_ms: int) -> None:
        self.cause = cause
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        self.act_at = time.monotonic() + kill_after_ms / 1000

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
