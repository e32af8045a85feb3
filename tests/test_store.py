"""The views' way to Redis: what is asked and how often, what comes of keys that are not what they should be, and troubles."""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING

import pytest
import trustme

from clustercron import config, schema
from clustercron.errors import ConfigError, StoreRefused, StoreUnavailable
from clustercron.store import RECENT_RUNS, Store
from tests.proxy import Peer, Proxy, reset, stay_silent
from tests.rig import Server, free_port

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import redis

SECRET = "hunter2"
TICK = 1_789_610_400
READING = {"hgetall", "hkeys", "hlen", "hmget", "llen", "lrange", "scan", "smembers", "time"}


def store_at(url: str, budget_s: float = 5, **variables: str) -> Store:
    environ = {"CLUSTERCRON_REDIS_URL": url}
    environ |= {f"CLUSTERCRON_{name.upper()}": value for name, value in variables.items()}
    return Store(config.store_settings(config.Sources(environ, "the file", {})), int(budget_s * 1000))


@pytest.fixture
def client(server: Server) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


def put_job(
    client: redis.Redis, name: str, runs: int = 1, prefix: str = "clustercron", state: str = "succeeded"
) -> None:
    keys = schema.JobKeys(prefix, name)
    ticks = [TICK + 60 * number for number in range(runs)]
    client.hset(keys.job, mapping={"layout": "1", "newest": ticks[-1], "definitions": f"{TICK}|* * * * *|UTC"})
    client.hset(keys.runs, mapping={str(t): f"a=1 s={state} n=node-1 c={t * 1000}" for t in ticks})
    client.rpush(keys.ticks, *(str(t) for t in sorted(ticks)))
    client.rpush(keys.recent, *map(str, ticks))
    client.hset(keys.nodes, mapping={"node-1": "i=1 t=1"})


def test_a_job_is_seen_whether_it_is_listed_or_not(server: Server, client: redis.Redis) -> None:
    put_job(client, "listed")
    client.sadd("clustercron:jobs", "listed", "gone")
    put_job(client, "unlisted")
    put_job(client, "other", prefix="elsewhere")
    with store_at(server.url) as store:
        assert store.job_names().names == ("gone", "listed", "unlisted")
        _, jobs = store.read_jobs(["gone", "listed"])
    assert [job.exists for job in jobs] == [False, True]


@pytest.mark.parametrize("prefix", ["a*c", "a?c", "a[b]c", "a\\c", "ümlaut"])
def test_a_prefix_is_no_pattern(server: Server, client: redis.Redis, prefix: str) -> None:
    put_job(client, "mine", prefix=prefix)
    put_job(client, "other", prefix="abc")
    with store_at(server.url, prefix=prefix) as store:
        assert store.job_names().names == ("mine",)


def test_entries_that_cannot_be_names_are_told_apart(server: Server, client: redis.Redis) -> None:
    client.sadd("clustercron:jobs", "fine", "\x1b[31mred", "a}b", "")
    with store_at(server.url) as store:
        found = store.job_names()
    assert found.names == ("fine",)
    assert found.strange == ("", "\x1b[31mred", "a}b")


def test_what_a_job_has_is_answered_whole(server: Server, client: redis.Redis) -> None:
    put_job(client, "billing", runs=RECENT_RUNS + 20)
    with store_at(server.url) as store:
        now_ms, (job,) = store.read_jobs(["billing"])
    last = [str(TICK + 60 * number) for number in range(20, RECENT_RUNS + 20)]
    assert abs(now_ms - time.time() * 1000) < 60_000
    assert sorted(job.runs) == last
    assert (job.run_count, job.taken_count, job.first_taken) == (RECENT_RUNS + 20, RECENT_RUNS + 20, TICK)
    assert job.oldest == f"a=1 s=succeeded n=node-1 c={TICK * 1000}"
    assert job.nodes == {"node-1": "i=1 t=1"}
    assert job.faults == ()


def test_a_live_run_is_answered_however_old(server: Server, client: redis.Redis) -> None:
    put_job(client, "billing", runs=RECENT_RUNS + 20)
    client.hset(schema.JobKeys("clustercron", "billing").job, "live", f"{TICK + 300} x {TICK + 600}")
    with store_at(server.url) as store:
        _, (job,) = store.read_jobs(["billing"])
    assert {str(TICK + 300), str(TICK + 600)} <= set(job.runs)


def test_runs_are_found_without_their_list(server: Server, client: redis.Redis) -> None:
    put_job(client, "billing", runs=RECENT_RUNS + 20)
    client.delete(schema.JobKeys("clustercron", "billing").recent)
    with store_at(server.url) as store:
        _, (job,) = store.read_jobs(["billing"])
    assert len(job.runs) == RECENT_RUNS
    assert str(TICK + 60 * (RECENT_RUNS + 19)) in job.runs


def test_the_last_success_is_found_however_far_back(server: Server, client: redis.Redis) -> None:
    put_job(client, "billing", runs=1500, state="failed")
    keys = schema.JobKeys("clustercron", "billing")
    client.hset(keys.runs, str(TICK + 120), "a=1 s=succeeded")
    client.hset(keys.runs, str(TICK + 60), "a=1 s=succeeded")
    client.hset(keys.runs, str(TICK), "a=1 s=succeeded")
    put_job(client, "never", runs=400, state="failed")
    with store_at(server.url) as store:
        _, jobs = store.read_jobs(["billing", "never"])
        assert not any("succeeded" in record for job in jobs for record in job.runs.values())
        before = store.round_trips
        assert store.find_success(jobs) == {"billing": str(TICK + 120)}
        assert store.round_trips - before < 12


def test_taken_ticks_of_a_window_are_those_of_the_list_and_of_the_records(server: Server, client: redis.Redis) -> None:
    put_job(client, "billing", runs=10)
    client.hset(schema.JobKeys("clustercron", "billing").runs, str(TICK + 90), "a=1 s=failed")
    window = {"billing": (TICK + 60, TICK + 240), "nobody": (0, TICK)}
    with store_at(server.url) as store:
        expected = {TICK + 60, TICK + 120, TICK + 180}
        assert store.read_taken(window) == {"billing": expected, "nobody": frozenset()}
        assert store.read_recorded(window) == {"billing": expected | {TICK + 90}, "nobody": frozenset()}


def test_round_trips_do_not_grow_with_the_jobs(server: Server, client: redis.Redis) -> None:
    trips = []
    for count in (2, 100):
        names = [f"job-{number}" for number in range(count)]
        for name in names:
            put_job(client, name, runs=3)
        with store_at(server.url) as store:
            store.read_jobs(names)
            store.read_taken(dict.fromkeys(names, (0, TICK)))
            store.read_recorded(dict.fromkeys(names, (0, TICK)))
            trips.append(store.round_trips)
    assert trips == [4, 4]


def test_nothing_but_reading_is_sent_and_nothing_before_it(server: Server, client: redis.Redis) -> None:
    put_job(client, "billing")
    with Proxy(server.socket) as proxy, store_at(proxy.url) as store:
        store.job_names()
        store.read_jobs(["billing"])
        _, job = store.read_fields("billing")
        store.read_runs(job, job.fields)
        store.find_success(store.read_jobs(["billing"])[1])
        store.read_recorded({"billing": (0, TICK)})
        store.read_taken({"billing": (0, TICK)})
    assert {kind for trip in proxy.trips for kind in trip} <= READING
    assert len(proxy.trips) == store.round_trips
    assert proxy.connections == 1


@pytest.mark.parametrize("part", ["job", "runs", "nodes", "recent", "ticks"])
def test_a_key_of_the_wrong_type_is_a_fault_of_its_job_alone(server: Server, client: redis.Redis, part: str) -> None:
    put_job(client, "billing", runs=2)
    put_job(client, "sound", runs=2)
    key = getattr(schema.JobKeys("clustercron", "billing"), part)
    client.delete(key)
    client.set(key, "something else")
    with store_at(server.url) as store:
        _, (job, sound) = store.read_jobs(["billing", "sound"])
        store.read_fields("billing")
        store.find_success([job])
        store.read_taken({"billing": (0, TICK)})
        store.read_recorded({"billing": (0, TICK)})
    assert job.faults == (f"its key `{part}` holds something else",)
    assert job.exists
    assert sound.faults == ()
    assert len(sound.runs) == 2


def test_records_of_a_newer_layout_are_refused(server: Server, client: redis.Redis) -> None:
    put_job(client, "billing")
    client.hset(schema.JobKeys("clustercron", "billing").job, "layout", schema.LAYOUT + 1)
    with store_at(server.url) as store:
        for look in (lambda: store.read_jobs(["billing"]), lambda: store.read_fields("billing")):
            with pytest.raises(StoreRefused, match=r"records of billing have layout 2, newer than this version reads"):
                look()


def test_bytes_that_are_no_text_are_no_trouble(server: Server, client: redis.Redis) -> None:
    put_job(client, "billing")
    client.hset(schema.JobKeys("clustercron", "billing").runs, str(TICK), b"s=\xff\xfe n=\x00")
    with store_at(server.url) as store:
        _, (job,) = store.read_jobs(["billing"])
    assert job.runs[str(TICK)] == "s=\\xff\\xfe n=\x00"


# Troubles


def fails(url: str, budget_s: float = 0.5, **variables: str) -> StoreUnavailable | StoreRefused:
    """Look once and answer the trouble, which comes in time and without the password."""
    started = time.monotonic()
    with store_at(url, budget_s, **variables) as store, pytest.raises((StoreUnavailable, StoreRefused)) as caught:
        store.job_names()
    assert time.monotonic() - started < budget_s + 1
    assert SECRET not in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


def drip(conn: socket.socket) -> None:
    while conn.recv(1 << 16):
        for _ in range(1000):
            conn.sendall(b"*")
            time.sleep(0.05)


@pytest.mark.parametrize("serve", [stay_silent, drip], ids=["silence", "drip"])
def test_one_budget_bounds_a_peer_that_does_not_get_on(serve: Callable[[socket.socket], None]) -> None:
    with Peer(serve) as peer:
        trouble = fails(peer.url)
    assert isinstance(trouble, StoreUnavailable)


def test_a_server_that_stops_between_questions_is_bounded_too(server: Server) -> None:
    with store_at(server.url, 0.6) as store:
        store.job_names()
        started = time.monotonic()
        with server.stopped(), pytest.raises(StoreUnavailable):
            store.job_names()
    assert time.monotonic() - started < 1.6


def test_nothing_listening_is_said_at_once_and_asked_once() -> None:
    trouble = fails(f"redis://127.0.0.1:{free_port()}", 10)
    assert isinstance(trouble, StoreUnavailable)
    assert trouble.message.endswith("connection refused")


def test_a_socket_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert fails(f"unix://{tmp_path}/none.sock").message.endswith("no such file or directory")


def test_a_reset_is_no_try_again() -> None:
    with Peer(lambda conn: (conn.recv(100), reset(conn))) as peer:
        assert isinstance(fails(peer.url), StoreUnavailable)
        assert peer.connections == 1


def test_a_name_that_does_not_resolve_is_said() -> None:
    assert isinstance(fails("redis://does-not-exist.invalid", 3), StoreUnavailable)


@pytest.mark.parametrize(
    ("reply", "kind", "part"),
    [
        ("-LOADING Redis is loading the dataset in memory", StoreUnavailable, "loading the dataset"),
        ("-MASTERDOWN Link with MASTER is down", StoreUnavailable, "Link with MASTER is down"),
        ("-NOPERM this user has no permissions", StoreRefused, "permission missing"),
        ("-NOAUTH Authentication required.", StoreRefused, "it asks for a password"),
        ("-MOVED 3999 127.0.0.1:6381", StoreRefused, "a node of a Redis Cluster"),
        ("-ERR what?", StoreRefused, "what?"),
        ("HTTP/1.1 400 Bad Request", StoreRefused, "this is no Redis"),
    ],
)
def test_an_error_reply_is_said_in_the_words_of_run(reply: str, kind: type[Exception], part: str) -> None:
    with Peer(lambda conn: (conn.recv(1000), conn.sendall(f"{reply}\r\n".encode() * 3), conn.recv(1000))) as peer:
        trouble = fails(peer.url)
    assert isinstance(trouble, kind)
    assert part in trouble.message


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("guarded"), "--requirepass", SECRET, port=True) as server:
        with server.client(password=SECRET) as client:
            client.execute_command("ACL", "SETUSER", "views", "on", ">s3cret", "~clustercron*", "+@read", "+time")
            client.execute_command("ACL", "SETUSER", "blind", "on", ">s3cret", "~clustercron*", "+ping")
            client.execute_command("ACL", "SETUSER", "wide", "on", ">s3cret", "~*", "+@all")
        yield server


def test_a_password_a_user_and_a_database_are_used(guarded: Server, tmp_path: Path) -> None:
    with guarded.client(password=SECRET, db=3) as client:
        put_job(client, "billing")
    (tmp_path / "password").write_text(f"{SECRET}\n")
    place = f"127.0.0.1:{guarded.port}/3"
    for store in (
        store_at(f"redis://:{SECRET}@{place}"),
        store_at(f"redis://{place}", redis_password_file=str(tmp_path / "password")),
        store_at(f"redis://wide:s3cret@{place}"),
        store_at(f"unix://wide:s3cret@{guarded.socket}?db=3"),
    ):
        with store:
            assert store.job_names().names == ("billing",)


def test_a_user_who_may_only_read_is_enough(guarded: Server) -> None:
    with store_at(f"redis://views:s3cret@127.0.0.1:{guarded.port}") as store:
        store.job_names()
        store.read_jobs(["billing"])
        store.read_fields("billing")
        store.read_taken({"billing": (0, 1)})


@pytest.mark.parametrize(
    ("credentials", "part"),
    [
        (":wrong@", "wrong user or password"),
        (f"nobody:{SECRET}@", "wrong user or password"),
        ("", "it asks for a password"),
        ("blind:s3cret@", "permission missing"),
    ],
)
def test_a_login_that_is_not_enough_is_refused(guarded: Server, credentials: str, part: str) -> None:
    trouble = fails(f"redis://{credentials}127.0.0.1:{guarded.port}", 5)
    assert isinstance(trouble, StoreRefused)
    assert part in trouble.message


def test_a_server_that_repeats_the_password_does_not_get_it_shown() -> None:
    with Peer(lambda conn: (conn.recv(1000), conn.sendall(f"-ERR what is '{SECRET}'?\r\n".encode()))) as peer:
        assert "***" in fails(peer.url.replace("//", f"//:{SECRET}@")).message


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def _terminator(authority: trustme.CA, client_needed: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    if client_needed:
        authority.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_tls_is_spoken_with_the_files_of_the_configuration(
    server: Server, client: redis.Redis, authority: trustme.CA, tmp_path: Path
) -> None:
    put_job(client, "billing")
    mine = authority.issue_cert("node-1")
    files = {"ca": authority.cert_pem, "cert": mine.cert_chain_pems[0], "key": mine.private_key_pem}
    variables = {}
    for name, blob in files.items():
        blob.write_to_path(tmp_path / f"{name}.pem")
        variables[f"redis_{name}_file"] = str(tmp_path / f"{name}.pem")
    with Proxy(server.socket, tls=_terminator(authority, client_needed=True)) as proxy:
        with store_at(proxy.url, **variables) as store:
            assert store.job_names().names == ("billing",)
        stranger = fails(proxy.url.replace("localhost", "127.0.0.1"), 3, **variables)
        assert isinstance(stranger, StoreRefused)
        assert "its certificate is not accepted" in stranger.message


def test_a_certificate_of_an_unknown_authority_is_refused(
    server: Server, authority: trustme.CA, tmp_path: Path
) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    with Proxy(server.socket, tls=_terminator(authority)) as proxy:
        trouble = fails(proxy.url, 3, redis_ca_file=str(tmp_path / "other.pem"))
    assert isinstance(trouble, StoreRefused)
    assert "its certificate is not accepted" in trouble.message


def test_the_wrong_port_for_tls_gets_a_hint(guarded: Server) -> None:
    assert "redis:// is for a port without TLS" in str(fails(f"rediss://127.0.0.1:{guarded.port}", 1).hint)


def test_no_url_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="CLUSTERCRON_REDIS_URL is not set"):
        store_at("")
