"""The way of the views to Redis, through redis-py. It reads and never writes; it judges nothing.

What is read are somebody's words: any field may be missing, huge or of another type. A key of the wrong type is a fault
of its job and stops nothing else. Questions go out in pipelines, so that the number of round trips grows with batches of
jobs and not with jobs. One attempt is made: a person, or a monitoring system, asks again soon enough.
"""

from __future__ import annotations

import inspect
import ssl
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from clustercron import options, schema
from clustercron.errors import StoreRefused, StoreUnavailable
from clustercron.wire import reply_trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from clustercron.config import StoreAddress, StoreSettings

    Command = tuple[str | int, ...]

T = TypeVar("T")

# The last runs of each job that `read_jobs` answers.
RECENT_RUNS = 50
_COMMANDS_A_BATCH = 1_000
_SCAN_COUNT = 5_000
_SCAN_CALLS = 40
_TLS = "look at CLUSTERCRON_REDIS_CA_FILE, _CERT_FILE and _KEY_FILE, and at the host name in the URL"
_TLS_PORT = "redis:// is for a port without TLS, rediss:// for one with it"
# redis-py cuts the first word off the errors that it has a class for.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (redis.exceptions.NoPermissionError, "NOPERM"),
    (redis.exceptions.BusyLoadingError, "LOADING"),
    (redis.exceptions.MasterDownError, "MASTERDOWN"),
    (redis.exceptions.ClusterDownError, "CLUSTERDOWN"),
    (redis.exceptions.MovedError, "MOVED"),
    (redis.exceptions.AskError, "ASK"),
    (redis.exceptions.TryAgainError, "TRYAGAIN"),
)


@dataclass(frozen=True)
class JobRecords:
    """What Redis holds of one job, as it is there.

    Attributes:
        name: the job's name.
        state: the hash `job`.
        runs: fields of the hash `runs` to their records, those that were asked for.
        fields: all fields of the hash `runs`, where they were asked for.
        nodes: the hash `nodes`.
        run_count: how many records there are.
        taken_count: how many ticks the list of taken ticks has.
        first_taken: the lowest of them, epoch seconds; None for an empty list.
        oldest: the record of the oldest kept claim; None where there is none.
        faults: what is not what it should be, a sentence each.
    """

    name: str
    state: Mapping[str, str]
    runs: Mapping[str, str]
    fields: tuple[str, ...]
    nodes: Mapping[str, str]
    run_count: int
    taken_count: int
    first_taken: int | None
    oldest: str | None
    faults: tuple[str, ...]

    @property
    def exists(self) -> bool:
        """Whether Redis knows anything of the job."""
        return bool(self.state or self.run_count or self.fields or self.faults)


@dataclass(frozen=True)
class JobNames:
    """The jobs that a store has.

    Attributes:
        names: sorted.
        strange: entries of the list of jobs that cannot be a job's name.
    """

    names: tuple[str, ...]
    strange: tuple[str, ...]


class Store:
    """A connection for one view. All questions share one budget of time, name resolution included.

    Every method raises StoreUnavailable when Redis did not answer within the budget, and StoreRefused when it answered
    that asking again cannot help: password, permission, TLS, a newer layout.

    Args:
        settings: where Redis is, and how keys are named.
        budget_ms: total time for all that is asked, in milliseconds.
    """

    def __init__(self, settings: StoreSettings, budget_ms: int) -> None:
        self._settings = settings
        self._budget_s = budget_ms / 1000
        self._deadline = time.monotonic() + self._budget_s
        self._client: redis.Redis | None = None
        self.round_trips = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._client is not None:
            self._client.close()

    def job_names(self) -> JobNames:
        """Answer which jobs there are: those of the list of jobs, and those whose keys are there but are not listed yet."""
        return self._within_budget(self._job_names)

    def read_jobs(self, names: Sequence[str]) -> tuple[int, list[JobRecords]]:
        """Answer Redis's clock before the reading, and of each job its state, its last and its live runs, and its nodes."""
        return self._within_budget(lambda: self._read_jobs(names))

    def read_fields(self, name: str) -> tuple[int, JobRecords]:
        """Answer Redis's clock before the reading, and of one job its state, nodes and the fields of all its runs."""
        return self._within_budget(lambda: self._read_fields(name))

    def read_runs(self, job: JobRecords, fields: Sequence[str]) -> JobRecords:
        """Answer the job with the records of these fields; one that was deleted meanwhile is left out."""
        return self._within_budget(lambda: self._read_runs([job], [fields])[0])

    def find_success(self, jobs: Sequence[JobRecords]) -> dict[str, str]:
        """Answer the field of the last success of each job that has one older than its last runs."""
        return self._within_budget(lambda: self._find_success(jobs))

    def read_taken(self, windows: Mapping[str, tuple[int, int]]) -> dict[str, frozenset[int]]:
        """Answer which ticks of a job's window (from, and before, epoch seconds) are in its list of taken ticks."""
        commands = [("LRANGE", schema.JobKeys(self._settings.prefix, name).ticks, 0, -1) for name in windows]
        return self._within_budget(lambda: self._read_ticks(windows, commands))

    def read_recorded(self, windows: Mapping[str, tuple[int, int]]) -> dict[str, frozenset[int]]:
        """Answer which ticks of a job's window have records: they may reach further back than the list."""
        commands = [("HKEYS", schema.JobKeys(self._settings.prefix, name).runs) for name in windows]
        return self._within_budget(lambda: self._read_ticks(windows, commands))

    def _within_budget(self, work: Callable[[], T]) -> T:
        """Do the work beside and wait no longer than the budget: neither a resolver nor a dripping peer can be bounded."""
        answers: list[T] = []
        troubles: list[BaseException] = []

        def exchange() -> None:
            try:
                answers.append(work())
            except BaseException as exc:  # noqa: BLE001 - raised below, by the thread that waits
                troubles.append(exc)

        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join(max(0.0, self._deadline - time.monotonic()))
        if answers:
            return answers[0]
        if not troubles:
            raise self._no_answer()
        trouble = troubles[0]
        if isinstance(trouble, redis.RedisError | OSError):
            raise self._named(trouble) from None
        raise trouble

    def _no_answer(self) -> StoreUnavailable:
        address = self._settings.address
        reason = f"cannot look: {address}: no answer within {self._budget_s:g} s"
        return StoreUnavailable(reason, _TLS_PORT if address.tls else None)

    def _named(self, trouble: Exception) -> StoreUnavailable | StoreRefused:
        """Say what is wrong in the words that `run` has for it."""
        begin = f"cannot look: {self._settings.address}: "
        secret = self._settings.address.password
        # A server may repeat what it was sent.
        text = str(trouble).replace(secret, "***") if secret else str(trouble)
        if isinstance(trouble, redis.exceptions.InvalidResponse):
            return StoreRefused(f"{begin}this is no Redis: {text}", "look at host and port of the URL")
        code = next((code for kind, code in _CODES if isinstance(trouble, kind)), "")
        if isinstance(trouble, redis.exceptions.AuthenticationError):
            code = "NOAUTH" if "required" in text.lower() else "WRONGPASS"
        if code or isinstance(trouble, redis.ResponseError):
            reply = reply_trouble(f"{code} {text}".strip())
            kind = StoreUnavailable if reply.passing else StoreRefused
            return kind(begin + reply.reason, reply.hint)
        return self._named_io(begin, trouble, text)

    def _named_io(self, begin: str, trouble: Exception, text: str) -> StoreUnavailable | StoreRefused:
        causes: list[BaseException] = []
        cause: BaseException | None = trouble
        while cause is not None and len(causes) < 8:
            causes.append(cause)
            cause = cause.__cause__ or cause.__context__
        for cause in causes:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return StoreRefused(f"{begin}TLS: its certificate is not accepted: {cause.verify_message}", _TLS)
            if isinstance(cause, ssl.SSLError) and cause.reason:
                reason = cause.reason.replace("_", " ").lower()
                return StoreRefused(f"{begin}TLS: {reason}", _TLS_PORT if "wrong version" in reason else _TLS)
        if any(isinstance(cause, TimeoutError | redis.exceptions.TimeoutError) for cause in causes):
            return self._no_answer()
        for cause in causes:
            if isinstance(cause, OSError) and cause.strerror:
                reset = isinstance(cause, ConnectionResetError) and not self._settings.address.path
                return StoreUnavailable(begin + cause.strerror.lower(), _TLS_PORT if reset else None)
        return StoreUnavailable(begin + (text.rstrip(".") or "no connection"))

    def _send(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in batches and answer their replies; only a key of the wrong type is a reply, other errors raise."""
        if self._client is None:
            self._client = _connect(self._settings.address, self._budget_s)
        replies: list[Any] = []
        for begin in range(0, len(commands), _COMMANDS_A_BATCH):
            pipeline = self._client.pipeline(transaction=False)
            for command in commands[begin : begin + _COMMANDS_A_BATCH]:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            self.round_trips += 1
            replies += pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception) and not _is_wrong_type(reply):
                raise reply
        return replies

    def _job_names(self) -> JobNames:
        prefix = self._settings.prefix
        listed, first = self._send([("SMEMBERS", schema.jobs_key(prefix)), self._scan_command(0)])
        found = set() if isinstance(listed, Exception) else set(listed)
        begin, _, end = schema.JobKeys(prefix, "*").job.rpartition("*")
        for _ in range(_SCAN_CALLS):
            cursor, keys = first
            found.update(key[len(begin) : -len(end)] for key in keys if key.startswith(begin) and key.endswith(end))
            if not int(cursor):
                break
            first = self._send([self._scan_command(int(cursor))])[0]
        names = {name for name in found if _is_job_name(name)}
        return JobNames(tuple(sorted(names)), tuple(sorted(found - names)))

    def _scan_command(self, cursor: int) -> Command:
        literal = "".join(f"\\{c}" if c in "*?[]\\^-" else c for c in self._settings.prefix)
        return ("SCAN", cursor, "MATCH", schema.JobKeys(literal, "*").job, "COUNT", _SCAN_COUNT)

    def _read_jobs(self, names: Sequence[str]) -> tuple[int, list[JobRecords]]:
        commands: list[Command] = [("TIME",)]
        for name in names:
            keys = schema.JobKeys(self._settings.prefix, name)
            commands += [
                ("HGETALL", keys.job),
                ("HGETALL", keys.nodes),
                ("HLEN", keys.runs),
                ("LLEN", keys.ticks),
                ("LRANGE", keys.ticks, 0, 0),
                ("LRANGE", keys.recent, 0, 0),
                ("LRANGE", keys.recent, -RECENT_RUNS, -1),
            ]
        clock, *replies = self._send(commands)
        each = len(commands[1:]) // max(1, len(names))
        jobs: list[JobRecords] = []
        asked: list[list[str]] = []
        oldest_fields: list[str] = []
        for index, name in enumerate(names):
            job, oldest, recent = self._read_job(name, replies[index * each : (index + 1) * each])
            live = job.state.get("live", "").split(" ")[:RECENT_RUNS]
            jobs.append(job)
            asked.append([f for f in dict.fromkeys([*recent, *live, job.state.get("newest", "")]) if f])
            oldest_fields.append(oldest)
        for index, fields in self._fields_without_list(jobs, oldest_fields):
            asked[index] += fields
        # The oldest record only dates the others: it is no run to show unless it is one of the last.
        jobs = self._read_runs(jobs, [[*fields, old] for fields, old in zip(asked, oldest_fields, strict=True)])
        return _clock_ms(clock), [
            replace(job, oldest=job.runs.get(old), runs={f: r for f, r in job.runs.items() if f != old or f in fields})
            for job, old, fields in zip(jobs, oldest_fields, asked, strict=True)
        ]

    def _read_job(self, name: str, replies: Sequence[object]) -> tuple[JobRecords, str, list[str]]:
        """Answer a job without runs, the field of its oldest claim ('' for none), and those of the last ones."""
        faults: list[str] = []
        state = _plain(replies[0], "job", dict, faults)
        nodes = _plain(replies[1], "nodes", dict, faults)
        run_count = _plain(replies[2], "runs", int, faults)
        taken_count = _plain(replies[3], "ticks", int, faults)
        first_taken = _plain(replies[4], "", list, faults)
        oldest = _plain(replies[5], "", list, faults)
        recent = _plain(replies[6], "recent", list, faults)
        self._refuse_newer_layout(name, state)
        first = _tick_number(first_taken[0]) if first_taken else None
        job = JobRecords(name, state, {}, (), nodes, run_count, taken_count, first, None, tuple(faults))
        return job, oldest[0] if oldest else "", recent

    def _refuse_newer_layout(self, name: str, state: Mapping[str, str]) -> None:
        layout = state.get("layout", "")
        if layout.isascii() and layout.isdigit() and int(layout[:9]) > schema.LAYOUT:
            raise StoreRefused(
                f"cannot look: {self._settings.address}: the records of {name} have layout {layout[:9]}, newer than "
                "this version reads",
                "upgrade clustercron on this node",
            )

    def _fields_without_list(self, jobs: Sequence[JobRecords], oldest: Sequence[str]) -> list[tuple[int, list[str]]]:
        """Find the last fields of jobs that have records but no list of them among all their fields."""
        lost = [index for index, job in enumerate(jobs) if job.run_count and not oldest[index]]
        keys = [schema.JobKeys(self._settings.prefix, jobs[index].name).runs for index in lost]
        replies = self._send([("HKEYS", key) for key in keys])
        return [
            (index, sorted(fields, key=_field_order)[-RECENT_RUNS:])
            for index, fields in zip(lost, replies, strict=True)
            if not isinstance(fields, Exception)
        ]

    def _read_fields(self, name: str) -> tuple[int, JobRecords]:
        keys = schema.JobKeys(self._settings.prefix, name)
        clock, *replies = self._send([("TIME",), ("HGETALL", keys.job), ("HGETALL", keys.nodes), ("HKEYS", keys.runs)])
        faults: list[str] = []
        state = _plain(replies[0], "job", dict, faults)
        nodes = _plain(replies[1], "nodes", dict, faults)
        fields = _plain(replies[2], "runs", list, faults)
        self._refuse_newer_layout(name, state)
        job = JobRecords(name, state, {}, tuple(fields), nodes, len(fields), 0, None, None, tuple(faults))
        return _clock_ms(clock), job

    def _read_runs(self, jobs: Sequence[JobRecords], fields: Sequence[Sequence[str]]) -> list[JobRecords]:
        commands: list[Command] = []
        places: list[tuple[int, Sequence[str]]] = []
        for index, job in enumerate(jobs):
            key = schema.JobKeys(self._settings.prefix, job.name).runs
            for begin in range(0, len(fields[index]), _COMMANDS_A_BATCH):
                part = fields[index][begin : begin + _COMMANDS_A_BATCH]
                commands.append(("HMGET", key, *part))
                places.append((index, part))
        found: list[dict[str, str]] = [{} for _ in jobs]
        for (index, part), reply in zip(places, self._send(commands), strict=True):
            if not isinstance(reply, Exception):
                found[index].update((f, r) for f, r in zip(part, reply, strict=True) if r is not None)
        return [replace(job, runs=runs) for job, runs in zip(jobs, found, strict=True)]

    def _find_success(self, jobs: Sequence[JobRecords]) -> dict[str, str]:
        found: dict[str, str] = {}
        skip, count = RECENT_RUNS, 4 * RECENT_RUNS
        left = [job for job in jobs if job.run_count > RECENT_RUNS]
        while left:
            keys = [schema.JobKeys(self._settings.prefix, job.name).recent for job in left]
            replies = self._send([("LRANGE", key, -skip - count, -skip - 1) for key in keys])
            older = self._read_runs(left, [[] if isinstance(fields, Exception) else fields for fields in replies])
            for job in older:
                succeeded = [field for field, record in job.runs.items() if " s=succeeded" in f" {record}"]
                if succeeded:
                    found[job.name] = succeeded[-1]
            left = [job for job, fields in zip(left, replies, strict=True) if fields and job.name not in found]
            left = [job for job in left if skip < job.run_count]
            skip, count = skip + count, 2 * count
        return found

    def _read_ticks(
        self, windows: Mapping[str, tuple[int, int]], commands: Sequence[Command]
    ) -> dict[str, frozenset[int]]:
        found: dict[str, frozenset[int]] = {}
        for (name, (begin, end)), reply in zip(windows.items(), self._send(commands), strict=True):
            texts = () if isinstance(reply, Exception) else reply
            ticks = (_tick_number(text) for text in texts)
            found[name] = frozenset(tick for tick in ticks if tick is not None and begin <= tick < end)
        return found


def _connect(address: StoreAddress, timeout_s: float) -> redis.Redis:
    """Make a client that neither tries again nor says more than is asked; it connects with the first command."""
    known = inspect.signature(redis.Redis.__init__).parameters
    quiet: dict[str, Any] = {"driver_info": None} if "driver_info" in known else {"lib_name": None, "lib_version": None}
    place: dict[str, Any] = {"host": address.host, "port": address.port}
    if address.path:
        place = {"unix_socket_path": address.path}
    if address.tls:
        place |= {
            "ssl": True,
            "ssl_ca_certs": address.ca_file,
            "ssl_certfile": address.cert_file,
            "ssl_keyfile": address.key_file,
            # Without an answer OpenSSL would ask for the passphrase of an encrypted key on the terminal.
            "ssl_password": "",
            "ssl_check_hostname": True,
        }
    return redis.Redis(
        db=address.db,
        username=address.username,
        password=address.password,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        protocol=2,
        decode_responses=True,
        encoding_errors="backslashreplace",
        **place,
        **quiet,
    )


def _plain(reply: object, what: str, kind: type, faults: list[str]) -> Any:
    """Answer a reply, or an empty one of its kind for a key of the wrong type, which is a fault."""
    if not isinstance(reply, Exception):
        return reply
    if what:
        faults.append(f"its key `{what}` holds something else")
    return kind()


def _is_wrong_type(reply: Exception) -> bool:
    return isinstance(reply, redis.ResponseError) and str(reply).startswith("WRONGTYPE")


def _clock_ms(reply: tuple[int, int]) -> int:
    return int(reply[0]) * 1000 + int(reply[1]) // 1000


def _tick_number(text: str) -> int | None:
    """Read the tick of a member or a field, `TICK` or `TICK.ATTEMPT`; None where there is none."""
    digits = text.partition(".")[0]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 12 else None


def _field_order(field: str) -> tuple[int, str]:
    return _tick_number(field) or -1, field


def _is_job_name(text: str) -> bool:
    try:
        options.job_name(text)
    except ValueError:
        return False
    return True
