"""The lease of a running attempt: renewed from a thread, so that a slow Redis never delays the end of the job."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from clustercron.supervise import Signals


class Renewal:
    """Keeps a lease alive from a thread, and says when it is lost.

    `lost` is None while all is well, `taken` when another attempt has the tick, `expired` when no renewal was confirmed in
    time. With a margin the lease counts as lost early enough to end the job before it runs out for others, and is then
    renewed no more. A clock that goes on while the node sleeps decides.

    Args:
        renew: one try within a time in seconds; answers whether the lease is ours, raises when that is not known.
        lease_ms: how long a renewal holds.
        margin_ms: how long before its end an unconfirmed lease counts as lost; 0 only to say so and to go on trying.
        held_since_ms: an instant before the request that began the lease, by `boot_ms`.
    """

    __slots__ = ("_boot_ms", "_lease_ms", "_margin_ms", "_renew", "_signals", "_stop", "_until_ms", "lost")

    def __init__(
        self,
        renew: Callable[[float], bool],
        lease_ms: int,
        margin_ms: int,
        held_since_ms: int,
        boot_ms: Callable[[], int],
        signals: Signals,
    ) -> None:
        import _thread

        self._renew = renew
        self._lease_ms = lease_ms
        self._margin_ms = margin_ms
        self._boot_ms = boot_ms
        self._until_ms = held_since_ms + lease_ms
        self._signals = signals
        self.lost: str | None = None
        self._stop = _thread.allocate_lock()
        self._stop.acquire()
        _thread.start_new_thread(self._run, ())

    def stop(self) -> None:
        """Renew no more. A renewal under way may still be answered; nobody waits for it."""
        if self._stop.locked():
            self._stop.release()

    def _run(self) -> None:
        period_ms = self._lease_ms / 3
        pause_ms = period_ms
        while not self._stop.acquire(timeout=max(0.0, pause_ms) / 1000):
            before_ms = self._boot_ms()
            left_ms = self._left_ms()
            if self._margin_ms and left_ms <= 0:
                self._say("expired")
                return
            try:
                ours = self._renew(min(period_ms, max(left_ms, 500.0)) / 1000)
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
