"""The run path's own Redis client: any bytes in any pieces, one deadline for everything, and what an error means."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustercron import wire
from clustercron.config import parse_url
from clustercron.wire import Connection, Parser, ReplyError, WireError, encode, reply_trouble
from tests.proxy import Peer, Proxy, full_listener, reset, stay_silent
from tests.rig import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from clustercron.wire import Reply

SLACK_S = 0.5

replies = st.recursive(
    st.one_of(
        st.none(),
        st.integers(-(10**18), 10**18),
        st.binary(max_size=40),
        st.text("abc XYZ", max_size=20).map(ReplyError),
    ),
    lambda items: st.lists(items, max_size=5),
    max_leaves=20,
).filter(lambda reply: _depth(reply) < 8)


def _depth(reply: Reply) -> int:
    return 1 + max(map(_depth, reply), default=0) if isinstance(reply, list) else 0


def _as_sent(reply: Reply) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, ReplyError):
        return b"-%b\r\n" % reply.text.encode()
    return b"*%d\r\n" % len(reply) + b"".join(map(_as_sent, reply))


def _plain(reply: Reply) -> object:
    if isinstance(reply, ReplyError):
        return ("error", reply.text)
    return list(map(_plain, reply)) if isinstance(reply, list) else reply


def _in_pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        yield data[begin:end]


@given(st.lists(replies, min_size=1, max_size=4), st.lists(st.integers(0, 10_000), max_size=12))
def test_replies_are_the_same_in_any_pieces(sent: list[Reply], cuts: list[int]) -> None:
    parser, got = Parser(), []
    for piece in _in_pieces(b"".join(map(_as_sent, sent)), cuts):
        parser.feed(piece)
        while (reply := parser.next()) is not None:
            got.append(reply[0])
    assert list(map(_plain, got)) == list(map(_plain, sent))


@given(replies, st.integers(0, 10_000))
def test_a_part_of_a_reply_is_no_reply_and_no_error(reply: Reply, cut: int) -> None:
    data = _as_sent(reply)
    parser = Parser()
    parser.feed(data[: cut % len(data)])
    assert parser.next() is None


fragments = st.one_of(
    st.binary(max_size=30),
    st.sampled_from([b"\r\n", b"*", b"$", b":", b"-", b"+", b"*2\r\n", b"$3\r\nabc\r\n", b"*-1\r\n", b"$-2\r\n"]),
    st.sampled_from(
        [b"*9999999\r\n", b"$99999999999999999999\r\n", b":1_0\r\n", b":+1\r\n", b": 1\r\n", b"*1\r\n" * 9]
    ),
    st.sampled_from([b"HTTP/1.1 400 Bad Request\r\n", b"\x15\x03\x01\x00\x02\x02\x28", b"%1\r\n", b"_\r\n", b"#t\r\n"]),
)


@given(st.lists(fragments, max_size=20))
def test_junk_gives_replies_or_a_wire_error_and_nothing_else(pieces: list[bytes]) -> None:
    parser = Parser()
    with contextlib.suppress(WireError):
        for piece in pieces:
            parser.feed(piece)
            while parser.next() is not None:
                pass


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "an answer begins with 'H'"),
        (b"\x15\x03\x01\x00\x02\x02\x28", "it speaks TLS"),
        (b":1x\r\n", "this is no Redis"),
        (b":\r\n", "this is no Redis"),
        (b"$3\r\nabcde\r\n", "this is no Redis"),
        (b"*1025\r\n", "this is no Redis"),
        (b"$1048577\r\n", "this is no Redis"),
        (b"*1\r\n" * 10, "this is no Redis"),
        (b"+" + b"x" * (1 << 20), "this is no Redis"),
    ],
    ids=["http", "tls", "digits", "no digits", "length", "items", "bulk", "depth", "line"],
)
def test_what_is_no_redis_is_said_and_final(data: bytes, reason: str) -> None:
    def read() -> None:
        parser = Parser()
        parser.feed(data)
        parser.next()

    with pytest.raises(WireError, match=reason) as caught:
        read()
    assert not caught.value.passing
    assert caught.value.hint


def test_a_command_is_text_or_bytes_of_any_kind() -> None:
    assert encode(["SET", "ключ", b"\0\r\n\xff", "\udcff"]) == (
        b"*4\r\n$3\r\nSET\r\n$8\r\n\xd0\xba\xd0\xbb\xd1\x8e\xd1\x87\r\n$4\r\n\0\r\n\xff\r\n$1\r\n\xff\r\n"
    )


@pytest.mark.parametrize(
    ("text", "passing", "reason"),
    [
        ("LOADING Redis is loading the dataset in memory", True, "LOADING"),
        ("READONLY You can't write against a read only replica.", True, "READONLY"),
        ("MASTERDOWN Link with MASTER is down", True, "MASTERDOWN"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", True, "TRYAGAIN"),
        ("CLUSTERDOWN Hash slot not served", True, "CLUSTERDOWN"),
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL.", True, "BUSY"),
        ("OOM command not allowed when used memory > 'maxmemory'.", True, "OOM"),
        ("MISCONF Redis is configured to save RDB snapshots", True, "MISCONF"),
        ("NOREPLICAS Not enough good replicas to write.", True, "NOREPLICAS"),
        ("ERR Error running script (call to f_1): @user_script:1: @user_script: 1: -READONLY No", True, "READONLY No"),
        ("ERR Error running script (call to f_1): @user_script:9: @user_script: 9: -OOM no", True, "OOM no"),
        ("ERR max number of clients reached", True, "max number of clients"),
        ("WRONGPASS invalid username-password pair or user is disabled.", False, "wrong user or password"),
        ("ERR invalid password", False, "wrong user or password"),
        ("NOAUTH Authentication required.", False, "it asks for a password"),
        ("ERR Protocol error: unauthenticated multibulk length", False, "it asks for a password"),
        ("ERR AUTH <password> called without any password configured for the default user.", False, "has no password"),
        ("ERR Client sent AUTH, but no password is set", False, "has no password"),
        ("NOPERM User cron has no permissions to run the 'eval' command", False, "permission missing"),
        ("ERR The user executing the script can't run this command or subcommand", False, "permission missing"),
        ("ERR ACL failure in script: User x has no permissions to run the 'time' command", False, "permission missing"),
        ("MOVED 13040 127.0.0.1:7001", False, "Redis Cluster"),
        ("CROSSSLOT Keys in request don't hash to the same slot", False, "Redis Cluster"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False, "holds something else"),
        (
            "ERR Error running script (call to f_1): @user_script:7: WRONGTYPE Op",
            False,
            "holds something else",
        ),
        ("ERR unknown command 'EVAL', with args beginning with: 'local' ", False, "ERR unknown command 'EVAL'"),
        ("OOM command not allowed script: 0f3a, on @user_script:9.", True, "OOM command not allowed"),
        ("ERR unhappy script: 0f3a, on @user_script:9.", False, "ERR unhappy"),
        ("BUSYGROUP Consumer Group name already exists", False, "BUSYGROUP"),
        ("", False, ""),
    ],
)
def test_an_error_reply_says_whether_it_passes(text: str, passing: bool, reason: str) -> None:
    trouble = reply_trouble(text)
    assert trouble.passing is passing
    assert reason in trouble.reason
    assert not any(noise in trouble.reason for noise in ("with args", "user_script", "Error running"))


@given(st.text())
def test_any_error_reply_is_short(text: str) -> None:
    assert len(reply_trouble(text).reason) < 300


def _ask(url: str, budget_s: float) -> list[Reply]:
    deadline = time.monotonic() + budget_s
    connection = Connection(parse_url(url), deadline)
    try:
        return connection.call([["PING"]], deadline)
    finally:
        connection.close()


def _fails_in_time(url: str, budget_s: float = 0.4) -> WireError:
    began = time.monotonic()
    with pytest.raises(WireError) as caught:
        _ask(url, budget_s)
    assert time.monotonic() - began < max(budget_s, 0) + SLACK_S
    return caught.value


def _drip(data: bytes) -> Callable[[socket.socket], None]:
    def serve(conn: socket.socket) -> None:
        for byte in data:
            conn.sendall(bytes([byte]))
            time.sleep(0.1)

    return serve


def _never_reads(conn: socket.socket) -> None:
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    threading.Event().wait(2)


@pytest.mark.parametrize(
    "serve",
    [stay_silent, _drip(b"+" + b"x" * 100), _drip(b"$1000\r\n" + b"x" * 100), _never_reads],
    ids=["silence", "dripping line", "dripping bulk", "reads nothing"],
)
def test_one_deadline_bounds_a_peer_that_does_not_get_on(serve: Callable[[socket.socket], None]) -> None:
    with Peer(serve) as peer:
        trouble = _fails_in_time(peer.url)
    assert (trouble.reason, trouble.passing) == ("no answer in time", True)


def test_a_request_that_does_not_leave_is_bounded_too() -> None:
    with Peer(_never_reads) as peer:
        deadline = time.monotonic() + 0.6
        connection = Connection(parse_url(peer.url), deadline)
        with pytest.raises(WireError, match="no answer in time"):
            connection.call([["SET", "k", b"x" * (32 << 20)]], deadline)
        assert time.monotonic() < deadline + SLACK_S


def test_connecting_is_bounded() -> None:
    with full_listener() as port:
        trouble = _fails_in_time(f"redis://127.0.0.1:{port}")
    assert (trouble.reason, trouble.passing) == ("no answer in time", True)


@pytest.mark.parametrize("serve", [stay_silent, _drip(b"\x16\x03\x03\x40\x00" + b"\0" * 100)], ids=["silence", "drip"])
def test_a_tls_handshake_is_bounded(serve: Callable[[socket.socket], None]) -> None:
    with Peer(serve) as peer:
        trouble = _fails_in_time(peer.url.replace("redis:", "rediss:"))
    assert (trouble.reason, trouble.passing) == ("TLS: no answer in time", True)


def test_a_deadline_in_the_past_ends_at_once() -> None:
    with Peer(stay_silent) as peer:
        assert _fails_in_time(peer.url, -1.0).passing
        assert _fails_in_time(peer.url.replace("127.0.0.1", "localhost"), -1.0).passing


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (lambda conn: None, "connection "),
        (lambda conn: (conn.recv(100), reset(conn)), "connection reset by peer"),
        (lambda conn: (conn.recv(100), conn.sendall(b"+PO")), "connection closed"),
    ],
    ids=["fin at once", "reset", "half a reply"],
)
def test_an_end_without_a_reply_passes(serve: Callable[[socket.socket], None], reason: str) -> None:
    with Peer(serve) as peer:
        trouble = _fails_in_time(peer.url)
    assert trouble.passing
    assert reason in trouble.reason


def test_what_a_server_says_before_it_closes_is_heard(tmp_path: Path) -> None:
    def refuse(conn: socket.socket) -> None:
        conn.sendall(b"-ERR max number of clients reached\r\n")
        conn.close()
        closed.set()

    for path in (None, tmp_path / "sock"):
        closed = threading.Event()
        with Peer(refuse, path) as peer:
            deadline = time.monotonic() + 2
            with contextlib.closing(Connection(parse_url(peer.url), deadline)) as connection:
                assert closed.wait(2)
                reply = connection.call([["PING"]], deadline)[0]
            assert isinstance(reply, ReplyError)
            assert reply.text == "ERR max number of clients reached"


def test_an_address_that_does_not_answer_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with full_listener() as blackhole, Peer(lambda conn: (conn.recv(100), conn.sendall(b"+PONG\r\n"))) as peer:
        places = [(socket.AF_INET, ("127.0.0.1", blackhole)), (socket.AF_INET, ("127.0.0.1", peer.port))]
        monkeypatch.setattr(wire, "_resolve", lambda *unused: places)
        assert _ask("redis://two-addresses", 1.0) == [b"PONG"]


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_address_is_reached() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on the loopback interface")
    with listener:
        deadline = time.monotonic() + 1
        with contextlib.closing(Connection(parse_url(f"redis://[::1]:{listener.getsockname()[1]}"), deadline)):
            listener.accept()[0].close()


def test_an_address_of_a_family_that_the_kernel_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer(lambda conn: (conn.recv(100), conn.sendall(b"+PONG\r\n"))) as peer:
        places = [(12345, ("::1", peer.port)), (socket.AF_INET, ("127.0.0.1", peer.port))]
        monkeypatch.setattr(wire, "_resolve", lambda *unused: places)
        assert _ask("redis://two-addresses", 1.0) == [b"PONG"]


def test_two_threads_that_wait_for_one_name_both_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    class SlowLookup(wire._Lookup):
        def _run(self, host: str, port: int) -> None:
            answer.wait(5)
            super()._run(host, port)

    monkeypatch.setattr(wire, "_Lookup", SlowLookup)
    got: list[object] = []

    def resolve() -> None:
        got.append(wire._resolve("localhost", 1, time.monotonic() + 5))

    threads = [threading.Thread(target=resolve) for _ in range(2)]
    for thread in threads:
        thread.start()
    answer.set()
    for thread in threads:
        thread.join()
    assert len(got) == 2
    assert got[0] == got[1] != []


def test_a_name_that_cannot_be_one_is_final() -> None:
    trouble = _fails_in_time(f"redis://{'x' * 64}ä.example")
    assert (trouble.reason, trouble.passing) == ("not a host name", False)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("guarded"), "--requirepass", "s3cret") as server:
        client = server.client(password="s3cret")
        client.execute_command("ACL", "SETUSER", "cron", "on", ">hunter2", "~*", "+@all")
        client.execute_command("ACL", "SETUSER", "open", "on", "nopass", "~*", "+@all")
        yield server


def _whoami(server: Server, credentials: str, query: str = "") -> tuple[list[Reply], list[tuple[str, ...]]]:
    with Proxy(server.socket) as proxy:
        address = parse_url(f"redis://{credentials}127.0.0.1:{proxy.port}{query}")
        deadline = time.monotonic() + 5
        connection = Connection(address, deadline)
        try:
            return connection.call([["ACL", "WHOAMI"], ["CLIENT", "INFO"]], deadline), proxy.trips
        finally:
            connection.close()


@pytest.mark.parametrize(
    ("credentials", "user"),
    [(":s3cret@", b"default"), ("cron:hunter2@", b"cron"), ("cron:hun%74er2@", b"cron"), ("open@", b"open")],
    ids=["password", "user and password", "percent", "user without password"],
)
def test_login_and_database_are_settled_before_the_first_command(
    guarded: Server, credentials: str, user: bytes
) -> None:
    (who, info), trips = _whoami(guarded, credentials, "/3")
    assert who == user
    assert isinstance(info, bytes)
    assert b" db=3 " in info
    assert trips == [("auth", "select"), ("acl", "client")]


def test_without_credentials_nothing_is_sent_before_the_command(guarded: Server) -> None:
    (who, _), trips = _whoami(guarded, "")
    assert isinstance(who, ReplyError)
    assert trips == [("acl", "client")]


@pytest.mark.parametrize("credentials", [":wrong@", "cron:wrong@", "nobody:hunter2@", "cron@"])
def test_a_refused_login_is_final(guarded: Server, credentials: str) -> None:
    with pytest.raises(WireError, match="wrong user or password") as caught:
        _whoami(guarded, credentials)
    assert not caught.value.passing


def test_a_refused_login_is_said_although_the_server_then_hangs_up() -> None:
    with Peer(lambda conn: (conn.recv(1000), conn.sendall(b"-WRONGPASS invalid\r\n"))) as peer:
        assert _fails_in_time(peer.url.replace("//", "//:hunter2@")).reason == "wrong user or password"


def test_a_password_that_is_part_of_an_error_code_does_not_hide_it(guarded: Server) -> None:
    with pytest.raises(WireError, match="wrong user or password"):
        _whoami(guarded, ":WRONG@")


def test_a_database_that_is_not_there_is_final(guarded: Server) -> None:
    with pytest.raises(WireError, match="out of range") as caught:
        _whoami(guarded, ":s3cret@", "/99")
    assert not caught.value.passing


@pytest.mark.parametrize(
    "text",
    ["ERR unknown command 'AUTH', with args beginning with: 'cron' 'hunter2' ", "ERR what is 'hunter2'?"],
)
def test_a_server_that_echoes_the_password_does_not_get_it_shown(text: str) -> None:
    with Peer(lambda conn: (conn.recv(1000), conn.sendall(f"-{text}\r\n+PONG\r\n".encode()))) as peer:
        trouble = _fails_in_time(peer.url.replace("//", "//cron:hunter2@"))
    assert "hunter2" not in trouble.reason
    assert trouble.reason.startswith("ERR ")


def test_a_connection_is_closed_after_a_failure() -> None:
    with Peer(lambda conn: None) as peer:
        deadline = time.monotonic() + 1
        connection = Connection(parse_url(peer.url), deadline)
        with pytest.raises(WireError):
            connection.call([["PING"]], deadline)
        with pytest.raises(WireError, match="bad file descriptor"):
            connection.call([["PING"]], deadline)
        connection.close()
