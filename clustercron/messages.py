"""What `run` says: one line for a trouble and one for a hint, decisions for -v and for --log, and nothing else.

cron mails every byte that is printed, so a fire that did what it should stays silent.
"""

from __future__ import annotations

import os
import time

from clustercron.errors import CannotWrite, ClustercronError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = "clustercron"


def escaped(text: str) -> str:
    """Answer a text as one line without control characters: names and replies come from anywhere."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def fill_standard_descriptors() -> None:
    """Put /dev/null where stdin, stdout or stderr is closed, so that no socket gets its number; the job has it closed.

    It is for reading only: what is written to a closed stdout fails as it would have.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            try:
                os.open(os.devnull, os.O_RDONLY)
            except OSError:
                return


def print_output(text: str, encoding: str = "utf-8", descriptor: int = 1) -> None:
    """Write the whole of what was asked for; a reader that has enough is no trouble.

    Raises:
        CannotWrite: the output is closed, full or broken.
    """
    view = memoryview(text.encode(encoding, "backslashreplace"))
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except BrokenPipeError:
        return
    except OSError as exc:
        raise CannotWrite(f"cannot write the output: {(exc.strerror or str(exc)).lower()}") from None


def print_error(text: str) -> None:
    """Write one line to stderr; a stderr that is closed or full is no reason to fail."""
    line = f"{PROGRAM}: {escaped(text)}\n".encode("utf-8", "backslashreplace")
    try:
        os.write(2, line)
    except OSError:
        pass


def print_trouble(job: str | None, trouble: ClustercronError) -> None:
    """Write a trouble, and its hint where it has one."""
    print_error(f"{job}: {trouble.message}" if job else trouble.message)
    if trouble.hint:
        print_error(f"hint: {trouble.hint}")


class Voice:
    """Says what one fire of a job decides.

    Args:
        job: its name.
        verbose: 1 for decisions on stderr, 2 for timings with them.
        log: None, `syslog`, or a file that lines are appended to.
        started_ms: when this process started, for timings, by the same clock as `now_ms`.
    """

    __slots__ = ("_job", "_log", "_now_ms", "_started_ms", "_verbose")

    def __init__(self, job: str, verbose: int, log: str | None, started_ms: int, now_ms: Callable[[], int]) -> None:
        self._job = job
        self._verbose = verbose
        self._log = log
        self._started_ms = started_ms
        self._now_ms = now_ms

    def note(self, text: str) -> None:
        """Say a step on the way, with -v only."""
        if self._verbose:
            timing = f" (+{self._now_ms() - self._started_ms} ms)" if self._verbose > 1 else ""
            print_error(f"{self._job}: {text}{timing}")

    def decide(self, text: str) -> None:
        """Say a decision: with -v on stderr, with --log in the log."""
        self.note(text)
        if self._log is not None:
            self._write_log(text)

    def complain(self, trouble: ClustercronError) -> None:
        """Say a trouble, whatever the options, and log it."""
        print_trouble(self._job, trouble)
        if self._log is not None:
            self._write_log(trouble.message)

    def _write_log(self, text: str) -> None:
        line = escaped(f"{self._job}: {text}")
        if self._log == "syslog":
            import syslog

            syslog.openlog(PROGRAM, syslog.LOG_PID, syslog.LOG_CRON)
            syslog.syslog(syslog.LOG_INFO, line.encode("utf-8", "backslashreplace").decode())
            return
        now_ms = self._now_ms()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_ms // 1000)) + f".{now_ms % 1000:03d}Z"
        data = f"{stamp} {PROGRAM}[{os.getpid()}]: {line}\n".encode("utf-8", "backslashreplace")
        try:
            # Not blocking: a named pipe that nobody reads must not hold the job up.
            fd = os.open(self._log or "", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
            try:
                os.write(fd, data)
            finally:
                os.close(fd)
        except OSError as exc:
            print_error(f"{self._job}: cannot write the log: {self._log}: {(exc.strerror or str(exc)).lower()}")
            self._log = None
