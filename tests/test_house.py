"""The shape of the house: which way imports point, who owns which dependency, and what a losing node loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import clustercron

if TYPE_CHECKING:
    from tests.rig import Fleet

PACKAGE = Path(clustercron.__file__).parent
# A module imports only what stands before it.
ORDER = (
    "__init__",
    "errors",
    "files",
    "options",
    "clock",
    "messages",
    "schema",
    "zone",
    "schedule",
    "tick",
    "fired",
    "command",
    "config",
    "wire",
    "claims",
    "spool",
    "output",
    "supervise",
    "lease",
    "ping",
    "attempt",
    "run",
    "store",
    "report",
    "render",
    "demo",
    "cli",
    "__main__",
)
PURE = ("errors", "options", "schema", "schedule", "tick", "report")
OWNERS = {
    "redis": {"store"},
    "rich": {"render"},
    "click": {"cli"},
    "croniter": {"schedule"},
    "signal": {"supervise", "ping", "demo"},
    "ssl": {"wire", "store"},
    "_socket": {"wire"},
    "subprocess": {"demo"},
    "urllib.request": {"ping"},
}
# What a node that loses loads beyond a bare interpreter; each costs well under a millisecond.
LOSERS_IMPORTS = {
    "__future__",
    "_socket",
    "binascii",
    "errno",
    "posix",
    "select",
    "time",
    "tzdata",
}


def modules() -> list[Path]:
    return sorted(PACKAGE.glob("*.py"))


def imports(path: Path) -> set[str]:
    """Full names of what a module imports when it runs, wherever in it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: a relative import"
            names.add(node.module or "")
            if node.module == "clustercron":
                names |= {f"clustercron.{alias.name}" for alias in node.names if not alias.name.startswith("__")}
    return names


def test_every_module_has_its_place_in_the_order() -> None:
    assert {path.stem for path in modules()} == set(ORDER)


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.stem)
def test_imports_point_one_way(path: Path) -> None:
    own = {name.removeprefix("clustercron.") for name in imports(path) if name.startswith("clustercron.")}
    before = set(ORDER[: ORDER.index(path.stem)])
    assert own <= before, f"{path.stem} imports what comes after it"


@pytest.mark.parametrize(("dependency", "owners"), OWNERS.items(), ids=OWNERS)
def test_each_dependency_has_one_owner(dependency: str, owners: set[str]) -> None:
    users = {
        path.stem
        for path in modules()
        if any(name == dependency or name.startswith(dependency + ".") for name in imports(path))
    }
    assert users <= owners


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_read_no_clock(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    clocks = {"time.time", "time.time_ns", "time.monotonic", "time.clock_gettime", "time.sleep", "datetime.now"}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not {name for name in called if name in clocks or name.endswith((".now", ".utcnow", ".today"))}


def test_keys_and_scripts_are_built_in_one_place() -> None:
    for path in modules():
        if path.stem not in ("schema", "config"):
            text = path.read_text()
            assert ".lua" not in text, path.name
            assert "{{" not in text, path.name


def _loaded(fleet: Fleet, *arguments: str) -> set[str]:
    code = (
        "import atexit, sys; from clustercron.__main__ import main; "
        "atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr)); sys.exit(main())"
    )
    end = fleet.start(*arguments, command=[sys.executable, "-I", "-c", code]).end()
    assert end.returncode == 0, end.stderr
    return set(end.stderr.split())


def test_losing_node_loads_next_to_nothing(fleet: Fleet) -> None:
    line = ["run", "--job", "billing", "--schedule", "0 0 * * *", "--tick", "2026-01-05T00:00:00Z", "--", "true"]
    assert fleet.call(*line).returncode == 0
    bare = subprocess.run(
        [sys.executable, "-I", "-c", "import atexit, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        env=fleet.env,
    )
    loaded = _loaded(fleet, *line) - set(bare.stdout.split())
    foreign = {name for name in loaded if not name.startswith("clustercron")}
    assert foreign <= LOSERS_IMPORTS, foreign - LOSERS_IMPORTS
    own = {name.removeprefix("clustercron.") for name in loaded}
    assert not own & {"supervise", "attempt", "store", "report", "render", "cli", "demo", "ping"}
