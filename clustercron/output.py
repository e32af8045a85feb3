"""The job's stdout and stderr where they pass through the wrapper: passed on, held back until it fails, discarded, kept."""

from __future__ import annotations

import os
import select
import sys

_CHUNK = 1 << 16


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
        """Answer the file actions for the child, and the descriptors to close here once it exists.

        Raises:
            OSError: no descriptor is left; none was taken.
        """
        if self._mode == "pass" and not self._keep_bytes:
            return [], []
        if self._mode == "discard" and not self._keep_bytes:
            null = os.open(os.devnull, os.O_WRONLY)
            return [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)], [null]
        import fcntl  # noqa: F401 - needed at the end: whoever cannot load it must know before the job exists
        import termios  # noqa: F401

        if self._mode == "on-failure":
            self._held = _unnamed_file()
            self._mode = self._mode if self._held is not None else "pass"
        actions: list[tuple[int, ...]] = []
        ends: list[int] = []
        try:
            # Under cron both are one pipe. So they stay here, and what was written first is read first.
            for targets in ((1, 2),) if _are_one(1, 2) else ((1,), (2,)):
                read_fd, write_fd = os.pipe()
                self._pipes[read_fd] = targets[0]
                ends.append(write_fd)
                os.set_blocking(read_fd, False)
                actions += [(os.POSIX_SPAWN_DUP2, write_fd, target) for target in targets]
        except OSError:
            self.abandon()
            for fd in ends:
                os.close(fd)
            raise
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
