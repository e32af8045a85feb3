"""A store that cannot be used: one line that says why, in time, with the right exit code, and never a password."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import ssl
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from clustercron import schema
from tests.proxy import Peer, Proxy, full_listener, reset, stay_silent
from tests.rig import COMMAND, Fleet, Server, free_port, lines, server_binary, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

TICK = "2026-01-05T02:00:00Z"
EPOCH = "1767578400"
SECRET = "hunter2"
BUDGET_S = 1.0
LINE = ["--job", "billing", "--schedule", "* * * * *", "--tick", TICK, "--store-timeout", f"{BUDGET_S:g}s"]
UNAVAILABLE, REFUSED = 75, 125


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet without a store of its own."""
    fleet = Fleet("", tmp_path)
    yield fleet
    fleet.close()


def assert_trouble(
    fleet: Fleet,
    url: str,
    exit_code: int | tuple[int, ...],
    reason: str,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] = COMMAND,
) -> str:
    """Fire once plainly and once with -vv, side by side; answer what the plain one said."""
    job, path = fleet.append_job()
    before = lines(path)
    env = {"CLUSTERCRON_REDIS_URL": url, **(env or {})}
    plain = fleet.start("run", *LINE, "--", *job, env=env, command=command)
    wordy = fleet.start("run", *LINE, "-vv", "--", *job, env=env, command=command, node="node-2")
    ends = [plain.end(), wordy.end()]
    took_s = time.monotonic() - plain.started
    codes = exit_code if isinstance(exit_code, tuple) else (exit_code,)
    for end in ends:
        assert end.returncode in codes, end.stderr
        assert end.stdout == ""
        assert "Traceback" not in end.stderr
        assert "Error" not in end.stderr.replace("Protocol Error", "")
        assert SECRET not in end.stderr
    said = ends[0].stderr.splitlines()
    assert said[0].startswith("clustercron: billing: cannot "), said
    assert reason in said[0], said
    assert all(line.startswith("clustercron: hint: ") for line in said[1:]), said
    assert len(said) <= 2, said
    assert took_s < BUDGET_S + 1, "within the budget and a second"
    assert lines(path) == before
    return ends[0].stderr


# What is said before Redis is asked


def test_no_url_is_said_and_no_localhost_is_tried(fleet: Fleet) -> None:
    said = assert_trouble(fleet, "", REFUSED, "CLUSTERCRON_REDIS_URL is not set")
    assert "hint: put CLUSTERCRON_REDIS_URL=redis://HOST:6379/0 into" in said


@pytest.mark.parametrize(
    "url",
    [
        "localhost",
        "http://localhost",
        f"redis://:{SECRET}",
        f"redis://cron:{SECRET}@",
        f"redis://cron:{SECRET}@/0",
        f"redis://cron:{SECRET}@host:{SECRET}/0",
        f"redis://cron:{SECRET}@host/{SECRET}",
        f"redis://cron:{SECRET}@host/0?password={SECRET}",
        f"redis://cron:x/{SECRET}?y",
        f"redis://cron:%zz{SECRET}@host",
        f"redis://cron:{SECRET}@ho st",
        f"redis://cron:{SECRET}@host\x1b[0m",
        f"redis://cron:{SECRET}@.host",
        f"redis://cron:{SECRET}@[::1/0",
        f"unix://cron:{SECRET}@relative/path",
        f"unix:///{'x' * 104}",
        f"redis+sentinel://:{SECRET}@a,b,c/mymaster/0",
    ],
)
def test_a_bad_url_is_refused_without_being_repeated(fleet: Fleet, url: str) -> None:
    said = assert_trouble(fleet, url, REFUSED, "cannot use CLUSTERCRON_REDIS_URL (environment): ")
    assert url not in said


@pytest.mark.parametrize(
    "variables",
    [
        {"PASSWORD_FILE": "/nonexistent"},
        {"PASSWORD_FILE": "/"},
        {"PASSWORD_FILE": "/dev/null"},
        {"CA_FILE": "/nonexistent"},
        {"CA_FILE": "/etc/passwd", "CERT_FILE": "/nonexistent"},
        {"KEY_FILE": "/dev/null"},
    ],
    ids=lambda variables: " ".join(f"{name}={value}" for name, value in variables.items()),
)
def test_a_file_that_cannot_be_used_is_named_with_its_variable(fleet: Fleet, variables: dict[str, str]) -> None:
    env = {f"CLUSTERCRON_REDIS_{name}": value for name, value in variables.items()}
    said = assert_trouble(fleet, "rediss://127.0.0.1:1", REFUSED, "CLUSTERCRON_REDIS_", env)
    assert list(variables)[-1] in said


def test_tls_files_without_tls_are_a_contradiction(fleet: Fleet) -> None:
    env = {"CLUSTERCRON_REDIS_CA_FILE": "/dev/null"}
    assert_trouble(fleet, "redis://127.0.0.1:1", REFUSED, "the scheme is not rediss", env)


# What the network does


def test_a_closed_port_is_tried_until_the_budget_is_over(fleet: Fleet) -> None:
    said = assert_trouble(fleet, f"redis://127.0.0.1:{free_port()}", UNAVAILABLE, "connection refused")
    assert " tries in " in said
    assert "hint: the job did not run on this node; --on-store-down=run would run it on every node" in said


def test_a_socket_that_is_not_there_is_tried_until_the_budget_is_over(fleet: Fleet, tmp_path: Path) -> None:
    assert_trouble(fleet, f"unix://{tmp_path}/none", UNAVAILABLE, f"redis at {tmp_path}/none: no such file")


def test_a_name_that_does_not_resolve_is_tried_until_the_budget_is_over(fleet: Fleet) -> None:
    assert_trouble(fleet, "redis://nowhere.invalid", UNAVAILABLE, "redis at nowhere.invalid:6379: ")


def test_a_name_that_cannot_be_one_is_refused(fleet: Fleet) -> None:
    assert_trouble(fleet, f"redis://{'x' * 64}.example", (UNAVAILABLE, REFUSED), ".example:6379: ")


def test_a_port_that_drops_connections_in_the_network(fleet: Fleet) -> None:
    with full_listener() as port:
        assert_trouble(fleet, f"redis://127.0.0.1:{port}", UNAVAILABLE, "no answer in time (1 try in 1 s)")


def _speak_http(conn: socket.socket) -> None:
    conn.recv(1 << 16)
    conn.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n400 Bad Request")


def _drip(conn: socket.socket) -> None:
    for byte in b"*3\r\n$3\r\nwon\r\n":
        conn.sendall(bytes([byte]))
        time.sleep(1)


def _read_and_reset(conn: socket.socket) -> None:
    conn.recv(1 << 16)
    reset(conn)


@pytest.mark.parametrize(
    ("serve", "scheme", "exit_code", "reason"),
    [
        (_speak_http, "redis", REFUSED, "this is no Redis: an answer begins with 'H'"),
        (_speak_http, "rediss", REFUSED, "TLS: wrong version number"),
        (stay_silent, "redis", UNAVAILABLE, "no answer in time"),
        (stay_silent, "rediss", UNAVAILABLE, "TLS: no answer in time"),
        (_drip, "redis", UNAVAILABLE, "no answer in time"),
        (_read_and_reset, "redis", UNAVAILABLE, "connection reset by peer"),
        (_read_and_reset, "rediss", UNAVAILABLE, "TLS: it closed the connection in the handshake"),
        (lambda conn: conn.sendall(b"+OK\r\n"), "redis", REFUSED, "none of clustercron's scripts"),
    ],
    ids=["http", "http by tls", "silence", "silence by tls", "drip", "reset", "reset by tls", "odd answer"],
)
def test_a_peer_that_is_no_redis(
    fleet: Fleet, serve: Callable[[socket.socket], None], scheme: str, exit_code: int, reason: str
) -> None:
    with Peer(serve) as peer:
        assert_trouble(fleet, peer.url.replace("redis:", scheme + ":"), exit_code, reason)


def _in_own_mounts(script: str) -> list[str]:
    return ["unshare", "--mount", "sh", "-ec", script + '\nexec "$@"', "sh", *COMMAND]


@pytest.fixture
def silent_resolver(tmp_path: Path) -> Iterator[tuple[socket.socket, list[str]]]:
    """A name server that never answers, and the command of a node that asks it."""
    address = f"127.{os.getpid() % 200 + 1}.{os.getpid() // 200 % 200}.53"  # of this process alone
    (tmp_path / "resolv.conf").write_text(f"nameserver {address}\n")
    (tmp_path / "nsswitch.conf").write_text("hosts: dns\n")
    script = "\n".join(
        f"mount --bind {tmp_path}/{name} $(readlink -f /etc/{name})" for name in ("resolv.conf", "nsswitch.conf")
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as resolver:
        resolver.bind((address, 53))
        resolver.settimeout(0)
        yield resolver, _in_own_mounts(script)


@pytest.mark.root
def test_a_silent_resolver_is_bounded(fleet: Fleet, silent_resolver: tuple[socket.socket, list[str]]) -> None:
    resolver, command = silent_resolver
    reason = "redis at redis.example.net:6379: the resolver does not answer"
    assert_trouble(fleet, "redis://redis.example.net", UNAVAILABLE, reason, command=command)
    assert resolver.recv(512), "it was asked"


@pytest.mark.root
def test_a_run_without_a_store_does_not_wait_for_a_silent_resolver(
    fleet: Fleet, silent_resolver: tuple[socket.socket, list[str]]
) -> None:
    job, path = fleet.append_job()
    fire = fleet.start(
        *("run", *LINE, "--on-store-down", "run", "--", *job),
        env={"CLUSTERCRON_REDIS_URL": "redis://redis.example.net"},
        command=silent_resolver[1],
    )
    assert fire.end().returncode == 0
    assert time.monotonic() - fire.started < 2 * BUDGET_S + 1, "for the claim and for the record"
    assert len(lines(path)) == 1


@pytest.mark.root
def test_a_second_address_serves_when_the_first_is_dead(fleet: Fleet, tmp_path: Path) -> None:
    job, path = fleet.append_job()
    with Server(tmp_path / "server", port=True) as server, full_listener("127.0.0.2", server.port):
        (tmp_path / "hosts").write_text("127.0.0.2 two\n127.0.0.1 two\n")
        end = fleet.run(
            *("--job", "billing", "--schedule", "* * * * *", "--tick", TICK, "--", *job),
            env={"CLUSTERCRON_REDIS_URL": f"redis://two:{server.port}"},
            command=_in_own_mounts(f"mount --bind {tmp_path}/hosts /etc/hosts"),
        )
        assert (end.returncode, end.stderr) == (0, "")
    assert len(lines(path)) == 1


# What a server answers


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that end with the test."""
    with contextlib.ExitStack() as stack:
        numbers = iter(range(100))

        def start(*options: str, port: bool = False) -> Server:
            return stack.enter_context(Server(tmp_path / f"server-{next(numbers)}", *options, port=port))

        yield start


@pytest.mark.parametrize("at", [":wrong@", "cron:wrong@", f"nobody:{SECRET}@", "cron@"])
def test_a_wrong_password_is_refused_at_once(fleet: Fleet, start: Callable[..., Server], at: str) -> None:
    server = start("--requirepass", SECRET)
    server.client(password=SECRET).execute_command("ACL", "SETUSER", "cron", "on", f">{SECRET}", "~*", "+@all")
    said = assert_trouble(fleet, server.url.replace("//", "//" + at), REFUSED, "wrong user or password")
    assert "wrong@" not in said


@pytest.mark.parametrize(("at", "db"), [("nobody:wrong@", ""), ("", "?db=99")], ids=["user", "database"])
def test_a_refused_login_or_database_writes_nothing_anywhere(
    fleet: Fleet, start: Callable[..., Server], at: str, db: str
) -> None:
    # A server that is open to everybody would carry out what comes behind a refused login, in its first database.
    server = start()
    job, path = fleet.append_job()
    line = ["--job", "billing", "--schedule", "* * * * *", "--tick", TICK, "--", *job]
    end = fleet.run(*line, env={"CLUSTERCRON_REDIS_URL": server.url.replace("//", f"//{at}") + db})
    assert end.returncode == REFUSED
    with server.client() as client:
        assert client.keys("*") == []
    assert lines(path) == []


def test_a_missing_password_is_refused_at_once(fleet: Fleet, start: Callable[..., Server]) -> None:
    said = assert_trouble(fleet, start("--requirepass", SECRET).url, REFUSED, "it asks for a password")
    assert "hint: look at CLUSTERCRON_REDIS_PASSWORD_FILE" in said


def test_a_password_for_a_server_without_one_is_refused(fleet: Fleet, start: Callable[..., Server]) -> None:
    url = start().url.replace("//", f"//:{SECRET}@")
    assert_trouble(fleet, url, REFUSED, "it has no password, and one is given")


def test_a_server_without_auth_does_not_show_the_password(fleet: Fleet, start: Callable[..., Server]) -> None:
    url = start("--rename-command", "AUTH", "").url.replace("//", f"//cron:{SECRET}@")
    assert_trouble(fleet, url, REFUSED, "ERR unknown command")


def test_a_database_that_is_not_there_is_refused(fleet: Fleet, start: Callable[..., Server]) -> None:
    assert_trouble(fleet, start().url + "?db=99", REFUSED, "DB index is out of range")


@pytest.mark.parametrize(
    "rules",
    [["~*", "-@all"], ["~*", "+@all", "-eval"], ["~*", "+@all", "-hset"], ["~other:*", "+@all"]],
    ids=["nothing", "no eval", "not in the script", "other keys"],
)
def test_a_user_without_permission_is_refused(fleet: Fleet, start: Callable[..., Server], rules: list[str]) -> None:
    server = start()
    server.client().execute_command("ACL", "SETUSER", "cron", "on", f">{SECRET}", *rules)
    url = server.url.replace("//", f"//cron:{SECRET}@")
    said = assert_trouble(fleet, url, REFUSED, "permission missing: ")
    assert "hint: give the user the commands and keys of clustercron(7)" in said


def test_a_replica_is_tried_until_the_budget_is_over(fleet: Fleet, start: Callable[..., Server]) -> None:
    master = start("--repl-diskless-sync-delay", "0", port=True)
    replica = start("--replicaof", "127.0.0.1", str(master.port))
    wait_for(lambda: replica.client().info("replication")["master_link_status"] == "up", "the replica is in step")
    assert_trouble(fleet, replica.url, UNAVAILABLE, "READONLY")


def test_a_replica_without_its_master(fleet: Fleet, start: Callable[..., Server]) -> None:
    replica = start("--replicaof", "127.0.0.1", str(free_port()), "--replica-serve-stale-data", "no")
    assert_trouble(fleet, replica.url, UNAVAILABLE, "MASTERDOWN")


def test_a_full_memory_is_tried_until_the_budget_is_over(fleet: Fleet, start: Callable[..., Server]) -> None:
    assert_trouble(fleet, start("--maxmemory", "1").url, UNAVAILABLE, "OOM")


def test_too_few_replicas_are_tried_until_the_budget_is_over(fleet: Fleet, start: Callable[..., Server]) -> None:
    assert_trouble(fleet, start("--min-replicas-to-write", "1").url, UNAVAILABLE, "NOREPLICAS")


def test_a_server_that_cannot_save(fleet: Fleet, start: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    server = start("--dir", str(tmp_path / "gone"))
    client = server.client()
    client.config_set("save", "3600 1")
    (tmp_path / "gone").rmdir()
    client.bgsave()
    wait_for(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "saving fails")
    assert_trouble(fleet, server.url, UNAVAILABLE, "MISCONF")


def test_a_server_that_is_busy_with_a_script(fleet: Fleet, start: Callable[..., Server]) -> None:
    server = start("--lua-time-limit", "50")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as other:
        other.connect(str(server.socket))
        other.sendall(b"EVAL 'while true do end' 0\r\n")
        assert_trouble(fleet, server.url, UNAVAILABLE, "BUSY")


def test_a_server_with_too_many_clients(fleet: Fleet, start: Callable[..., Server]) -> None:
    server = start("--maxclients", "1", port=True)
    other = server.client()
    wait_for(lambda: _pings(other), "the only place is taken")
    for url in (server.url, server.tcp_url):
        assert_trouble(fleet, url, UNAVAILABLE, "max number of clients reached")
    other.close()


def _pings(client: object) -> bool:
    import redis

    try:
        return bool(client.ping())  # type: ignore[attr-defined]
    except redis.RedisError:
        return False


def _loading(start: Callable[..., Server], delay_us: int) -> Server:
    server = start("--rdbcompression", "no")
    for number in range(60):
        server.client().set(f"key-{number}", "x" * 500_000)
    server.client().save()
    server.stop()
    server.options = ("--key-load-delay", str(delay_us))
    server.start()
    return server


def test_a_server_that_loads_its_data(fleet: Fleet, start: Callable[..., Server]) -> None:
    assert_trouble(fleet, _loading(start, 40_000).url, UNAVAILABLE, "LOADING")


def test_what_was_said_counts_more_than_the_silence_after_it(fleet: Fleet) -> None:
    answers = iter([b"-LOADING Redis is loading the dataset in memory\r\n"])

    def serve(conn: socket.socket) -> None:
        conn.recv(1 << 16)
        conn.sendall(next(answers, b""))
        stay_silent(conn)

    with Peer(serve) as peer:
        end = fleet.run(*LINE, "--", "/bin/true", env={"CLUSTERCRON_REDIS_URL": peer.url})
    assert end.returncode == UNAVAILABLE
    assert "LOADING Redis is loading the dataset in memory (2 tries in 1 s)" in end.stderr


def test_a_server_that_has_loaded_its_data_within_the_budget(fleet: Fleet, start: Callable[..., Server]) -> None:
    server = _loading(start, 5_000)
    job, path = fleet.append_job()
    env = {"CLUSTERCRON_REDIS_URL": server.url}
    end = fleet.run("--job", "billing", "--schedule", "* * * * *", "--tick", TICK, "--", *job, env=env)
    assert (end.returncode, end.stderr) == (0, "")
    assert len(lines(path)) == 1


def test_a_node_of_a_cluster_is_named_as_such(fleet: Fleet, start: Callable[..., Server]) -> None:
    # The nodes speak to each other on a port 10,000 above.
    ports = [next(port for port in iter(free_port, 0) if port < 55_536) for _ in range(2)]
    ours, other = (start("--cluster-enabled", "yes", "--port", str(port)) for port in ports)
    assert_trouble(fleet, ours.url, UNAVAILABLE, "CLUSTERDOWN")
    slots = sorted({ours.client().cluster("keyslot", "clustercron:{billing}:job"), 0, 16383})
    other.client().execute_command("CLUSTER", "ADDSLOTS", *range(slots[1], 16384))
    ours.client().execute_command("CLUSTER", "ADDSLOTS", *range(slots[1]))
    ours.client().execute_command("CLUSTER", "MEET", "127.0.0.1", ports[1])
    wait_for(lambda: ours.client().cluster("info")["cluster_state"] == "ok", "the cluster is whole")
    said = assert_trouble(fleet, ours.url, REFUSED, "this is a node of a Redis Cluster")
    assert "hint: this version speaks to one Redis server" in said


@pytest.mark.parametrize("key", ["job", "ticks", "runs", "nodes", "recent"])
def test_a_key_of_another_type_is_named_as_such(fleet: Fleet, start: Callable[..., Server], key: str) -> None:
    server = start()
    server.client().set(f"clustercron:{{billing}}:{key}", "mine")
    assert_trouble(fleet, server.url, REFUSED, "a key of this job holds something else")


def test_records_of_a_newer_layout_are_refused(fleet: Fleet, start: Callable[..., Server]) -> None:
    server = start()
    server.client().hset("clustercron:{billing}:job", "layout", schema.LAYOUT + 1)
    said = assert_trouble(fleet, server.url, REFUSED, f"its records have layout {schema.LAYOUT + 1}")
    assert "hint: upgrade clustercron on this node" in said
    assert server.client().keys() == ["clustercron:{billing}:job"]


# TLS


class Certificates:
    """Certificates for localhost, made for the session, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca, self.other_ca = trustme.CA(), trustme.CA()
        now = dt.datetime.now(dt.UTC)
        day = dt.timedelta(days=1)
        self.ca_file = self._write("ca", self.ca.cert_pem)
        self.other_ca_file = self._write("other-ca", self.other_ca.cert_pem)
        self.server = self.ca.issue_cert("localhost", "127.0.0.1")
        self.expired = self.ca.issue_cert("localhost", not_before=now - 2 * day, not_after=now - day)
        self.elsewhere = self.ca.issue_cert("redis.example.net")
        self.client = self.ca.issue_cert("node-1")
        self.client_file = self._write("client", *self.client.cert_chain_pems)
        self.client_key_file = self._write("client-key", self.client.private_key_pem)

    def _write(self, name: str, *blobs: trustme.Blob) -> Path:
        path = self.folder / f"{name}.pem"
        path.write_bytes(b"".join(blob.bytes() for blob in blobs))
        return path

    def terminator(self, cert: trustme.LeafCert, client_needed: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        cert.configure_cert(context)
        if client_needed:
            self.ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def options(self, port: int, cert: trustme.LeafCert, client_needed: bool) -> list[str]:
        cert_file = self._write(f"{port}", *cert.cert_chain_pems)
        key_file = self._write(f"{port}-key", cert.private_key_pem)
        options = ["--tls-port", str(port), "--tls-cert-file", str(cert_file), "--tls-key-file", str(key_file)]
        wanted = "yes" if client_needed else "no"
        return [*options, "--tls-ca-cert-file", str(self.ca_file), "--tls-auth-clients", wanted]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def server_has_tls(tmp_path_factory: pytest.TempPathFactory) -> bool:
    folder = tmp_path_factory.mktemp("tls")
    refused = subprocess.run(
        [server_binary(), "--port", "0", "--tls-port", "1", "--dir", str(folder), "--daemonize", "no"],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=10,
        check=False,
    )
    # Without a certificate no server starts; one that has TLS says that it misses it.
    return b"tls-cert-file" in refused.stdout


@pytest.fixture(params=["terminator", "server"])
def serve_tls(
    request: pytest.FixtureRequest, server_has_tls: bool, certificates: Certificates, tmp_path: Path
) -> Iterator[Callable[..., str]]:
    """Serves Redis over TLS with a certificate and answers the URL: through a terminator, and by the server itself."""
    if request.param == "server" and not server_has_tls:
        pytest.skip(f"{server_binary()} is built without TLS")
    with contextlib.ExitStack() as stack:

        def serve(cert: trustme.LeafCert, client_needed: bool = False) -> str:
            if request.param == "terminator":
                server = stack.enter_context(Server(tmp_path / "server"))
                return stack.enter_context(Proxy(server.socket, tls=certificates.terminator(cert, client_needed))).url
            port = free_port()
            stack.enter_context(Server(tmp_path / "server", *certificates.options(port, cert, client_needed)))
            return f"rediss://localhost:{port}"

        yield serve


def _tls_env(**files: Path) -> dict[str, str]:
    return {f"CLUSTERCRON_REDIS_{name.upper()}_FILE": str(path) for name, path in files.items()}


def _runs_with(fleet: Fleet, url: str, env: dict[str, str]) -> None:
    job, path = fleet.append_job()
    before = len(lines(path))
    tick = f"2026-01-05T02:{before:02}:00Z"
    line = ["--job", "billing", "--schedule", "* * * * *", "--tick", tick, "--", *job]
    end = fleet.run(*line, env={**env, "CLUSTERCRON_REDIS_URL": url})
    assert (end.returncode, end.stdout, end.stderr) == (0, "", "")
    assert len(lines(path)) == before + 1


def test_tls_serves(fleet: Fleet, certificates: Certificates, serve_tls: Callable[..., str]) -> None:
    url = serve_tls(certificates.server)
    _runs_with(fleet, url, _tls_env(ca=certificates.ca_file))
    _runs_with(fleet, url.replace("localhost", "127.0.0.1"), _tls_env(ca=certificates.ca_file))


def test_a_client_certificate_serves(fleet: Fleet, certificates: Certificates, serve_tls: Callable[..., str]) -> None:
    url = serve_tls(certificates.server, client_needed=True)
    files = _tls_env(ca=certificates.ca_file, cert=certificates.client_file, key=certificates.client_key_file)
    _runs_with(fleet, url, files)
    # Without one it ends once the client has said all it has to say: in the first answer.
    env = _tls_env(ca=certificates.ca_file)
    said = assert_trouble(fleet, url.replace("//", f"//:{SECRET}@"), REFUSED, "certificate required", env)
    assert "hint: look at CLUSTERCRON_REDIS_CA_FILE, _CERT_FILE and _KEY_FILE" in said


@pytest.mark.parametrize(
    ("cert", "ca", "reason"),
    [
        ("expired", "ca_file", "certificate has expired"),
        ("elsewhere", "ca_file", "not valid for 'localhost'"),
        ("server", "other_ca_file", "certificate is not accepted: "),
        ("server", None, "certificate is not accepted: "),
    ],
    ids=["expired", "wrong name", "unknown CA", "no CA file"],
)
def test_a_certificate_that_is_not_accepted(
    fleet: Fleet, certificates: Certificates, serve_tls: Callable[..., str], cert: str, ca: str | None, reason: str
) -> None:
    url = serve_tls(getattr(certificates, cert)).replace("//", f"//:{SECRET}@")
    env = _tls_env(ca=getattr(certificates, ca)) if ca else {}
    said = assert_trouble(fleet, url, REFUSED, reason, env)
    assert "TLS: its certificate is not accepted: " in said


def test_a_plain_client_at_a_port_with_tls(
    fleet: Fleet, certificates: Certificates, serve_tls: Callable[..., str]
) -> None:
    url = serve_tls(certificates.server).replace("rediss:", "redis:").replace("//", f"//:{SECRET}@")
    said = assert_trouble(fleet, url, (UNAVAILABLE, REFUSED), "redis at localhost:")
    assert "hint: redis:// is for a port without TLS, rediss:// for one with it" in said


def test_tls_at_a_plain_port(fleet: Fleet, start: Callable[..., Server]) -> None:
    url = start(port=True).tcp_url.replace("redis:", "rediss:")
    # By chance the handshake holds a line end, and then the server does answer.
    said = assert_trouble(fleet, url, (UNAVAILABLE, REFUSED), "TLS: ")
    assert "hint: redis:// is for a port without TLS, rediss:// for one with it" in said


def test_tls_files_that_are_no_use_are_named(fleet: Fleet, certificates: Certificates, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk\n")
    locked = tmp_path / "locked.pem"
    key = serialization.load_pem_private_key(certificates.client_key_file.read_bytes(), None)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.write_bytes(key.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"x")))
    with Peer(stay_silent) as peer:
        url = peer.url.replace("redis:", "rediss:")
        assert_trouble(fleet, url, REFUSED, f"TLS: cannot use {junk}: no certificate or crl found", _tls_env(ca=junk))
        for key_file in (junk, locked, certificates.ca_file):
            files = _tls_env(ca=certificates.ca_file, cert=certificates.client_file, key=key_file)
            assert_trouble(fleet, url, REFUSED, f"TLS: cannot use {certificates.client_file}: ", files)


# What goes well


@pytest.mark.parametrize(
    ("at", "query"),
    [(f":{SECRET}@", ""), (f"default:{SECRET}@", "?db=0"), (f"cron:{SECRET}@", "?db=3"), ("open@", "")],
)
def test_users_and_databases_serve(fleet: Fleet, start: Callable[..., Server], at: str, query: str) -> None:
    server = start("--requirepass", SECRET)
    client = server.client(password=SECRET)
    client.execute_command("ACL", "SETUSER", "cron", "on", f">{SECRET}", "~*", "+@all")
    client.execute_command("ACL", "SETUSER", "open", "on", "nopass", "~*", "+@all")
    _runs_with(fleet, server.url.replace("//", "//" + at) + query, {})
    database = int(query.partition("=")[2] or 0)
    assert server.client(password=SECRET, db=database).exists("clustercron:{billing}:job")


def test_a_password_file_is_read_again_by_each_run(fleet: Fleet, start: Callable[..., Server], tmp_path: Path) -> None:
    server = start("--requirepass", "first")
    file = tmp_path / "password"
    env = {"CLUSTERCRON_REDIS_PASSWORD_FILE": str(file)}
    file.write_text("first\n")
    _runs_with(fleet, server.url, env)
    server.client(password="first").config_set("requirepass", "second: %41 #")
    assert_trouble(fleet, server.url, REFUSED, "wrong user or password", env)
    file.write_text("second: %41 #\r\n")
    _runs_with(fleet, server.url, env)


# --on-store-down run


def _record(server: Server, field: str = EPOCH) -> dict[str, str]:
    text = server.client().hget("clustercron:{billing}:runs", field)
    return schema.decode(str(text), schema.RECORD_LETTERS) if text else {}


def test_run_without_a_store_is_said_and_recorded_by_the_nodes_next_fire(
    fleet: Fleet, start: Callable[..., Server]
) -> None:
    server = start()
    path = fleet.folder / "environment"
    job = ["/bin/sh", "-c", f'echo "$CLUSTERCRON_UNCLAIMED $CLUSTERCRON_FENCING_TOKEN" >> {path}; exit 3']
    env = {"CLUSTERCRON_REDIS_URL": server.url}
    server.stop()
    end = fleet.run(*LINE, "--on-store-down", "run", "--", *job, env=env)
    assert end.returncode == 3
    assert lines(path) == ["1 0"]
    said = end.stderr.splitlines()
    assert f"cannot claim {TICK}: redis at {server.socket}: no such file" in said[0]
    assert said[1] == "clustercron: hint: runs it all the same, without a claim: --on-store-down=run"
    assert f"cannot record the end of {TICK}" in said[2]
    assert "this node's next fire records it (unclaimed)" in said[3]
    assert len(said) == 4

    server.start()
    other = ["--job", "reports", "--schedule", "* * * * *", "--tick", TICK, "--", "/bin/true"]
    end = fleet.run(*other, env=env)
    assert (end.returncode, end.stderr) == (0, "")
    record = _record(server)
    assert (record["state"], record["node"], record["exit_code"]) == ("unclaimed", "node-1", "3")
    # It is recorded once, and the tick counts as taken.
    assert fleet.run(*LINE, "--", *job, env=env, node="node-2").returncode == 0
    assert lines(path) == ["1 0"]


def test_an_unclaimed_run_is_kept_beside_the_one_that_had_the_claim(fleet: Fleet, start: Callable[..., Server]) -> None:
    server = start()
    job, path = fleet.append_job()
    up = {"CLUSTERCRON_REDIS_URL": server.url}
    with Proxy(server.socket) as proxy:
        # The same store by a way that is broken for one node.
        proxy.lose("claim", "request", times=99)
        proxy.lose("finish", "request", times=99)
        env = {"CLUSTERCRON_REDIS_URL": proxy.url, "CLUSTERCRON_STATE_DIR": str(fleet.folder / "own")}
        assert fleet.run(*LINE, "--", *job, env=up, node="node-2").returncode == 0
        assert fleet.run(*LINE, "--on-store-down", "run", "--", *job, env=env).returncode == 0
        assert [line.split()[1] for line in lines(path)] == ["node-2", "node-1"]
        proxy.heal()
        fires = [fleet.run(*LINE, "--", *job, env=env) for _ in range(2)]
        assert [(end.returncode, end.stderr) for end in fires] == [(0, "")] * 2
    assert (_record(server)["state"], _record(server)["node"]) == ("succeeded", "node-2")
    beside = [f for f in server.client().hkeys("clustercron:{billing}:runs") if f != EPOCH]
    assert [_record(server, field)["state"] for field in beside] == ["unclaimed"]
    assert _record(server, beside[0])["node"] == "node-1"


def test_a_claim_whose_start_is_not_confirmed_may_run_without_a_store(
    fleet: Fleet, start: Callable[..., Server]
) -> None:
    server = start()
    job, path = fleet.append_job()
    with Proxy(server.socket) as proxy:
        proxy.lose("start", "request", times=99)
        env = {"CLUSTERCRON_REDIS_URL": proxy.url}
        end = fleet.run(*LINE, "--on-store-down", "run", "--", *job, env=env)
    assert end.returncode == 0
    assert len(lines(path)) == 1
    assert f"cannot start {TICK}" in end.stderr
    assert _record(server)["state"] in ("unclaimed", "abandoned")


def test_what_cannot_be_mended_by_waiting_does_not_run_without_a_store(
    fleet: Fleet, start: Callable[..., Server]
) -> None:
    url = start("--requirepass", SECRET).url
    assert_trouble(fleet, url, REFUSED, "it asks for a password", {"CLUSTERCRON_ON_STORE_DOWN": "run"})
