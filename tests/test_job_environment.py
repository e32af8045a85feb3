"""The job's environment: cron's own, what a job may want to know of its run, and no password."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from clustercron.config import OTHER_VARIABLES
from clustercron.options import RUN_OPTIONS
from tests.rig import COMMAND, Fleet, Server, free_port

if TYPE_CHECKING:
    import subprocess

TICK = "2026-03-29T00:30:00Z"
SCHEDULE = ("--schedule", "30 2 * * *", "--tz", "Europe/Amsterdam")
OURS = {
    "CLUSTERCRON_JOB",
    "CLUSTERCRON_TICK",
    "CLUSTERCRON_TICK_LOCAL",
    "CLUSTERCRON_TICK_EPOCH",
    "CLUSTERCRON_PREVIOUS_TICK",
    "CLUSTERCRON_RUN_ID",
    "CLUSTERCRON_ATTEMPT",
    "CLUSTERCRON_FENCING_TOKEN",
    "CLUSTERCRON_NODE",
    "CLUSTERCRON_LATE_SECONDS",
    "CLUSTERCRON_IS_CATCH_UP",
}


def read(text: str) -> dict[str, str]:
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def environment(fleet: Fleet, *options: str, **popen: Any) -> dict[str, str]:
    end = fleet.run("--job", "env", *SCHEDULE, *options, "--", "env", "-0", **popen)
    assert (end.returncode, end.stderr) == (0, "")
    return read(end.stdout)


def record(server: Server, job: str, instant: str) -> dict[str, str]:
    found = str(server.client().hget(f"clustercron:{{{job}}}:runs", instant))
    return dict(pair.split("=", 1) for pair in found.split())


def test_the_job_finds_its_run_in_its_environment(fleet: Fleet, server: Server) -> None:
    env = environment(fleet, "--tick", "2026-03-30T00:30:00Z")
    ran = record(server, "env", "1774830600")
    assert {name: env.get(name) for name in OURS} == {
        "CLUSTERCRON_JOB": "env",
        "CLUSTERCRON_TICK": "2026-03-30T00:30:00Z",
        "CLUSTERCRON_TICK_LOCAL": "2026-03-30T02:30:00+02:00",
        "CLUSTERCRON_TICK_EPOCH": "1774830600",
        # The day before, 02:30 was skipped: that run was at the change.
        "CLUSTERCRON_PREVIOUS_TICK": "2026-03-29T01:00:00Z",
        "CLUSTERCRON_RUN_ID": "env@2026-03-30T00:30:00Z",
        "CLUSTERCRON_ATTEMPT": "1",
        "CLUSTERCRON_FENCING_TOKEN": ran["k"],
        "CLUSTERCRON_NODE": "node-1",
        "CLUSTERCRON_LATE_SECONDS": str((int(ran["b"]) - 1774830600_000) // 1000),
        "CLUSTERCRON_IS_CATCH_UP": "0",
    }
    assert "CLUSTERCRON_UNCLAIMED" not in env


def test_the_rest_is_the_environment_of_cron(fleet: Fleet) -> None:
    given = {"SHELL": "/bin/sh", "LOGNAME": "root", "ODD": "a=b\nc", "EMPTY": "", "LANG": "nl_NL.UTF-8", "LC_ALL": "C"}
    env = environment(fleet, "--tick", "2026-03-30T00:30:00Z", env=given)
    assert {name: value for name, value in env.items() if name not in OURS} == {**fleet.env, **given}


def test_bytes_that_are_no_utf8_stay_as_they_are(fleet: Fleet) -> None:
    job = "import os; print(os.environb[b'ODD'])"
    argv = [sys.executable, "-I", "-c", job]
    for locale in ({}, {"LC_ALL": "C"}):
        end = fleet.run(
            "--job", f"env{len(locale)}", *SCHEDULE, "--tick", "2026-03-30T00:30:00Z", "--", *argv,
            env={"ODD": "\udcff\udcc3", **locale},
        )  # fmt: skip
        assert end.stdout == "b'\\xff\\xc3'\n"


def test_no_fact_is_the_variable_of_an_option() -> None:
    taken = {option.variable for option in RUN_OPTIONS} | set(OTHER_VARIABLES)
    facts = {*OURS, "CLUSTERCRON_UNCLAIMED", "CLUSTERCRON_OUTCOME", "CLUSTERCRON_EXIT_CODE"}
    assert facts & taken == {"CLUSTERCRON_NODE"}


def test_the_facts_of_an_outer_run_are_replaced(fleet: Fleet) -> None:
    outer = dict.fromkeys(OURS - {"CLUSTERCRON_NODE"}, "outer")
    env = environment(fleet, "--tick", "2026-03-30T00:30:00Z", env={**outer, "CLUSTERCRON_UNCLAIMED": "1"})
    assert "outer" not in env.values()
    assert "CLUSTERCRON_UNCLAIMED" not in env


@pytest.mark.parametrize(
    ("user", "stays"), [(":secret@", False), ("u:secret@", False), ("u%40x:secret@", False), ("u@", True), ("", True)]
)
def test_a_url_is_taken_out_if_it_has_a_password(fleet: Fleet, user: str, stays: bool) -> None:
    url = f"redis://{user}redis.example.net:6379/0"
    env = environment(fleet, "--tick", "2026-03-30T00:30:00Z", env={"CLUSTERCRON_REDIS_READ_URL": url})
    assert env.get("CLUSTERCRON_REDIS_READ_URL") == (url if stays else None)
    assert "secret" not in "".join(env.values())


def test_a_switch_s_url_with_a_password_is_taken_out_too(fleet: Fleet) -> None:
    url = f"http://user:secret@127.0.0.1:{free_port()}/uuid"
    end = fleet.run(
        "--job", "env", *SCHEDULE, "--tick", "2026-03-30T00:30:00Z", "--", "env", env={"CLUSTERCRON_PING": url}
    )
    assert end.returncode == 0
    assert end.stderr.count("cannot ping http://127.0.0.1:") == 2
    assert "secret" not in end.stdout + end.stderr


def test_neither_job_nor_hook_sees_the_password_that_was_used(fleet: Fleet, server: Server) -> None:
    client = server.client()
    client.config_set("requirepass", "secret")
    try:
        url = server.url.replace("unix://", "unix://:secret@")
        options = ["--tick", "2026-03-30T00:30:00Z", "--on-failure", "env"]
        fire = ("--job", "env", *SCHEDULE, *options, "--", "sh", "-c", "env; exit 3")
        end = fleet.run(*fire, env={"CLUSTERCRON_REDIS_URL": url})
    finally:
        client.config_set("requirepass", "")
    assert end.returncode == 3
    assert end.stdout.count("CLUSTERCRON_RUN_ID=") == 2
    assert "secret" not in end.stdout + end.stderr


def test_a_run_without_a_claim_says_so_to_its_job(fleet: Fleet) -> None:
    fleet.set_url(f"redis://127.0.0.1:{free_port()}")
    options = ["--on-store-down", "run", "--store-timeout", "300ms", "--tick", "2026-03-30T00:30:00Z"]
    end = fleet.run("--job", "env", *SCHEDULE, *options, "--", "env", "-0")
    assert end.returncode == 0
    env = read(end.stdout)
    assert (env["CLUSTERCRON_UNCLAIMED"], env["CLUSTERCRON_FENCING_TOKEN"]) == ("1", "0")
    assert env["CLUSTERCRON_RUN_ID"] == "env@2026-03-30T00:30:00Z"


def _nested(fleet: Fleet, *options: str) -> subprocess.CompletedProcess[str]:
    inner = [*COMMAND, "run", "--job", "inner", "--schedule", "* * * * *", *options, "--", "env", "-0"]
    return fleet.run("--job", "outer", *SCHEDULE, "--tick", "2026-03-30T00:30:00Z", "--", *inner)


def test_a_job_can_run_another_job(fleet: Fleet, server: Server) -> None:
    end = _nested(fleet)
    assert (end.returncode, end.stderr) == (0, "")
    env = read(end.stdout)
    assert env["CLUSTERCRON_RUN_ID"] == f"inner@{env['CLUSTERCRON_TICK']}"
    ran = record(server, "inner", env["CLUSTERCRON_TICK_EPOCH"])
    assert ran["s"] == "succeeded"
    # It takes its own start as fired at.
    assert (ran["w"], abs(int(ran["f"]) - int(ran["c"])) < 5_000) == ("own-start", True)


def test_the_password_that_is_taken_out_does_not_reach_a_nested_run(fleet: Fleet, server: Server) -> None:
    client = server.client()
    client.acl_setuser("u", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"])
    (fleet.folder / "clustercron.conf").write_text("")
    try:
        inner = [*COMMAND, "run", "--job", "inner", "--schedule", "* * * * *", "--", "true"]
        url = server.url.replace("unix://", "unix://u:secret@")
        end = fleet.run(
            "--job",
            "outer",
            *SCHEDULE,
            "--tick",
            "2026-03-30T00:30:00Z",
            "--",
            *inner,
            env={"CLUSTERCRON_REDIS_URL": url},
        )
    finally:
        client.acl_deluser("u")
    assert end.returncode == 125
    assert "CLUSTERCRON_REDIS_URL is not set" in end.stderr
    assert "secret" not in end.stderr
