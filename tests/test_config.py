"""Where settings come from, what a config file may say, and what is said of a bad one."""

from __future__ import annotations

import contextlib
import os
import string
import subprocess
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clustercron import config, options
from clustercron.config import Sources, parse_file, parse_url, read_sources, run_settings
from clustercron.errors import ConfigError, UsageError
from tests.rig import Fleet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = "/etc/clustercron.conf"
SECRET = "hunter2"
REQUIRED = {"job": "billing", "schedule": "0 2 * * *"}

# For each option two texts that mean something different, and one that it does not take.
SAMPLES = {
    "job": ("a", "b", "a/b"),
    "schedule": ("0 2 * * *", "@daily", "a\x0bb"),
    "tz": ("Europe/Amsterdam", "Asia/Tokyo", "Europe/\x07"),
    "grace": ("5m", "auto", "soon"),
    "poll": ("yes", "no", "maybe"),
    "splay": ("5m", "0", "-1"),
    "max-skew": ("5s", "1.5s", "1w"),
    "retries": ("1", "100", "101"),
    "retry-delay": ("5s", "1h", "1h30"),
    "timeout": ("5s", "1h", "0"),
    "kill-after": ("5s", "1h", "s"),
    "lease": ("5s", "1h", "999ms"),
    "on-lease-lost": ("warn", "kill", "die"),
    "on-store-down": ("fail", "run", "wait"),
    "store-timeout": ("5s", "1m", "0s"),
    "output": ("pass", "discard", "keep"),
    "keep-output": ("64K", "1M", "2M"),
    "ping": ("https://hc.example.net/1", "http://hc.example.net/2", "hc.example.net"),
    "on-failure": ("mail root", "logger x", "  "),
    "log": ("syslog", "/var/log/clustercron", "/var/\x1b[0m"),
    "skip-exit-code": ("0", "75", "256"),
    "tick": ("2026-01-05T02:00:00Z", "@0", "\x7f"),
    "dry-run": ("yes", "no", "perhaps"),
}
WITH_VARIABLE = [option for option in options.RUN_OPTIONS if option.variable]
BAD_ON_THE_LINE = [option for option in options.RUN_OPTIONS if not option.is_flag]


def _name(option: options.Option) -> str:
    return option.name


def _value(option: options.Option, given_: str | None, environ: str | None, file: str | None) -> object:
    variable = option.variable or ""
    sources = Sources(
        {variable: environ} if environ is not None else {}, FILE, {variable: file} if file is not None else {}
    )
    line = {**REQUIRED, **({option.name: given_} if given_ is not None else {})}
    return getattr(run_settings(line, sources), option.field)


def test_every_option_has_its_samples() -> None:
    assert set(SAMPLES) == {option.name for option in options.RUN_OPTIONS}


@pytest.mark.parametrize("option", WITH_VARIABLE, ids=_name)
def test_option_then_environment_then_file_then_default(option: options.Option) -> None:
    a, b, _ = SAMPLES[option.name]
    first, second = option.parse(a), option.parse(b)
    assert first != second
    default = option.parse(option.default) if option.default is not None else (False if option.is_flag else None)
    assert _value(option, None, None, None) == default
    assert _value(option, None, None, a) == first
    assert _value(option, None, a, b) == first
    assert _value(option, None, b, a) == second
    if not option.is_flag:
        assert _value(option, a, b, b) == first
        assert _value(option, b, a, a) == second
    else:
        assert _value(option, "yes", "no", "no") is True


@pytest.mark.parametrize("option", WITH_VARIABLE, ids=_name)
def test_an_empty_variable_counts_as_not_set(option: options.Option) -> None:
    a, b, _ = SAMPLES[option.name]
    unset = _value(option, None, None, None)
    assert _value(option, None, "", "") == unset
    assert _value(option, None, "", a) == option.parse(a)
    assert _value(option, None, b, "") == option.parse(b)


@pytest.mark.parametrize("option", [o for o in options.RUN_OPTIONS if not o.variable], ids=_name)
def test_what_belongs_to_the_line_is_not_taken_from_elsewhere(option: options.Option) -> None:
    a, b, _ = SAMPLES[option.name]
    variable = "CLUSTERCRON_" + option.name.upper().replace("-", "_")
    line = {**REQUIRED, option.name: "yes" if option.is_flag else a}
    got = run_settings(line, Sources({variable: b}, FILE, {variable: b}))
    assert getattr(got, option.field) == option.parse(line[option.name])


@pytest.mark.parametrize("option", WITH_VARIABLE, ids=_name)
@pytest.mark.parametrize("place", ["environment", FILE])
def test_a_bad_variable_is_named_with_its_place(option: options.Option, place: str) -> None:
    bad = SAMPLES[option.name][2]
    with pytest.raises(ConfigError) as caught:
        _value(option, None, *((bad, None) if place == "environment" else (None, bad)))
    assert caught.value.message.startswith(f"cannot use {option.variable} ({place}): {bad!r}: ")


@pytest.mark.parametrize("option", BAD_ON_THE_LINE, ids=_name)
def test_a_bad_option_is_named(option: options.Option) -> None:
    bad = SAMPLES[option.name][2]
    with pytest.raises(UsageError) as caught:
        _value(option, bad, None, None)
    assert caught.value.message.startswith(f"cannot use --{option.name}: {bad!r}: ")


@pytest.mark.parametrize(
    "bad",
    [f"htp://user:{SECRET}@hc.example.net/x", f"https://{SECRET}@hc.example.net:x/", f"user:{SECRET}@hc.example.net"],
)
@pytest.mark.parametrize("variable", ["PING", "GRACE", "RETENTION", "NODE", "TZDATA", "RETRIES"])
def test_a_value_that_may_hold_a_password_is_not_repeated(quiet_fleet: Fleet, variable: str, bad: str) -> None:
    line = [f"--{name}={text}" for name, text in REQUIRED.items()]
    said = _refused(quiet_fleet, *line, env={f"CLUSTERCRON_{variable}": bad})
    assert f"cannot use CLUSTERCRON_{variable}" in said
    assert "'...@hc" in said
    assert SECRET not in said


@pytest.fixture(scope="module")
def quiet_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Nodes that never get as far as asking their store."""
    fleet = Fleet("unix:///nonexistent", tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.close()


def _refused(fleet: Fleet, *arguments: str, env: dict[str, str | None] | None = None) -> str:
    """Run a line that cannot be used; answer the one line that is said."""
    end = fleet.run(*arguments, "--", "/bin/true", env=env)
    assert (end.returncode, end.stdout) == (125, ""), end
    said = end.stderr.splitlines()
    assert len(said) == 1
    assert said[0].isprintable()
    return said[0]


@pytest.mark.parametrize("option", BAD_ON_THE_LINE, ids=_name)
def test_run_says_a_bad_option_in_one_line(quiet_fleet: Fleet, option: options.Option) -> None:
    bad = SAMPLES[option.name][2]
    line = [f"--{name}={text}" for name, text in REQUIRED.items() if name != option.name]
    said = _refused(quiet_fleet, *line, f"--{option.name}={bad}")
    job = bad if option.name == "job" else "billing"
    assert said.startswith(f"clustercron: {job}: cannot use --{option.name}: {bad!r}: ")


@pytest.mark.parametrize("option", WITH_VARIABLE, ids=_name)
def test_run_says_a_bad_variable_in_one_line(quiet_fleet: Fleet, option: options.Option) -> None:
    bad = SAMPLES[option.name][2]
    line = [f"--{name}={text}" for name, text in REQUIRED.items()]
    said = _refused(quiet_fleet, *line, env={str(option.variable): bad})
    assert said.startswith(f"clustercron: billing: cannot use {option.variable} (environment): {bad!r}: ")


def test_run_says_a_bad_line_of_the_file_with_its_number(quiet_fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "conf"
    line = [f"--{name}={text}" for name, text in REQUIRED.items()]
    env: dict[str, str | None] = {"CLUSTERCRON_CONFIG": str(path)}
    assert f"cannot read the configuration: {path}: no such file" in _refused(quiet_fleet, *line, env=env)
    path.write_text("# ours\n\nCLUSTERCRON_GRACE 5m\n")
    assert f"{path} line 3: not of the form NAME=value" in _refused(quiet_fleet, *line, env=env)
    path.write_text("CLUSTERCRON_GRACE=soon\n")
    assert f"cannot use CLUSTERCRON_GRACE ({path}): 'soon': " in _refused(quiet_fleet, *line, env=env)
    path.write_text("CLUSTERCRON_REDIS_URL=redis://\x1b[31mhost\n")
    assert f"cannot use CLUSTERCRON_REDIS_URL ({path}): has blanks or control" in _refused(quiet_fleet, *line, env=env)


# The file


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("CLUSTERCRON_A=b", "b"),
        ("  \tCLUSTERCRON_A=b  ", "b"),
        ("CLUSTERCRON_A=b\r", "b"),
        ("CLUSTERCRON_A='b c'\r", "b c"),
        ("CLUSTERCRON_A=", ""),
        ("CLUSTERCRON_A=''", ""),
        ("CLUSTERCRON_A=b=c", "b=c"),
        ("CLUSTERCRON_A=b#c", "b#c"),
        ("CLUSTERCRON_A='b # c'", "b # c"),
        ('CLUSTERCRON_A="b c"', "b c"),
        ('CLUSTERCRON_A="it\'s"', "it's"),
        ("CLUSTERCRON_A='say \"x\"'", 'say "x"'),
        (r"CLUSTERCRON_A='a\b$c`d`'", r"a\b$c`d`"),
        ("CLUSTERCRON_A=rediss://cron:p%40ss@[::1]:6380/0", "rediss://cron:p%40ss@[::1]:6380/0"),
        ("CLUSTERCRON_A=ü", "ü"),
        ("CLUSTERCRON_A=b\u2028c\x0bd", None),
        ("CLUSTERCRON_A=b\u2028c", "b\u2028c"),
    ],
)
def test_a_value_is_read_as_a_shell_would(line: str, value: str | None) -> None:
    if value is None:
        with pytest.raises(ConfigError, match="line 1: "):
            parse_file(line, FILE)
    else:
        assert parse_file(line, FILE) == {"CLUSTERCRON_A": value}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("CLUSTERCRON_A", "not of the form NAME=value"),
        ("=b", "not of the form NAME=value"),
        ("CLUSTERCRON_A =b", "not of the form NAME=value"),
        ("export CLUSTERCRON_A=b", "not of the form NAME=value"),
        ("CLUSTERCRON-A=b", "not of the form NAME=value"),
        ("<<<<<<< HEAD", "not of the form NAME=value"),
        ("CLUSTERCRON_A=b c", "stands in single quotes"),
        ("CLUSTERCRON_A=b # comment", "stands in single quotes"),
        ("CLUSTERCRON_A= b", "stands in single quotes"),
        ("CLUSTERCRON_A=b;c", "stands in single quotes"),
        ("CLUSTERCRON_A=~/b", "stands in single quotes"),
        ("CLUSTERCRON_A=$HOME", "stands in single quotes"),
        ("CLUSTERCRON_A=b\\", "stands in single quotes"),
        ("CLUSTERCRON_A='b", "does not close"),
        ("CLUSTERCRON_A='", "does not close"),
        ("CLUSTERCRON_A=\"b'", "does not close"),
        ("CLUSTERCRON_A='b' # comment", "does not close"),
        ("CLUSTERCRON_A='it's'", "in the other quotes"),
        ('CLUSTERCRON_A="$HOME"', "stands in single quotes"),
        ('CLUSTERCRON_A="a\\"', "stands in single quotes"),
        ("CLUSTERCRON_A=a\0b", "NUL"),
    ],
)
def test_what_a_shell_would_read_differently_is_refused_with_its_line(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{FILE} line 3: .*{reason}"):
        parse_file(f"# a comment\n\n{line}\n", FILE)


@pytest.mark.parametrize(
    "value", ['"', "'", 'a"b', '"a" \'', "a\\", '"a\\"', "\"it's", "'a\\' '", "\\\\\\", '\\"" x', "it's # a comment"]
)
def test_a_foreign_value_that_goes_on_in_the_next_line_is_refused(value: str) -> None:
    text = f"FOO={value}\nCLUSTERCRON_NODE=sneaky\nBAR='\"\n"
    with pytest.raises(ConfigError, match=f"{FILE} line 1: the value does not end with the line"):
        parse_file(text, FILE)


@given(st.lists(st.sampled_from(["'", '"', "\\", "a", "\\\\"]), max_size=8).map("".join))
@settings(max_examples=60, deadline=None)
def test_what_is_read_after_a_foreign_value_a_shell_reads_too(value: str) -> None:
    text = f"FOO={value}\nCLUSTERCRON_A=1\n"
    with contextlib.suppress(ConfigError):
        assert parse_file(text, FILE) == {"CLUSTERCRON_A": "1"}
        script = f'{text}printf %s "$CLUSTERCRON_A"\n'
        shell = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True)
        assert (shell.stdout, shell.stderr) == (b"1", b"")


def test_a_byte_order_mark_is_named() -> None:
    with pytest.raises(ConfigError, match=f"{FILE} line 1: begins with a byte order mark"):
        parse_file("\ufeff# ours\nCLUSTERCRON_A=1\n", FILE)


def test_comments_unknown_names_and_other_programs_names_are_passed_over() -> None:
    text = (
        "; note\n  # note\nPATH=/bin\nCLUSTERCRON_FROM_THE_FUTURE=1\nCLUSTERCRON_A=1\nCLUSTERCRON_A=2\nOTHER=$(x y)\n"
    )
    assert parse_file(text, FILE) == {"CLUSTERCRON_FROM_THE_FUTURE": "1", "CLUSTERCRON_A": "2"}


values = st.text(
    st.one_of(st.sampled_from("ab:/ '\"\\$`;&|<>()#~*?[]{}!=%@^,.-"), st.characters(exclude_categories=["Cc", "Cs"])),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "'", '"']), values), min_size=1, max_size=20))
def test_what_is_accepted_a_shell_reads_in_the_same_way(drawn: list[tuple[str, str]]) -> None:
    accepted = []
    for quote_, value in drawn:
        line = f"CLUSTERCRON_A={quote_}{value}{quote_}"
        with contextlib.suppress(ConfigError):
            accepted.append((line, parse_file(line, FILE)["CLUSTERCRON_A"]))
    script = "".join(f"{line}\nprintf '%s\\0' \"$CLUSTERCRON_A\"\n" for line, _ in accepted)
    shell = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True)
    assert shell.stdout.decode().split("\0")[:-1] == [value for _, value in accepted]
    assert shell.stderr == b""


@given(st.lists(st.sampled_from(["CLUSTERCRON_", "A", "=", "'", '"', "\\", "\n", "\r", "\0", " ", "#", "é", "\u2028"])))
def test_any_file_is_read_or_refused(pieces: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        assert all(name.startswith("CLUSTERCRON_") for name in parse_file("".join(pieces), FILE))


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_file(text, FILE)


def test_the_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_sources({"CLUSTERCRON_CONFIG": str(tmp_path / "none")})


def test_the_usual_file_need_not_be_there_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", str(tmp_path / "none"))
    assert read_sources({}).file == {}
    assert read_sources({"CLUSTERCRON_CONFIG": ""}).file == {}
    with pytest.raises(ConfigError, match="no such file"):
        read_sources({"CLUSTERCRON_CONFIG": config.DEFAULT_FILE})


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "conf"
    for content, reason in ((b"\xff\xfeC\0", "not UTF-8"), (b"#" * (1 << 20) + b"\n", "larger than")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            read_sources({"CLUSTERCRON_CONFIG": str(path)})
    with pytest.raises(ConfigError, match="is a directory"):
        read_sources({"CLUSTERCRON_CONFIG": str(tmp_path)})


@pytest.mark.parametrize(
    "variable",
    ["CONFIG", "REDIS_PASSWORD_FILE", "REDIS_CA_FILE", "REDIS_CERT_FILE", "REDIS_KEY_FILE", "DAEMON_TZ"],
)
def test_a_named_pipe_is_refused_and_never_waited_for(tmp_path: Path, variable: str) -> None:
    fleet = Fleet("rediss://127.0.0.1:1", tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    line = ["run", *(f"--{name}={text}" for name, text in REQUIRED.items()), "--", "/bin/true"]
    end = fleet.start(*line, env={f"CLUSTERCRON_{variable}": str(pipe)}).end(15)
    assert (end.returncode, end.stdout) == (125, "")
    (said,) = end.stderr.splitlines()
    assert f"{pipe}: " in said
    assert said.endswith(("not a regular file", "no such readable file"))


def test_a_link_to_a_file_and_a_redirected_file_are_files(tmp_path: Path) -> None:
    path = tmp_path / "conf"
    path.write_text("CLUSTERCRON_A=1\n")
    (tmp_path / "link").symlink_to(path)
    assert read_sources({"CLUSTERCRON_CONFIG": str(tmp_path / "link")}).file == {"CLUSTERCRON_A": "1"}
    with path.open() as file:
        assert read_sources({"CLUSTERCRON_CONFIG": f"/dev/fd/{file.fileno()}"}).file == {"CLUSTERCRON_A": "1"}


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "conf"
    path.write_text("CLUSTERCRON_A=1\n")
    path.chmod(0)
    uid = os.geteuid()
    if uid == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match="permission denied") as caught:
            read_sources({"CLUSTERCRON_CONFIG": str(path)})
    finally:
        os.seteuid(uid)
    assert caught.value.hint is not None


# The URL


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host", (False, "host", 6379, "", 0, None, None)),
        ("redis://host/", (False, "host", 6379, "", 0, None, None)),
        ("rediss://host:1/15", (True, "host", 1, "", 15, None, None)),
        ("redis://cron@host", (False, "host", 6379, "", 0, "cron", None)),
        ("redis://:pw@host", (False, "host", 6379, "", 0, None, "pw")),
        ("redis://a%40b:p%3A%2f%3F@h.x-y_z.net:65535", (False, "h.x-y_z.net", 65535, "", 0, "a@b", "p:/?")),
        ("redis://cron:a/b?c@d#e:f@host", (False, "host", 6379, "", 0, "cron", "a/b?c@d#e:f")),
        ("redis://:%ff@host", (False, "host", 6379, "", 0, None, "\udcff")),
        ("redis://[::1]", (False, "::1", 6379, "", 0, None, None)),
        ("redis://[fe80::1%25eth0]:7/2", (False, "fe80::1%25eth0", 7, "", 2, None, None)),
        ("unix:///run/redis.sock", (False, "", 6379, "/run/redis.sock", 0, None, None)),
        ("unix://cron:pw@/run/a%20b?db=3", (False, "", 6379, "/run/a b", 3, "cron", "pw")),
    ],
)
def test_a_url_is_read(url: str, expected: tuple[object, ...]) -> None:
    address = parse_url(url)
    got = (address.tls, address.host, address.port, address.path, address.db, address.username, address.password)
    assert got == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:6379",
        "redis:/host",
        "http://host",
        "REDIS://host",
        "redis://",
        "redis:///0",
        "redis://:pw@",
        "redis://user:@host",
        "redis://host:0",
        "redis://host:65536",
        "redis://host:port",
        "redis://host:6379x",
        "redis://host:\u0661",
        "redis://host/x",
        "redis://host/-1",
        "redis://host/0/1",
        "redis://host/123456",
        "redis://host?db=1",
        "redis://host/0?ssl_cert_reqs=none",
        "redis://host#1",
        "redis://ho st",
        "redis://host\n",
        "redis://h1,h2",
        "redis://.host",
        "redis://[::1",
        "redis://[::1]6379",
        "redis://a%4:pw@host",
        "redis://a%:pw@host",
        "redis://a%zz:pw@host",
        "redis://a%+1:pw@host",
        "unix://run/redis.sock",
        "unix://",
        "unix:///a%00b",
        "unix:///a?x=1",
        "unix:///a?db=x",
        "unix:///" + "x" * 103,
        "redis+sentinel://a,b/m/0",
        "rediss+cluster://a,b",
    ],
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_url(url)


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)
hosts = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,10}[a-z0-9])?", fullmatch=True)


@given(st.none() | words, st.none() | words, hosts, st.integers(1, 65535), st.integers(0, 99999))
def test_a_url_says_what_was_put_into_it(user: str | None, password: str | None, host: str, port: int, db: int) -> None:
    login = quote(user or "", safe="") + (f":{quote(password, safe='')}" if password is not None else "")
    url = f"redis://{login}@{host}:{port}/{db}" if login else f"redis://{host}:{port}/{db}"
    address = parse_url(url)
    assert (address.username, address.password) == (user, password)
    assert (address.host, address.port, address.db) == (host, port, db)
    assert config.has_password(url) is (password is not None)
    assert str(address) == f"redis at {host}:{port}"


pieces = st.lists(
    st.sampled_from(
        ["redis://", "rediss://", "unix://", "redis+sentinel://", "://", ":", "@", "/", "?", "#", "%", "%4"]
    )
    | st.sampled_from(["[", "]", "?db=", "host", "::1", "6379", SECRET, SECRET, " ", "\0", "é", "=", "&", ","]),
    max_size=10,
).map("".join)


@example(f"redis://host:{SECRET}")
@example(f"redis://host/{SECRET}")
@example(f"redis://host?{SECRET}=1")
@example(f"unix:///run/redis.sock?db={SECRET}")
@given(st.one_of(pieces, st.text().map("redis://".__add__)))
def test_any_url_is_read_or_refused_without_being_repeated(url: str) -> None:
    said = ""
    try:
        address = parse_url(url)
        assert address.path or address.host
    except ValueError as exc:
        said = str(exc)
    assert SECRET not in said


def test_the_text_of_an_address_never_has_the_password() -> None:
    for url in (f"redis://u:{SECRET}@h/1", f"unix://u:{SECRET}@/run/s", f"rediss://:{SECRET}@[::1]"):
        address = parse_url(url)
        assert SECRET not in str(address)
        assert SECRET not in str(config.StoreSettings(address, "p", 1, False))


# The rest


def _sources(**variables: str) -> Sources:
    return Sources({f"CLUSTERCRON_{name}": text for name, text in variables.items()}, FILE, {})


def test_the_store_is_found_with_its_files(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("pw 1\r\n")
    ca = tmp_path / "ca"
    ca.write_text("")
    found = _sources(REDIS_URL="rediss://cron@h", REDIS_PASSWORD_FILE=str(password), REDIS_CA_FILE=str(ca))
    address = config.store_address(found)
    assert (address.username, address.password, address.ca_file) == ("cron", "pw 1", str(ca))
    both = _sources(REDIS_URL="redis://:other@h", REDIS_PASSWORD_FILE=str(password))
    assert config.store_address(both).password == "other"


def test_the_views_url_is_the_stores_where_there_is_none() -> None:
    variable = "CLUSTERCRON_REDIS_READ_URL"
    assert config.store_address(_sources(REDIS_URL="redis://a"), variable).host == "a"
    assert config.store_address(_sources(REDIS_URL="redis://a", REDIS_READ_URL="redis://b"), variable).host == "b"
    with pytest.raises(ConfigError, match="cannot use CLUSTERCRON_REDIS_READ_URL"):
        config.store_address(_sources(REDIS_URL="redis://a", REDIS_READ_URL="b"), variable)
    with pytest.raises(ConfigError, match="CLUSTERCRON_REDIS_URL is not set"):
        config.store_address(_sources(), variable)


@pytest.mark.parametrize(
    "variables",
    [
        {"PREFIX": "a{b"},
        {"PREFIX": "a b"},
        {"PREFIX": "a\x07"},
        {"PREFIX": "x" * 101},
        {"RETENTION": "0"},
        {"RETENTION": "ever"},
        {"STORE_COMMAND": "perhaps"},
        {"REDIS_PASSWORD_FILE": "/nonexistent\0"},
        {"REDIS_URL": "rediss://h", "REDIS_CA_FILE": "/nonexistent"},
        {"REDIS_CA_FILE": "/dev/null"},
        {"REDIS_KEY_FILE": "/dev/null"},
    ],
    ids=str,
)
def test_a_bad_setting_of_the_store_is_refused(variables: dict[str, str]) -> None:
    variable = next(name for name in variables if name != "REDIS_URL")
    with pytest.raises(ConfigError) as caught:
        config.store_settings(_sources(**{"REDIS_URL": "redis://h", **variables}))
    said = caught.value.message
    assert f"CLUSTERCRON_{variable}" in said or "the scheme is not rediss" in said


def test_the_store_has_its_defaults() -> None:
    store = config.store_settings(_sources(REDIS_URL="redis://h"))
    assert (store.prefix, store.retention_ms, store.stores_command) == ("clustercron", 30 * 86_400_000, False)
    assert str(store) == "redis at h:6379, database 0, prefix clustercron"


def test_a_nodes_name_is_its_host_name_unless_given() -> None:
    allowed = set(string.ascii_letters + string.digits + "._-")
    assert set(config.node_name(_sources())) <= allowed
    assert config.node_name(_sources(NODE="web-1")) == "web-1"
    for bad in ("a b", "x" * 65, "ü", "a\n"):
        with pytest.raises(ConfigError, match="CLUSTERCRON_NODE"):
            config.node_name(_sources(NODE=bad))


def test_the_state_directory_is_never_a_relative_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.state_dir(_sources(STATE_DIR="/a/b")) == "/a/b"
    with pytest.raises(ConfigError, match="cannot use CLUSTERCRON_STATE_DIR: 'a/b': not an absolute path"):
        config.state_dir(_sources(STATE_DIR="a/b"))
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000)
    monkeypatch.setenv("HOME", "/var/x")
    assert config.state_dir(_sources()) == "/var/x/.local/state/clustercron"
    monkeypatch.setenv("HOME", "x")
    with pytest.raises(ConfigError, match="cannot find the state directory: this user has no home directory"):
        config.state_dir(_sources())
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000_000)
    with pytest.raises(ConfigError, match="cannot find the state directory: this user has no home directory"):
        config.state_dir(_sources())


def test_zone_rules_come_from_one_of_two_places() -> None:
    assert config.tzdata_source(_sources()) == "package"
    assert config.tzdata_source(_sources(TZDATA="system")) == "system"
    with pytest.raises(ConfigError, match="CLUSTERCRON_TZDATA"):
        config.tzdata_source(_sources(TZDATA="internet"))


def test_null_device_means_no_file() -> None:
    sources = config.read_sources({"CLUSTERCRON_CONFIG": "/dev/null", "CLUSTERCRON_GRACE": "5m"})
    assert (sources.file, sources.get("CLUSTERCRON_GRACE")) == ({}, "5m")
