"""`clustercron run`: one fire of a crontab line, from what cron started to a recorded outcome.

The steps of `run` stand in one function, in their order: that order is the product. A node that loses leaves before
anything heavy is loaded; what only a winner needs is imported where it wins.
"""

from __future__ import annotations

import os

from clustercron import __version__, command, config, schedule, schema, spool, tick, zone
from clustercron.claims import Claims, Lost, Tick
from clustercron.clock import pause
from clustercron.errors import (
    ClustercronError,
    ConfigError,
    NotDue,
    StoreUnavailable,
    TooLate,
    UsageError,
    ZoneMismatch,
    reason_of,
)
from clustercron.fired import find_fire
from clustercron.messages import Voice, escaped, fill_standard_descriptors, print_output, print_trouble

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from clustercron.clock import Clock
    from clustercron.config import RunSettings, Sources, StoreSettings
    from clustercron.fired import Fire
    from clustercron.options import RunArguments
    from clustercron.schedule import Schedule
    from clustercron.zone import Zone


def main(arguments: RunArguments, environ: Mapping[str, str], clock: Clock) -> int:
    """Do one fire and answer its exit code; every expected trouble has become one line on stderr."""
    fill_standard_descriptors()
    if os.getpid() == 1:
        from clustercron.supervise import act_as_any_process

        act_as_any_process()
    try:
        return run(arguments, environ, clock)
    except ClustercronError as exc:
        trouble = exc
    except Exception as exc:  # noqa: BLE001 - cron mails what is printed, and a traceback says nothing to its reader
        trouble = ClustercronError(f"cannot go on: {reason_of(exc)}")
    print_trouble(escaped(arguments.given["job"]), trouble)
    return trouble.exit_code


def run(arguments: RunArguments, environ: Mapping[str, str], clock: Clock) -> int:
    """Do one fire: find its tick, claim it, execute the command if it is won, record the outcome.

    Raises:
        ClustercronError: nothing was executed, and its `exit_code` says why.
    """
    sources = config.read_sources(environ)
    settings = config.run_settings(arguments.given, sources)
    store = config.store_settings(sources)
    node = config.node_name(sources)

    fire = find_fire(environ)
    fired_at_ms = fire.fired_at_ms + clock.shift_ms
    voice = Voice(settings.job, arguments.verbose, settings.log, fire.own_start_ms + clock.shift_ms, clock.node_now_ms)
    voice.note(f"fired at {schema.utc_ms(fired_at_ms)} ({fire.source}: {fire.detail})")

    line = _read_line(settings, sources, environ, fire)
    file = command.find(arguments.command[0], environ.get("PATH"))

    state_dir = config.state_dir(sources)
    claims = Claims(store, settings.job, clock, settings.store_timeout_ms, settings.max_skew_ms)
    try:
        tick_at = _tick_of_fire(line, settings, fired_at_ms, claims, voice)
        if tick_at is None:
            return settings.skip_exit_code
        claimed = _describe(line, settings, store, node, arguments, fire.source, fired_at_ms, tick_at)
        if settings.dry_run:
            _print_plan(line, claimed, claims, file, arguments.command)
            return 0
        _wait_splay(settings.splay_ms, voice)
        claims.restart_budget()
        try:
            answer = claims.claim(claimed)
        except StoreUnavailable as exc:
            if settings.on_store_down != "run":
                raise exc.with_advice() from None
            voice.complain(exc.going_on())
            answer = None
        if isinstance(answer, Lost):
            _tell_loss(answer, claimed, voice)
            _deliver_spool(store, state_dir, clock, voice)
            return settings.skip_exit_code

        from clustercron.attempt import Attempt
        from clustercron.supervise import die_of

        facts = _job_facts(line, claimed, settings.job)
        with Attempt(settings, store, state_dir, claimed, claims, clock, voice) as attempt:
            begun = attempt.begin(answer)
            if begun is None:
                exit_code = attempt.execute(file, arguments.command, environ, facts)
        if isinstance(begun, Lost):
            _tell_loss(begun, claimed, voice)
            return settings.skip_exit_code
        if begun is not None:
            return die_of(begun)
        if not attempt.spooled:  # else the store has just been asked in vain
            _deliver_spool(store, state_dir, clock, voice)
        return exit_code
    finally:
        claims.close()


class _Line:
    """The crontab line as clustercron reads it: its schedule and zone, cron's own zone, its grace in seconds."""

    __slots__ = ("daemon_zone", "grace", "random_delay_minutes", "schedule", "zone")

    def __init__(
        self, schedule_: Schedule, zone_: Zone, daemon_zone: Zone, grace: int, random_delay_minutes: int
    ) -> None:
        self.schedule = schedule_
        self.zone = zone_
        self.daemon_zone = daemon_zone
        self.grace = grace
        self.random_delay_minutes = random_delay_minutes


def _read_line(settings: RunSettings, sources: Sources, environ: Mapping[str, str], fire: Fire) -> _Line:
    """Read schedule and zones. CRON_TZ counts where it moves the schedule: under cronie and systemd-cron.

    Raises:
        BadSchedule, BadZone: one of them cannot be read.
        ConfigError: whether CRON_TZ counts cannot be told.
    """
    parsed = schedule.parse(settings.schedule, extended=settings.poll)
    cron_tz = environ.get("CRON_TZ") or None
    heeds_cron_tz = fire.daemon in ("cronie", "systemd-cron")
    name = settings.tz or (cron_tz if heeds_cron_tz else None)
    if name is None and cron_tz is not None and fire.daemon != "debian-cron":
        raise ConfigError(
            f"cannot tell the zone of {settings.schedule!r}: CRON_TZ is {cron_tz!r}, and which cron fired this, and so "
            "whether it heeds that, is not known",
            f"give --tz {cron_tz}, or --tz UTC",
        )
    scheduled_in = zone.load(name or "UTC", config.tzdata_source(sources))
    daemon_zone = zone.daemon_zone(sources.get("CLUSTERCRON_DAEMON_TZ") or (cron_tz if heeds_cron_tz else None))
    delay = environ.get("RANDOM_DELAY", "") if heeds_cron_tz else ""
    delay_minutes = int(delay) if delay.isascii() and delay.isdigit() and len(delay) < 6 else 0
    grace = tick.default_grace(parsed, delay_minutes) if settings.grace_ms is None else settings.grace_ms // 1000
    return _Line(parsed, scheduled_in, daemon_zone, grace, delay_minutes)


def _tick_of_fire(line: _Line, settings: RunSettings, fired_at_ms: int, claims: Claims, voice: Voice) -> int | None:
    """Answer the tick that this fire serves, or None when there is nothing to do.

    Raises:
        ZoneMismatch, TooLate, NotDue: it serves none.
        UsageError: --tick names no tick.
        StoreUnavailable, StoreRefused: a late fire could not ask whether somebody has its tick.
    """
    if settings.tick is not None:
        return _chosen_tick(line, settings.tick)
    decision = tick.tick_for(
        line.schedule,
        line.zone,
        fired_at_ms,
        line.grace,
        daemon_zone=line.daemon_zone,
        poll=settings.poll,
        random_delay_minutes=line.random_delay_minutes,
    )
    fired_at = schema.utc_ms(fired_at_ms)
    if decision.kind == "run" and decision.tick is not None:
        voice.note(f"serves {tick.utc_text(decision.tick)}, {_seconds(decision.late_ms)} after it")
        return decision.tick
    if decision.kind == "zone-mismatch":
        minute = (fired_at_ms + tick.EARLY_MS) // 60_000 * 60
        raise ZoneMismatch(
            f"zone mismatch: cron fired this at {tick.local_text(line.daemon_zone, minute)}, which is "
            f"{line.schedule.text!r} in cron's zone {line.daemon_zone.name}; in the schedule's zone {line.zone.name} it "
            f"is {tick.local_text(line.zone, minute)}, which is not",
            f"give --tz {line.daemon_zone.name}, or write the line's five fields in cron's zone and add --poll where "
            f"{line.zone.name} has summer time",
        )
    if settings.poll:
        voice.decide(f"fired at {fired_at}: nothing to do")
        return None
    if decision.kind == "too-late" and decision.tick is not None:
        text = tick.utc_text(decision.tick)
        state, _ = claims.known(_bare_tick(decision.tick))
        if state and state != "abandoned":
            voice.decide(f"{text}: stands aside: too late for it, and it is taken: {state}")
            return None
        raise TooLate(
            f"too late for {text}: fired at {fired_at}, {_seconds(decision.late_ms)} after it; the grace is "
            f"{line.grace} s, and no node is known to have run it",
            f"to run it now: add --tick {text}; to wait longer each time: --grace",
        )
    before = tick.utc_text(decision.previous) if decision.previous is not None else "never"
    after = tick.utc_text(decision.next) if decision.next is not None else "never"
    raise NotDue(
        f"not due: fired at {fired_at}, but {line.schedule.text!r} in {line.zone.name} has a tick at {before} and then at "
        f"{after}",
        f"--schedule repeats the line's own five fields; by hand, choose a tick: --tick {before}; a line that fires more "
        "often than its schedule takes --poll",
    )


def _chosen_tick(line: _Line, text: str) -> int:
    try:
        chosen = tick.parse_instant(text)
    except UsageError as exc:
        raise UsageError(f"cannot use --tick: {exc.message}", exc.hint) from None
    if chosen < 0:
        raise UsageError(f"cannot use --tick: {text!r}: before 1970")
    if not tick.is_tick(line.schedule, line.zone, chosen):
        before = tick.latest_tick(line.schedule, line.zone, chosen)
        after = tick.next_tick(line.schedule, line.zone, chosen)
        near = " and ".join(tick.utc_text(t) for t in (before, after) if t is not None)
        raise UsageError(
            f"cannot use --tick: {text!r}: not a tick of {line.schedule.text!r} in {line.zone.name}",
            f"the ticks beside it are {near}" if near else None,
        )
    return chosen


def _bare_tick(instant: int) -> Tick:
    """A tick to ask about, not to claim."""
    return Tick(instant, tick.utc_text(instant), "fire", 0, 1, "", "", "", "", "")


def _describe(
    line: _Line,
    settings: RunSettings,
    store: StoreSettings,
    node: str,
    arguments: RunArguments,
    source: str,
    fired_at_ms: int,
    tick_at: int,
) -> Tick:
    """Say of a tick all that a claim records."""
    backfill = settings.tick is not None
    max_age_ms = line.grace * 1000 + settings.splay_ms + settings.max_skew_ms + settings.store_timeout_ms
    gap_ms = tick.period(line.schedule, line.zone, tick_at) * 1000
    definition = f"{' '.join(line.schedule.text.split())}|{line.zone.name}"
    what = " ".join(arguments.command) if store.stores_command else None
    return Tick(
        instant=tick_at,
        text=tick.utc_text(tick_at),
        kind="tick" if backfill else "fire",
        max_age_ms=0 if backfill else max_age_ms,
        ttl_ms=max(store.retention_ms, 2 * gap_ms),
        node=node,
        about=schema.encode(z=line.zone.rules_version, v=__version__, d=definition),
        definition=definition,
        rules=zone.offsets_fingerprint(line.zone, tick_at),
        fire=schema.encode(f=fired_at_ms, w=source, z=line.zone.rules_version, v=__version__, m=what),
    )


def _print_plan(line: _Line, claimed: Tick, claims: Claims, file: str, argv: tuple[str, ...]) -> None:
    """Ask Redis what it knows of the tick, and say what a fire would do with that."""
    state, store_now_ms = claims.known(claimed)
    if state in ("", "abandoned", "start-failed"):
        wait_ms = claims.check_reached(claimed, store_now_ms)
        waiting = f"wait {_seconds(wait_ms)} for Redis's clock, " if wait_ms else ""
        plan = f"{waiting}claim it as {claimed.node} and execute {file} {' '.join(map(repr, argv[1:]))}".rstrip()
    elif state == "claimed":
        plan = "wait until it runs, which is to be soon, or its claim lapses"
    else:
        plan = "stand aside"
    lines = [
        f"tick   {claimed.text} ({tick.local_text(line.zone, claimed.instant)} {line.zone.name})",
        f"state  {state or 'free'}",
        f"plan   {plan}",
        "dry run: nothing was claimed and nothing was executed",
    ]
    print_output("".join(escaped(text) + "\n" for text in lines))


def _wait_splay(splay_ms: int, voice: Voice) -> None:
    if splay_ms:
        wait_s = splay_ms / 1000 * int.from_bytes(os.urandom(4), "big") / 2**32
        voice.note(f"waits {wait_s:.1f} s of splay")
        pause(wait_s)


def _tell_loss(lost: Lost, claimed: Tick, voice: Voice) -> None:
    by = f" on {lost.node}" if lost.node else ""
    since = f", since {schema.utc_ms(lost.since_ms)}" if lost.since_ms is not None else ""
    if lost.state not in ("claimed", "running"):
        since = since.replace("since", "started at")
    voice.decide(f"{claimed.text}: stands aside: {lost.state}{by}{since}")
    if claimed.kind == "tick" and os.isatty(2):
        # A person asked for this tick; silence would look like success.
        voice.complain(
            ClustercronError(
                f"did not run {claimed.text}: it is taken: {lost.state}{by}{since}",
                "clustercron history shows its runs",
            )
        )


def _deliver_spool(store: StoreSettings, state_dir: str, clock: Clock, voice: Voice) -> None:
    """Hand over what earlier runs of this node could not say; costs one system call when there is nothing."""
    if spool.is_empty(state_dir):
        return
    try:
        from clustercron.attempt import deliver

        deliver(store, state_dir, clock, voice)
    except Exception as exc:  # noqa: BLE001 - they can wait, and the exit code is that of what was done before
        voice.note(f"kept records stay where they are: {reason_of(exc)}")


def _job_facts(line: _Line, claimed: Tick, job: str) -> dict[str, str]:
    """What the job finds in its environment about its tick."""
    previous = tick.previous_tick(line.schedule, line.zone, claimed.instant)
    return {
        "CLUSTERCRON_JOB": job,
        "CLUSTERCRON_TICK": claimed.text,
        "CLUSTERCRON_TICK_LOCAL": tick.local_text(line.zone, claimed.instant),
        "CLUSTERCRON_TICK_EPOCH": str(claimed.instant),
        "CLUSTERCRON_PREVIOUS_TICK": tick.utc_text(previous) if previous is not None else "",
        "CLUSTERCRON_RUN_ID": f"{job}@{claimed.text}",
        "CLUSTERCRON_NODE": claimed.node,
        "CLUSTERCRON_IS_CATCH_UP": "0",
    }


def _seconds(milliseconds: int | None) -> str:
    return f"{(milliseconds or 0) / 1000:.3f} s"
