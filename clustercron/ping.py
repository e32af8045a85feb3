"""One request to a dead man's switch, in a process of its own: `python -I -m clustercron.ping JOB URL BODY`."""

from __future__ import annotations

import sys

from clustercron.messages import print_error

TIMEOUT_S = 10.0
TRIES = 2


def main(argv: list[str]) -> int:
    """Send the request, twice at the most; a failure is one line."""
    import urllib.error
    import urllib.request

    job, url, body = argv
    reason = ""
    for _ in range(TRIES):
        try:
            with urllib.request.urlopen(url, data=body.encode() or None, timeout=TIMEOUT_S):
                return 0
        except urllib.error.HTTPError as exc:
            reason = f"HTTP {exc.code}"
            exc.close()
        except (OSError, ValueError) as exc:
            reason = str(getattr(exc, "reason", exc)).lower()
    print_error(f"{job}: cannot ping {url}: {reason}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
