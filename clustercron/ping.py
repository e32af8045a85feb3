"""One request to a dead man's switch, in a process of its own: `python -I -m clustercron.ping JOB SUFFIX BODY`.

The URL comes in the environment, since it is a secret where the config file has it. While somebody has the other end of
stdin, an earlier request is still under way, and this one waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from clustercron.messages import print_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

TRY_S = 10
TRIES = 2


def main(argv: list[str]) -> int:
    """Send the request, twice at the most; a failure is one line."""
    job, suffix, body = argv
    try:
        target, headers = _addressed(os.environ["CLUSTERCRON_PING"], suffix)
    except ValueError:  # its text may have the password
        print_error(f"{job}: cannot ping: the URL cannot be read")
        return 1
    signal.signal(signal.SIGALRM, _give_up)
    _await_turn()
    for _ in range(TRIES):
        signal.alarm(TRY_S)
        reason = _send(target, body.encode(), headers)
        signal.alarm(0)
        if reason is None:
            return 0
    print_error(f"{job}: cannot ping {target}: {reason}")
    return 1


def _addressed(text: str, suffix: str) -> tuple[str, dict[str, str]]:
    """Answer the URL with the suffix behind its path and without its user, who goes into the headers."""
    import urllib.parse

    url = urllib.parse.urlsplit(text)
    path = url.path.rstrip("/") + (f"/{suffix}" if suffix else "")
    user, at, place = url.netloc.rpartition("@")
    headers = {"Authorization": "Basic " + _encoded(urllib.parse.unquote(user))} if at else {}
    return url._replace(netloc=place, path=path, fragment="").geturl(), headers


def _await_turn() -> None:
    signal.alarm(TRY_S * TRIES)
    # The end of stdin is the end of the request before; the first of two has the end for writing, which cannot be read.
    with contextlib.suppress(OSError):
        os.read(0, 1)


def _send(target: str, body: bytes, headers: dict[str, str]) -> str | None:
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(target, data=body or None, headers=headers)  # noqa: S310 - options checks the scheme
    try:
        with urllib.request.urlopen(request, timeout=TRY_S):  # noqa: S310
            return None
    except urllib.error.HTTPError as exc:
        exc.close()
        return f"HTTP {exc.code}"
    except urllib.error.URLError as exc:
        return str(getattr(exc.reason, "strerror", None) or exc.reason).lower()
    except (OSError, ValueError, http.client.HTTPException) as exc:
        return str(exc).lower() or type(exc).__name__


def _encoded(user: str) -> str:
    import base64

    return base64.b64encode(user.encode()).decode("ascii")


def _give_up(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's arguments
    raise TimeoutError("no answer in time")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
