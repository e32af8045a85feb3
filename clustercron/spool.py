"""Ends of runs that Redis could not be told: a file each, in the state directory, until a later fire of the node.

A file knows for which store it is. Links and files of other users are not followed: the directory may be one that others
can write to.
"""

from __future__ import annotations

import os
import stat

from clustercron.errors import ClustercronError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FILES = 1_000
_MAX_FILE_BYTES = 4 << 20
_BATCH = 20
_SUFFIX = ".run"
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
        if len(os.listdir(folder)) >= MAX_FILES:
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


def deliver(state_dir: str, store: str, send: Callable[[dict[str, str]], bool]) -> None:
    """Hand the records kept for a store to `send`, oldest first, a few at a time; forget those it took.

    `send` answers whether a record is done with. What it raises ends the delivery: the rest waits for another fire.
    """
    folder = os.path.join(state_dir, "spool")
    try:
        names = os.listdir(folder)
    except OSError:
        return
    try:
        _check_folder(folder)
    except SpoolError:
        return
    tried = 0
    for name in sorted(n for n in names if n.endswith(_SUFFIX)):
        path = os.path.join(folder, name)
        record = _read(path)
        if record is None or record["store"] != store:
            continue
        if send(record):
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass  # another fire of this node was quicker; the record is the same sent twice
            except OSError:
                return
        tried += 1
        if tried == _BATCH:
            return


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
