"""The command. A well-formed `run` goes straight to its work; everything else goes through click."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Answer the exit code of what the command line asks for."""
    try:
        return _obey(sys.argv[1:])
    except KeyboardInterrupt:
        from clustercron.supervise import die_of

        return die_of(2)


def _obey(argv: list[str]) -> int:
    if argv[:1] == ["run"]:
        from clustercron.options import read_run

        arguments = read_run(argv[1:])
        if arguments is not None:
            from clustercron.clock import Clock
            from clustercron.run import main as run

            return run(arguments, os.environ, Clock())
    from clustercron.cli import main as cli

    return cli(argv)


if __name__ == "__main__":
    sys.exit(main())
