"""What a winner does with its claim: begin, execute, renew, retry, and record how it ended.

Only winners load this. Whatever Redis does once the command is executed, the job is unharmed: what cannot be recorded
waits in the spool.
"""

from __future__ import annotations

import binascii
import os
import select
import sys
import time

from clustercron import config, options, schema, spool, supervise
from clustercron.claims import Claims, Ending, Lost, Tick, Won
from clustercron.errors import ClustercronError, StoreRefused, StoreUnavailable, reason_of
from clustercron.lease import Renewal
from clustercron.output import Output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from clustercron.clock import Clock
    from clustercron.config import RunSettings, StoreSettings
    from clustercron.messages import Voice
    from clustercron.supervise import End

TIMED_OUT = 124
START_FAILED = 126
STOPPED = 128 + 15
_SHORT_BUDGET_S = 0.8
_DELIVERY_MS = 2_000
_HOOK_MS = 300_000


class Attempt:
    """The attempts of one owner at one tick. Use it as a context: it catches signals from its beginning to its end."""

    __slots__ = (
        "_began_ms",
        "_claimed",
        "_claims",
        "_clock",
        "_held_since_ms",
        "_pinging",
        "_renewal",
        "_settings",
        "_signals",
        "_state_dir",
        "_store",
        "_voice",
        "_won",
        "spooled",
    )

    def __init__(
        self,
        settings: RunSettings,
        store: StoreSettings,
        state_dir: str,
        claimed: Tick,
        claims: Claims,
        clock: Clock,
        voice: Voice,
    ) -> None:
        self._settings = settings
        self._store = store
        self._state_dir = state_dir
        self._claimed = claimed
        self._claims = claims
        self._clock = clock
        self._voice = voice
        for script in ("start", "renew", "finish"):
            schema.script(script)  # whoever cannot read them must know before anything is executed
        self._signals = supervise.Signals()
        self._won: Won | None = None
        self._renewal: Renewal | None = None
        self._pinging: int | None = None
        self._began_ms = 0
        self._held_since_ms = 0
        self.spooled = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._renewal is not None:
            self._renewal.stop()
        self._signals.close()

    def begin(self, won: Won | None) -> Lost | int | None:
        """Have the claim confirmed as a run. Answers None when the command may be executed.

        Answers the signal that came before that, when the tick was given back; or Lost, when the claim lapsed and another
        attempt has the tick. Without a claim there is nothing to confirm.

        Raises:
            StoreUnavailable: not confirmed; the tick is given back, now or through the spool.
            StoreRefused, ClockSkew: the same, and trying again cannot help.
        """
        self._began_ms = self._clock.node_now_ms()
        self._won = won
        try:
            if won is not None:
                self._renewal = self._new_renewal()
            return self._signals.interruptible(lambda: self._confirm(won))
        except supervise.Interrupted:
            if self._won is not None:
                self._give_back(self._won)
            return self._signals.stop
        except Exception as exc:
            if self._won is not None:
                self._give_back(self._won)
            if not isinstance(exc, StoreUnavailable):
                raise
            if self._settings.on_store_down != "run":
                raise exc.with_advice() from None
            self._voice.complain(exc.going_on())
            self._won = None
            return None
        finally:
            # No child may inherit it, and no run needs it for the next hours.
            self._claims.close()

    def _confirm(self, won: Won | None) -> Lost | None:
        while won is not None:
            self._won = won
            self._voice.decide(
                f"{self._claimed.text}: won attempt {won.attempt} with fencing token {won.token}"
                + ("; it is older than the list of taken ticks, so its claim key alone decided" if won.below else "")
            )
            self._held_since_ms = self._clock.boot_ms()
            began_ms = self._claims.start(self._claimed, won, self._settings.lease_ms)
            if isinstance(began_ms, Lost):
                return began_ms
            if began_ms is not None:
                self._began_ms = began_ms
                return None
            answer = self._claims.claim(self._claimed)
            if isinstance(answer, Lost):
                return answer
            won = answer
        return None

    def execute(self, file: str, argv: tuple[str, ...], environ: Mapping[str, str], facts: Mapping[str, str]) -> int:
        """Execute the command, again for each retry; record the outcome; answer the exit code."""
        self._ping("start", "")
        for left in range(self._settings.retries, -1, -1):
            job_environ = self._job_environ(environ, facts)
            ending, exit_code, again = self._execute_once(supervise.Job(file, argv, job_environ))
            if not (again and left and self._begin_next(ending)):
                break
        if self._renewal is not None:
            self._renewal.stop()
        self._record(ending)
        if exit_code:
            self._run_failure_hook(job_environ, ending.outcome, exit_code)
        self._ping("" if exit_code == 0 else "fail", f"{ending.outcome}, exit code {exit_code}")
        return exit_code

    def _execute_once(self, job: supervise.Job) -> tuple[Ending, int, bool]:
        """Answer how it ended, the exit code, and whether a retry may follow."""
        settings = self._settings
        output = Output(settings.output, settings.keep_output_bytes)
        self._begin_renewal()
        try:
            watch = supervise.Watch(
                job, output, self._signals, settings.timeout_ms, settings.kill_after_ms, self._heed_renewal
            )
        except Exception as exc:  # noqa: BLE001 - whatever it was, nothing is executed, and the tick must not look run
            self._voice.complain(ClustercronError(f"cannot execute {job.file}: {reason_of(exc)}"))
            return self._ending("start-failed", ""), START_FAILED, False
        end = watch.until_end()
        outcome, exit_code = self._judge(end)
        self._voice.decide(f"{self._claimed.text}: {outcome}, exit code {exit_code}")
        facts = schema.encode(x=end.exit_code, y=end.signal)
        ending = self._ending(outcome, facts, bytes(output.kept))
        again = outcome in ("failed", "killed", "timed-out") and end.stopped_by is None and self._won is not None
        return ending, exit_code, again

    def _judge(self, end: End) -> tuple[str, int]:
        exit_code = 128 + end.signal if end.signal is not None else end.exit_code or 0
        if end.cause == "timeout":
            limit = (self._settings.timeout_ms or 0) / 1000
            self._voice.complain(ClustercronError(f"stopped the run of {self._claimed.text}: --timeout {limit:g}s"))
            return "timed-out", TIMED_OUT
        if end.cause == "lease":
            # One that ends well of our TERM has been cut off all the same.
            return "lease-lost", exit_code or STOPPED
        if end.signal is not None:
            return "killed", exit_code
        return ("succeeded" if exit_code == 0 else "failed"), exit_code

    def _ending(self, outcome: str, facts: str, kept: bytes = b"") -> Ending:
        return Ending("unclaimed" if self._won is None else outcome, facts, self._clock.node_now_ms(), kept)

    def _job_environ(self, environ: Mapping[str, str], facts: Mapping[str, str]) -> dict[str, str]:
        """The environment of cron, less what carries a password, with what the job may want to know of its run."""
        job_environ = dict(environ)
        if job_environ.get("LC_CTYPE") and not _began_with("LC_CTYPE"):
            del job_environ["LC_CTYPE"]  # in the C locale Python sets it, and would change how the job sorts and prints
        for variable in config.URL_VARIABLES:
            if config.has_password(job_environ.get(variable, "")):
                del job_environ[variable]
        job_environ.update(facts)
        job_environ["CLUSTERCRON_ATTEMPT"] = self._won.attempt if self._won else "1"
        # A job without a claim has the lowest token there is: what checks tokens refuses it.
        job_environ["CLUSTERCRON_FENCING_TOKEN"] = self._won.token if self._won else "0"
        late_ms = self._began_ms - self._claimed.instant * 1000
        job_environ["CLUSTERCRON_LATE_SECONDS"] = str(max(0, late_ms // 1000))
        job_environ.pop("CLUSTERCRON_UNCLAIMED", None)
        if self._won is None:
            job_environ["CLUSTERCRON_UNCLAIMED"] = "1"
        return job_environ

    def _restorable(self) -> str:
        """What the record says, for a Redis that has lost it."""
        won = self._won
        pairs = schema.encode(
            a=won.attempt if won else "1",
            s="running",
            n=self._claimed.node,
            o=self._claims.owner,
            k=won.token if won else None,
            c=won.claimed_at_ms if won else None,
            b=self._began_ms,
        )
        return f"{pairs} {self._claimed.fire}"

    def _new_renewal(self) -> Renewal:
        stop_ms = self._settings.kill_after_ms if self._settings.on_lease_lost == "kill" else None
        return Renewal(self._settings.lease_ms, stop_ms, self._clock.boot_ms, self._signals)

    def _begin_renewal(self) -> None:
        won, renewal = self._won, self._renewal
        if won is None or renewal is None:
            return
        restorable = self._restorable()
        lease_ms = self._settings.lease_ms

        def renew(timeout_s: float) -> bool:
            return self._claims.renew(self._claimed, won, lease_ms, restorable, timeout_s) != "fenced"

        renewal.begin(renew, self._held_since_ms)

    def _heed_renewal(self) -> int | None:
        """Say what the renewal has to say; answers how long the job may take to end if it is to be stopped."""
        renewal = self._renewal
        lost = renewal.lost if renewal else None
        if renewal is None or lost is None:
            return None
        kills = self._settings.on_lease_lost == "kill"
        why = "another attempt has the tick" if lost == "taken" else f"{self._store.address} did not confirm it in time"
        what = "stops the job" if kills else "the job goes on"
        self._voice.complain(
            ClustercronError(
                f"lost the lease of {self._claimed.text}: {why}: {what}",
                None if kills else "--on-lease-lost=kill would stop it",
            )
        )
        return renewal.time_to_end_ms if kills else None

    def _begin_next(self, ending: Ending) -> bool:
        """Wait the delay of a retry and begin the tick's next attempt; the run counts as alive meanwhile."""
        delay_ms = self._settings.retry_delay_ms
        self._voice.decide(f"{self._claimed.text}: tries again in {delay_ms / 1000:g} s")
        if not self._wait(delay_ms):
            return False
        self._claims.restart_budget()
        held_since_ms = self._clock.boot_ms()
        try:
            renewal = self._new_renewal()
            following = self._signals.interruptible(
                lambda: self._claims.finish(
                    self._claimed, self._won, ending, self._restorable(), self._settings.lease_ms
                )
            )
        except supervise.Interrupted:
            return False
        except Exception as exc:  # noqa: BLE001 - whatever it was, there is an end to record
            self._voice.complain(self._trouble(f"cannot try {self._claimed.text} again", exc))
            return False
        finally:
            self._claims.close()
        if not isinstance(following, Won):
            return False
        if self._renewal is not None:
            self._renewal.stop()
        self._renewal, self._held_since_ms = renewal, held_since_ms
        self._won, self._began_ms = following, following.claimed_at_ms
        return True

    @staticmethod
    def _trouble(what: str, exc: Exception) -> ClustercronError:
        return exc if isinstance(exc, ClustercronError) else ClustercronError(f"{what}: {reason_of(exc)}")

    def _wait(self, delay_ms: int) -> bool:
        """Wait; answers False when a signal or the loss of the lease ends it."""
        until = time.monotonic() + delay_ms / 1000
        poll = select.poll()
        poll.register(self._signals.read_fd, select.POLLIN)
        while (left_s := until - time.monotonic()) > 0:
            poll.poll(int(min(left_s, 86_400.0) * 1000) + 1)  # poll() takes no more than 24 days
            for number in self._signals.take():
                if number in supervise.STOPPING or (number == supervise.NEWS and self._heed_renewal() is not None):
                    return False
        return True

    def _give_back(self, won: Won) -> None:
        """Say that nothing was executed, so that the tick is free again."""
        self._claims.restart_budget(_SHORT_BUDGET_S)
        self._voice.decide(f"{self._claimed.text}: gives the tick back")
        self._tell_store(won, Ending("abandoned", "", self._clock.node_now_ms()))

    def _record(self, ending: Ending) -> None:
        self._claims.restart_budget()
        if self._tell_store(self._won, ending):
            return
        what = f"did not record the end of {self._claimed.text} ({ending.outcome}): another attempt has the tick"
        if ending.outcome == "lease-lost":
            self._voice.decide(what)  # that the lease was lost has been said already
        else:
            self._voice.complain(ClustercronError(what))

    def _tell_store(self, won: Won | None, ending: Ending) -> bool:
        """Record an ending, in Redis or in the spool. Answers False when another attempt has the tick."""

        def finish() -> bool:
            return bool(self._claims.finish(self._claimed, won, ending, self._restorable()))

        try:
            try:
                return self._signals.interruptible(finish)
            except supervise.Interrupted:
                # Whoever stops us may not wait for a whole budget.
                self._claims.close()
                self._claims.restart_budget(_SHORT_BUDGET_S)
                return finish()
        except Exception as exc:  # noqa: BLE001 - whatever it was, the end must be kept
            self._spool(won, ending, self._trouble(f"cannot record the end of {self._claimed.text}", exc))
            return True
        finally:
            self._claims.close()

    def _spool(self, won: Won | None, ending: Ending, trouble: ClustercronError) -> None:
        self.spooled = True
        record = {
            "store": str(self._store),
            "job": self._claims.job,
            "tick": str(self._claimed.instant),
            "owner": self._claims.owner,
            "token": won.token if won else "",
            "attempt": won.attempt if won else "1",
            "outcome": ending.outcome,
            "facts": ending.facts,
            "ended_at_ms": str(ending.ended_at_ms),
            "ttl_ms": str(self._claimed.ttl_ms),
            "restore": self._restorable(),
            "output": binascii.b2a_base64(ending.output, newline=False).decode("ascii"),
        }
        kept = f"this node's next fire records it ({ending.outcome})"
        try:
            path = spool.keep(self._state_dir, f"{ending.ended_at_ms}-{self._claims.owner}-{record['attempt']}", record)
        except Exception as exc:  # noqa: BLE001 - the exit code is the job's own, whatever becomes of its record
            self._voice.complain(trouble)
            self._voice.complain(self._trouble("cannot keep the record", exc))
            return
        if ending.outcome == "abandoned":
            # Why nothing was executed is said by whoever gave up; this would be a second line about it.
            self._voice.decide(f"{self._claimed.text}: {kept}, from {path}")
        else:
            self._voice.complain(type(trouble)(trouble.message, f"{kept}, from {path}"))

    def _run_failure_hook(self, job_environ: dict[str, str], outcome: str, exit_code: int) -> None:
        hook = self._settings.on_failure
        if hook is None:
            return
        environ = {**job_environ, "CLUSTERCRON_OUTCOME": outcome, "CLUSTERCRON_EXIT_CODE": str(exit_code)}
        job = supervise.Job("/bin/sh", ("sh", "-c", hook), environ)
        try:
            watch = supervise.Watch(job, Output("pass", 0), self._signals, _HOOK_MS, 1_000, lambda: None)
            end = watch.until_end()
            reason = f"exit code {end.exit_code}" if end.signal is None else f"signal {end.signal}"
            if end.cause is not None:
                reason = f"stopped after {_HOOK_MS // 1000} s"
            failed = end.exit_code != 0
        except Exception as exc:  # noqa: BLE001 - the exit code is the job's own, whatever becomes of the hook
            failed, reason = True, reason_of(exc)
        if failed:
            self._voice.complain(ClustercronError(f"the --on-failure command failed: {hook!r}: {reason}"))

    def _ping(self, suffix: str, body: str) -> None:
        """Send a signal to the dead man's switch from a process of its own: it may be slow, this run is not.

        The one at the end waits for the one at the start, whose process holds the other end of a pipe: the switch must
        not hear them in the wrong order.
        """
        url = self._settings.ping
        if url is None:
            return
        stdin, self._pinging = self._pinging, None
        argv = [sys.executable, "-I", "-m", "clustercron.ping", self._claims.job, suffix, body]
        try:
            if stdin is None:
                self._pinging, stdin = os.pipe()
            supervise.spawn_detached(argv, {**os.environ, "CLUSTERCRON_PING": url}, stdin)
        except Exception as exc:  # noqa: BLE001 - the job runs, or has run, whether it is heard of or not
            self._voice.complain(ClustercronError(f"cannot ping: {reason_of(exc)}"))
        finally:
            if stdin is not None:
                os.close(stdin)


def _began_with(variable: str) -> bool:
    """Say whether this process was started with a variable; where that cannot be known, it was."""
    try:
        with open("/proc/self/environ", "rb") as file:
            began = b"\0" + file.read()
    except OSError:
        return True
    return b"\0" + os.fsencode(variable) + b"=" in began


def deliver(store: StoreSettings, state_dir: str, clock: Clock, voice: Voice) -> None:
    """Record the ends that this node could not tell this store before, as far as a short time allows."""
    until_ms = clock.boot_ms() + _DELIVERY_MS
    for path, record in spool.waiting(state_dir, str(store)):
        left_ms = until_ms - clock.boot_ms()
        if left_ms <= 0:
            return
        try:
            _send(record, store, clock, voice, left_ms)
        except (StoreRefused, ValueError, OverflowError, OSError) as exc:
            voice.note(f"a kept record stays where it is: {path}: {reason_of(exc)}")
            spool.put_last(path)
        except StoreUnavailable as exc:
            voice.note(f"kept records stay where they are: {exc.message}")
            spool.put_last(path)
            return
        else:
            spool.forget(path)


def _send(record: dict[str, str], store: StoreSettings, clock: Clock, voice: Voice, budget_ms: int) -> None:
    job, instant = options.job_name(record["job"]), int(record["tick"])
    text = schema.utc_ms(instant * 1000).replace(".000Z", "Z")
    tick = Tick(instant, text, "fire", 0, int(record["ttl_ms"]), "", "", "", "", "")
    output = binascii.a2b_base64(record["output"])
    ending = Ending(record["outcome"], record["facts"], int(record["ended_at_ms"]), output)
    won = Won(str(int(record["token"])), str(int(record["attempt"])), 0, False) if record["token"] else None
    claims = Claims(store, job, clock, budget_ms, 0, owner=record["owner"])
    try:
        recorded = claims.finish(tick, won, ending, record["restore"])
    finally:
        claims.close()
    what = f"the end of {job} that was kept: {ending.outcome}"
    voice.decide(
        f"{text}: recorded {what}" if recorded else f"{text}: did not record {what}: another attempt has the tick"
    )
