"""The real, unmodified Debian cron on a virtual clock: which lines it fires when, in milliseconds of real time."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

CRON = "/usr/sbin/cron"
# A mount namespace of its own: the daemon's directories are these, and nothing of the machine is touched.
_IN_NAMESPACE = """
set -e
mount -t tmpfs tmpfs /run
mount --bind "$1/spool" /var/spool/cron
mount --bind "$1/system-crontab" /etc/crontab
mount --bind "$1/system-crontabs" /etc/cron.d
shift
exec "$@"
"""


def missing() -> str | None:
    """Say what this machine lacks to run the daemon so; None if nothing."""
    if not Path(CRON).exists():
        return f"no {CRON}: apt-get install cron"
    if shutil.which("cc") is None:
        return "no cc: apt-get install gcc libc6-dev"
    tried = subprocess.run(["unshare", "--mount", "--propagation", "private", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "no mount namespaces for this user"


class VirtualCron:
    """A daemon that can be run over any stretch of time, in any zone; `directory` is its scratch space."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = directory / "virtual_clock.so"
        source = Path(__file__).with_name("virtual_clock.c")
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", self.clock, source, "-ldl"], check=True
        )
        (directory / "spool" / "crontabs").mkdir(parents=True)
        (directory / "system-crontabs").mkdir()
        (directory / "system-crontab").touch()

    def fires(
        self, schedules: list[str], zone_file: Path, begin: int, end: int, suspends: tuple[tuple[int, int], ...] = ()
    ) -> list[tuple[int, int]]:
        """Run the daemon from `begin` to `end` (epoch seconds) and return each fire as (instant, index of its schedule).

        `suspends` are (instant, seconds) at which the machine sleeps. A daemon never fires the minute it starts in.
        """
        crontab = self.directory / "spool" / "crontabs" / "root"
        crontab.write_text("".join(f"{text} {index}\n" for index, text in enumerate(schedules)))
        crontab.chmod(0o600)
        log = self.directory / "fires"
        log.unlink(missing_ok=True)
        subprocess.run(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", _IN_NAMESPACE, "sh", self.directory,
             "env", "-i", f"LD_PRELOAD={self.clock}", f"LAB_BEGIN={begin}", f"LAB_END={end}", f"LAB_LOG={log}",
             "LAB_SUSPENDS=" + ",".join(f"{at}:{seconds}" for at, seconds in suspends), f"TZ=:{zone_file}", CRON, "-f"],
            check=True,
            capture_output=True,
            timeout=100,
        )  # fmt: skip
        lines = [line.split("\t") for line in log.read_text().splitlines()]
        if not lines or lines.pop()[1] != "end":
            raise RuntimeError("the daemon did not reach the end")
        return [(int(second), int(command)) for second, command in lines]
