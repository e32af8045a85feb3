"""How a job lies in Redis: names of keys, letters of records, scripts. Nothing else builds a key or knows a letter.

All keys of one job carry its name in braces, so that Redis Cluster keeps them in one slot:

    clustercron:{billing}:claim:2026-09-17T02:00:00Z   owner of the tick; SET NX with expiry
    clustercron:{billing}:job      hash, no expiry: layout, token, newest, known, definitions, max_age, rules,
                                   differed, live, nodes
    clustercron:{billing}:ticks    list, sorted, no expiry: the last 1,024 ticks that were taken
    clustercron:{billing}:runs     hash: tick, or tick.attempt for an attempt with a successor, to its record
    clustercron:{billing}:recent   list: the fields of `runs`, oldest claim first, by which old records are deleted
    clustercron:{billing}:nodes    hash: node's name to what was last seen of it
    clustercron:{billing}:output:2026-09-17T02:00:00Z.1   kept output of an attempt, with expiry
    clustercron:jobs               set: which jobs exist; another slot, so it is written beside a run, again and again
"""

from __future__ import annotations

import os
import time

LAYOUT = 1

# A record is `letter=value` pairs with blanks between: a kept run is to cost less than 400 bytes. Instants are
# milliseconds since the epoch, by Redis's clock but for the fire.
RECORD_LETTERS = {
    "a": "attempt",
    "s": "state",
    "n": "node",
    "o": "owner",
    "k": "fencing_token",
    "f": "fired_at_ms",
    "w": "fired_source",
    "c": "claimed_at_ms",
    "b": "started_at_ms",
    "e": "ended_at_ms",
    "l": "lease_until_ms",
    "g": "lease_ms",
    "r": "renewals",
    "x": "exit_code",
    "y": "signal",
    "z": "rules_version",
    "v": "version",
    "t": "tried",
    "m": "command",
}
NODE_LETTERS = {
    "i": "number",
    "t": "seen_at_ms",
    "k": "clock_offset_ms",
    "z": "rules_version",
    "v": "version",
    "d": "definition",
}
SCRIPTS = ("claim", "start", "renew", "finish", "known")
_read: dict[str, str] = {}


class JobKeys:
    """The keys of one job.

    Args:
        prefix: CLUSTERCRON_PREFIX, without braces.
        job: a name that `options.job_name` accepts.
    """

    __slots__ = ("base", "job", "nodes", "recent", "runs", "ticks")

    def __init__(self, prefix: str, job: str) -> None:
        self.base = f"{prefix}:{{{job}}}:"
        self.job = self.base + "job"
        self.ticks = self.base + "ticks"
        self.runs = self.base + "runs"
        self.recent = self.base + "recent"
        self.nodes = self.base + "nodes"

    def claim(self, tick_text: str) -> str:
        """Name the claim key of a tick, given as UTC text."""
        return f"{self.base}claim:{tick_text}"

    def output(self, tick_text: str, attempt: str) -> str:
        """Name the key of an attempt's kept output."""
        return f"{self.base}output:{tick_text}.{attempt}"


def jobs_key(prefix: str) -> str:
    """Name the set of all jobs."""
    return f"{prefix}:jobs"


def script(name: str) -> str:
    """Answer the text of a script with what all scripts share, without comments.

    It is sent whole each time: that costs no more than a digest, and NOSCRIPT cannot happen. It is read once: at the end
    of a run of hours there may be no descriptor to read it with, or another version of it.

    Raises:
        OSError: it cannot be read.
    """
    if name in _read:
        return _read[name]
    folder = os.path.join(os.path.dirname(__file__), "lua")
    lines = []
    for part in ("prelude", name):
        with open(os.path.join(folder, part + ".lua"), encoding="utf-8") as file:
            lines += [line.strip() for line in file]
    _read[name] = "\n".join(line for line in lines if line and not line.startswith("--"))
    return _read[name]


def encode(**values: str | int | None) -> str:
    """Write the pairs of a record, each under its letter; None leaves one out.

    What would break a record apart stands as `%XX`, as in a URL.
    """
    return " ".join(f"{letter}={_quoted(str(value))}" for letter, value in values.items() if value is not None)


def _quoted(text: str) -> str:
    if text.isascii() and text.isalnum():
        return text
    safe = "._-:/|*,#@+"
    return "".join(
        c if (c.isascii() and c.isalnum()) or c in safe else "".join(f"%{byte:02X}" for byte in _bytes(c)) for c in text
    )


def _bytes(character: str) -> bytes:
    return character.encode("utf-8", "surrogateescape")


def decode(record: str, letters: dict[str, str]) -> dict[str, str]:
    """Read a record into full names and plain values; unknown letters keep their letter, what is no pair is passed over.

    The values are somebody's words: escape control characters before they are shown.
    """
    from urllib.parse import unquote

    pairs = (pair.partition("=") for pair in record.split(" "))
    return {letters.get(letter, letter): unquote(value) for letter, equals, value in pairs if equals}


def utc_ms(instant_ms: int) -> str:
    """Write an instant in milliseconds as UTC text with milliseconds."""
    seconds, milliseconds = divmod(instant_ms, 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03d}Z"
