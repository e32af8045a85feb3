"""Which file a command means. Seen before anything is claimed, so that a node without it leaves the tick to others."""

from __future__ import annotations

import os

from clustercron.errors import CommandNotExecutable, CommandNotFound

DEFAULT_PATH = "/usr/bin:/bin"


def find(name: str, path: str | None) -> str:
    """Answer the file that a command's name means, as execvp would find it.

    Raises:
        CommandNotFound: there is none.
        CommandNotExecutable: it is there but cannot be executed, or its `#!` interpreter is missing.
    """
    if not name:
        raise CommandNotFound("cannot run '': no such command")
    if "/" in name:
        candidates = [name]
    else:
        path = DEFAULT_PATH if path is None else path
        candidates = [os.path.join(folder or ".", name) for folder in path.split(":")]
    found = None
    for candidate in candidates:
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            _check_interpreter(candidate)
            return candidate
        if found is None and os.path.exists(candidate):
            found = candidate
    if found is not None:
        reason = "is a directory" if os.path.isdir(found) else "permission denied"
        raise CommandNotExecutable(f"cannot run {name}: {found}: {reason}")
    if "/" in name:
        raise CommandNotFound(f"cannot run {name}: no such file")
    raise CommandNotFound(
        f"cannot run {name}: not found on PATH {path}",
        "cron's PATH is short: write the command with its full path",
    )


def _check_interpreter(command: str) -> None:
    try:
        with open(command, "rb") as file:
            line = file.readline(512)
    except OSError:
        return  # executable but not readable: only the kernel can tell
    if not line.startswith(b"#!"):
        return
    # As the kernel reads it: a line with a carriage return, as written on Windows, means another file.
    interpreter = line[2:].rstrip(b"\n").replace(b"\t", b" ").strip(b" ").partition(b" ")[0]
    if not interpreter:
        return
    name = os.fsdecode(interpreter)
    if not os.path.exists(name):
        hint = "the file was written on Windows: take the carriage returns out" if name.endswith("\r") else None
        raise CommandNotExecutable(f"cannot run {command}: its interpreter {name!r} does not exist", hint)
    if not os.access(name, os.X_OK) or os.path.isdir(name):
        raise CommandNotExecutable(f"cannot run {command}: its interpreter {name!r} cannot be executed")
