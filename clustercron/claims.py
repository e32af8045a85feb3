"""What the run path says to Redis about one tick: claim, start, renew, finish, and what is known of it.

Each request may be sent again with the same owner as often as the budget allows: the scripts answer the same twice. A
reply that did not come means *unknown*, never *lost*:

    node A                      Redis                       node B
    claim owner=a  ---------->  SET NX: a has the tick
                   <--- lost
    (no answer)                                             claim owner=b --> lost: claimed by a; asks again
    claim owner=a  ---------->  record has owner a
                   <----------  won, the same fencing token
    start          ---------->  running                     asks again --> lost: running; leaves
"""

from __future__ import annotations

import os
import time

from clustercron import schema
from clustercron.clock import pause
from clustercron.errors import ClaimUnsettled, ClockSkew, StoreRefused, StoreUnavailable, TooLate, UsageError
from clustercron.wire import NO_ANSWER, Connection, ReplyError, WireError, reply_trouble

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from clustercron.clock import Clock
    from clustercron.config import StoreSettings

CLAIM_LEASE_MS = 5_000
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_SHORTEST_TRY_S = 2.0
# How many words there are at least in an answer that begins with such a one.
_ANSWER_LENGTHS = {"won": 5, "lost": 8, "layout": 3, "fenced": 4}


class Tick:
    """The tick to claim, with all that the records are to say of this fire.

    Args:
        instant: UTC seconds.
        text: the same as UTC text.
        kind: `fire` or `tick` (backfill).
        max_age_ms: how old the tick may be by Redis's clock; 0 for any age.
        ttl_ms: how long claim, records and output are kept.
        node: this node's name.
        about: what this node says of itself, as a record.
        definition: `schedule|zone`.
        rules: fingerprint of the zone's offsets.
        fire: what the record says of the fire, as a record.
    """

    __slots__ = ("about", "definition", "fire", "instant", "kind", "max_age_ms", "node", "rules", "text", "ttl_ms")

    def __init__(
        self,
        instant: int,
        text: str,
        kind: str,
        max_age_ms: int,
        ttl_ms: int,
        node: str,
        about: str,
        definition: str,
        rules: str,
        fire: str,
    ) -> None:
        self.instant = instant
        self.text = text
        self.kind = kind
        self.max_age_ms = max_age_ms
        self.ttl_ms = ttl_ms
        self.node = node
        self.about = about
        self.definition = definition
        self.rules = rules
        self.fire = fire


class Won:
    """A claim that this owner has; nothing may be executed before `start` says so.

    `below` is true when the tick is older than the list of taken ticks, so that only its claim key could tell.
    """

    __slots__ = ("attempt", "below", "claimed_at_ms", "token")

    def __init__(self, token: str, attempt: str, claimed_at_ms: int, below: bool) -> None:
        self.token = token
        self.attempt = attempt
        self.claimed_at_ms = claimed_at_ms
        self.below = below


class Lost:
    """A tick that somebody has: its state, and the node where that is known."""

    __slots__ = ("node", "since_ms", "state")

    def __init__(self, state: str, node: str, since_ms: int | None) -> None:
        self.state = state
        self.node = node
        self.since_ms = since_ms


class Ending:
    """How an attempt ended, with all that a later delivery needs.

    Args:
        outcome: how it ended, as `history` names it.
        facts: exit code and signal, as a record.
        ended_at_ms: by the node's clock.
        output: what is kept of the job's output.
    """

    __slots__ = ("ended_at_ms", "facts", "outcome", "output")

    def __init__(self, outcome: str, facts: str, ended_at_ms: int, output: bytes = b"") -> None:
        self.outcome = outcome
        self.facts = facts
        self.ended_at_ms = ended_at_ms
        self.output = output


class _Unstarted:
    """Watches a claim by another that is not started: its node may have died in between.

    A lease that was watched in full by the own boot clock has run out, whatever Redis's clock does meanwhile.
    """

    __slots__ = ("_clock", "_lease_ms", "_pause_s", "_since_ms", "_token", "ripe_token")

    def __init__(self, lease_ms: int, clock: Clock) -> None:
        self._lease_ms = lease_ms
        self._clock = clock
        self._token = ""
        self._since_ms = 0
        self._pause_s = _FIRST_PAUSE_S
        self.ripe_token = ""

    def pause_s(self, token: str, lease_left_ms: int) -> float:
        """Take note of who has the claim; answer how long to wait before asking again."""
        now_ms = self._clock.boot_ms()
        if token != self._token:
            self._token, self._since_ms, self.ripe_token = token, now_ms, ""
        elif now_ms - self._since_ms >= self._lease_ms:
            self.ripe_token = token
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, _LONGEST_PAUSE_S / 2)
        return min(pause_s, max(0.02, lease_left_ms / 1000))


def _whole(text: str) -> int:
    """Read a number of an answer; 0 for what is none: what a script answers comes from what lies in Redis."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 16 else 0


class Claims:
    """One owner's conversation with Redis about one job.

    Not for two threads at once, but for `renew`, which has a connection of its own.

    Args:
        budget_ms: total time for asking before anything was executed; `finish` gets the same again.
        max_skew_ms: how far the clocks of node and Redis may differ.
        owner: of an attempt whose end was kept; a new one where there is none.
    """

    __slots__ = (
        "_budget_s",
        "_connection",
        "_deadline",
        "_keys",
        "_max_skew_ms",
        "_offset_ms",
        "_sent_ms",
        "_store",
        "clock",
        "job",
        "owner",
    )

    def __init__(
        self,
        store: StoreSettings,
        job: str,
        clock: Clock,
        budget_ms: int,
        max_skew_ms: int,
        owner: str | None = None,
    ) -> None:
        self.owner = owner or os.urandom(16).hex()
        self.clock = clock
        self._store = store
        self.job = job
        self._keys = schema.JobKeys(store.prefix, job)
        self._budget_s = budget_ms / 1000
        self._max_skew_ms = max_skew_ms
        self._connection: Connection | None = None
        self._sent_ms = 0
        self._offset_ms: int | None = None  # Redis's clock minus the node's, once a delay made it matter
        self._deadline = time.monotonic() + self._budget_s

    def close(self) -> None:
        """Close the connection, so that no child can inherit it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def restart_budget(self, at_most_s: float | None = None) -> None:
        """Give the next requests the whole budget again, or a shorter one."""
        self._deadline = time.monotonic() + min(self._budget_s, at_most_s or self._budget_s)

    def known(self, tick: Tick) -> tuple[str, int]:
        """Answer the state of the tick's latest attempt and Redis's clock in milliseconds; claim nothing.

        The state is `gone` for a tick taken without a record, and '' for a free one.

        Raises:
            StoreUnavailable: not answered within the budget.
            StoreRefused: asking again cannot help.
        """
        keys = [self._keys.job, self._keys.ticks, self._keys.runs, self._keys.claim(tick.text)]
        store_now, state = self._ask(f"cannot look up {tick.text}", "known", keys, lambda *_: [str(tick.instant)])
        return state, _whole(store_now)

    def claim(self, tick: Tick) -> Won | Lost:
        """Claim the tick; wait for Redis's clock to reach it, and for a claim by another that is not started yet.

        Raises:
            ClockSkew: the clocks differ by more than --max-skew.
            TooLate: the tick is too old by Redis's clock, and free.
            UsageError: a chosen tick is in the future by Redis's clock.
            ClaimUnsettled: another node claimed it, and what came of that is not clear.
            StoreUnavailable: not answered within the budget.
            StoreRefused: asking again cannot help.
        """
        what = f"cannot claim {tick.text}"
        keys = [self._keys.job, self._keys.ticks, self._keys.runs, self._keys.recent, self._keys.nodes]
        keys.append(self._keys.claim(tick.text))
        lease_ms = min(CLAIM_LEASE_MS, max(500, int(self._budget_s * 1000 / 3)))
        unstarted = _Unstarted(lease_ms, self.clock)

        def arguments(sent_ms: int, deadline_ms: int) -> list[str]:
            clocks = [sent_ms, deadline_ms, self._max_skew_ms, tick.max_age_ms]
            lives = [lease_ms, tick.ttl_ms]
            numbers = [str(number) for number in (tick.instant, *clocks, *lives)]
            said = [tick.node, tick.about, tick.definition, tick.rules, tick.fire, unstarted.ripe_token, tick.kind]
            return [self.owner, *numbers, *said]

        while True:
            status, now_text, *rest = self._ask(what, "claim", keys, arguments)
            store_now_ms = _whole(now_text)
            match status:
                case "won":
                    return Won(rest[0], rest[1], store_now_ms, rest[2] == "below")
                case "lost" if rest[0] != "claimed":
                    state, node, _, lease_left, claimed_at, started_at = rest
                    if state == "running" and lease_left.startswith("-"):
                        state = "lost"
                    return Lost(state, node, _whole(started_at) or _whole(claimed_at) or None)
                case "lost":
                    self._wait_for_start(what, rest[1], unstarted.pause_s(rest[2], _whole(rest[3])))
                case "early":
                    self._wait_for_store_clock(tick, store_now_ms)
                case "stale" | "skew":
                    self._tell_delay_from_skew(what, store_now_ms)
                case "too-late":
                    raise TooLate(
                        f"too late for {tick.text}: by Redis's clock it is {schema.utc_ms(store_now_ms)}, and no node is "
                        "known to have run it",
                        f"to run it now: add --tick {tick.text}; to wait longer each time: --grace",
                    )
                case _:
                    raise self._unread(what, status, rest)

    def check_reached(self, tick: Tick, store_now_ms: int) -> int:
        """Answer how long it is until Redis's clock reaches the tick, in milliseconds; 0 when it has.

        Raises:
            UsageError: the tick was chosen, and nobody chooses a future one and means to wait for it.
        """
        wait_ms = max(0, tick.instant * 1000 - store_now_ms)
        if wait_ms and tick.kind == "tick":
            raise UsageError(
                f"cannot claim {tick.text}: it is in the future by Redis's clock, {schema.utc_ms(store_now_ms)}"
            )
        return wait_ms

    def start(self, tick: Tick, won: Won, lease_ms: int) -> int | Lost | None:
        """Turn the claim into a run. Answers the instant of the start by Redis's clock, in milliseconds.

        Answers Lost when another attempt took the claim over; None when it has lapsed or is gone and must be claimed
        again.

        Raises:
            ClockSkew: the clocks differ by more than --max-skew.
            StoreUnavailable: not confirmed within the budget.
            StoreRefused: asking again cannot help.
        """
        what = f"cannot start {tick.text}"

        def arguments(_: int, deadline_ms: int) -> list[str]:
            return [self.owner, str(tick.instant), won.token, str(deadline_ms), str(lease_ms)]

        while True:
            status, now_text, *rest = self._ask(what, "start", [self._keys.job, self._keys.runs], arguments)
            match status:
                case "ok" if rest:
                    return _whole(rest[0])
                case "fenced":
                    return Lost(rest[0], rest[1], None)
                case "lapsed" | "gone":
                    return None
                case "stale":
                    self._tell_delay_from_skew(what, _whole(now_text))
                case _:
                    raise self._unread(what, status, rest)

    def renew(self, tick: Tick, won: Won, lease_ms: int, restore: str, timeout_s: float) -> str:
        """Say that the attempt is alive, in one try. Answers `ok`, `restored` or `fenced`.

        Raises:
            WireError: no answer, and so not known.
        """
        keys = [self._keys.job, self._keys.ticks, self._keys.runs, self._keys.recent, self._keys.claim(tick.text)]
        argv = [self.owner, str(tick.instant), won.token, str(lease_ms), str(tick.ttl_ms), restore]
        deadline = time.monotonic() + timeout_s
        connection = Connection(self._store.address, deadline)
        try:
            return self._call(connection, "renew", keys, argv, deadline, listed=True)[0]
        finally:
            connection.close()

    def finish(
        self, tick: Tick, won: Won | None, ending: Ending, restore: str, next_lease_ms: int | None = None
    ) -> Won | bool:
        """Record how the attempt ended, and with a next lease begin the tick's next attempt.

        Without a claim (`won` is None) the run is recorded beside whatever the tick came to. Answers False when another
        attempt has the tick and nothing was changed, True when recorded, the next attempt where one was asked for. A next
        attempt that was asked for in vain is taken back by recording the end once more without one.

        Raises:
            ClockSkew: the clocks differ by more than --max-skew; only with a next lease.
            StoreUnavailable: not confirmed within the budget.
            StoreRefused: asking again cannot help.
        """
        keys = [self._keys.job, self._keys.ticks, self._keys.runs, self._keys.recent, self._keys.claim(tick.text)]
        keys.append(self._keys.output(tick.text, won.attempt if won else self.owner))
        begins_next = next_lease_ms is not None

        def arguments(_: int, deadline_ms: int) -> list[str | bytes]:
            age_ms = max(0, self.clock.node_now_ms() - ending.ended_at_ms)
            fixed = [self.owner, str(tick.instant), won.token if won else "", ending.outcome, ending.facts]
            fixed += [str(age_ms), str(tick.ttl_ms), restore]
            return [*fixed, ending.output, *([str(next_lease_ms), str(deadline_ms)] if begins_next else ["", ""])]

        what = f"cannot try {tick.text} again" if begins_next else f"cannot record the end of {tick.text}"
        while True:
            status, now_text, *rest = self._ask(what, "finish", keys, arguments, listed=True)
            match status:
                case "ok" if not begins_next:
                    return True
                case "ok" if len(rest) > 1:
                    return Won(rest[0], rest[1], _whole(now_text), False)
                case "fenced":
                    return False
                case "stale":
                    self._tell_delay_from_skew(what, _whole(now_text))
                case _:
                    raise self._unread(what, status, rest)

    def _tell_delay_from_skew(self, what: str, store_now_ms: int) -> None:
        """Tell a request that was late from a clock that is wrong, by the round trip of the last try.

        A mere delay leaves the offset for the next request's deadline.

        Raises:
            ClockSkew: no delay within the round trip explains the difference.
        """
        received_ms = self.clock.node_now_ms()
        lowest, highest = store_now_ms - received_ms, store_now_ms - self._sent_ms
        if lowest > self._max_skew_ms or highest < -self._max_skew_ms:
            raise ClockSkew(
                f"{what}: the clocks differ by more than --max-skew {self._max_skew_ms / 1000:g}s: "
                f"node {schema.utc_ms(received_ms)}, {self._store.address} {schema.utc_ms(store_now_ms)}",
                "set the clock of whichever is wrong; is an NTP client running?",
            )
        self._offset_ms = highest

    def _wait_for_store_clock(self, tick: Tick, store_now_ms: int) -> None:
        """Sleep until Redis's clock reaches the tick, which is no time spent on asking."""
        wait_ms = self.check_reached(tick, store_now_ms)
        self.close()
        pause(wait_ms / 1000)
        self.restart_budget()

    def _wait_for_start(self, what: str, node: str, pause_s: float) -> None:
        """Wait a little for another's claim to become a run, to end, or to lapse."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise ClaimUnsettled(f"{what}: {node} claimed it and did not start it within the budget")
        pause(min(pause_s, left_s))

    def _unread(self, what: str, status: str, rest: Sequence[str]) -> StoreRefused:
        if status == "layout" and rest:
            return StoreRefused(
                f"{what}: {self._store.address}: its records have layout {rest[0]}, newer than this version reads",
                "upgrade clustercron on this node",
            )
        return StoreRefused(f"{what}: {self._store.address}: it answered {status!r}, which this version does not know")

    def _ask(
        self,
        what: str,
        name: str,
        keys: Sequence[str],
        arguments: Callable[[int, int], Sequence[str | bytes]],
        listed: bool = False,
    ) -> list[str]:
        """Send a script until it is answered or the budget is over.

        Each try has fresh arguments: the node's clock, and the instant after which Redis must not carry it out any more,
        since its sender has given up by then.
        """
        began = time.monotonic()
        tries = 0
        trouble: WireError | None = None
        while True:
            left_s = self._deadline - time.monotonic()
            tries += 1
            try:
                deadline = time.monotonic() + min(left_s, max(_SHORTEST_TRY_S, self._budget_s / 4))
                if self._connection is None:
                    self._connection = Connection(self._store.address, deadline)
                    left_s = self._deadline - time.monotonic()
                self._sent_ms = self.clock.node_now_ms()
                ahead_ms = self._max_skew_ms if self._offset_ms is None else self._offset_ms
                argv = arguments(self._sent_ms, self._sent_ms + ahead_ms + max(0, int(left_s * 1000)))
                return self._call(self._connection, name, keys, argv, deadline, listed)
            except WireError as exc:
                self.close()
                if not exc.passing:
                    raise StoreRefused(f"{what}: {self._store.address}: {exc.reason}", exc.hint) from None
                # The last try may have had no time to be answered; then what was said before tells more.
                if trouble is None or not exc.reason.endswith(NO_ANSWER):
                    trouble = exc
                left_s = self._deadline - time.monotonic()
                pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries, 10)) * os.urandom(1)[0] / 255
                if left_s <= pause_s:
                    spent_s = time.monotonic() - began
                    spent = f"{tries} {'try' if tries == 1 else 'tries'} in {spent_s:.{int(spent_s < 1)}f} s"
                    reason = f"{what}: {self._store.address}: {trouble.reason} ({spent})"
                    raise StoreUnavailable(reason, trouble.hint) from None
                pause(pause_s)

    def _call(
        self,
        connection: Connection,
        name: str,
        keys: Sequence[str],
        argv: Sequence[str | bytes],
        deadline: float,
        listed: bool,
    ) -> list[str]:
        commands: list[list[str | bytes]] = [["EVAL", schema.script(name), str(len(keys)), *keys, *argv]]
        if listed:
            # The list of jobs lies in another slot, so no script can write it; it is said again with every record.
            commands.append(["SADD", schema.jobs_key(self._store.prefix), self.job])
        reply = connection.call(commands, deadline)[0]
        if isinstance(reply, ReplyError):
            raise reply_trouble(reply.text)
        words = (
            [item.decode("utf-8", "replace") for item in reply if isinstance(item, bytes)]
            if isinstance(reply, list)
            else []
        )
        if len(words) < 2 or len(words) < _ANSWER_LENGTHS.get(words[0], 2):
            raise WireError("its answer is none of clustercron's scripts; is this a Redis?", False)
        return words
