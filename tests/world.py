"""A server and nodes whose clocks a test sets. Needs libfaketime, so its tests are marked `root`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.faketime import FakeClock
from tests.rig import Fire, Fleet, Server, wheel_server_binary

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from subprocess import CompletedProcess


class World:
    """One clock for Redis and one for all nodes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.store_clock = FakeClock(folder, "store")
        self.node_clock = FakeClock(folder, "node")
        # Debian's redis-server has an allocator that asks for the time before libfaketime can tell it.
        self.server = Server(folder / "redis", env=self.store_clock.env, binary=wheel_server_binary())
        self.fleet = Fleet(self.server.url, folder)

    def set_all(self, epoch: float) -> None:
        self.store_clock.set_to(epoch)
        self.node_clock.set_to(epoch)

    def start(self, *arguments: str, node: str = "node-1", env: Mapping[str, str] | None = None) -> Fire:
        return self.fleet.start("run", *arguments, node=node, env={**self.node_clock.env, **(env or {})})

    def run(self, *arguments: str, node: str = "node-1", env: Mapping[str, str] | None = None) -> CompletedProcess[str]:
        return self.start(*arguments, node=node, env=env).end()

    def close(self) -> None:
        self.fleet.close()
        self.server.stop()
