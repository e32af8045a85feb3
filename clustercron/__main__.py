"""The command. A well-formed `run` goes straight to its work; everything else goes through click."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Answer the exit code of what the command line asks for."""
    if sys.argv[1:2] == ["run"]:
        from clustercron.options import read_run

        arguments = read_run(sys.argv[2:])
        if arguments is not None:
            from clustercron.clock import Clock
            from clustercron.run import main as run

            try:
                return run(arguments, os.environ, Clock())
            except KeyboardInterrupt:
                from clustercron.supervise import die_of

                return die_of(2)
    from clustercron.cli import main as cli

    return cli(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
