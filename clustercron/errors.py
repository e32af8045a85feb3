"""Every expected trouble, named for its condition, with the exit code it ends a `run` with.

The text of an error is the part after `clustercron: JOB: `; it names what could not be done, the object, and why.
`hint`, where there is one, says what to do. Whoever catches an error at the top prints both and never a traceback.
"""

from __future__ import annotations


class ClustercronError(Exception):
    """A trouble that the user can understand and act on.

    Args:
        message: one line, without the `clustercron: JOB: ` before it.
        hint: one line that says what to do, or None.
    """

    exit_code = 125

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(ClustercronError):
    """An option, argument or variable that cannot be used as given."""


class ConfigError(ClustercronError):
    """A configuration that is missing, unreadable or contradicts itself."""


class BadSchedule(ClustercronError):
    """A schedule that cron would not read, would read differently elsewhere, or would never fire."""


class BadZone(ClustercronError):
    """A time zone that is unknown, or whose rules cannot be read."""


class NotDue(ClustercronError):
    """A fire that belongs to no tick of the schedule."""


class TooLate(ClustercronError):
    """A fire for a tick whose grace is over and that nobody is known to have taken."""


class ZoneMismatch(ClustercronError):
    """cron runs in one zone and the schedule is read in another."""


class ClockSkew(ClustercronError):
    """The node's clock and Redis's differ by more than --max-skew."""


class CommandNotExecutable(ClustercronError):
    """The command exists but cannot be executed, or its `#!` interpreter is missing."""

    exit_code = 126


class CommandNotFound(ClustercronError):
    """There is no such command on this node."""

    exit_code = 127


class StoreUnavailable(ClustercronError):
    """Redis could not be asked, or would not confirm, within the budget; the same may be tried again."""

    exit_code = 75

    def with_advice(self) -> StoreUnavailable:
        """Answer the same with the hint that a run's owner needs, where there is no better one."""
        advice = "the job did not run on this node; --on-store-down=run would run it on every node"
        return StoreUnavailable(self.message, self.hint or advice)

    def going_on(self) -> StoreUnavailable:
        """Answer the same with the hint that the job is run all the same."""
        return StoreUnavailable(self.message, "runs it all the same, without a claim: --on-store-down=run")


class ClaimUnsettled(ClustercronError):
    """Another node claimed the tick and neither started it nor let it lapse within the budget."""

    exit_code = 75


class StoreRefused(ClustercronError):
    """Redis answered, and trying again cannot help: password, permission, TLS, layout, not a Redis."""


class NotKnown(ClustercronError):
    """A job, tick or run that was asked for and that Redis does not know."""

    exit_code = 1


class CannotWrite(ClustercronError):
    """An output that is closed, full or broken."""


def reason_of(exc: BaseException) -> str:
    """Answer why, of an exception that nobody expected, without the name of its class."""
    if isinstance(exc, MemoryError):
        return "out of memory"
    return str(getattr(exc, "strerror", None) or exc).lower() or "unknown"
