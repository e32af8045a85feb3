"""Both transition days under the real Debian cron: two nodes each, the clock set to just before the change."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.rig import lines, wait_for
from tests.test_zones_of_nodes import at
from tests.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
CRON = "/usr/sbin/cron"
ZONE = "/usr/share/zoneinfo/Europe/Amsterdam"
NODES = ("node-1", "node-2")
# A minute's lines are fired within 2 s of it; on the day of a change Debian's cron spaces them by up to 10 s each.
FIRED_S = 90


class CronHost:
    """A Debian cron in Amsterdam, with its own crontab, clock and /etc/localtime, and nothing of the machine's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.crontab = world.folder / "crontab"
        self.fired = world.folder / "fired"
        self.ended = world.folder / "ended"
        job, self.runs = world.fleet.append_job()
        self.crontab.write_text(self._environment() + self._lines(job))
        (world.folder / "empty").mkdir()

    def _environment(self) -> str:
        variables = {**self.world.node_clock.env, **self.world.fleet.env}
        del variables["CLUSTERCRON_DAEMON_TZ"]  # /etc/localtime is to tell it
        return "".join(f"{name}={value}\n" for name, value in variables.items())

    def _lines(self, job: list[str]) -> str:
        (self.world.folder / "job").write_text(f"#!/bin/sh\n{job[2]}\n")
        (self.world.folder / "job").chmod(0o755)
        run = f"{sys.executable} -I -m clustercron run --job nightly --schedule '30 2 * * *' --tz Europe/Amsterdam"
        return "".join(
            f"30 2 * * * root echo {node} >> {self.fired}; CLUSTERCRON_NODE={node} {run} -- {self.world.folder}/job"
            f" 2>> {self.ended}; echo {node} $? >> {self.ended}\n"
            for node in NODES
        )

    @contextlib.contextmanager
    def running(self, epoch: float) -> Iterator[None]:
        """The daemon, from an instant on."""
        self.world.set_all(epoch)
        setup = (
            f"mount -t tmpfs tmpfs /run\nmount --bind {self.world.folder}/empty /var/spool/cron\n"
            f"mount --bind {self.crontab} /etc/crontab\nmount --bind {self.world.folder}/empty /etc/cron.d\n"
            f'mount --bind {ZONE} "$(readlink -f /etc/localtime)"\n'
            f"exec env {' '.join(f'{k}={v}' for k, v in self.world.node_clock.env.items())} {CRON} -f"
        )
        self.crontab.chmod(0o644)
        daemon = subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", "sh", "-ec", setup],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()

    def await_fires(self, fires: int) -> None:
        wait_for(lambda: len([e for e in lines(self.ended) if e.endswith(" 0")]) >= fires, self.story(fires), FIRED_S)

    def story(self, fires: int) -> str:
        return f"{fires} fires end well: fired {lines(self.fired)}, ended {lines(self.ended)}"


def _spring(folder: Path) -> list[str]:
    host = CronHost(World(folder))
    try:
        # 02:30 does not exist; cron runs it when the clock goes from 02:00 to 03:00.
        with host.running(at("2026-03-29T00:59Z") + 30):
            host.await_fires(2)
        return lines(host.runs)
    finally:
        host.world.close()


def _autumn(folder: Path) -> list[str]:
    host = CronHost(World(folder))
    try:
        with host.running(at("2026-10-25T00:29Z") + 30):
            host.await_fires(2)
        # Left alone cron lets the second 02:30 pass; one that was restarted in between fires the line again.
        with host.running(at("2026-10-25T01:29Z") + 30):
            host.await_fires(4)
        return lines(host.runs)
    finally:
        host.world.close()


def test_half_past_two_runs_once_on_both_transition_days(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        spring = pool.submit(_spring, tmp_path / "spring")
        autumn = pool.submit(_autumn, tmp_path / "autumn")
        assert [run.split()[0] for run in spring.result()] == ["2026-03-29T01:00:00Z"]
        assert [run.split()[0] for run in autumn.result()] == ["2026-10-25T00:30:00Z"]
