"""Where settings come from: the option, the environment, the config file, the default, in this order.

Everything is read and checked once, before anything is done, and the first fault is named with the place it stands in.
"""

from __future__ import annotations

import os

from clustercron import options
from clustercron.errors import ConfigError, UsageError
from clustercron.files import read_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_FILE = "/etc/clustercron.conf"
DEFAULT_PREFIX = "clustercron"
DEFAULT_RETENTION = "30d"
ROOT_STATE_DIR = "/var/lib/clustercron"
_MAX_FILE_BYTES = 1 << 20
_MAX_SECRET_BYTES = 1 << 16
_MAX_NODE = 64
_SHELL_MARKS = frozenset(" \t\r\v\f'\"\\$`;&|<>()~")
_MAX_SOCKET_PATH = 103  # what every system takes

# Everything that may stand in the environment and the file beside the options of `run`.
OTHER_VARIABLES = (
    "CLUSTERCRON_REDIS_URL",
    "CLUSTERCRON_REDIS_READ_URL",
    "CLUSTERCRON_REDIS_PASSWORD_FILE",
    "CLUSTERCRON_REDIS_CA_FILE",
    "CLUSTERCRON_REDIS_CERT_FILE",
    "CLUSTERCRON_REDIS_KEY_FILE",
    "CLUSTERCRON_PREFIX",
    "CLUSTERCRON_RETENTION",
    "CLUSTERCRON_STORE_COMMAND",
    "CLUSTERCRON_TZDATA",
    "CLUSTERCRON_DAEMON_TZ",
    "CLUSTERCRON_NODE",
    "CLUSTERCRON_STATE_DIR",
)
URL_VARIABLES = ("CLUSTERCRON_REDIS_URL", "CLUSTERCRON_REDIS_READ_URL", "CLUSTERCRON_PING")


class Sources:
    """The environment and the config file as one place to ask for a variable.

    An empty variable counts as not set, so that `CLUSTERCRON_GRACE= clustercron run ...` takes a value of the
    environment back.
    """

    __slots__ = ("environ", "file", "path")

    def __init__(self, environ: Mapping[str, str], path: str, file: Mapping[str, str]) -> None:
        self.environ = environ
        self.path = path
        self.file = file

    def find(self, variable: str) -> tuple[str, str] | None:
        """Answer a variable's text and the place it stands in, or None."""
        text = self.environ.get(variable)
        if text:
            return text, "environment"
        text = self.file.get(variable)
        if text:
            return text, self.path
        return None

    def get(self, variable: str) -> str | None:
        """Answer a variable's text, or None."""
        found = self.find(variable)
        return found[0] if found else None


def read_sources(environ: Mapping[str, str]) -> Sources:
    """Read the config file that the environment names, else /etc/clustercron.conf.

    Raises:
        ConfigError: the file is named but missing, cannot be read, or has a line that is no `NAME=value`.
    """
    named = environ.get("CLUSTERCRON_CONFIG")
    path = named or DEFAULT_FILE
    if path == os.devnull:  # how one says that there is to be no file
        return Sources(environ, path, {})
    try:
        text = _read_text(path, _MAX_FILE_BYTES)
    except FileNotFoundError:
        if not named:
            return Sources(environ, path, {})
        raise ConfigError(f"cannot read the configuration: {path}: no such file") from None
    except OSError as exc:
        hint = f"every user with a clustercron line reads {path}" if isinstance(exc, PermissionError) else None
        raise ConfigError(f"cannot read the configuration: {path}: {_reason(exc)}", hint) from None
    except ValueError as exc:
        raise ConfigError(f"cannot read the configuration: {path}: {exc}") from None
    return Sources(environ, path, parse_file(text, path))


def parse_file(text: str, path: str) -> dict[str, str]:
    """Read lines `NAME=value` as a shell and systemd's EnvironmentFile both would; what they read differently is a fault.

    Names that are not clustercron's are passed over, and so are unknown ones of its own: an older version must be able
    to read a newer one's file.

    Raises:
        ConfigError: a line is neither blank, comment nor assignment, or its value needs other quotes or another line.
    """
    values: dict[str, str] = {}
    if text.startswith("\ufeff"):
        raise ConfigError(f"cannot read the configuration: {path} line 1: begins with a byte order mark")
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip(" \t\r")
        if not line or line[0] in "#;":
            continue
        name, equals, value = line.partition("=")
        try:
            if not equals or not name or not all(c.isascii() and (c.isalnum() or c == "_") for c in name):
                raise ValueError("not of the form NAME=value")
            if name.startswith(options.ENV_PREFIX):
                values[name] = _unquoted(value)
            elif _goes_on(value):
                raise ValueError("the value does not end with the line")
        except ValueError as exc:
            raise ConfigError(f"cannot read the configuration: {path} line {number}: {exc}") from None
    return values


def _unquoted(value: str) -> str:
    if "\0" in value:
        raise ValueError("has a NUL character")
    quote = value[:1]
    if quote not in ("'", '"'):
        if any(c in _SHELL_MARKS for c in value):
            raise ValueError("a value with blanks or characters of the shell's stands in single quotes")
        return value
    inner = value[1:-1]
    if len(value) < 2 or value[-1] != quote:
        raise ValueError("the quote does not close at the end of the line")
    if quote in inner:
        raise ValueError(f"a value with {quote} stands in the other quotes")
    if quote == '"' and any(c in "$`\\" for c in inner):
        raise ValueError("a value with $, ` or a backslash stands in single quotes")
    return inner


def _goes_on(value: str) -> bool:
    """Whether a shell would read on in the next line: a quote is open, or a backslash stands at the end."""
    quote = ""
    characters = iter(value)
    for character in characters:
        if character == "\\" and quote != "'":
            if next(characters, None) is None:
                return True
        elif character == quote:
            quote = ""
        elif not quote and character in "'\"":
            quote = character
    return bool(quote)


def _read_text(path: str, limit: int) -> str:
    content = read_regular(path, limit + 1)
    if len(content) > limit:
        raise ValueError(f"larger than {limit} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None


def _reason(exc: OSError) -> str:
    return (exc.strerror or str(exc)).lower()


_TLS_FILES = ("CLUSTERCRON_REDIS_CA_FILE", "CLUSTERCRON_REDIS_CERT_FILE", "CLUSTERCRON_REDIS_KEY_FILE")


class StoreAddress:
    """Where Redis is and who we are there. Its text never has the password."""

    __slots__ = ("ca_file", "cert_file", "db", "host", "key_file", "password", "path", "port", "tls", "username")

    def __init__(self) -> None:
        self.tls = False
        self.host = ""
        self.port = 6379
        self.path = ""
        self.db = 0
        self.username: str | None = None
        self.password: str | None = None
        self.ca_file: str | None = None
        self.cert_file: str | None = None
        self.key_file: str | None = None

    def __str__(self) -> str:
        if self.path:
            return f"redis at {self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis at {host}:{self.port}"


def parse_url(url: str) -> StoreAddress:
    """Read redis://, rediss:// and unix:// URLs.

    Raises:
        ValueError: with the reason; it never repeats the URL, which may hold a password.
    """
    scheme, colon, rest = url.partition("://")
    if not colon:
        raise ValueError("not a URL such as redis://redis.example.net:6379/0")
    if scheme in ("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"):
        raise ValueError(f"this version speaks to one Redis server; {scheme}:// is not in it")
    if scheme not in ("redis", "rediss", "unix"):
        raise ValueError("the scheme is not one of redis, rediss, unix")
    if not rest.isprintable() or " " in rest:
        raise ValueError("has blanks or control characters")
    address = StoreAddress()
    address.tls = scheme == "rediss"
    user, at, place = rest.rpartition("@")
    place, _, query = place.partition("?")
    if at:
        name, sep, password = user.partition(":")
        address.username = _percent_decoded(name) or None
        address.password = _percent_decoded(password) if sep else None
        if address.password == "":
            raise ValueError("the password is empty")
    if "#" in place:
        raise ValueError("has a '#'; write %23 in a user or password")
    if scheme == "unix":
        _read_path(address, place)
    else:
        _read_host(address, place)
    if query:
        name, _, value = query.partition("=")
        if name != "db" or scheme != "unix":
            raise ValueError("has a '?'; only unix:///PATH?db=N takes a parameter")
        address.db = _database(value)
    return address


def _read_path(address: StoreAddress, place: str) -> None:
    address.path = _percent_decoded(place)
    if not address.path.startswith("/"):
        raise ValueError("a unix URL has an absolute path: unix:///run/redis/redis.sock")
    if "\0" in address.path or len(os.fsencode(address.path)) > _MAX_SOCKET_PATH:
        raise ValueError(f"the path of a socket has at most {_MAX_SOCKET_PATH} bytes, and no NUL")


def _read_host(address: StoreAddress, place: str) -> None:
    host, slash, db = place.partition("/")
    if slash and db:
        address.db = _database(db)
    address.host, port = options.host_and_port(host)
    if not address.host:
        raise ValueError("has no host: a Redis on every node would run the job on every node")
    address.port = port or address.port


def _database(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 5:
        raise ValueError("the database is not a number")
    return int(text)


def _percent_decoded(text: str) -> str:
    head, *parts = text.split("%")
    if not parts:
        return text
    decoded = bytearray(head.encode())
    for part in parts:
        try:
            decoded += bytes.fromhex(part[:2]) if len(part[:2]) == 2 else bytes.fromhex("-")
        except ValueError:
            raise ValueError("has a '%' that is not followed by two hexadecimal digits; write %25") from None
        decoded += part[2:].encode()
    return decoded.decode(errors="surrogateescape")


def has_password(url: str) -> bool:
    """Say whether a URL carries a password, without judging the rest of it."""
    user, at, _ = url.partition("://")[2].rpartition("@")
    return bool(at) and ":" in user


def store_address(sources: Sources, variable: str = "CLUSTERCRON_REDIS_URL") -> StoreAddress:
    """Find Redis: the URL, and the files that belong to it.

    Raises:
        ConfigError: no URL (never a silent localhost), a bad one, or a file that cannot be read.
    """
    found = sources.find(variable)
    if found is None:
        variable = "CLUSTERCRON_REDIS_URL"
        found = sources.find(variable)
    if found is None:
        raise ConfigError(
            f"cannot find Redis: {variable} is not set, neither in the environment nor in {sources.path}",
            f"put {variable}=redis://HOST:6379/0 into {sources.path}, the same on every node",
        )
    url, place = found
    try:
        address = parse_url(url)
    except ValueError as exc:
        raise ConfigError(f"cannot use {variable} ({place}): {exc}") from None
    path = sources.get("CLUSTERCRON_REDIS_PASSWORD_FILE")
    if path and address.password is None:
        address.password = _secret(path)
    if not address.tls and any(map(sources.get, _TLS_FILES)):
        raise ConfigError(f"cannot use {variable} ({place}): TLS files are set, but the scheme is not rediss")
    address.ca_file, address.cert_file, address.key_file = (_existing(sources, file) for file in _TLS_FILES)
    if address.key_file and not address.cert_file:
        raise ConfigError("cannot use CLUSTERCRON_REDIS_KEY_FILE: CLUSTERCRON_REDIS_CERT_FILE is not set")
    return address


def _secret(path: str) -> str:
    try:
        text = _read_text(path, _MAX_SECRET_BYTES)
    except OSError as exc:
        raise ConfigError(f"cannot read the password: CLUSTERCRON_REDIS_PASSWORD_FILE {path}: {_reason(exc)}") from None
    except ValueError as exc:
        raise ConfigError(f"cannot read the password: CLUSTERCRON_REDIS_PASSWORD_FILE {path}: {exc}") from None
    password = text.strip("\r\n")
    if not password:
        raise ConfigError(f"cannot read the password: CLUSTERCRON_REDIS_PASSWORD_FILE {path}: the file is empty")
    return password


def _existing(sources: Sources, variable: str) -> str | None:
    path = sources.get(variable)
    if path is None:
        return None
    try:
        read_regular(path, 0)
    except OSError as exc:
        raise ConfigError(f"cannot read {variable}: {path}: {_reason(exc)}") from None
    return path


class StoreSettings:
    """What every command needs to find the same records; its text names the store in the spool."""

    __slots__ = ("address", "prefix", "retention_ms", "stores_command")

    def __init__(self, address: StoreAddress, prefix: str, retention_ms: int, stores_command: bool) -> None:
        self.address = address
        self.prefix = prefix
        self.retention_ms = retention_ms
        self.stores_command = stores_command

    def __str__(self) -> str:
        return f"{self.address}, database {self.address.db}, prefix {self.prefix}"


def store_settings(sources: Sources, variable: str = "CLUSTERCRON_REDIS_URL") -> StoreSettings:
    """Read where Redis is and how records are named and kept there.

    Raises:
        ConfigError: one of the variables is missing or bad.
    """
    prefix = sources.get("CLUSTERCRON_PREFIX") or DEFAULT_PREFIX
    if not prefix.isprintable() or any(c in "{} " for c in prefix) or len(prefix) > 100:
        raise ConfigError("cannot use CLUSTERCRON_PREFIX: braces, blanks and control characters do not fit in it")
    text = sources.get("CLUSTERCRON_RETENTION") or DEFAULT_RETENTION
    try:
        retention_ms = options.positive_duration_ms(text)
    except ValueError as exc:
        raise ConfigError(f"cannot use CLUSTERCRON_RETENTION: {options.quoted(text)}: {exc}") from None
    try:
        stores_command = options.flag(sources.get("CLUSTERCRON_STORE_COMMAND") or "no")
    except ValueError as exc:
        raise ConfigError(f"cannot use CLUSTERCRON_STORE_COMMAND: {exc}") from None
    return StoreSettings(store_address(sources, variable), prefix, retention_ms, stores_command)


def node_name(sources: Sources) -> str:
    """Answer this node's name: a label, never an identity.

    Raises:
        ConfigError: CLUSTERCRON_NODE has a character that a name cannot have.
    """
    given = sources.get("CLUSTERCRON_NODE")
    if given is None:
        host = os.uname().nodename[:_MAX_NODE]
        return "".join(c if c in options.NAME_CHARACTERS else "-" for c in host) or "unknown"
    if len(given) > _MAX_NODE or any(c not in options.NAME_CHARACTERS for c in given):
        raise ConfigError(
            f"cannot use CLUSTERCRON_NODE: {options.quoted(given)}: 1 to {_MAX_NODE} of A-Z a-z 0-9 . _ -"
        )
    return given


def state_dir(sources: Sources) -> str:
    """Answer the directory for records that could not be delivered; it may not exist yet.

    Raises:
        ConfigError: it is not absolute, or this user has no home for it.
    """
    given = sources.get("CLUSTERCRON_STATE_DIR")
    if given is None:
        if os.geteuid() == 0:
            return ROOT_STATE_DIR
        home = os.path.expanduser("~")
        if not home.startswith("/"):
            raise ConfigError(
                "cannot find the state directory: this user has no home directory",
                "name one in CLUSTERCRON_STATE_DIR, or set HOME",
            )
        return os.path.join(home, ".local", "state", "clustercron")
    if not given.startswith("/"):
        raise ConfigError(f"cannot use CLUSTERCRON_STATE_DIR: {options.quoted(given)}: not an absolute path")
    return given


def tzdata_source(sources: Sources) -> str:
    """Answer which zone rules are used: `package` or `system`.

    Raises:
        ConfigError: CLUSTERCRON_TZDATA is something else.
    """
    word = sources.get("CLUSTERCRON_TZDATA") or "package"
    if word not in ("package", "system"):
        raise ConfigError(f"cannot use CLUSTERCRON_TZDATA: {options.quoted(word)} is not one of package, system")
    return word


class RunSettings:
    """The options of `run` as values; None where nothing is set. Durations are milliseconds."""

    __slots__ = (
        "dry_run",
        "grace_ms",
        "job",
        "keep_output_bytes",
        "kill_after_ms",
        "lease_ms",
        "log",
        "max_skew_ms",
        "on_failure",
        "on_lease_lost",
        "on_store_down",
        "output",
        "ping",
        "poll",
        "retries",
        "retry_delay_ms",
        "schedule",
        "skip_exit_code",
        "splay_ms",
        "store_timeout_ms",
        "tick",
        "timeout_ms",
        "tz",
    )
    job: str
    schedule: str
    tz: str | None
    grace_ms: int | None
    poll: bool
    splay_ms: int
    max_skew_ms: int
    retries: int
    retry_delay_ms: int
    timeout_ms: int | None
    kill_after_ms: int
    lease_ms: int
    on_lease_lost: str
    on_store_down: str
    store_timeout_ms: int
    output: str
    keep_output_bytes: int
    ping: str | None
    on_failure: str | None
    log: str | None
    skip_exit_code: int
    tick: str | None
    dry_run: bool


def run_settings(given: Mapping[str, str], sources: Sources) -> RunSettings:
    """Give every option of `run` its value: from the command line, the environment, the file, the default.

    Raises:
        UsageError: a value on the command line does not fit its option.
        ConfigError: one in the environment or the file does not.
    """
    settings = RunSettings()
    for option in options.RUN_OPTIONS:
        text = given.get(option.name)
        found = None
        if text is None and option.variable is not None:
            found = sources.find(option.variable)
        try:
            if text is not None:
                value = option.parse(text)
            elif found is not None:
                value = option.parse(found[0])
            elif option.default is not None:
                value = option.parse(option.default)
            else:
                value = False if option.is_flag else None
        except ValueError as exc:
            if found is not None:
                name = f"{option.variable} ({found[1]})"
                raise ConfigError(f"cannot use {name}: {options.quoted(found[0])}: {exc}") from None
            raise UsageError(f"cannot use --{option.name}: {options.quoted(str(text))}: {exc}") from None
        setattr(settings, option.field, value)
    return settings
