"""The options of `run`, each defined once: for the lean reader here, for click, the environment and the config file.

Both readers hand on raw text; `config` turns it into values, so that an option means the same wherever it stands.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Parser = Callable[[str], object]

ENV_PREFIX = "CLUSTERCRON_"
NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
MAX_NAME = 100
_HOST_MARKS = "._-:%"
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_MAX_DURATION_MS = 10 * 366 * 86_400_000
_UNITS_BYTES = {"": 1, "K": 1 << 10, "KB": 1 << 10, "KIB": 1 << 10, "M": 1 << 20, "MB": 1 << 20, "MIB": 1 << 20}
MAX_KEPT_OUTPUT = 1 << 20


def _digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


def quoted(text: str) -> str:
    """Quote a value that cannot be used, for a message; of what may hold a password, in front of an @, only the rest."""
    user, _, place = text.rpartition("@")
    return repr(f"...@{place}" if ":" in user else text)


def job_name(text: str) -> str:
    """Check a job's name.

    Raises:
        ValueError: it is not 1 to 100 of A-Za-z0-9._- or begins with neither a letter nor a digit.
    """
    if not 1 <= len(text) <= MAX_NAME:
        raise ValueError(f"a name has 1 to {MAX_NAME} characters")
    for character in text:
        if character not in NAME_CHARACTERS:
            raise ValueError(f"{character!r} is not one of A-Z a-z 0-9 . _ -")
    if text[0] in "._-":
        raise ValueError("a name begins with a letter or a digit")
    return text


def duration_ms(text: str) -> int:
    """Read `90s`, `10m`, `2h`, `7d`, `250ms`; a bare number is seconds. Answers milliseconds.

    Raises:
        ValueError: the text is no duration.
    """
    number = text.rstrip("smhd")
    unit = text[len(number) :] or "s"
    whole, point, fraction = number.partition(".")
    if unit not in _UNITS_MS or not _digits(whole) or (point and not _digits(fraction)):
        raise ValueError("not a duration such as 90s, 10m, 2h or 7d")
    if len(whole) > 12 or len(fraction) > 9:
        raise ValueError("longer than ten years")
    scale = _UNITS_MS[unit]
    milliseconds = int(whole) * scale + (int(fraction) * scale // 10 ** len(fraction) if point else 0)
    if milliseconds > _MAX_DURATION_MS:
        raise ValueError("longer than ten years")
    return milliseconds


def positive_duration_ms(text: str) -> int:
    """Read a duration longer than nothing. Answers milliseconds.

    Raises:
        ValueError: no duration, or zero.
    """
    milliseconds = duration_ms(text)
    if milliseconds == 0:
        raise ValueError("must be longer than 0")
    return milliseconds


def grace_ms(text: str) -> int | None:
    """Read a duration in milliseconds, or `auto` as None.

    Raises:
        ValueError: neither.
    """
    return None if text == "auto" else duration_ms(text)


def lease_ms(text: str) -> int:
    """Read a lease in milliseconds, at least one second: it is renewed every third of it.

    Raises:
        ValueError: no duration, or shorter.
    """
    milliseconds = duration_ms(text)
    if milliseconds < 1_000:
        raise ValueError("shorter than 1s")
    return milliseconds


def count(low: int, high: int) -> Parser:
    """Make a reader of whole numbers from `low` to `high`."""

    def read(text: str) -> int:
        if not _digits(text) or len(text) > 9 or not low <= int(text) <= high:
            raise ValueError(f"not a whole number from {low} to {high}")
        return int(text)

    return read


def choice(*words: str) -> Parser:
    """Make a reader of one of a few words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError("not one of " + ", ".join(words))
        return text

    return read


def size_bytes(text: str) -> int:
    """Read a size: `65536`, `64K`, `1M` (powers of 1,024), at most 1 MiB. Answers bytes.

    Raises:
        ValueError: no size, or too large.
    """
    number = text.rstrip("KMIBkmib")
    unit = text[len(number) :].upper()
    if not _digits(number) or len(number) > 9 or unit not in _UNITS_BYTES:
        raise ValueError("not a size such as 65536, 64K or 1M")
    size = int(number) * _UNITS_BYTES[unit]
    if size > MAX_KEPT_OUTPUT:
        raise ValueError("more than 1 MiB")
    return size


def flag(text: str) -> bool:
    """Read a flag's variable: 1, yes, true, on, or 0, no, false, off.

    Raises:
        ValueError: none of these.
    """
    word = text.lower()
    if word in ("1", "yes", "true", "on"):
        return True
    if word in ("0", "no", "false", "off"):
        return False
    raise ValueError("not one of yes, no")


def plain(text: str) -> str:
    """Take the text as it is, but for an empty one and one with control characters.

    Raises:
        ValueError: it is one of these.
    """
    if not text:
        raise ValueError("empty")
    if not text.isprintable():
        raise ValueError("has control characters")
    return text


def schedule_text(text: str) -> str:
    """Take a schedule whatever blanks stand between its fields: cron takes tabs as well.

    Raises:
        ValueError: it is empty or has control characters.
    """
    return plain(text.replace("\t", " "))


def command_text(text: str) -> str:
    """Take a shell command as it is.

    Raises:
        ValueError: it is blank.
    """
    if not text.strip():
        raise ValueError("empty")
    return text


def host_and_port(text: str) -> tuple[str, int | None]:
    """Read `name`, `name:443`, `127.0.0.1:443` or `[::1]:443`; the host may be empty and is not looked up.

    Raises:
        ValueError: with the reason.
    """
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("the IPv6 address is not of the form [::1]:6379")
        port = rest[1:]
    else:
        host, _, port = text.partition(":")
    if host.startswith(".") or not all(c.isalnum() or c in _HOST_MARKS for c in host):
        raise ValueError("the host is no name and no address")
    if port and (not _digits(port) or not 0 < int(port[:6]) < 65536):
        raise ValueError("the port is not a number from 1 to 65535")
    return host, int(port) if port else None


def http_url(text: str) -> str:
    """Check that a text is an http or https URL.

    Raises:
        ValueError: it is not.
    """
    scheme, colon, rest = text.partition("://")
    place = rest.partition("#")[0].partition("?")[0].partition("/")[0]
    host, _ = host_and_port(place.rpartition("@")[2])
    if not colon or scheme not in ("http", "https") or not host or not text.isprintable() or " " in text:
        raise ValueError("not a URL such as https://hc.example.net/uuid")
    return text


class Option:
    """One option of `run`.

    Args:
        name: without its dashes; the attribute of the settings is `field`.
        parse: text to value, or None for a flag. Raises ValueError with the reason.
        default: the text that stands when nothing else does, or None.
        variable: whether CLUSTERCRON_<NAME> and the config file may give it.
    """

    __slots__ = ("default", "field", "help", "is_flag", "metavar", "name", "parse", "variable")

    def __init__(
        self,
        name: str,
        field: str,
        parse: Parser | None,
        metavar: str,
        default: str | None,
        help: str,
        variable: bool = True,
    ) -> None:
        self.name = name
        self.field = field
        self.is_flag = parse is None
        self.parse: Parser = parse or flag
        self.metavar = metavar
        self.default = default
        self.help = help
        self.variable = ENV_PREFIX + name.upper().replace("-", "_") if variable else None


RUN_OPTIONS = (
    Option("job", "job", job_name, "NAME", None, "name of the job, the same on every node", variable=False),
    Option(
        "schedule",
        "schedule",
        schedule_text,
        "EXPR",
        None,
        "the line's own five fields, or an @alias, quoted",
        variable=False,
    ),
    Option("tz", "tz", plain, "ZONE", None, "IANA zone the schedule is read in; UTC when nothing says otherwise"),
    Option("grace", "grace_ms", grace_ms, "D", "auto", "how late after its tick a run may still start"),
    Option("poll", "poll", None, "", None, "the line fires more often than the schedule: stay silent in between"),
    Option("splay", "splay_ms", duration_ms, "D", "0", "wait a random time up to D before claiming"),
    Option(
        "max-skew",
        "max_skew_ms",
        positive_duration_ms,
        "D",
        "30s",
        "refuse when the clocks of node and Redis differ by more",
    ),
    Option("retries", "retries", count(0, 100), "N", "0", "run a failed command again up to N times"),
    Option("retry-delay", "retry_delay_ms", duration_ms, "D", "30s", "wait D before each retry"),
    Option("timeout", "timeout_ms", positive_duration_ms, "D", None, "TERM to the job's process group after D"),
    Option("kill-after", "kill_after_ms", duration_ms, "D", "10s", "KILL when it is still there D after TERM"),
    Option("lease", "lease_ms", lease_ms, "D", "60s", "how long a run counts as alive without a renewal"),
    Option(
        "on-lease-lost",
        "on_lease_lost",
        choice("warn", "kill"),
        "warn|kill",
        "warn",
        "what to do with a job whose lease is lost",
    ),
    Option(
        "on-store-down",
        "on_store_down",
        choice("fail", "run"),
        "fail|run",
        "fail",
        "without Redis: exit 75, or run without a claim (on every node)",
    ),
    Option(
        "store-timeout",
        "store_timeout_ms",
        positive_duration_ms,
        "D",
        "15s",
        "total time for asking Redis, retries included",
    ),
    Option(
        "output",
        "output",
        choice("pass", "on-failure", "discard"),
        "pass|on-failure|discard",
        "pass",
        "what becomes of the job's output, and so what cron mails",
    ),
    Option(
        "keep-output", "keep_output_bytes", size_bytes, "SIZE", "0", "keep the last SIZE bytes with the run, at most 1M"
    ),
    Option("ping", "ping", http_url, "URL", None, "tell URL/start, URL or URL/fail when the winner starts and ends"),
    Option("on-failure", "on_failure", command_text, "CMD", None, "shell command for the winner when the job fails"),
    Option("log", "log", plain, "syslog|FILE", None, "one line for each decision of this node"),
    Option("skip-exit-code", "skip_exit_code", count(0, 255), "N", "0", "exit code of a node that stood aside"),
    Option(
        "tick", "tick", plain, "INSTANT", None, "run for this tick instead, whatever the clock says", variable=False
    ),
    Option("dry-run", "dry_run", None, "", None, "say what would happen; claim and run nothing", variable=False),
)
_BY_FLAG = {"--" + option.name: option for option in RUN_OPTIONS}


class RunArguments:
    """What stands on the command line of `run`, as text.

    `given` maps an option's name to its text (flags to `yes`), `verbose` counts -v.
    """

    __slots__ = ("command", "given", "verbose")

    def __init__(self, given: dict[str, str], verbose: int, command: Sequence[str]) -> None:
        self.given = given
        self.verbose = verbose
        self.command = tuple(command)


def read_run(argv: Sequence[str]) -> RunArguments | None:
    """Read a well-formed command line of `run`, without the word `run`.

    Answers None for whatever is not plainly well-formed (help, unknown options, a missing value or command): click
    reads those again and says what is wrong. Where this answers, click answers the same.
    """
    given: dict[str, str] = {}
    verbose = 0
    position = 0
    end = len(argv)
    while position < end:
        word = argv[position]
        position += 1
        if word == "--":
            break
        if word in ("-v", "-vv"):
            verbose += len(word) - 1
            continue
        if not word.startswith("-"):
            position -= 1
            break
        name, equals, text = word.partition("=")
        option = _BY_FLAG.get(name)
        if option is None or (option.is_flag and equals):
            return None
        if option.is_flag:
            given[option.name] = "yes"
            continue
        if not equals:
            if position == end:
                return None
            text = argv[position]
            position += 1
        given[option.name] = text
    if position == end or "job" not in given or "schedule" not in given:
        return None
    return RunArguments(given, verbose, argv[position:])
