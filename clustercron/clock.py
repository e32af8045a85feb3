"""The node's clocks: wall time, and time since boot, which neither steps nor stops while the node sleeps."""

from __future__ import annotations

import select
import time

_BOOT_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock:
    """The clocks of this node.

    Args:
        shift_ms: added to wall time; only the demo's nodes have one, so that their clocks differ.
    """

    __slots__ = ("shift_ms",)

    def __init__(self, shift_ms: int = 0) -> None:
        self.shift_ms = shift_ms

    def node_now_ms(self) -> int:
        """Answer the node's wall time in milliseconds since the epoch."""
        return time.time_ns() // 1_000_000 + self.shift_ms

    def boot_ms(self) -> int:
        """Answer milliseconds since boot, time asleep included; only differences mean something."""
        return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000_000


def pause(seconds: float) -> None:
    """Wait. Unlike `time.sleep` it names no absolute instant, so it also works where a clock is shifted for a test."""
    select.select([], [], [], max(0.0, seconds))
