"""The lease of a running attempt: renewed from a thread, so that a slow Redis never delays the end of the job."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from clustercron.supervise import Signals


class Renewal:
    """Keeps a lease alive from a thread, and says when it is lost.

    `lost` is None while all is well, `taken` when another attempt has the tick, `expired` when no renewal was confirmed in
    time. With `ends_early` the lease counts as lost early enough to end the job before it runs out for others, and is then
    renewed no more; else that is only said, and trying goes on. A clock that goes on while the node sleeps decides.

    The thread exists from the beginning: whoever cannot have one must know before there is a lease to keep.

    Args:
        lease_ms: how long a renewal holds.
        stop_ms: how long the job may take to end; None where it goes on whatever becomes of the lease.
        boot_ms: that clock.
        signals: told when there is news.

    Raises:
        RuntimeError: no thread can be started.
    """

    __slots__ = ("_begun", "_boot_ms", "_lease_ms", "_margin_ms", "_renew", "_signals", "_stop", "_until_ms", "lost")

    def __init__(self, lease_ms: int, stop_ms: int | None, boot_ms: Callable[[], int], signals: Signals) -> None:
        import _thread

        self._lease_ms = lease_ms
        self._margin_ms = 0 if stop_ms is None else min(stop_ms + self._dying_ms, lease_ms // 2)
        self._boot_ms = boot_ms
        self._signals = signals
        self._renew: Callable[[float], bool]
        self._until_ms = 0
        self.lost: str | None = None
        self._begun = _thread.allocate_lock()
        self._begun.acquire()
        self._stop = _thread.allocate_lock()
        self._stop.acquire()
        _thread.start_new_thread(self._run, ())

    def begin(self, renew: Callable[[float], bool], held_since_ms: int) -> None:
        """Renew from now on.

        Args:
            renew: one try within a time in seconds; answers whether the lease is ours, raises when that is not known.
            held_since_ms: an instant before the request that began the lease, by `boot_ms`.
        """
        self._renew = renew
        self._until_ms = held_since_ms + self._lease_ms
        self._begun.release()

    def stop(self) -> None:
        """Renew no more. A renewal under way may still be answered; nobody waits for it."""
        for lock in (self._stop, self._begun):
            if lock.locked():
                lock.release()

    @property
    def time_to_end_ms(self) -> int:
        """How long the job may still take to end by itself, so that it is gone when the lease is over."""
        return max(0, self._until_ms - self._dying_ms - self._boot_ms())

    @property
    def _dying_ms(self) -> int:
        """What is left for a KILL to take effect."""
        return min(1_000, self._lease_ms // 8)

    def _run(self) -> None:
        self._begun.acquire()
        period_ms = self._lease_ms / 3
        pause_ms = period_ms
        while not self._stop.acquire(timeout=max(0.0, pause_ms) / 1000):
            before_ms = self._boot_ms()
            left_ms = self._left_ms()
            if self._margin_ms and left_ms <= 0:
                self._say("expired")
                return
            longest_ms = self.time_to_end_ms if self._margin_ms else period_ms
            try:
                ours = self._renew(min(period_ms, max(left_ms, 500.0), longest_ms) / 1000)
            except Exception:  # noqa: BLE001 - whatever it was, nothing is confirmed, and the thread must live to say so
                left_ms = self._left_ms()
                if left_ms <= 0 and self.lost is None:
                    self._say("expired")
                pause_ms = min(period_ms / 4, 5_000.0)
                if self.lost is None:
                    pause_ms = min(pause_ms, max(left_ms, 50.0))
                continue
            if not ours:
                self._say("taken")
                return
            self._until_ms = before_ms + self._lease_ms
            self.lost = None
            pause_ms = period_ms

    def _left_ms(self) -> int:
        return self._until_ms - self._margin_ms - self._boot_ms()

    def _say(self, lost: str) -> None:
        self.lost = lost
        self._signals.tell_news()
