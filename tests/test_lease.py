"""The lease: renewed while the job runs, lost and regained, and the end of a run told to Redis now or by a later fire."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from clustercron import spool
from tests.proxy import Proxy
from tests.rig import Fire, Fleet, Server, lines, wait_for

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

TICK = "2026-01-05T02:00:00Z"
FIELD = "1767578400"
RUN = ("run", "--job", "lease", "--schedule", "* * * * *")


def start(fleet: Fleet, options: str, *command: str, tick: str = TICK, **popen: Any) -> Fire:
    return fleet.start(*RUN, "--tick", tick, *options.split(), "--", *command, **popen)


def run(fleet: Fleet, options: str, *command: str, **popen: Any) -> subprocess.CompletedProcess[str]:
    return start(fleet, options, *command, **popen).end()


def record(server: Server, field: str = FIELD) -> dict[str, str]:
    text = str(server.client().hget("clustercron:{lease}:runs", field) or "")
    return dict(pair.split("=", 1) for pair in text.split())


def await_renewals(server: Server, count: int) -> dict[str, str]:
    return wait_for(lambda: (r := record(server)) and int(r.get("r", 0)) >= count and r, f"{count} renewals")


class Held:
    """A job that runs until it is let go, and says when it has been told to stop."""

    def __init__(self, fleet: Fleet, name: str = "held") -> None:
        self.pid_file = fleet.folder / f"{name}.pid"
        self.go = fleet.folder / f"{name}.go"
        loop = f"until test -e {self.go}; do sleep 0.02; done; echo end; exit 3"
        self.command = ("/bin/sh", "-c", f"echo $$ > {self.pid_file}; {loop}")

    def await_start(self) -> int:
        return int(wait_for(lambda: lines(self.pid_file), "the job runs")[0])

    def let_go(self) -> None:
        self.go.touch()


@pytest.fixture
def held(fleet: Fleet) -> Held:
    return Held(fleet)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "own") as server:
        yield server


def spooled(fleet: Fleet) -> list[Path]:
    folder = fleet.folder / "state" / "spool"
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("policy", ["warn", "kill"])
def test_a_lease_is_renewed_for_as_long_as_the_job_runs(fleet: Fleet, server: Server, held: Held, policy: str) -> None:
    fire = start(fleet, f"--lease 1s --on-lease-lost {policy}", *held.command)
    first = await_renewals(server, 1)
    later = await_renewals(server, 4)
    assert int(later["l"]) - int(first["l"]) >= 900
    assert (later["s"], later["g"], later["k"]) == ("running", "1000", first["k"])
    held.let_go()
    end = fire.end()
    assert (end.returncode, end.stdout, end.stderr) == (3, "end\n", "")
    assert (record(server)["s"], record(server)["x"]) == ("failed", "3")


@pytest.mark.parametrize("part", ["request", "reply"])
def test_a_renewal_that_hangs_does_not_delay_the_end(fleet: Fleet, server: Server, held: Held, part: Any) -> None:
    with Proxy(server.socket) as proxy:
        fleet.set_url(proxy.url)
        proxy.lose("renew", part, "silence", times=100)
        fire = start(fleet, "--lease 60s", *held.command, env={"CLUSTERCRON_LEASE": "30s"})
        held.await_start()
        held.let_go()
        assert fire.end().returncode == 3
        # Once more with one under way.
        slow = Held(fleet, "slow")
        fire = start(fleet, "--lease 6s", *slow.command, tick="2026-01-05T02:01:00Z")
        wait_for(lambda: proxy.count("renew"), "a renewal is under way")
        began = time.monotonic()
        slow.let_go()
        assert fire.end().returncode == 3
        assert time.monotonic() - began < 1.5
    assert record(server, "1767578460")["s"] == "failed"


def test_a_store_that_is_restarted_empty_has_the_run_again(fleet: Fleet, own_server: Server, held: Held) -> None:
    fleet.set_url(own_server.url)
    fire = start(fleet, "--lease 1s", *held.command)
    before = await_renewals(own_server, 1)
    own_server.stop()
    own_server.start()
    assert record(own_server) == {}
    after = await_renewals(own_server, 1)
    assert [after[x] for x in "asnokcbf"] == [before[x] for x in "asnokcbf"]
    assert run(fleet, "", "/bin/echo", "twice", node="node-2").stdout == ""
    held.let_go()
    end = fire.end()
    assert (end.returncode, end.stderr) == (3, "")
    assert record(own_server)["s"] == "failed"


def test_after_flushall_the_record_is_restored_and_tokens_go_on(fleet: Fleet, server: Server, held: Held) -> None:
    fire = start(fleet, "--lease 1s", *held.command)
    before = await_renewals(server, 1)
    server.client().flushall()
    after = await_renewals(server, 1)
    assert after["k"] == before["k"]
    held.let_go()
    assert fire.end().returncode == 3
    later = run(fleet, "", "/bin/sh", "-c", "echo $CLUSTERCRON_FENCING_TOKEN", tick="2026-01-05T02:01:00Z")
    assert int(later.stdout) > int(before["k"])


def test_the_end_is_recorded_when_the_store_is_back_within_the_budget(
    fleet: Fleet, own_server: Server, held: Held
) -> None:
    fleet.set_url(own_server.url)
    fire = start(fleet, "--lease 60s --keep-output 1K", *held.command)
    pid = held.await_start()
    own_server.stop()
    held.let_go()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the job has ended")
    own_server.start()
    end = fire.end()
    assert (end.returncode, end.stdout, end.stderr) == (3, "end\n", "")
    assert (record(own_server)["s"], record(own_server)["x"]) == ("failed", "3")
    assert own_server.client().get(f"clustercron:{{lease}}:output:{TICK}.1") == "end\n"
    assert spooled(fleet) == []


def _spool_one(fleet: Fleet, server: Server, held: Held, options: str = "") -> float:
    """Have one end of a run kept; answers when the job ended."""
    fleet.set_url(server.url)
    fire = start(fleet, f"--lease 60s --store-timeout 1s --keep-output 1K {options}", *held.command)
    held.await_start()
    server.stop()
    held.let_go()
    ended_at = time.time()
    end = fire.end()
    assert (end.returncode, end.stdout) == (3, "end\n")
    first, second = end.stderr.splitlines()
    assert first.startswith(f"clustercron: lease: cannot record the end of {TICK}: redis at {server.socket}: ")
    assert second.startswith("clustercron: hint: this node's next fire records it (failed), from ")
    (path,) = spooled(fleet)
    assert str(path) in second
    assert path.stat().st_mode & 0o777 == 0o600
    return ended_at


@pytest.mark.parametrize("by", ["winner", "loser", "another job"])
def test_what_could_not_be_recorded_is_recorded_by_the_nodes_next_fire(
    fleet: Fleet, own_server: Server, held: Held, by: str
) -> None:
    ended_at = _spool_one(fleet, own_server, held)
    own_server.start()
    later = "2026-01-05T02:01:00Z"
    if by == "loser":
        assert run(fleet, "", "/bin/true", tick=later, env={"CLUSTERCRON_STATE_DIR": "/nowhere"}).returncode == 0
    job = ["--job", "other"] if by == "another job" else []
    end = fleet.run(*RUN[1:], *job, "--tick", later, "--", "/bin/true")
    assert (end.returncode, end.stdout, end.stderr) == (0, "", "")
    assert spooled(fleet) == []
    kept = record(own_server)
    assert (kept["s"], kept["x"], kept["n"]) == ("failed", "3", "node-1")
    assert abs(int(kept["e"]) / 1000 - ended_at) < 2
    assert own_server.client().get(f"clustercron:{{lease}}:output:{TICK}.1") == "end\n"
    assert run(fleet, "", "/bin/echo", "twice").stdout == ""


def test_a_second_term_sends_the_end_to_the_spool_at_once(fleet: Fleet, own_server: Server, held: Held) -> None:
    fleet.set_url(own_server.url)
    fire = start(fleet, "--lease 60s --store-timeout 50s", *held.command)
    pid = held.await_start()
    own_server.stop()
    fire.process.terminate()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the job has ended")
    began = time.monotonic()
    fire.process.terminate()
    assert fire.end().returncode == 143
    assert time.monotonic() - began < 10
    assert len(spooled(fleet)) == 1


def test_a_start_that_is_never_confirmed_is_one_line_and_gives_the_tick_back(fleet: Fleet, server: Server) -> None:
    job, path = fleet.append_job()
    with Proxy(server.socket) as proxy:
        fleet.set_url(proxy.url)
        proxy.lose("start", "reply", times=1000)
        proxy.lose("finish", "request", times=1000)
        end = run(fleet, "--store-timeout 1s", *job)
        assert end.returncode == 75
        assert [line.split(": ")[:2] for line in end.stderr.splitlines()] == [
            ["clustercron", "lease"],
            ["clustercron", "hint"],
        ]
        assert len(spooled(fleet)) == 1
        proxy.heal()
        fleet.run(*RUN[1:], "--job", "other", "--tick", TICK, "--", "/bin/true")
    fleet.set_url(server.url)
    assert record(server)["s"] == "abandoned"
    assert run(fleet, "", *job, node="node-2").returncode == 0
    assert [line.split()[1] for line in lines(path)] == ["node-2"]


def _line(fire: Fire) -> str:
    """The next line of stderr, and no byte more."""
    assert fire.process.stderr is not None
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(fire.process.stderr.fileno(), 1)
    return line.decode()


def _take_over(fleet: Fleet, server: Server, name: str) -> Fire:
    """Lose the data and let another node claim the tick before the first one renews."""
    other = Held(fleet, name)
    server.client().flushall()
    fire = start(fleet, "", *other.command, node="node-2")
    other.await_start()
    return fire


def test_a_lease_that_is_taken_is_said_and_the_job_goes_on(fleet: Fleet, server: Server, held: Held) -> None:
    fire = start(fleet, "--lease 6s", *held.command)
    held.await_start()
    other = _take_over(fleet, server, "other")
    assert _line(fire) == (
        f"clustercron: lease: lost the lease of {TICK}: another attempt has the tick: the job goes on\n"
    )
    held.let_go()
    end = fire.end()
    assert (end.returncode, end.stdout) == (3, "end\n")
    assert end.stderr.splitlines() == [
        "clustercron: hint: --on-lease-lost=kill would stop it",
        f"clustercron: lease: did not record the end of {TICK} (failed): another attempt has the tick",
    ]
    assert (record(server)["n"], record(server)["s"]) == ("node-2", "running")
    other.kill()


def test_a_lease_that_is_taken_ends_the_job_with_kill(fleet: Fleet, server: Server, held: Held) -> None:
    fire = start(fleet, "--lease 6s --on-lease-lost kill --retries 3", *held.command)
    held.await_start()
    other = _take_over(fleet, server, "other")
    end = fire.end()
    assert (end.returncode, end.stdout) == (143, "")
    assert end.stderr == f"clustercron: lease: lost the lease of {TICK}: another attempt has the tick: stops the job\n"
    assert (record(server)["n"], record(server)["s"]) == ("node-2", "running")
    other.kill()


def test_with_kill_the_job_ends_before_its_lease_does(fleet: Fleet, own_server: Server, held: Held) -> None:
    fleet.set_url(own_server.url)
    fire = start(fleet, "--lease 4s --kill-after 500ms --store-timeout 2s --on-lease-lost kill", *held.command)
    pid = held.await_start()
    with own_server.stopped():
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the job is stopped")
        ended_at_ms = time.time() * 1000
    end = fire.end()
    assert end.returncode == 143
    assert f"redis at {own_server.socket} did not confirm it in time: stops the job" in end.stderr
    kept = record(own_server)
    assert kept["s"] == "lease-lost"
    # While the server was stopped nothing renewed it.
    assert ended_at_ms < int(kept["b"]) + 4_000


@pytest.mark.parametrize("options", ["", "--kill-after 60s", "--timeout 1s --kill-after 60s"])
def test_with_kill_a_job_that_does_not_heed_term_is_gone_before_its_lease_is(
    fleet: Fleet, own_server: Server, options: str
) -> None:
    fleet.set_url(own_server.url)
    script = f'trap "" TERM; echo $$ > {fleet.folder}/pid; while :; do sleep 0.02; done'
    fire = start(fleet, f"--lease 4s --store-timeout 2s --on-lease-lost kill {options}", "/bin/sh", "-c", script)
    (pid,) = wait_for(lambda: lines(fleet.folder / "pid"), "it runs")
    with own_server.stopped():
        wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "the job is stopped")
        ended_at_ms = time.time() * 1000
    end = fire.end()
    assert "stops the job" in end.stderr
    kept = record(own_server)
    assert (end.returncode, kept["s"]) == ((124, "timed-out") if "timeout 1s" in options else (137, "lease-lost"))
    # While the server was stopped nothing renewed it.
    assert ended_at_ms < int(kept["b"]) + 4_000


def test_a_lease_that_expired_is_said_once_and_regained(fleet: Fleet, own_server: Server, held: Held) -> None:
    fleet.set_url(own_server.url)
    fire = start(fleet, "--lease 1s", *held.command)
    await_renewals(own_server, 1)
    with own_server.stopped():
        line = _line(fire)
        assert line.startswith(f"clustercron: lease: lost the lease of {TICK}: redis at {own_server.socket} did not ")
    count = int(record(own_server).get("r", 0))
    await_renewals(own_server, count + 2)
    held.let_go()
    end = fire.end()
    assert (end.returncode, end.stderr) == (3, "clustercron: hint: --on-lease-lost=kill would stop it\n")
    assert record(own_server)["s"] == "failed"


def test_a_wrapper_that_slept_longer_than_its_lease_ends_the_job_with_kill(
    fleet: Fleet, server: Server, held: Held
) -> None:
    fire = start(fleet, "--lease 1s --kill-after 200ms --on-lease-lost kill", *held.command)
    await_renewals(server, 1)
    fire.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: time.time() * 1000 > int(record(server)["l"]) + 200, "the lease has run out")
    fire.process.send_signal(signal.SIGCONT)
    end = fire.end()
    assert end.returncode == 143
    assert "did not confirm it in time: stops the job" in end.stderr
    assert record(server)["s"] == "lease-lost"


def test_a_job_that_ends_well_when_its_lease_is_lost_has_not_succeeded(fleet: Fleet, own_server: Server) -> None:
    fleet.set_url(own_server.url)
    script = f'trap "exit 0" TERM; echo > {fleet.folder}/up; while :; do sleep 0.02; done'
    options = ["--lease", "1s", "--on-lease-lost", "kill", "--store-timeout", "2s", "--on-failure", "echo hook"]
    fire = fleet.start(*RUN, "--tick", TICK, *options, "--", "/bin/sh", "-c", script)
    wait_for(lambda: lines(fleet.folder / "up"), "it runs")
    with own_server.stopped():
        assert "stops the job" in _line(fire)
    end = fire.end()
    assert (end.returncode, end.stdout) == (143, "hook\n")
    assert (record(own_server)["s"], record(own_server)["x"]) == ("lease-lost", "0")


# --- the spool: hostile files, other stores, no room


def _fill(fleet: Fleet, count: int, **fields: str) -> Path:
    folder = fleet.folder / "state" / "spool"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    known = dict.fromkeys(spool.FIELDS, "1")
    for number in range(count):
        (folder / f"000000000{number:04}-x-1.run").write_text(json.dumps({**known, **fields}))
    return folder


def test_the_spool_of_another_store_is_left_alone_and_in_nobodys_way(
    fleet: Fleet, own_server: Server, held: Held
) -> None:
    folder = _fill(fleet, 30, store="redis at elsewhere:6379, database 0, prefix clustercron")
    for path in spooled(fleet):
        path.rename(folder / f"0{path.name}")
    fleet.set_url(own_server.url)
    fire = start(fleet, "--lease 60s --store-timeout 1s", *held.command)
    held.await_start()
    own_server.stop()
    held.let_go()
    assert fire.end().returncode == 3
    assert len(spooled(fleet)) == 31
    own_server.start()
    fleet.run(*RUN[1:], "--tick", "2026-01-05T02:01:00Z", "--", "/bin/true")
    assert len(spooled(fleet)) == 30
    assert record(own_server)["s"] == "failed"


def _store(server: Server) -> str:
    return f"redis at {server.socket}, database 0, prefix clustercron"


BAD = {
    "job": "no{braces}",
    "tick": "9" * 40,
    "ended_at_ms": "soon",
    "ttl_ms": "x",
    "output": "x",
    "token": "no number",
}


def test_hostile_spool_files_are_passed_over(fleet: Fleet, own_server: Server, held: Held) -> None:
    folder = _fill(fleet, 0)
    good = {**dict.fromkeys(spool.FIELDS, "1"), "store": _store(own_server), "job": "lease", "output": ""}
    for field, value in BAD.items():
        (folder / f"00-{field}.run").write_text(json.dumps({**good, field: value}))
    (folder / "01-garbage.run").write_bytes(b"\xff{")
    (folder / "01-empty.run").write_bytes(b"")
    (folder / "01-list.run").write_text("[1]")
    (folder / "01-number.run").write_text(json.dumps({**good, "tick": 5}))
    (folder / "01-nested.run").write_text("[" * 100_000)
    with (folder / "01-large.run").open("wb") as file:
        file.truncate(100 << 20)
    outside = fleet.folder / "outside"
    outside.write_text(json.dumps(good))
    (folder / "02-link.run").symlink_to(outside)
    os.mkfifo(folder / "02-fifo.run")
    (folder / "02-folder.run").mkdir()
    strangers = spooled(fleet)
    _spool_one_more(fleet, own_server, held)
    own_server.start()
    end = fleet.run(*RUN[1:], "--tick", "2026-01-05T02:01:00Z", "--", "/bin/true", timeout_s=20)
    assert (end.returncode, end.stdout, end.stderr) == (0, "", "")
    assert spooled(fleet) == strangers
    assert outside.exists()
    assert record(own_server)["s"] == "failed"


def _spool_one_more(fleet: Fleet, server: Server, held: Held) -> None:
    fleet.set_url(server.url)
    fire = start(fleet, "--lease 60s --store-timeout 1s", *held.command)
    held.await_start()
    server.stop()
    held.let_go()
    assert fire.end().returncode == 3


def _keep_ends(fleet: Fleet, store: str, jobs: list[str]) -> Path:
    """Have the end of a run of each job kept, the first the oldest."""
    folder = _fill(fleet, 0)
    end = {"store": store, "tick": FIELD, "restore": "a=1 s=running", "output": "", "outcome": "failed", "facts": "x=3"}
    for number, job in enumerate(jobs):
        path = folder / f"{job}.run"
        path.write_text(json.dumps({**dict.fromkeys(spool.FIELDS, "1"), **end, "job": job}))
        os.utime(path, (number, number))
    return folder


def test_ends_that_are_refused_keep_no_other_from_being_delivered(fleet: Fleet, server: Server) -> None:
    broken = [f"broken-{number}" for number in range(50)]
    folder = _keep_ends(fleet, _store(server), [*broken, "lease"])
    for job in broken:
        server.client().set(f"clustercron:{{{job}}}:runs", "no hash")
    end = run(fleet, "", "/bin/true", tick="2026-01-05T02:01:00Z")
    assert (end.returncode, end.stderr) == (0, "")
    assert record(server)["s"] == "failed"
    assert sorted(path.stem for path in folder.iterdir()) == sorted(broken)
    for job in broken:
        server.client().delete(f"clustercron:{{{job}}}:runs")
    run(fleet, "", "/bin/true", tick="2026-01-05T02:02:00Z")
    assert spooled(fleet) == []


@pytest.mark.parametrize("how", ["late", "silence"])
def test_ends_that_take_long_hold_no_fire_and_each_has_its_turn(fleet: Fleet, server: Server, how: Any) -> None:
    with Proxy(server.socket) as proxy:
        fleet.set_url(proxy.url)
        store = f"redis at 127.0.0.1:{proxy.port}, database 0, prefix clustercron"
        folder = _keep_ends(fleet, store, [f"job-{number}" for number in range(20)])
        proxy.lose("finish", "reply", how, times=1000, after=1)  # the first is its own
        fire = start(fleet, "", "/bin/true")
        wait_for(lambda: proxy.count("finish") > 1, "it begins to deliver")
        began = time.monotonic()
        end = fire.end()
        assert (end.returncode, end.stderr) == (0, "")
        assert time.monotonic() - began < 4
        assert 18 <= len(spooled(fleet)) <= 20
        first = min(folder.iterdir(), key=lambda path: path.stat().st_mtime)
        assert first.stem in ("job-1", "job-2"), "what was tried in vain is the last to be tried again"
        proxy.heal()
        assert run(fleet, "", "/bin/true", tick="2026-01-05T02:01:00Z").returncode == 0
    assert spooled(fleet) == []


def test_a_kept_end_that_another_attempt_makes_void_is_said_to_be(fleet: Fleet, own_server: Server, held: Held) -> None:
    _spool_one(fleet, own_server, held)
    own_server.start()
    assert run(fleet, "", "/bin/true", node="node-2", env={"CLUSTERCRON_STATE_DIR": "/nowhere"}).returncode == 0
    end = run(fleet, "-v", "/bin/true", tick="2026-01-05T02:01:00Z")
    said = f"{TICK}: did not record the end of lease that was kept: failed: another attempt has the tick"
    assert said in end.stderr
    assert "recorded the end" not in end.stderr
    assert spooled(fleet) == []
    assert (record(own_server)["n"], record(own_server)["s"]) == ("node-2", "succeeded")


@pytest.mark.parametrize("by", ["delivery", "keeping"])
def test_what_a_crash_left_half_written_is_deleted_when_it_is_old(
    fleet: Fleet, own_server: Server, held: Held, by: str
) -> None:
    folder = _fill(fleet, 0)
    old, new = folder / "1-x-1.run.new", folder / "2-x-1.run.new"
    for path in (old, new):
        path.write_text("{")
    os.utime(old, (time.time() - 7_200,) * 2)
    if by == "delivery":
        run(fleet, "", "/bin/true")
    else:
        _spool_one_more(fleet, own_server, held)
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.root
def test_a_spool_file_of_another_user_is_not_read(fleet: Fleet, server: Server) -> None:
    folder = _fill(fleet, 1, store=_store(server), job="lease", tick=FIELD, output="")
    os.chown(folder / "0000000000000-x-1.run", 65534, 65534)
    assert run(fleet, "", "/bin/true", tick="2026-01-05T02:01:00Z").returncode == 0
    assert len(spooled(fleet)) == 1


@pytest.mark.parametrize("how", ["link", "writable", "file"])
def test_a_spool_directory_that_others_control_is_not_used(
    fleet: Fleet, own_server: Server, held: Held, how: str
) -> None:
    state, elsewhere = fleet.folder / "state", fleet.folder / "elsewhere"
    state.mkdir()
    elsewhere.mkdir()
    if how == "link":
        (state / "spool").symlink_to(elsewhere)
    elif how == "file":
        (state / "spool").write_text("")
    else:
        (state / "spool").mkdir()
        (state / "spool").chmod(0o777)
    fleet.set_url(own_server.url)
    fire = start(fleet, "--lease 60s --store-timeout 1s", *held.command)
    held.await_start()
    own_server.stop()
    held.let_go()
    end = fire.end()
    assert end.returncode == 3
    first, second = (line for line in end.stderr.splitlines() if "hint" not in line)
    assert "cannot record the end" in first
    assert "cannot keep the record" in second
    assert "Traceback" not in end.stderr
    assert list(elsewhere.iterdir()) == []
    own_server.start()
    assert run(fleet, "", "/bin/true", tick="2026-01-05T02:01:00Z").stderr == ""


def test_a_full_spool_takes_no_more(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir(mode=0o700)
    for number in range(spool.MAX_FILES):
        (folder / f"{number}.run").touch()
    with pytest.raises(spool.SpoolError, match="are waiting there already"):
        spool.keep(str(tmp_path), "name", dict.fromkeys(spool.FIELDS, "x"))


@pytest.mark.root
def test_a_full_disk_leaves_no_half_record(fleet: Fleet) -> None:
    # The mount is in this test's own namespace only as long as the process that made it lives.
    script = (
        "import os, sys; from clustercron import spool\n"
        "try: spool.keep(sys.argv[1], 'x', dict.fromkeys(spool.FIELDS, 'x' * 100_000))\n"
        "except spool.SpoolError as exc: print(exc)\n"
        "print(os.listdir(sys.argv[1] + '/spool'))\n"
    )
    small = fleet.folder / "small"
    small.mkdir()
    import subprocess
    import sys

    mount = f'mount -t tmpfs -o size=64k none {small} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-I", "-c", script, str(small)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"cannot keep the record: {small}/spool/x.run: no space left on device\n[]\n"
