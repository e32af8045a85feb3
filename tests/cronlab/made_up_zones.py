"""Zone files written by hand, for changes that no real zone has made."""

from __future__ import annotations


def tzif(
    footer: str, changes: tuple[tuple[int, int], ...] = (), offsets: tuple[int, ...] = (0,), version: bytes = b"2"
) -> bytes:
    """Write a TZif file by hand: changes are (instant, index of the new offset)."""

    def block(width: int, used: tuple[tuple[int, int], ...]) -> bytes:
        counts = (0, 0, 0, len(used), len(offsets), 4)
        return (
            b"TZif"
            + version
            + bytes(15)
            + b"".join(count.to_bytes(4, "big") for count in counts)
            + b"".join(instant.to_bytes(width, "big", signed=True) for instant, _ in used)
            + bytes(index for _, index in used)
            + b"".join(offset.to_bytes(4, "big", signed=True) + b"\0\0" for offset in offsets)
            + b"abc\0"
        )

    if version == b"\0":
        return block(4, changes)
    return block(4, ()) + block(8, changes) + f"\n{footer}\n".encode()


# (the offsets, the changes as (minutes after the first, index of the offset)): closer together than in any real zone.
# The middle offset is that of the first minutes.
CLOSE_CHANGES = {
    "back, then forward": ((3600, 0), ((0, 1), (30, 0))),
    "forward, then back": ((3600, 7200), ((0, 1), (30, 0))),
    "back twice": ((7200, 3600, 0), ((0, 1), (30, 2))),
    "forward twice": ((0, 3600, 7200), ((0, 1), (30, 2))),
    "back, and forward by more": ((3600, 0, 7200), ((0, 1), (30, 2))),
    "forward, and back by more": ((3600, 7200, 0), ((0, 1), (30, 2))),
    "back an hour twice, then forward": ((7200, 3600, 0), ((0, 1), (90, 2), (100, 0))),
}


def close_changes(kind: str, first: int) -> bytes:
    """Write a zone whose offset changes a few times from the instant `first` on."""
    offsets, changes = CLOSE_CHANGES[kind]
    return tzif("", tuple((first + minutes * 60, index) for minutes, index in changes), offsets)
