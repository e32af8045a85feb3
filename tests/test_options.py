"""The options of `run`: what each takes, and that the lean reader and click read one command line in one way."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import clustercron.run
from clustercron import cli, options
from clustercron.options import RUN_OPTIONS, RunArguments, read_run
from tests.rig import Fleet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from clustercron.clock import Clock

DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("0", 0),
        ("90", 90_000),
        ("90s", 90_000),
        ("10m", 600_000),
        ("2h", 7_200_000),
        ("7d", 7 * DAY_MS),
        ("250ms", 250),
        ("1.5h", 5_400_000),
        ("0.001", 1),
        ("0.0001s", 0),
        ("007", 7_000),
        ("3660d", 3660 * DAY_MS),
    ],
)
def test_durations(text: str, milliseconds: int) -> None:
    assert options.duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    "text",
    [
        "s",
        "-1",
        "+1",
        "1w",
        "1sm",
        "1dd",
        "1h30m",
        "1e3",
        "0x10",
        "1.",
        ".5",
        "1.5.5",
        "1_0",
        "٣",
        "1M",
        "inf",
        "nan",
        "auto",
        "3661d",
        "",
        " 1",
        "1 s",
        "9" * 13,
        "1." + "1" * 10,
    ],
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a duration|longer than ten years"):
        options.duration_ms(text)


@given(st.integers(0, 10**7), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_a_duration_is_its_number_times_its_unit(number: int, unit: str) -> None:
    scale = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": DAY_MS}[unit]
    if number * scale > 3660 * DAY_MS:
        with pytest.raises(ValueError, match="longer than ten years"):
            options.duration_ms(f"{number}{unit}")
    else:
        assert options.duration_ms(f"{number}{unit}") == number * scale


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("65536", 65536), ("64K", 65536), ("64KiB", 65536), ("64kb", 65536), ("1M", 1 << 20), ("1MIB", 1 << 20)],
)
def test_sizes(text: str, size: int) -> None:
    assert options.size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5K", "1G", "1B", "1KM", "1iB", "1048577", "2M", "1025K", "9" * 10])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a size|more than 1 MiB"):
        options.size_bytes(text)


@pytest.mark.parametrize("text", ["a", "0", "Billing-2.x_y", "x" * 100])
def test_job_names(text: str) -> None:
    assert options.job_name(text) == text


@pytest.mark.parametrize("text", ["", "x" * 101, "-a", ".a", "_a", "a b", "a/b", "a{b}", "a\n", "ü", "a\0", "a:b"])
def test_what_is_no_job_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"a name |is not one of"):
        options.job_name(text)


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (options.flag, ["1", "yes", "TRUE", "on", "0", "No", "false", "off"], ["", "2", "y", " yes"]),
        (options.lease_ms, ["1s", "1000ms", "7d"], ["0", "999ms", ""]),
        (options.positive_duration_ms, ["1ms", "7d"], ["0", "0.0001s", ""]),
        (options.grace_ms, ["auto", "0", "5m"], ["AUTO", "", "never"]),
        (options.count(0, 255), ["0", "255", "007"], ["256", "-1", "1.0", "", "٣", "9" * 10]),
        (options.choice("warn", "kill"), ["warn", "kill"], ["Warn", "", "warn "]),
        (options.plain, ["x", "é", "a b"], ["", "\t", "a\0", "\udcff", "\u2028"]),
        (options.schedule_text, ["0 2 * * *", "0\t2 * * *"], ["", "a\vb", "a\nb"]),
        (options.command_text, ["x", "a\nb"], ["", " \n"]),
        (
            options.http_url,
            [
                "http://a",
                "https://a/b?c=d",
                "https://u:p@h.example.net:443/b",
                "http://[::1]:80",
                "http://a?b/c",
                "http://a/[:x@y",
            ],
            [
                "",
                "http://",
                "http:///",
                "ftp://a",
                "http://a b",
                "a",
                "http://a@",
                "http://[",
                "http://[::1]x",
                "http://:1",
            ]
            + [f"http://a:{port}/x" for port in ("abc", "0", "65536", "-1", "1:1", "٣")],
        ),
    ],
)
def test_other_values(read: Callable[[str], object], good: list[str], bad: list[str]) -> None:
    for text in good:
        read(text)
    for text in bad:
        with pytest.raises(ValueError, match=r"\w"):
            read(text)


@given(st.sampled_from(RUN_OPTIONS), st.text() | st.text("0123456789.smhdKMB-+_ "))
def test_any_text_is_a_value_or_a_value_error(option: options.Option, text: str) -> None:
    with contextlib.suppress(ValueError):
        option.parse(text)


@pytest.mark.parametrize("option", RUN_OPTIONS, ids=lambda option: option.name)
def test_an_option_takes_its_own_default(option: options.Option) -> None:
    if option.default is not None:
        option.parse(option.default)


# The two readers


class ClickReading:
    """What click makes of a command line of `run`: what it would run, or what it says."""

    def __init__(self, argv: list[str]) -> None:
        self.arguments: RunArguments | None = None

        def take(arguments: RunArguments, environ: Mapping[str, str], clock: Clock) -> int:
            self.arguments = arguments
            return 0

        # Both outputs are written to their descriptors, so a pipe stands in the place of each.
        with pytest.MonkeyPatch.context() as patch, _caught(1) as printed, _caught(2) as said:
            patch.setattr(clustercron.run, "main", take)
            self.exit_code = cli.main(["run", *argv])
        self.printed, self.said = printed[0], said[0]


@contextlib.contextmanager
def _caught(descriptor: int) -> Iterator[list[str]]:
    """Catch what is written to a descriptor; the list has it afterwards."""
    caught: list[str] = []
    read_fd, write_fd = os.pipe()
    saved = os.dup(descriptor)
    os.dup2(write_fd, descriptor)
    try:
        yield caught
    finally:
        os.dup2(saved, descriptor)
        os.close(saved)
        os.close(write_fd)
        with os.fdopen(read_fd, "rb") as file:
            caught.append(file.read().decode(errors="replace"))


VALUED = [f"--{option.name}" for option in RUN_OPTIONS if not option.is_flag]
FLAGS = [f"--{option.name}" for option in RUN_OPTIONS if option.is_flag]
texts = st.sampled_from(
    ["", "x", "5m", "-", "--", "-v", "--job", "a b", "=", "=x", "é", "\udcff", "0 2 * * *", "-5", "\n"]
)
odd_words = st.sampled_from(
    [
        "-h",
        "--help",
        "-vvv",
        "-vx",
        "-x",
        "--jo",
        "--JOB",
        "--unknown",
        "--poll=yes",
        "--no-poll",
        "---",
        "--=x",
        "-j=x",
        "--job=",
        "--verbose",
        "-V",
        "-v=1",
        "run",
        "—job",
    ]
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Lines that are well-formed more often than not."""
    line: list[str] = []
    required = [["--job", draw(texts)], ["--schedule", draw(texts)]] if draw(st.integers(0, 9)) else []
    for words in draw(st.permutations([*required, *draw(st.lists(_option_words(), max_size=5))])):
        line += words
    if draw(st.booleans()):
        line.append("--")
    return [*line, *draw(st.lists(st.one_of(texts, odd_words, st.sampled_from(["/bin/true", *FLAGS])), max_size=4))]


@st.composite
def _option_words(draw: st.DrawFn) -> list[str]:
    kind = draw(st.integers(0, 19))
    if kind < 5:
        return [draw(st.sampled_from(VALUED)), draw(texts)]
    if kind < 10:
        return [draw(st.sampled_from(VALUED)) + "=" + draw(texts)]
    if kind < 14:
        return [draw(st.sampled_from(FLAGS))]
    if kind < 18:
        return [draw(st.sampled_from(["-v", "-vv"]))]
    return [draw(odd_words | texts)]


GOOD = ["--job", "a", "--schedule", "b"]


@settings(max_examples=400, deadline=None)
@given(command_lines())
@example([*GOOD, "--", "--", "x"])
@example([*GOOD, "-", "x"])
@example([*GOOD, "x", "--poll", "-v"])
@example([*GOOD, "--job", "c", "-v", "-vv", "-v", "x"])
@example(["--job", "--schedule", "--schedule", "--", "x"])
@example(["--job=", "--schedule=", "x"])
@example([*GOOD, "--poll", "--poll", "--dry-run", "x"])
@example([*GOOD])
@example([*GOOD, "--"])
@example([])
@example(["--help"])
def test_where_the_lean_reader_answers_click_answers_the_same(argv: list[str]) -> None:
    lean = read_run(argv)
    click = ClickReading(argv)
    assert "Traceback" not in click.said
    if lean is None:
        if click.arguments is None and not click.printed:
            assert click.exit_code == 125
            said = click.said.splitlines()
            assert 1 <= len(said) <= 2
            assert said[0].startswith("clustercron: ")
            assert all(line.startswith("clustercron: hint: ") for line in said[1:])
        return
    assert click.arguments is not None, click.said
    assert click.arguments.given == lean.given
    assert click.arguments.verbose == lean.verbose
    assert click.arguments.command == lean.command


@pytest.mark.parametrize(
    "argv",
    [
        [*GOOD, "--grace", "5m", "--", "/bin/true"],
        [*GOOD, "--grace=5m", "--poll", "-v", "/bin/true", "--not-ours", "-v"],
        [*GOOD, "--dry-run", "-vv", "-v", "/bin/true"],
    ],
)
def test_a_well_formed_line_is_read_without_click(argv: list[str]) -> None:
    assert read_run(argv) is not None


def test_what_stands_last_counts_and_the_command_keeps_its_words() -> None:
    lean = read_run(["--job", "a", "--schedule", "s", "--job=b", "--poll", "-vv", "-v", "--", "x", "--job", "c", "--"])
    assert lean is not None
    assert lean.given == {"job": "b", "schedule": "s", "poll": "yes"}
    assert (lean.verbose, lean.command) == (3, ("x", "--job", "c", "--"))


@pytest.fixture(scope="module")
def quiet_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet("unix:///nonexistent", tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.close()


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([*GOOD], "missing argument 'COMMAND"),
        ([*GOOD, "--"], "missing argument 'COMMAND"),
        (["--job", "a", "--", "true"], "missing option '--schedule'"),
        (["--schedule", "a", "--", "true"], "missing option '--job'"),
        ([*GOOD, "--retires", "3", "--", "true"], "no such option"),
        ([*GOOD, "--poll=yes", "--", "true"], "does not take a value"),
        ([*GOOD, "--grace"], "requires an argument"),
        ([*GOOD, "-x", "--", "true"], "no such option"),
    ],
)
def test_run_says_what_is_wrong_with_its_line(quiet_fleet: Fleet, argv: list[str], reason: str) -> None:
    end = quiet_fleet.run(*argv)
    assert (end.returncode, end.stdout) == (125, "")
    said = end.stderr.splitlines()
    assert said[0].startswith("clustercron: ")
    assert reason in said[0]
    cut = "; in a crontab, % ends the command: write \\%" if "COMMAND" in reason else ""
    assert said[1:] in ([], [f"clustercron: hint: clustercron run --help{cut}"])


def test_help_names_every_option_with_its_default(quiet_fleet: Fleet) -> None:
    end = quiet_fleet.run("--help")
    assert (end.returncode, end.stderr) == (0, "")
    for option in RUN_OPTIONS:
        assert f"--{option.name}" in end.stdout
    assert "Example:" in end.stdout


def test_bytes_that_are_no_utf8_reach_the_command(fleet: Fleet) -> None:
    for extra in ([], ["-vvv"]):  # the lean reader, and click
        end = fleet.run(*GOOD[:2], "--schedule", "* * * * *", "--dry-run", *extra, "--", "/bin/echo", b"\xff\xfe a")
        assert end.returncode == 0, end.stderr
        assert "\\udcff\\udcfe a" in end.stdout
