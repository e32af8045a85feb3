"""A peer that does as it is told: a proxy in front of a server that loses, holds and counts what passes, or an impostor.

The client under test sends a batch of commands and waits for all their replies; the proxy follows that, so each batch is
one round trip and everything it does is decided by what the batch holds, never by time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, Literal, Self

from clustercron import schema
from clustercron.wire import Parser
from tests.rig import WAIT_S

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator
    from pathlib import Path

Part = Literal["request", "reply"]
How = Literal["reset", "fin", "silence", "drip", "late"]


class Peer:
    """Listens on a loopback port, or on a Unix socket, and gives each connection to `serve` in a thread of its own."""

    def __init__(self, serve: Callable[[socket.socket], None], path: Path | None = None) -> None:
        self._serve = serve
        self._path = path
        self._closed = threading.Event()
        self._open: set[socket.socket] = set()
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(path))
            self._listener.listen(128)
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}" if self._path is None else f"unix://{self._path}"

    def _accept(self) -> None:
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.add(conn)
            threading.Thread(target=self._handle, args=(conn,), daemon=True).start()

    def _handle(self, conn: socket.socket) -> None:
        # A client that goes away in the middle is what these tests are about.
        with contextlib.suppress(OSError):
            self._serve(conn)
        conn.close()
        self._open.discard(conn)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for conn in list(self._open):
            with contextlib.suppress(OSError):
                conn.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def reset(conn: socket.socket) -> None:
    """Close with RST instead of FIN."""
    conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    conn.close()


def stay_silent(conn: socket.socket) -> None:
    """Read until the other side gives up, and say nothing."""
    while conn.recv(1 << 16):
        pass


class _Fault:
    def __init__(self, kind: str, part: Part, how: How, times: int, after: int) -> None:
        self.kind = kind
        self.part = part
        self.how = how
        self.times = times
        self.after = after


class Hold:
    """Requests of one kind that wait in the proxy until they are let through."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._reached = threading.Event()
        self._released = threading.Event()

    def wait_until_reached(self) -> None:
        assert self._reached.wait(WAIT_S), f"no {self.kind} came"

    def release(self) -> None:
        self._released.set()

    def pass_through(self) -> None:
        self._reached.set()
        self._released.wait(WAIT_S * 3)


class Proxy(Peer):
    """Forwards to a server's Unix socket.

    A kind is a script's name (`claim`, `start`, `renew`, `finish`, `known`) or a command in lower case (`auth`). `trips`
    lists the kinds of each batch, in the order in which the batches came, and `sent` their bytes.
    """

    def __init__(self, upstream: Path, path: Path | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = upstream
        self._tls = tls
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._holds: list[Hold] = []
        self._scripts = {schema.script(name).encode(): name for name in schema.SCRIPTS}
        self.trips: list[tuple[str, ...]] = []
        self.sent: list[bytes] = []
        super().__init__(self._forward, path)

    @property
    def url(self) -> str:
        return super().url if self._tls is None else f"rediss://localhost:{self.port}"

    def lose(self, kind: str, part: Part, how: How = "reset", times: int = 1, after: int = 0) -> None:
        """Lose the request or the reply of batches with this kind: `times` of them, the first `after` go through.

        `drip` does not lose a reply, but hands it on a byte a second; `late` hands it on a second later.
        """
        self._faults.append(_Fault(kind, part, how, times, after))

    def heal(self) -> None:
        """Lose nothing more."""
        self._faults = []

    def hold(self, kind: str) -> Hold:
        """Keep the requests of this kind back until they are released."""
        hold = Hold(kind)
        self._holds.append(hold)
        return hold

    def count(self, kind: str) -> int:
        return sum(kind in trip for trip in list(self.trips))

    def _forward(self, conn: socket.socket) -> None:
        if self._tls is not None:
            conn = self._tls.wrap_socket(conn, server_side=True)
            self._open.add(conn)
        with conn, socket.socket(socket.AF_UNIX) as upstream:
            upstream.connect(str(self._upstream))
            while (batch := _read_batch(conn)) is not None:
                data, whole = batch
                self.sent.append(data)
                fault = self._note(tuple(map(self._kind, whole)))
                if fault is not None and fault.part == "request":
                    return _fail(conn, fault.how)
                upstream.sendall(data)
                replies = _read_replies(upstream, len(whole))
                if fault is None:
                    conn.sendall(replies)
                elif fault.how == "drip":
                    self._drip(conn, replies)
                elif fault.how == "late":
                    self._closed.wait(1)
                    conn.sendall(replies)
                else:
                    return _fail(conn, fault.how)
        return None

    def _kind(self, command: list[bytes]) -> str:
        name = command[0].decode().lower()
        return self._scripts.get(command[1], "script") if name == "eval" else name

    def _note(self, kinds: tuple[str, ...]) -> _Fault | None:
        """Count a batch, hold it where that is asked for, and answer what is to go wrong with it."""
        chosen = None
        with self._lock:
            self.trips.append(kinds)
            for fault in self._faults:
                if fault.kind in kinds and fault.times and chosen is None:
                    if fault.after:
                        fault.after -= 1
                    else:
                        fault.times -= 1
                        chosen = fault
        for hold in self._holds:
            if hold.kind in kinds:
                hold.pass_through()
        return chosen

    def _drip(self, conn: socket.socket, data: bytes) -> None:
        for byte in data:
            conn.sendall(bytes([byte]))
            if self._closed.wait(1):
                return


def _fail(conn: socket.socket, how: How) -> None:
    if how == "reset":
        reset(conn)
    elif how == "silence":
        stay_silent(conn)
    # and for a FIN it is enough to leave


def _read_batch(conn: socket.socket) -> tuple[bytes, list[list[bytes]]] | None:
    """Read whole commands until nothing of a further one has come; None at the end of the connection."""
    data = b""
    while (whole := commands(data)) is None:
        more = conn.recv(1 << 16)
        if not more:
            return None
        data += more
    return data, whole


def commands(data: bytes) -> list[list[bytes]] | None:
    """Answer the commands that stand in some bytes, or None where the last is not whole."""
    found, position = [], 0
    try:
        while position < len(data):
            end = data.index(b"\r\n", position)
            words, count = [], int(data[position + 1 : end])
            position = end + 2
            for _ in range(count):
                end = data.index(b"\r\n", position)
                size = int(data[position + 1 : end])
                words.append(data[end + 2 : end + 2 + size])
                position = end + 4 + size
            found.append(words)
    except ValueError:
        return None
    return found if found and position == len(data) else None


def _read_replies(upstream: socket.socket, count: int) -> bytes:
    data, parser = b"", Parser()
    while count:
        more = upstream.recv(1 << 16)
        if not more:
            raise ConnectionResetError
        data += more
        parser.feed(more)
        while count and parser.next() is not None:
            count -= 1
    return data


@contextlib.contextmanager
def full_listener(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port whose queue is full, so that the kernel drops every SYN: connecting neither succeeds nor fails."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(0)
        place = listener.getsockname()
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(place)
        yield int(place[1])
