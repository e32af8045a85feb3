"""install.sh on real prefixes: one install shared by most tests, and a few of their own where one must fail."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TREE = Path(__file__).resolve().parent.parent
INSTALL = TREE / "install.sh"
VERSION = re.search(r'__version__ = "(.+)"', (TREE / "clustercron" / "__init__.py").read_text()).group(1)

# Some of these take half a minute on a cold cache of packages.
pytestmark = pytest.mark.timeout(300)


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    options.setdefault("cwd", "/")
    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)


def install(*arguments: object, tree: Path = TREE, **options: object) -> subprocess.CompletedProcess[str]:
    done = run(tree / "install.sh", *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def answers(command: Path) -> bool:
    done = run(command, "--version", env={"PATH": "/usr/bin:/bin", "HOME": "/"})
    return done.stdout == f"clustercron {VERSION}\n" and done.returncode == 0 and not done.stderr


def releases(base: Path) -> set[str]:
    return {path.name for path in (base / "releases").iterdir()}


def everything_below(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def stand_in(directory: Path, name: str, script: str) -> dict[str, str]:
    """An environment in which a program of the system is another one."""
    directory.mkdir(exist_ok=True)
    program = directory / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with clustercron in it, installed with a mask that hides everything. Tests leave it working."""
    prefix = tmp_path_factory.mktemp("shared") / "prefix"
    install("--prefix", prefix, umask=0o077)
    return prefix


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same from a tree and into a prefix whose names a shell could trip over, given relative to the directory."""
    directory = tmp_path_factory.mktemp("spaced") / "it's a é $HOME"
    tree = directory / "the tree"
    ignore = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "tests")
    shutil.copytree(TREE, tree, ignore=ignore)
    install("--prefix", "the prefix", tree=tree, cwd=directory, env={**os.environ, "LC_ALL": "C"})
    return directory / "the prefix"


def test_the_command_answers_in_an_empty_environment(shared: Path) -> None:
    assert answers(shared / "bin" / "clustercron")


def test_the_command_answers_where_every_name_has_spaces(spaced: Path) -> None:
    assert answers(spaced / "bin" / "clustercron")


def test_a_poisoned_path_and_directory_change_nothing(shared: Path, spaced: Path, tmp_path: Path) -> None:
    for name in ("click", "clustercron", "redis", "os", "site", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('poisoned: {name}')")
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(tmp_path), "PYTHONSTARTUP": "click.py"}
    for prefix in (shared, spaced):
        done = run(prefix / "bin" / "clustercron", "--version", cwd=tmp_path, env=environ)
        assert done.stdout == f"clustercron {VERSION}\n", done.stderr


def test_everything_is_readable_for_all_users_whatever_the_mask(shared: Path) -> None:
    for path in [shared, *everything_below(shared)]:
        if not path.is_symlink():
            wanted = 0o555 if path.is_dir() else 0o444
            assert path.stat().st_mode & wanted == wanted, path


def test_every_module_is_compiled_and_a_start_writes_nothing(shared: Path) -> None:
    packages = next((shared / "lib/clustercron/current/lib").glob("python3*/site-packages"))
    modules = list((packages / "clustercron").rglob("*.py"))
    assert modules
    for module in modules:
        (compiled,) = (module.parent / "__pycache__").glob(f"{module.stem}.*.pyc")
        # Bit 0 set, bit 1 not: goes by a hash of the source, and does not look at it.
        assert compiled.read_bytes()[4:8] == b"\x01\x00\x00\x00"
    before = everything_below(shared)
    assert answers(shared / "bin" / "clustercron")
    assert everything_below(shared) == before


def test_the_lua_scripts_are_installed(shared: Path) -> None:
    packages = next((shared / "lib/clustercron/current/lib").glob("python3*/site-packages"))
    assert {path.name for path in (TREE / "clustercron" / "lua").glob("*.lua")} == {
        path.name for path in (packages / "clustercron" / "lua").glob("*.lua")
    }


def test_the_man_pages_are_installed_as_they_are(shared: Path) -> None:
    for page in (TREE / "man").glob("*.[1-9]"):
        assert (shared / "share/man" / f"man{page.suffix[1:]}" / page.name).read_text() == page.read_text()


def test_the_short_launcher_starts_python_and_no_shell(shared: Path) -> None:
    base = shared / "lib" / "clustercron"
    first = (shared / "bin" / "clustercron").read_text().splitlines()[0]
    assert first == f"#!{base}/{os.readlink(base / 'current')}/bin/python3 -IS"


def test_a_release_stays_while_something_runs_from_it(shared: Path) -> None:
    base = shared / "lib" / "clustercron"
    first = os.readlink(base / "current")
    for left in (".new.1", "0.0.1-20200101000000-1"):
        (base / "releases" / left).mkdir()
    with subprocess.Popen(
        [base / first / "bin" / "python3", "-I", "-c", "input(); import croniter"], stdin=subprocess.PIPE
    ) as runs:
        install("--prefix", shared)
        second = os.readlink(base / "current")
        install("--prefix", shared)
        third = os.readlink(base / "current")
        refused = run(INSTALL, "--prefix", shared, "--uninstall")
        assert releases(base) == {Path(name).name for name in (first, second, third)}
        runs.communicate(b"\n")
    assert runs.returncode == 0
    assert refused.returncode == 1
    assert f"pid {runs.pid};" in refused.stderr
    said = install("--prefix", shared).stdout
    assert releases(base) == {Path(name).name for name in (third, os.readlink(base / "current"))}
    assert os.readlink(base / "previous") == third
    assert f"{shared}/bin/clustercron" in said
    assert len(said.splitlines()) < 10
    assert answers(shared / "bin" / "clustercron")


# Each program stands for a point: after pip, after the build, and when all is done but the switch.
@pytest.mark.parametrize(("program", "signal"), [("find", "KILL"), ("chmod", "TERM"), ("sync", "KILL")])
def test_an_interrupted_install_leaves_the_old_one_working(
    shared: Path, tmp_path: Path, program: str, signal: str
) -> None:
    base = shared / "lib" / "clustercron"
    before = os.readlink(base / "current")
    there = releases(base)
    done = run(INSTALL, "--prefix", shared, env=stand_in(tmp_path / "bin", program, f"kill -{signal} $PPID"))
    assert done.returncode in {-9, 143}
    assert os.readlink(base / "current") == before
    assert answers(shared / "bin" / "clustercron")
    if signal == "TERM":
        assert releases(base) == {name for name in there if not name.startswith(".new")}


def test_a_failed_install_leaves_the_old_one_working(shared: Path) -> None:
    base = shared / "lib" / "clustercron"
    before = os.readlink(base / "current")
    done = run(INSTALL, "--prefix", shared, env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/nowhere"})
    assert done.returncode == 1
    assert "ERROR: No matching distribution found" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("install.sh: installing the packages with pip failed")
    assert os.readlink(base / "current") == before
    assert not list((base / "releases").glob(".new.*"))
    assert answers(shared / "bin" / "clustercron")


def test_a_failed_first_install_leaves_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/nowhere", "TMPDIR": str(tmp_path)}
    assert run(INSTALL, "--prefix", tmp_path / "new" / "prefix", env=environ).returncode == 1
    assert everything_below(tmp_path) == []


def test_two_installs_at_once_are_one(shared: Path) -> None:
    base = shared / "lib" / "clustercron"
    there = releases(base)
    with (base / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(INSTALL, "--prefix", shared)
    assert done.returncode == 1
    assert done.stderr == f"install.sh: another install is at work in {base}: try again when it has ended\n"
    assert releases(base) == there


def test_a_command_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "clustercron"
    command.parent.mkdir()
    command.write_text("mine")
    done = run(INSTALL, "--prefix", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"install.sh: {command} is there and was not installed by this script: ")
    run(INSTALL, "--prefix", tmp_path, "--uninstall")
    assert everything_below(tmp_path) == [command.parent, command]
    assert command.read_text() == "mine"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A staged root install, made where somebody else's link is in cron's PATH and a page of theirs among the manuals.

    The second value is what install.sh said.
    """
    stage = tmp_path_factory.mktemp("staged") / "machine"
    (stage / "usr/bin").mkdir(parents=True)
    (stage / "usr/bin/clustercron").symlink_to("/somewhere/else")
    (stage / "usr/local/share/man/man1").mkdir(parents=True)
    (stage / "usr/local/share/man/man1/clustercron.1").write_text("mine")
    said = install(env={**os.environ, "DESTDIR": str(stage)}).stdout
    return stage, said


def test_a_staged_install_has_the_layout_of_root_and_names_the_final_places(staged: tuple[Path, str]) -> None:
    stage, _ = staged
    command = stage / "usr/local/bin/clustercron"
    assert os.readlink(command) == "/opt/clustercron/current/bin/clustercron"
    release = stage / "opt/clustercron" / os.readlink(stage / "opt/clustercron/current")
    first = (release / "bin/clustercron").read_text().splitlines()[0]
    assert first == f"#!/opt/clustercron/releases/{release.name}/bin/python3 -IS"
    named = [
        path
        for path in everything_below(stage)
        if path.is_file() and not path.is_symlink() and str(stage).encode() in path.read_bytes()
    ]
    assert named == []


def test_what_somebody_else_put_there_is_neither_replaced_nor_removed(staged: tuple[Path, str]) -> None:
    stage, said = staged
    assert os.readlink(stage / "usr/bin/clustercron") == "/somewhere/else"
    assert (stage / "usr/local/share/man/man1/clustercron.1").read_text() == "mine"
    assert "left alone, since this script did not make it: /usr/bin/clustercron;" in said
    assert "linked from" not in said


@pytest.mark.root
def test_a_staged_install_runs_where_it_was_meant_to(staged: tuple[Path, str]) -> None:
    stage, _ = staged
    script = """
        mount --bind "$0/opt" /opt && mount --bind "$0/usr/local" /usr/local &&
        exec env -i PATH=/usr/bin:/bin HOME=/ /usr/local/bin/clustercron --version
    """
    done = run("unshare", "-m", "sh", "-c", script, stage)
    assert done.stdout == f"clustercron {VERSION}\n", done.stderr


def test_an_uninstall_leaves_configuration_and_state_and_nothing_else(tmp_path: Path) -> None:
    stage = tmp_path / "machine"
    kept = [stage / "etc/clustercron.conf", stage / "var/lib/clustercron/spool", stage / "usr/bin/env"]
    for path in kept:
        path.parent.mkdir(parents=True)
        path.write_text("kept")
    before = everything_below(stage)
    environ = {**os.environ, "DESTDIR": str(stage)}
    install(env=environ)
    assert os.readlink(stage / "usr/bin/clustercron") == "/usr/local/bin/clustercron"
    install("--uninstall", env=environ)
    assert everything_below(stage) == before
    assert install("--uninstall", env=environ).stdout == "clustercron is not installed in /opt/clustercron\n"


@pytest.mark.parametrize(
    ("arguments", "environ", "reason"),
    [
        (["--prefix"], {}, "--prefix: needs a directory"),
        (["--prefix="], {}, "--prefix: needs a directory"),
        (["--user"], {}, "--user: not known here"),
        (["--demo", "--uninstall"], {}, "--demo and --uninstall: one or the other"),
        (["--demo"], {"DESTDIR": "/tmp/machine"}, "--demo: cannot run below DESTDIR"),
    ],
    ids=["no prefix", "empty prefix", "unknown option", "demo of nothing", "demo elsewhere"],
)
def test_a_wrong_call_is_told_in_one_line(arguments: list[str], environ: dict[str, str], reason: str) -> None:
    done = run(INSTALL, *arguments, env={**os.environ, **environ})
    assert (done.returncode, done.stderr) == (2, f"install.sh: {reason}; see ./install.sh --help\n")


def test_help_names_every_option_and_ends_with_an_example() -> None:
    said = install("--help").stdout
    options = set(re.findall(r"^ +(--[a-z]+)", INSTALL.read_text(), re.MULTILINE))
    assert {"--prefix", "--demo", "--uninstall"} <= options <= set(re.findall(r"--[a-z]+", said))
    assert said.splitlines()[-2] == "example"


def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    environ = stand_in(tmp_path, "python9", "echo 3.9; exit 11")
    done = run(INSTALL, "--prefix", tmp_path / "prefix", env={**environ, "PYTHON": "python9"})
    assert (done.returncode, done.stderr) == (1, "install.sh: PYTHON=python9: not a Python 3.11 or newer\n")


# What the system's python3 is made to answer to the question whether it will do, and what should then be installed.
LACKING = [
    ("exit 127", "no python3 found", {"apt-get": "python3 python3-venv", "dnf": "python3", "apk": "python3"}),
    ("exit 12", "/usr/bin/python3 has no venv module", {"apt-get": "python3-venv", "dnf": "python3", "apk": "python3"}),
    (
        "echo 3.9; exit 11",
        "/usr/bin/python3 is Python 3.9, and 3.11 is the oldest that will do",
        {"apt-get": "python3.11 python3.11-venv", "dnf": "python3.11", "apk": "python3"},
    ),
]


@pytest.fixture
def without_python() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run install.sh where no Python will do until the package manager is asked for the right thing.

    A mount namespace has something else in the place of the system's Python; the package manager takes that away. All
    stands where any user can reach it.
    """
    with tempfile.TemporaryDirectory(prefix="install-", dir="/tmp") as name:
        place = Path(name)
        tools = place / "tools"
        tools.mkdir()
        for program in Path("/usr/bin").iterdir():
            if not program.name.startswith(("python", "apt", "dnf", "apk")):
                (tools / program.name).symlink_to(program)
        (place / "clustercron").mkdir()
        for file in ("install.sh", "pyproject.toml", "clustercron/__init__.py"):
            shutil.copy(TREE / file, place / file)
        python = os.path.realpath("/usr/bin/python3")

        def try_it(answer: str, manager: str, packages: str, *, user: int) -> subprocess.CompletedProcess[str]:
            lacking = place / "python3"
            lacking.write_text(f"#!/bin/sh\n{answer}\n")
            asked = tools / manager
            asked.write_text(
                f'#!/bin/sh\necho "$*" >>{place}/asked\n'
                f'case "$*" in *" {packages}") umount {python} ;; update*) ;; *) exit 1 ;; esac\n'
            )
            script = f"""
                mount --bind {lacking} {python} || exit 99
                [ ! -e /usr/local/bin/python3 ] || mount --bind {lacking} $(readlink -f /usr/local/bin/python3) || exit 99
                exec setpriv --reuid={user} --regid={user} --clear-groups env -i PATH={tools} HOME=/ \
                    {place}/install.sh --prefix /proc/nowhere
            """
            for path in [place, *everything_below(place)]:
                if not path.is_symlink():
                    path.chmod(0o755)
            return run("unshare", "-m", "sh", "-c", script)

        yield try_it


@pytest.mark.root
@pytest.mark.parametrize("manager", ["apt-get", "dnf", "apk"])
@pytest.mark.parametrize(("answer", "why", "packages"), LACKING, ids=["no python", "no venv", "too old"])
def test_a_missing_python_is_told_with_the_command_that_brings_it(
    without_python: Callable[..., subprocess.CompletedProcess[str]],
    answer: str,
    why: str,
    packages: dict[str, str],
    manager: str,
) -> None:
    done = without_python(answer, manager, packages[manager], user=65534)
    verb = "add" if manager == "apk" else "install"
    assert done.stderr == f"install.sh: {why}: run: sudo {manager} {verb} {packages[manager]}\n"
    assert done.returncode == 1


@pytest.mark.root
@pytest.mark.parametrize("manager", ["apt-get", "dnf", "apk"])
@pytest.mark.parametrize(("answer", "why", "packages"), LACKING, ids=["no python", "no venv", "too old"])
def test_root_installs_a_missing_python_and_says_so(
    without_python: Callable[..., subprocess.CompletedProcess[str]],
    answer: str,
    why: str,
    packages: dict[str, str],
    manager: str,
) -> None:
    done = without_python(answer, manager, packages[manager], user=0)
    assert done.stdout == f"installed with {manager}, since {why}: {packages[manager]}\n", done.stderr
    # With the real Python back it goes on, as far as a place where nothing can be made.
    assert done.stderr.startswith("install.sh: cannot make /proc/nowhere/lib/clustercron/releases: ")


@pytest.mark.soak
def test_demo_is_installed_and_run(tmp_path: Path) -> None:
    said = install("--prefix", tmp_path / "prefix", "--demo").stdout
    assert "thrown away at the end: Valkey server" in said
    assert "\nOne tick, one run: " in said
    assert "clustercron run --job" in said
    install("--prefix", tmp_path / "prefix", "--uninstall")
