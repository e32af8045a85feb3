"""Reading the files that settings name: whatever stands there, it is read at once or not at all."""

from __future__ import annotations

import errno
import os
import stat


def read_regular(path: str, most: int) -> bytes:
    """Read the first `most` bytes of a regular file, links followed.

    A pipe or a device is refused: one that nobody writes to would hold every fire up.

    Raises:
        OSError: there is no such file, it cannot be read, or it is not a regular one.
        ValueError: the path has a NUL character.
    """
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return file.read(most)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
