"""Ends of runs that Redis could not be told: a file each, in the state directory, until a later fire of the node.

A file knows for which store it is. Links and files of other users are not followed: the directory may be one that others
can write to.
"""

from __future__ import annotations

import os
import stat
import time

from clustercron.errors import ClustercronError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FILES = 1_000
_MAX_FILE_BYTES = 4 << 20
_SUFFIX = ".run"
_HALF = ".run.new"  # being written, or left by a crash
_HALF_AGE_S = 3_600
FIELDS = (
    "store",
    "job",
    "tick",
    "owner",
    "token",
    "attempt",
    "outcome",
    "facts",
    "ended_at_ms",
    "ttl_ms",
    "restore",
    "output",
)


class SpoolError(ClustercronError):
    """A record that could not be kept."""


def keep(state_dir: str, name: str, record: dict[str, str]) -> str:
    """Write a record so that it survives a crash; answers the file.

    Args:
        state_dir: made if it is not there.
        name: unique to the attempt.
        record: a text for each of FIELDS.

    Raises:
        SpoolError: no room, no permission, or too many are waiting already.
    """
    import json

    folder = os.path.join(state_dir, "spool")
    path = os.path.join(folder, name + _SUFFIX)
    try:
        os.makedirs(state_dir, mode=0o700, exist_ok=True)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        _check_folder(folder)
        if len(_names(folder)) >= MAX_FILES:
            raise SpoolError(f"cannot keep the record: {folder}: {MAX_FILES} records are waiting there already")
        _write_through(path + ".new", json.dumps(record).encode("ascii"))
        os.replace(path + ".new", path)
        _sync(folder)
    except OSError as exc:
        raise SpoolError(f"cannot keep the record: {path}: {(exc.strerror or str(exc)).lower()}") from None
    return path


def _write_through(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
    except OSError:
        os.unlink(path)
        raise


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_empty(state_dir: str) -> bool:
    """Say whether nothing is waiting; one system call."""
    try:
        return not os.listdir(os.path.join(state_dir, "spool"))
    except OSError:
        return True


def waiting(state_dir: str, store: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Answer the files and records kept for a store, the one that has waited longest since it was put last first."""
    folder = os.path.join(state_dir, "spool")
    try:
        _check_folder(folder)
        paths = [os.path.join(folder, name) for name in _names(folder)]
    except (OSError, SpoolError):
        return
    for path in sorted(paths, key=lambda path: (_waits_since(path), path)):
        record = _read(path)
        if record is not None and record["store"] == store:
            yield path, record


def forget(path: str) -> None:
    """Delete a record; another fire of this node may have been quicker."""
    try:
        os.unlink(path)
    except OSError:
        pass  # the record is the same sent twice


def put_last(path: str) -> None:
    """Have all others tried before this record is tried again: it must not keep them from being delivered."""
    try:
        os.utime(path, follow_symlinks=False)
    except OSError:
        pass


def _names(folder: str) -> list[str]:
    """Answer the names of whole records; what a crash left half-written is deleted."""
    names = os.listdir(folder)
    for name in names:
        path = os.path.join(folder, name)
        if name.endswith(_HALF) and time.time() - _waits_since(path) / 1e9 > _HALF_AGE_S:
            forget(path)
    return [name for name in names if name.endswith(_SUFFIX)]


def _waits_since(path: str) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0


def _check_folder(folder: str) -> None:
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise SpoolError(f"cannot keep the record: {folder}: not a directory of this user alone")


def _read(path: str) -> dict[str, str] | None:
    import json

    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > _MAX_FILE_BYTES:
                return None
            record = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not all(isinstance(record.get(field), str) for field in FIELDS):
        return None
    return record
