"""The command line through click: help, completion, errors, and every command but a well-formed `run`.

`run` takes its options from the same table as the lean reader. A command answers its exit code; troubles become one line
here and nowhere else.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from clustercron import __version__
from clustercron.clock import Clock
from clustercron.errors import ClustercronError, StoreRefused, StoreUnavailable
from clustercron.messages import print_error, print_trouble
from clustercron.options import RUN_OPTIONS, Option, RunArguments

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_UNUSABLE = 2
EXIT_NO_STORE = 3
EXIT_RUN_FAILED = 125
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Lines(click.Command):
    """A command whose epilog keeps its line breaks: it is an example to copy."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog + "\n")


class _Group(_Lines, click.Group):
    command_class = _Lines


@click.group(
    cls=_Group,
    context_settings=_CONTEXT,
    epilog="Example:\n  0 2 * * *  root  clustercron run --job billing --schedule '0 2 * * *' -- /opt/billing/run",
)
@click.version_option(__version__, prog_name="clustercron", message="%(prog)s %(version)s")
def cli() -> None:
    """Run a crontab line once across a fleet whose nodes all have it."""


def main(argv: Sequence[str]) -> int:
    """Answer the exit code of a command line, without the program's name."""
    unusable = EXIT_RUN_FAILED if argv[:1] == ["run"] else EXIT_UNUSABLE
    try:
        answer = cli.main(args=list(argv), prog_name="clustercron", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.ctx.get_help(), err=True)
        return unusable
    except click.ClickException as exc:
        context = getattr(exc, "ctx", None)
        print_error(_click_message(exc))
        if context is not None:
            print_error(f"hint: {context.command_path} --help")
        return unusable
    except click.Abort:
        return 128 + 2
    except ClustercronError as exc:
        print_trouble(None, exc)
        return EXIT_NO_STORE if isinstance(exc, (StoreUnavailable, StoreRefused)) else unusable
    except BrokenPipeError:
        # Whoever read us has enough; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    return answer if isinstance(answer, int) else 0


def _click_message(exc: click.ClickException) -> str:
    message = " ".join(exc.format_message().split())
    return message[:1].lower() + message[1:].rstrip(".")


def _parameter(option: Option) -> click.Option:
    text = option.help
    if option.default not in (None, "0"):
        text += f" [{option.default}]"
    if option.is_flag:
        return click.Option([f"--{option.name}"], is_flag=True, default=False, help=text)
    return click.Option(
        [f"--{option.name}"],
        metavar=option.metavar,
        type=click.UNPROCESSED,
        help=text,
        required=option.name in ("job", "schedule"),
    )


def _run(verbose: int, command: tuple[str, ...], **values: Any) -> int:
    from clustercron.run import main as run

    given = {}
    for option in RUN_OPTIONS:
        value = values[option.name.replace("-", "_")]
        if option.is_flag:
            if value:
                given[option.name] = "yes"
        elif value is not None:
            given[option.name] = value
    return run(RunArguments(given, verbose, command), os.environ, Clock())


cli.add_command(
    _Lines(
        "run",
        callback=_run,
        params=[
            *map(_parameter, RUN_OPTIONS),
            click.Option(["-v", "verbose"], count=True, help="say each decision on stderr; -vv with timings"),
            click.Argument(["command"], nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND [ARG]..."),
        ],
        context_settings={**_CONTEXT, "allow_interspersed_args": False},
        short_help="run a command once for the tick that cron fired it for",
        help=(
            "Run COMMAND once across the fleet for the tick of the schedule that cron fired this line for.\n\n"
            "Options end at COMMAND. All but --job, --schedule, --tick, --dry-run and -v may stand as "
            "CLUSTERCRON_<OPTION> in the environment or in /etc/clustercron.conf. Durations: 90s, 10m, 2h, 7d; a bare "
            "number is seconds. Exit code: the command's own, 0 for a node that stood aside, 75 without Redis, 125 when "
            "nothing could be run; see clustercron-run(1)."
        ),
        epilog="Example:\n  clustercron run --job billing --schedule '0 2 * * *' -- /opt/billing/run --all",
    )
)
