"""The views as commands: what they show of real runs, their documents key by key, and what they do in bad company."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING, Any

import pytest

from clustercron import options, schema
from clustercron.cli import cli
from clustercron.render import FURTHER_KEYS
from tests.rig import COMMAND, Fleet, Server, free_port, lines, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import redis

TICK = "2026-01-05T02:00:00Z"
EPOCH = 1_767_578_400
VIEWS = ("next", "explain", "history", "status")
RUN_KEYS = [
    "tick",
    "attempt",
    "node",
    "outcome",
    "exit_code",
    "signal",
    "fired_at",
    "claimed_at",
    "started_at",
    "ended_at",
    "late_seconds",
    "fencing_token",
    "tried",
]
ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z")


@pytest.fixture
def client(server: Server) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


def read(fleet: Fleet, *arguments: str, exit_code: int = 0, **options: Any) -> Any:
    """Call a view with --json and answer its document."""
    end = fleet.call(*arguments, "--json", **options)
    assert (end.returncode, end.stderr) == (exit_code, ""), end
    return json.loads(end.stdout)


def show(fleet: Fleet, *arguments: str, exit_code: int = 0, **options: Any) -> str:
    """Call a view and answer its screen."""
    end = fleet.call(*arguments, **options)
    assert (end.returncode, end.stderr) == (exit_code, ""), end
    return end.stdout


def fire(fleet: Fleet, *command: str, tick: str = TICK, job: str = "billing", node: str = "node-1", **more: str) -> int:
    line = ["--job", job, "--schedule", more.pop("schedule", "0 * * * *"), "--tick", tick]
    line += [word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", value)]
    return fleet.run(*line, "--", *command, node=node).returncode


def put_job(client: redis.Redis, name: str, runs: dict[str, str | bytes], **state: str) -> None:
    """Write a job's records by hand."""
    keys = schema.JobKeys("clustercron", name)
    client.hset(keys.job, mapping={"layout": "1", "definitions": "0|0 * * * *|UTC", **state})
    if runs:
        client.hset(keys.runs, mapping=runs)
        client.rpush(keys.recent, *runs)


# Documents


def keys_of(command: str, place: str = "") -> list[str]:
    return [
        key[len(place) :] for key in FURTHER_KEYS[command] if key.startswith(place) and "[" not in key[len(place) :]
    ]


def test_the_document_of_next_has_its_keys(fleet: Fleet) -> None:
    document = read(
        fleet, "next", "--schedule", "0 2 * * *", "--tz", "Europe/Amsterdam", "--from", TICK, "--count", "1"
    )
    assert list(document) == ["version", *[k for k in document if k in keys_of("next")][:3], "ticks", "truncated"]
    assert set(document) == {"version", "ticks", *keys_of("next")}
    assert document["version"] == 1
    assert document["ticks"] == [{"tick": "2026-01-06T01:00:00Z", "local": "2026-01-06T02:00:00+01:00", "note": None}]


def test_the_document_of_explain_has_its_keys(fleet: Fleet) -> None:
    document = read(fleet, "explain", "--schedule", "0 2 * * *", "--at", "2026-01-05T02:00:30Z")
    promised = {"version", "decision", "tick", "late_seconds", "previous", "next"}
    assert set(document) == {*promised, *keys_of("explain")}
    assert {key: document[key] for key in promised} == {
        "version": 1,
        "decision": "run",
        "tick": TICK,
        "late_seconds": 30,
        "previous": TICK,
        "next": "2026-01-06T02:00:00Z",
    }


def test_the_document_of_history_has_its_keys(fleet: Fleet) -> None:
    fire(fleet, "sh", "-c", "exit 3")
    fire(fleet, "true", node="node-2")
    fire(fleet, "true", node="node-3")
    document = read(fleet, "history", "billing")
    assert set(document) == {"version", "job", "runs", *keys_of("history")}
    (run,) = document["runs"]
    assert set(run) == {*RUN_KEYS, *keys_of("history", "runs[].")}
    assert (document["version"], document["job"], document["tz"]) == (1, "billing", "UTC")
    plain = ("tick", "attempt", "node", "outcome", "exit_code", "signal", "tried", "faults")
    assert [run[key] for key in plain] == [TICK, 1, "node-1", "failed", 3, None, ["node-2", "node-3"], []]
    times = [run[key] for key in ("fired_at", "claimed_at", "started_at", "ended_at")]
    assert all(ISO.fullmatch(instant) for instant in times)
    assert times[1:] == sorted(times[1:])
    assert isinstance(run["fencing_token"], int)
    assert run["late_seconds"] > 0


def test_the_document_of_status_has_its_keys(fleet: Fleet) -> None:
    fire(fleet, "true")
    document = read(fleet, "status")
    assert set(document) == {"version", "jobs"}
    (job,) = document["jobs"]
    promised = {"job", "schedule", "tz", "last_run", "last_success", "next_tick", "missed", "missed_total", "running"}
    promised |= {"effective_interval_seconds", "paused"}
    assert set(job) == {*promised, *keys_of("status", "jobs[].")}
    assert set(job["last_run"]) == {*RUN_KEYS, *keys_of("history", "runs[].")}
    assert (job["job"], job["schedule"], job["tz"], job["last_success"]) == ("billing", "0 * * * *", "UTC", TICK)
    assert (job["missed"], job["missed_total"], job["running"], job["paused"]) == ([], 0, [], None)
    assert job["effective_interval_seconds"] is None
    assert ISO.fullmatch(job["next_tick"])


# What they show of real runs


def test_a_run_that_goes_on_is_running_and_one_that_was_killed_is_lost_within_its_lease(fleet: Fleet) -> None:
    job, path = fleet.append_job()
    started = fleet.start(
        "run", "--job", "long", "--schedule", "0 * * * *", "--tick", TICK, "--lease", "1s", "--", *job[:2],
        f"{job[2]}; exec sleep 60", start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: lines(path), "the job runs")
    (row,) = read(fleet, "status", "long")["jobs"]
    assert [run["outcome"] for run in row["running"]] == ["running"]
    assert row["last_run"]["outcome"] == "running"
    assert "1 running" in show(fleet, "status")
    os.killpg(started.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: read(fleet, "history", "long")["runs"][0]["outcome"] == "lost", "the run is lost", 8)
    assert time.monotonic() - killed < 5
    (row,) = read(fleet, "status")["jobs"]
    assert (row["running"], row["last_run"]["outcome"]) == ([], "lost")


def test_retries_are_attempts_of_their_own(fleet: Fleet) -> None:
    fire(fleet, "false", retries="2", retry_delay="0")
    runs = read(fleet, "history", "billing")["runs"]
    assert [(run["attempt"], run["outcome"]) for run in runs] == [(3, "failed"), (2, "failed"), (1, "failed")]
    assert len({run["fencing_token"] for run in runs}) == 3


def test_a_death_by_signal_is_shown_as_such(fleet: Fleet) -> None:
    fire(fleet, "sh", "-c", "kill -9 $$")
    (run,) = read(fleet, "history", "billing")["runs"]
    assert (run["outcome"], run["exit_code"], run["signal"]) == ("killed", None, 9)
    assert "killed, signal 9" in show(fleet, "history", "billing")


def test_a_limit_shows_the_newest(fleet: Fleet, client: redis.Redis) -> None:
    put_job(client, "billing", {str(EPOCH + 3600 * hour): "a=1 s=succeeded" for hour in range(30)})
    assert len(read(fleet, "history", "billing")["runs"]) == 20
    two = read(fleet, "history", "billing", "--limit", "2")["runs"]
    assert [run["tick"] for run in two] == ["2026-01-06T07:00:00Z", "2026-01-06T06:00:00Z"]


@pytest.mark.parametrize(("date", "hours"), [("2026-03-29", 23), ("2026-10-25", 25), ("2026-09-16", 24)])
def test_a_day_is_the_jobs_own(fleet: Fleet, client: redis.Redis, date: str, hours: int) -> None:
    begin = EPOCH // 86400 * 86400
    runs = {str(tick): "a=1 s=succeeded" for tick in range(begin, begin + 330 * 86400, 3600)}
    put_job(client, "billing", runs, definitions="0|0 * * * *|Europe/Amsterdam")
    document = read(fleet, "history", "billing", "--at", date)
    assert len(document["runs"]) == hours
    offset = "+01:00" if date == "2026-10-25" else "+02:00"
    last = f"{date}T{'22' if offset == '+01:00' else '21'}:00:00Z"
    assert document["runs"][0]["tick"] == last


def test_a_day_without_a_run_is_said_with_its_ticks_and_has_an_exit_code(fleet: Fleet, client: redis.Redis) -> None:
    put_job(client, "billing", {str(EPOCH): "a=1 s=succeeded"}, definitions="0|0 2 * * 1|UTC")
    assert read(fleet, "history", "billing", "--at", "2026-01-12", exit_code=1)["runs"] == []
    missing = fleet.call("history", "billing", "--at", "2026-01-12")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr.splitlines() == [
        "clustercron: billing: no run for 2026-01-12",
        "clustercron: hint: '0 2 * * 1' in UTC has 1 tick on that day: 2026-01-12T02:00:00Z",
    ]
    assert "has no tick on that day" in fleet.call("history", "billing", "--at", "2026-01-13").stderr


def test_missed_ticks_are_those_that_nobody_ran(fleet: Fleet, client: redis.Redis) -> None:
    hour = int(time.time()) // 3600 * 3600
    ticks = [hour - 3600 * back for back in range(20, -2, -1)]
    put_job(client, "billing", {str(t): "a=1 s=succeeded" for t in ticks[:3] + ticks[6:]}, known=f"{ticks[0] * 1000}")
    client.zadd(schema.JobKeys("clustercron", "billing").ticks, {str(t): t for t in ticks[:3] + ticks[6:]})
    (row,) = read(fleet, "status", "billing")["jobs"]
    names = [time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t)) for t in ticks[3:6]]
    assert (row["missed"], row["missed_total"]) == (names, 3)
    text = show(fleet, "status", "billing")
    assert all(name in text for name in names)


def test_a_minutely_job_that_nobody_saw_for_a_year_is_shown_at_once(fleet: Fleet, client: redis.Redis) -> None:
    begin = int(time.time()) // 60 * 60 - 365 * 86400
    put_job(
        client, "old", {str(begin): "a=1 s=succeeded"}, known=str(begin * 1000 + 500), definitions="0|* * * * *|UTC"
    )
    started = time.monotonic()
    (row,) = read(fleet, "status", "old")["jobs"]
    assert time.monotonic() - started < 3
    assert 365 * 1440 - 10 <= row["missed_total"] <= 365 * 1440
    assert len(row["missed"]) == 100


def test_next_of_a_job_is_read_by_its_newest_definition(fleet: Fleet, client: redis.Redis) -> None:
    put_job(client, "billing", {}, definitions="0|0 1 * * *|UTC\n60|30 2 * * *|Europe/Amsterdam")
    document = read(fleet, "next", "billing", "--from", "2026-10-25T00:00:00Z", "--count", "2")
    assert document["job"] == "billing"
    assert [t["local"] for t in document["ticks"]] == ["2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]
    assert document["ticks"][0]["note"] == "first of two 02:30 on this day: the second does not run"
    assert document["ticks"][1]["note"] is None


def test_next_of_a_schedule_needs_no_redis(fleet: Fleet) -> None:
    fleet.set_url(f"redis://127.0.0.1:{free_port()}")
    line = ["next", "--schedule", "*/10 * * * *", "--from", TICK, "--to", "2026-01-05T03:00:00Z"]
    assert len(read(fleet, *line)["ticks"]) == 6
    (fleet.folder / "clustercron.conf").write_text("")
    assert len(read(fleet, *line)["ticks"]) == 6
    assert read(fleet, *line, "--count", "2")["truncated"] is True
    assert len(read(fleet, "next", "--schedule", "*/10 * * * *")["ticks"]) == 10


def test_explain_counts_the_zone_of_this_nodes_cron(fleet: Fleet) -> None:
    line = ["explain", "--schedule", "0 2 * * *", "--tz", "Europe/Amsterdam", "--at", "2026-01-05T02:00:01Z"]
    assert read(fleet, *line)["decision"] == "zone-mismatch"
    assert read(fleet, *line, env={"CLUSTERCRON_DAEMON_TZ": "Europe/Amsterdam"})["decision"] == "run"
    assert read(fleet, *line, "--poll")["decision"] == "run"
    text = show(fleet, *line)
    assert "cron's zone UTC" in text
    assert "schedule's zone Europe/Amsterdam" in text


@pytest.mark.parametrize(
    ("at", "decision"),
    [("01:00:01", "run"), ("01:10:00", "run"), ("01:10:01", "too-late"), ("04:14", "too-late"), ("09:10", "not-due")],
)
def test_explain_decides_by_the_grace_that_is_given(fleet: Fleet, at: str, decision: str) -> None:
    line = ["explain", "--schedule", "0 2 * * *", "--tz", "Europe/Amsterdam", "--at", f"2026-01-05T{at}Z"]
    assert read(fleet, *line, "--grace", "10m")["decision"] == decision
    assert read(fleet, *line, env={"CLUSTERCRON_GRACE": "10m"})["decision"] == decision


# In bad company


HOSTILE: dict[str, str | bytes] = {
    str(EPOCH): "a=1 s=succeeded n=\x1b[31mred\x07 t=1",
    str(EPOCH + 3600): "a=1 s=%1B%5B2Jgone n=[bold]markup[/bold] x=1e9",
    str(EPOCH + 7200): "a=one s=running l=soon n=%0Anext",
    str(EPOCH + 10800): b"\xff\xfe\x00",
    str(EPOCH + 14400): "s=failed x=1 n=" + "n" * 100_000,
    str(EPOCH + 18000): "",
    "not a tick": "s=succeeded",
    f"{EPOCH}.\x1b[5m": "a=1 s=failed n=%E2%80%AEedoc",
}


@pytest.fixture
def hostile(client: redis.Redis) -> None:
    put_job(client, "billing", HOSTILE, newest=str(EPOCH + 18000), live="x \x1b[31m", known="yes")
    client.hset(schema.JobKeys("clustercron", "billing").nodes, mapping={"\x1b]0;title\x07": "i=1", "b": "\x00"})
    put_job(client, "odd-schedule", {}, definitions="0|\x1b[31m* * * *|UTC")
    put_job(client, "odd-zone", {}, definitions="0|* * * * *|../../\x1b[0m")
    client.sadd("clustercron:jobs", "billing", "\x1b[31mno-name", "wrong-type")
    client.set("clustercron:{wrong-type}:job", "a string")


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("width", ["", "80"])
@pytest.mark.parametrize("arguments", [["status"], ["status", "billing"], ["history", "billing"], ["next", "billing"]])
def test_hostile_records_are_shown_escaped(fleet: Fleet, arguments: list[str], width: str) -> None:
    for more in ([], ["--json"]):
        end = fleet.call(*arguments, *more, env={"COLUMNS": width or None, "LC_ALL": "C.UTF-8"})
        assert end.returncode == 0, end.stderr
        assert "Traceback" not in end.stderr
        for text in (end.stdout, end.stderr):
            assert all(c.isprintable() or c == "\n" for c in text), ascii(text)
        if more:
            assert json.loads(end.stdout)["version"] == 1


@pytest.mark.usefixtures("hostile")
def test_what_is_wrong_with_records_is_said(fleet: Fleet) -> None:
    status = fleet.call("status")
    assert "billing: `known` is 'yes', not a whole number" in status.stdout
    assert "wrong-type: its key `job` holds something else" in status.stdout
    assert "odd-zone: zone" in status.stdout
    assert r"'\x1b[31mno-name', which cannot be a job's name" in status.stderr
    history = fleet.call("history", "billing").stdout
    assert r"\x1b[31mred\x07" in history
    assert "[bold]markup[/bold]" in history
    assert "damaged record: attempt is 'one'" in history
    assert "the record has no state" in history
    runs = json.loads(fleet.call("history", "billing", "--json").stdout)["runs"]
    assert runs[-1]["tried"] == ["\x1b]0;title\x07"] or runs[-2]["tried"] == ["\x1b]0;title\x07"]
    assert any("exit_code is '1e9'" in fault for run in runs for fault in run["faults"])


def test_a_newer_layout_is_refused_with_a_message(fleet: Fleet, client: redis.Redis) -> None:
    put_job(client, "billing", {}, layout="2")
    for arguments in (["status"], ["history", "billing"], ["next", "billing"]):
        end = fleet.call(*arguments)
        assert (end.returncode, end.stdout) == (3, "")
        assert "layout 2, newer than this version reads" in end.stderr


def test_an_empty_store_is_told_kindly(fleet: Fleet) -> None:
    assert show(fleet, "status").startswith("no jobs yet")
    assert read(fleet, "status") == {"version": 1, "jobs": []}


@pytest.mark.parametrize("arguments", [["status"], ["history"], ["next"]])
def test_a_job_that_is_not_known_gets_the_nearest_names(
    fleet: Fleet, client: redis.Redis, arguments: list[str]
) -> None:
    for name in ("billing", "building", "mail"):
        put_job(client, name, {})
    for more in ([], ["--json"]):
        end = fleet.call(*arguments, "bilding", *more)
        assert (end.returncode, end.stdout) == (1, "")
        assert end.stderr.splitlines() == [
            "clustercron: no such job: 'bilding'",
            "clustercron: hint: did you mean building or billing?",
        ]
    assert fleet.call(*arguments, "\x1b[31m{x}").stderr.splitlines()[0] == r"clustercron: no such job: '\x1b[31m{x}'"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["next"], "give either JOB or --schedule"),
        (["next", "billing", "--schedule", "* * * * *"], "give either JOB or --schedule"),
        (["next", "billing", "--tz", "UTC"], "a job has its own zone"),
        (["next", "--schedule", "61 * * * *"], "minute: 61 is not in 0-59"),
        (["next", "--schedule", "* * * * *", "--tz", "Europe/Amsterdm"], "unknown time zone"),
        (["next", "--schedule", "* * * * *", "--from", "yesterday"], "cannot use --from: instant 'yesterday'"),
        (["next", "--schedule", "* * * * *", "--count", "0"], "cannot use --count: '0'"),
        (["explain"], "give --schedule"),
        (["explain", "--schedule", "* * * * *", "--at", "02:00"], "cannot use --at"),
        (["explain", "--schedule", "* * * * *", "--grace", "soon"], "cannot use --grace: 'soon'"),
        (["history"], "missing argument"),
        (["history", "billing", "--at", "2026-02-30"], "cannot use --at: '2026-02-30': not a date"),
        (["history", "billing", "--limit", "many"], "cannot use --limit: 'many'"),
        (["status", "--jsn"], "no such option"),
        (["status", "--store-timeout", "0"], "cannot use --store-timeout"),
    ],
)
def test_what_cannot_be_used_is_said_with_exit_code_2(fleet: Fleet, arguments: list[str], part: str) -> None:
    end = fleet.call(*arguments)
    assert (end.returncode, end.stdout) == (2, ""), end.stderr
    assert part in end.stderr
    assert len(end.stderr.splitlines()) <= 2


@pytest.mark.parametrize("arguments", [["status"], ["status", "--json"], ["history", "billing"], ["next", "billing"]])
def test_without_redis_there_is_one_line_and_exit_code_3(fleet: Fleet, arguments: list[str]) -> None:
    fleet.set_url(f"redis://127.0.0.1:{free_port()}")
    end = fleet.call(*arguments)
    assert (end.returncode, end.stdout) == (3, "")
    assert end.stderr.startswith("clustercron: cannot look: redis at 127.0.0.1:")
    assert end.stderr.endswith(": connection refused\n")
    assert end.stderr.count("\n") == 1


def test_a_silent_redis_is_waited_for_no_longer_than_the_budget(fleet: Fleet, tmp_path: Path) -> None:
    with Server(tmp_path / "own") as server, server.stopped():
        started = time.monotonic()
        end = fleet.call("status", "--store-timeout", "500ms", env={"CLUSTERCRON_REDIS_READ_URL": server.url})
        assert time.monotonic() - started < 3
    assert end.returncode == 3
    assert end.stderr.endswith("no answer within 0.5 s\n")


def test_views_read_where_they_are_told_to(fleet: Fleet, client: redis.Redis) -> None:
    put_job(client, "billing", {})
    fleet.set_url(
        f"redis://127.0.0.1:{free_port()}\nCLUSTERCRON_REDIS_READ_URL=unix://{client.connection_pool.connection_kwargs['path']}"
    )
    assert [job["job"] for job in read(fleet, "status")["jobs"]] == ["billing"]


# Screens


def in_terminal(fleet: Fleet, *arguments: str, columns: int = 80, **environ: str) -> str:
    """Run a view with a terminal of so many columns as its stdout; answer all that it wrote."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**fleet.env, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environ}
    with subprocess.Popen([*COMMAND, *arguments], stdout=follower, stderr=subprocess.PIPE, env=env) as process:
        os.close(follower)
        written = b""
        while True:
            try:
                part = os.read(leader, 1 << 16)
            except OSError:  # Linux says so when the last writer is gone
                break
            if not part:
                break
            written += part
        assert process.stderr is not None
        assert process.stderr.read() == b""
    os.close(leader)
    assert process.returncode == 0
    return written.decode().replace("\r\n", "\n")


@pytest.fixture
def busy(client: redis.Redis) -> None:
    hour = int(time.time()) // 3600 * 3600
    record = f"n=web-1.example s=failed x=1 t=1,2 a=1 k={EPOCH}000 f={EPOCH}100 c={EPOCH}200 b={EPOCH}300 e={EPOCH}900"
    for name in ("billing", "a-job-with-a-rather-long-name-that-fills-a-line"):
        put_job(client, name, {str(hour): record, str(hour - 3600): record}, definitions="0|0 * * * *|Europe/Amsterdam")
        client.hset(schema.JobKeys("clustercron", name).nodes, mapping={"node-1": "i=1", "node-2": "i=2"})


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("columns", [80, 120, 200])
@pytest.mark.parametrize("arguments", [["status"], ["history", "billing"], ["next", "billing"]])
def test_a_table_fits_the_terminal(fleet: Fleet, arguments: list[str], columns: int) -> None:
    written = in_terminal(fleet, *arguments, columns=columns, NO_COLOR="1")
    assert max(map(len, written.splitlines())) <= columns
    assert "─" in written
    if arguments[0] == "status":
        assert all(
            header in written for header in ("JOB", "LAST TICK", "OUTCOME", "TOOK", "NODE", "NEXT TICK", "MISSED")
        )
    if arguments[0] == "history":
        assert all(header in written for header in ("TICK", "ATTEMPT", "NODE", "OUTCOME", "STARTED", "LATE", "TRIED"))


@pytest.mark.usefixtures("busy")
def test_colour_is_for_terminals_and_never_with_no_color(fleet: Fleet) -> None:
    assert "\x1b[" in in_terminal(fleet, "status")
    assert "\x1b" not in in_terminal(fleet, "status", NO_COLOR="1")
    assert "\x1b" not in in_terminal(fleet, "status", TERM="dumb")
    assert "\x1b" not in show(fleet, "status", env={"TERM": "xterm-256color", "FORCE_COLOR": "1"})


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, {"LANG": "C", "LC_ALL": ""}, {"LC_ALL": ""}])
def test_the_c_locale_gets_ascii(fleet: Fleet, client: redis.Redis, locale: dict[str, str]) -> None:
    client.hset(schema.JobKeys("clustercron", "billing").runs, str(EPOCH), "s=succeeded n=knöten")
    for arguments in (["status"], ["history", "billing"]):
        assert in_terminal(fleet, *arguments, **locale, NO_COLOR="1").isascii()
        assert show(fleet, "history", "billing", env=dict(locale)).isascii()
    assert r"kn\xf6ten" in show(fleet, "history", "billing", env=dict(locale))


@pytest.mark.usefixtures("busy")
def test_piped_a_row_is_a_line(fleet: Fleet) -> None:
    text = show(fleet, "status").splitlines()
    assert len(text) == 3
    assert text[1].split()[0] == "a-job-with-a-rather-long-name-that-fills-a-line"
    assert "Europe/Amsterdam" in text[2]
    assert not any(line.endswith(" ") for line in text)


def test_a_reader_that_has_enough_is_no_trouble(fleet: Fleet) -> None:
    line = ["next", "--schedule", "* * * * *", "--from", TICK, "--count", "20000"]
    for more in ([], ["--json"]):
        command = " ".join(f"'{word}'" for word in [*COMMAND, *line, *more])
        script = f'{{ {command}; echo "exit $?" >&2; }} | head -n 1'
        end = subprocess.run(
            ["sh", "-c", script], capture_output=True, env=fleet.env, timeout=60, check=False, text=True
        )
        assert end.stderr == "exit 0\n"
        assert len(end.stdout.splitlines()) == 1


SPEAKING = [
    (3, "next --schedule '* * * * *'"),
    (3, "status"),
    (3, "--help"),
    (3, "--version"),
    (3, "status --help"),
    (125, "run --help"),
    (125, f"run --job billing --schedule '0 * * * *' --tick {TICK} --dry-run -- true"),
]


@pytest.mark.parametrize(("exit_code", "line"), SPEAKING)
@pytest.mark.parametrize(
    ("target", "reason"), [(">/dev/full", "no space left on device"), (">&-", "bad file descriptor")]
)
def test_an_output_that_takes_nothing_is_one_line(
    fleet: Fleet, exit_code: int, line: str, target: str, reason: str
) -> None:
    script = f"'{COMMAND[0]}' -I -m clustercron {line} {target}"
    end = subprocess.run(["sh", "-c", script], capture_output=True, env=fleet.env, timeout=60, check=False, text=True)
    job = "billing: " if "--job" in line else ""
    assert (end.returncode, end.stderr) == (exit_code, f"clustercron: {job}cannot write the output: {reason}\n")


@pytest.mark.parametrize("line", [line for _, line in SPEAKING])
def test_an_output_that_was_closed_early_is_no_trouble(fleet: Fleet, line: str) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    command = [*COMMAND, *shlex.split(line)]
    end = subprocess.run(command, stdout=write_fd, stderr=subprocess.PIPE, env=fleet.env, timeout=60, check=False)
    os.close(write_fd)
    assert (end.returncode, end.stderr) == (0, b"")


def test_a_message_never_goes_to_redis_in_place_of_a_closed_stderr(fleet: Fleet, client: redis.Redis) -> None:
    client.sadd("clustercron:jobs", "not a job's name")
    client.config_resetstat()
    assert fleet.call("status", command=["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", *COMMAND]).returncode == 0
    assert client.info("errorstats") == {}
    assert "cmdstat_smembers" in client.info("commandstats")


@pytest.mark.parametrize(
    "line",
    [
        ["next", "--schedule", ""],
        ["next", "--schedule", "@daily", "--tz", ""],
        ["next", "--schedule", "@daily", "--from", ""],
        ["next", "--schedule", "@daily", "--count", ""],
        ["next", "--schedule", "@daily", "--from", "@-99999999999"],
        ["next", "--schedule", "@daily", "--to", "@999999999999"],
        ["explain", "--schedule", ""],
        ["explain", "--schedule", "@daily", "--grace", ""],
        ["explain", "--schedule", "@daily", "--at", "0001-01-01T00:00+00:01"],
        ["status", "--store-timeout", ""],
    ],
    ids=" ".join,
)
def test_a_value_that_is_empty_or_out_of_time_is_refused_in_one_line(fleet: Fleet, line: list[str]) -> None:
    end = fleet.call(*line)
    assert (end.returncode, end.stdout) == (2, "")
    (said,) = end.stderr.splitlines()
    assert said.startswith(f"clustercron: cannot use {line[-2]}: ")


def test_the_first_and_the_last_ticks_of_time_are_shown_whole(fleet: Fleet) -> None:
    def rows(*line: str) -> list[list[str]]:
        return [re.split("  +", row)[:2] for row in show(fleet, "next", *line).splitlines()[1:]]

    last = rows("--schedule", "0 * * * *", "--tz", "Asia/Tokyo", "--from", "9999-12-31T23:00Z", "--count", "2")
    assert last == [
        ["9999-12-31 23:00Z", "Sat 10000-01-01 08:00+09"],
        ["10000-01-01 00:00Z", "Sat 10000-01-01 09:00+09"],
    ]
    first = rows("--schedule", "0 * * * *", "--tz", "Etc/GMT+5", "--from", "0001-01-01T00:00Z", "--count", "1")
    assert first == [["0001-01-01 00:00Z", "Sun 0000-12-31 19:00-05"]]


def test_a_schedule_may_have_tabs(fleet: Fleet) -> None:
    document = read(fleet, "next", "--schedule", "0\t2 *\t* *", "--from", TICK, "--count", "1")
    assert [found["tick"] for found in document["ticks"]] == [TICK]
    assert fire(fleet, "true", schedule="0\t2 * *\t*") == 0
    (job,) = read(fleet, "status")["jobs"]
    assert job["schedule"] == "0 2 * * *"


@pytest.mark.parametrize(
    ("module", "line"),
    [("clustercron.options", "run"), ("clustercron.wire", "run"), ("clustercron.cli", "status"), ("click", "--help")],
)
def test_an_interrupt_while_it_loads_ends_it_without_a_word(fleet: Fleet, module: str, line: str) -> None:
    code = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
from clustercron.__main__ import main
sys.meta_path.insert(0, Interrupting())
sys.exit(main())
"""
    words = [line, *(["--job", "a", "--schedule", "@daily", "--", "true"] if line == "run" else [])]
    end = fleet.call(*words, command=[sys.executable, "-I", "-c", code])
    assert (end.returncode, end.stdout, end.stderr) == (-signal.SIGINT, "", "")


# Help


def test_without_a_command_there_is_help_and_exit_code_2(fleet: Fleet) -> None:
    end = fleet.call()
    assert (end.returncode, end.stdout) == (2, "")
    assert end.stderr.startswith("Usage: clustercron [OPTIONS] COMMAND")
    assert all(f"\n  {name} " in end.stderr for name in ("run", *VIEWS))


@pytest.mark.parametrize("name", VIEWS)
def test_the_help_ends_with_an_example_that_works(fleet: Fleet, client: redis.Redis, name: str) -> None:
    put_job(client, "billing", {str(EPOCH): "a=1 s=succeeded", "1789524000": "a=1 s=succeeded"})
    text = show(fleet, name, "--help")
    example = text.rstrip().partition("\nExample:\n")[2]
    assert example.strip().startswith(f"clustercron {name}")
    assert max(map(len, text.splitlines())) <= 100
    for line in example.strip().splitlines():
        command = line.strip().replace("clustercron", f"'{COMMAND[0]}' -I -m clustercron", 1)
        end = subprocess.run(
            ["sh", "-c", command], capture_output=True, env=fleet.env, check=False, timeout=60, text=True
        )
        assert (end.returncode, end.stderr) == (0, ""), line


def test_an_option_that_run_has_too_means_the_same() -> None:
    of_run = {option.name: option for option in options.RUN_OPTIONS}
    shared = 0
    for name in VIEWS:
        for parameter in cli.commands[name].params:
            option = of_run.get((parameter.opts[0]).lstrip("-"))
            if option is not None and parameter.opts[0].startswith("--"):
                shared += 1
                assert getattr(parameter, "is_flag", False) == option.is_flag
                assert option.is_flag or parameter.metavar == option.metavar
                # A view may say less of it, and in the same words.
                assert option.help.startswith(str(getattr(parameter, "help", "")).partition(" [")[0])
    assert shared >= 8


# Size


def fill(client: redis.Redis, jobs: int, runs: int) -> list[str]:
    """Write jobs with hourly runs, as five nodes would have left them."""
    last = int(time.time()) // 3600 * 3600
    names = [f"job-{number:04}" for number in range(jobs)]
    for name in names:
        keys = schema.JobKeys("clustercron", name)
        ticks = [last - 3600 * back for back in range(runs - 1, -1, -1)]
        pipeline = client.pipeline(transaction=False)
        state = {"layout": 1, "newest": ticks[-1], "known": ticks[0] * 1000 + 900, "nodes": 5, "live": ""}
        pipeline.hset(keys.job, mapping={**state, "definitions": f"{ticks[0]}|0 * * * *|Europe/Amsterdam"})
        pipeline.rpush(keys.ticks, *(str(t) for t in sorted(ticks)))
        pipeline.rpush(keys.recent, *ticks)
        about = "z=2026f v=0.1.0 d=0%20*%20*%20*%20*|Europe/Amsterdam"
        pipeline.hset(keys.nodes, mapping={f"node-{n}": f"i={n} t={last}000 k=3 {about}" for n in range(1, 6)})
        record = "a=1 n=node-{n} k={t}500 c={t}500 f={t}100 w=daemon-child z=2026f v=0.1.0 t=1,2,3 s=succeeded b={t}510 e={e}200 x=0"
        pipeline.hset(keys.runs, mapping={str(t): record.format(t=t, e=t + 4, n=t // 3600 % 5 + 1) for t in ticks})
        for t in ticks:
            pipeline.set(keys.claim(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t))), "x" * 32)
        pipeline.execute()
    client.sadd("clustercron:jobs", *names)
    return names


@pytest.mark.benchmark
@pytest.mark.parametrize("runs", [50, 128])
def test_a_thousand_jobs_are_shown_in_a_moment(fleet: Fleet, client: redis.Redis, runs: int) -> None:
    fill(client, 1_000, runs)
    for arguments, most_s in ((["status"], 1.5), (["status", "--json"], 1.5), (["history", "job-0500"], 0.4)):
        took = []
        for _ in range(5):
            started = time.monotonic()
            show(fleet, *arguments)
            took.append(time.monotonic() - started)
        print(f"{' '.join(arguments)}: {sorted(took)[2]:.2f} s with {runs} runs a job")
        assert sorted(took)[2] < most_s
