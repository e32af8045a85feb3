"""The run path's own way to speak to Redis: one socket, one total deadline, nothing sent twice behind one's back.

redis-py resends a claim whose reply was lost and so turns a win into a loss, has no bound on a whole exchange, and costs
several times the rest of a lost `run` to import. This speaks RESP2, sends AUTH and SELECT in one go,
and leaves every decision to try again to the caller. TLS loads `ssl`; nothing else here is heavy.
"""

from __future__ import annotations

import _socket
import errno
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence
    from typing import TypeAlias

    from clustercron.config import StoreAddress

    Reply: TypeAlias = "bytes | int | ReplyError | list[Reply] | None"

# No script answers a hundredth of this; whoever says more is no Redis, and must not fill the memory.
_MAX_BYTES = 1 << 20
_MAX_ITEMS = 1 << 10
_MAX_DEPTH = 8
_MAX_SHOWN = 200
# What a Redis says when the same request may succeed a moment later.
_PASSING = (
    "LOADING",
    "READONLY",
    "MASTERDOWN",
    "TRYAGAIN",
    "CLUSTERDOWN",
    "BUSY",
    "OOM",
    "MISCONF",
    "NOREPLICAS",
    "UNKILLABLE",
    "UNBLOCKED",
)


NO_ANSWER = "no answer in time"


class WireError(Exception):
    """An exchange that failed. `passing` says whether trying again can help; `hint` what to look at, or None."""

    def __init__(self, reason: str, passing: bool, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.passing = passing
        self.hint = hint


class ReplyError:
    """An error reply inside the answer to a pipeline."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def encode(command: Sequence[str | bytes]) -> bytes:
    """Write one command as RESP, text as UTF-8."""
    parts = [b"*%d\r\n" % len(command)]
    for word in command:
        data = word if isinstance(word, bytes) else word.encode("utf-8", "surrogateescape")
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class Parser:
    """Reads RESP2 replies from bytes that come in any pieces.

    A peer that is no Redis, or a reply beyond all bounds, raises WireError; half a reply is not an error.
    """

    __slots__ = ("_buffer", "_position")

    def __init__(self) -> None:
        self._buffer = b""
        self._position = 0

    def feed(self, data: bytes) -> None:
        """Add bytes as they came.

        Raises:
            WireError: more than any reply has.
        """
        self._buffer = self._buffer[self._position :] + data
        self._position = 0
        if len(self._buffer) > _MAX_BYTES:
            raise _not_redis(self._buffer[:1])

    def next(self) -> tuple[Reply] | None:
        """Answer the next whole reply in a tuple of one, or None when more bytes are needed.

        Raises:
            WireError: the bytes are no RESP2.
        """
        start = self._position
        try:
            return (self._reply(0),)
        except _MoreNeeded:
            self._position = start
            return None

    def _line(self) -> bytes:
        end = self._buffer.find(b"\r\n", self._position)
        if end < 0:
            raise _MoreNeeded
        line = self._buffer[self._position : end]
        self._position = end + 2
        return line

    def _reply(self, depth: int) -> Reply:
        if self._position < len(self._buffer) and self._buffer[self._position] not in b"+-:$*":
            raise _not_redis(self._buffer[self._position : self._position + 1])
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ReplyError(rest.decode("utf-8", "replace"))
        number = _number(rest)
        if kind == b":":
            return number
        if number == -1:
            return None
        if kind == b"$":
            return self._bulk(number)
        if not 0 <= number <= _MAX_ITEMS or depth >= _MAX_DEPTH:
            raise _not_redis(line[:1])
        return [self._reply(depth + 1) for _ in range(number)]

    def _bulk(self, length: int) -> bytes:
        if not 0 <= length <= _MAX_BYTES:
            raise _not_redis(b"$")
        end = self._position + length
        if len(self._buffer) < end + 2:
            raise _MoreNeeded
        if self._buffer[end : end + 2] != b"\r\n":
            raise _not_redis(self._buffer[end : end + 1])
        data = self._buffer[self._position : end]
        self._position = end + 2
        return data


class _MoreNeeded(Exception):
    pass


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 19:
        raise _not_redis(text[:1])
    return int(text)


def _not_redis(begin: bytes) -> WireError:
    if begin == b"\x15":
        return WireError("it speaks TLS", False, _TLS_PORT)
    shown = ascii(begin.decode("latin-1"))
    return WireError(f"this is no Redis: an answer begins with {shown}", False, "look at host and port of the URL")


def reply_trouble(text: str) -> WireError:
    """Judge an error reply: whether it passes, and what to look at.

    Of the error of a command inside a script only that is kept: older servers put a text of their own before it, newer
    ones behind it. A command that a server does not know comes back with its arguments: those of AUTH are not for
    anybody's eyes.
    """
    text = text.partition(", with args")[0].partition(" script: ")[0]
    if text.startswith("ERR Error running script"):
        text = text.rpartition("@user_script:")[2].partition(": ")[2].removeprefix("-")
    code = text.split(" ", 1)[0]
    if len(text) > _MAX_SHOWN:
        text = text[:_MAX_SHOWN] + "..."
    if code in _PASSING:
        return WireError(text, True)
    if code == "ERR" and "max number of clients" in text:
        return WireError("max number of clients reached", True)
    if code == "NOAUTH" or "unauthenticated" in text:  # the second for a request as long as ours
        return WireError("it asks for a password", False, _LOGIN)
    if code == "WRONGPASS" or "invalid password" in text:
        return WireError("wrong user or password", False, _LOGIN)
    if "without any password" in text or "no password is set" in text:
        return WireError("it has no password, and one is given", False, _LOGIN)
    if code == "NOPERM" or "can't run this command" in text or "ACL failure" in text or "no permissions" in text:
        return WireError(f"permission missing: {text}", False, "give the user the commands and keys of clustercron(7)")
    if code in ("MOVED", "ASK", "CROSSSLOT"):
        return WireError("this is a node of a Redis Cluster", False, "this version speaks to one Redis server")
    if code == "WRONGTYPE":
        return WireError("a key of this job holds something else", False, "set CLUSTERCRON_PREFIX to a free name")
    return WireError(text, False)


_LOGIN = "look at CLUSTERCRON_REDIS_PASSWORD_FILE, and at user and password in the URL"


class Connection:
    """One connection. After a WireError it is closed and of no more use.

    Args:
        address: where to connect.
        deadline: an instant of `time.monotonic()` that bounds name resolution, connecting and the handshake.

    Raises:
        WireError: no connection by then.
    """

    __slots__ = ("_address", "_greeting", "_parser", "_socket")

    def __init__(self, address: StoreAddress, deadline: float) -> None:
        self._address = address
        self._parser = Parser()
        self._greeting: list[Sequence[str | bytes]] = []
        if address.username:
            self._greeting.append(["AUTH", address.username, address.password or ""])
        elif address.password is not None:
            self._greeting.append(["AUTH", address.password])
        if address.db:
            self._greeting.append(["SELECT", str(address.db)])
        self._socket = _connect(address, deadline)

    def call(self, commands: Sequence[Sequence[str | bytes]], deadline: float) -> list[Reply]:
        """Send commands in one go and read their replies, the first time behind AUTH and SELECT, all by one deadline (`time.monotonic()`).

        An error reply of a command is an item of the answer; one to AUTH or SELECT raises.

        Raises:
            WireError: the replies did not come, and so it is not known whether the commands were carried out.
        """
        greeting, self._greeting = self._greeting, []
        try:
            if greeting:
                # A round trip of its own: what is sent behind a refused AUTH or SELECT is carried out all the same, as
                # the default user, in database 0.
                for reply in self._exchange(greeting, deadline):
                    self._check_greeting(reply)
            return self._exchange(commands, deadline)
        except OSError as exc:
            self.close()
            raise _io_trouble(exc, self._address) from None
        except BaseException:
            self.close()
            raise

    def _exchange(self, commands: Sequence[Sequence[str | bytes]], deadline: float) -> list[Reply]:
        self._send(b"".join(map(encode, commands)), deadline)
        return [self._receive(deadline) for _ in commands]

    def _check_greeting(self, reply: Reply) -> None:
        if isinstance(reply, ReplyError):
            trouble, secret = reply_trouble(reply.text), self._address.password
            if secret and trouble.reason.removesuffix("...") in reply.text:  # its words, not ours
                trouble.reason = trouble.reason.replace(secret, "***")
            raise trouble

    def close(self) -> None:
        """Close the socket; calling it again is harmless."""
        self._socket.close()

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        try:
            while view:
                self._socket.settimeout(_left(deadline))
                view = view[self._socket.send(view) :]
        except TimeoutError:
            raise
        except OSError:
            pass  # it may have said why before it closed: reading shows

    def _receive(self, deadline: float) -> Reply:
        while True:
            reply = self._parser.next()
            if reply is not None:
                return reply[0]
            self._socket.settimeout(_left(deadline))
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "connection closed")
            self._parser.feed(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _connect(address: StoreAddress, deadline: float) -> _socket.socket:
    if address.path:
        return _open(address, _socket.AF_UNIX, address.path, deadline)
    trouble: WireError | None = None
    places = _resolve(address.host, address.port, deadline)
    for index, (family, place) in enumerate(places):
        now = time.monotonic()
        # An address that does not answer must leave time for the next.
        share = (deadline - now) / (len(places) - index)
        try:
            return _open(address, family, place, now + share)
        except WireError as exc:
            trouble = exc
            if not exc.passing:
                break
    raise trouble or WireError("the name has no address", True)


def _open(address: StoreAddress, family: int, place: object, deadline: float) -> _socket.socket:
    sock = None
    try:
        sock = _socket.socket(family, _socket.SOCK_STREAM, 0)
        sock.settimeout(_left(deadline))
        sock.connect(place)  # type: ignore[arg-type]
        if family != _socket.AF_UNIX:
            sock.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        return _secured(sock, address, deadline) if address.tls else sock
    except OSError as exc:
        if sock is not None:
            sock.close()
        raise _io_trouble(exc, address) from None
    except BaseException:
        if sock is not None:
            sock.close()
        raise


def _secured(sock: _socket.socket, address: StoreAddress, deadline: float) -> _socket.socket:
    import socket
    import ssl

    full = socket.socket(fileno=sock.detach())
    try:
        context = _tls_context(address)
        full.settimeout(_left(deadline))
        return context.wrap_socket(full, server_hostname=address.host)
    except ssl.SSLCertVerificationError as exc:
        reason = exc.verify_message.rstrip(".")
        raise WireError(f"TLS: its certificate is not accepted: {reason}", False, _TLS) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError):
        raise WireError("TLS: it closed the connection in the handshake", True, _TLS_PORT) from None
    except ssl.SSLError as exc:
        reason = _tls_reason(exc)
        raise WireError(f"TLS: {reason}", False, _TLS_PORT if "wrong version" in reason else _TLS) from None
    except TimeoutError:
        raise WireError(f"TLS: {NO_ANSWER}", True, _TLS_PORT) from None
    finally:
        full.close()  # nothing is left in it where the handshake succeeded


def _tls_context(address: StoreAddress) -> ssl.SSLContext:
    import ssl

    file = address.ca_file
    try:
        context = ssl.create_default_context(cafile=file)
        if address.cert_file:
            file = address.cert_file
            # Without an answer OpenSSL would ask for the passphrase of an encrypted key on the terminal.
            context.load_cert_chain(file, address.key_file, password=lambda: "")
    except OSError as exc:
        raise WireError(f"TLS: cannot use {file}: {_tls_reason(exc)}", False, _TLS) from None
    return context


def _tls_reason(exc: OSError) -> str:
    reason: str = getattr(exc, "reason", None) or exc.strerror or str(exc)
    return reason.partition(" (_ssl.c")[0].replace("_", " ").lower()


_TLS = "look at CLUSTERCRON_REDIS_CA_FILE, _CERT_FILE and _KEY_FILE, and at the host name in the URL"
_TLS_PORT = "redis:// is for a port without TLS, rediss:// for one with it"


def _io_trouble(exc: OSError, address: StoreAddress) -> WireError:
    if isinstance(exc, TimeoutError):
        return WireError(NO_ANSWER, True)
    if type(exc).__module__ == "ssl":
        reason = _tls_reason(exc)
        return WireError(f"TLS: {reason}", "alert" not in reason, _TLS)
    reason = (exc.strerror or str(exc) or type(exc).__name__).lower()
    reset = isinstance(exc, ConnectionResetError) and not address.tls and not address.path
    return WireError(reason, exc.errno not in (errno.EACCES, errno.EPERM), _TLS_PORT if reset else None)


# A resolver cannot be bounded; it runs beside, and a try that runs out of time leaves it to be asked again.
_pending: dict[tuple[str, int], _Lookup] = {}


class _Lookup:
    __slots__ = ("answer", "done", "passing", "trouble")

    def __init__(self, host: str, port: int) -> None:
        import _thread

        self.answer: list[tuple[int, object]] = []
        self.trouble: str | None = None
        self.passing = True
        self.done = _thread.allocate_lock()
        self.done.acquire()
        try:
            _thread.start_new_thread(self._run, (host, port))
        except RuntimeError:
            raise WireError("its name cannot be looked up: no thread can be started", True) from None

    def _run(self, host: str, port: int) -> None:
        try:
            found = _socket.getaddrinfo(host, port, 0, _socket.SOCK_STREAM)
            self.answer = [(item[0], item[4]) for item in found]
        except OSError as exc:
            self.trouble = (exc.strerror or str(exc)).lower()
        except UnicodeError:
            self.trouble = "not a host name"
            self.passing = False
        finally:
            self.done.release()


def _resolve(host: str, port: int, deadline: float) -> list[tuple[int, object]]:
    numeric = _socket.AI_NUMERICHOST
    try:
        return [(item[0], item[4]) for item in _socket.getaddrinfo(host, port, 0, _socket.SOCK_STREAM, 0, numeric)]
    except (OSError, UnicodeError):
        pass  # not an address, so a name
    lookup = _pending.get((host, port))
    if lookup is None:
        lookup = _pending[host, port] = _Lookup(host, port)
    if not lookup.done.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise WireError("the resolver does not answer", True)
    lookup.done.release()  # a renewal may wait for the same name
    _pending.pop((host, port), None)
    if lookup.trouble is not None:
        raise WireError(lookup.trouble, lookup.passing)
    return lookup.answer
