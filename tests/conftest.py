"""Fixtures: one private server for the session, emptied for each test, and a fleet of nodes on it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.rig import Fleet, Server
from tests.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session", autouse=True)
def nothing_ignored() -> None:
    """Whoever runs these tests in the background of a shell has INT and QUIT ignored, and so would every node."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Server:
    """The session's server, empty. A test that stops, breaks or configures its server starts one of its own."""
    with shared_server.client() as client:
        client.flushall()
    return shared_server


@pytest.fixture
def fleet(server: Server, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(server.url, tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A server and nodes whose clocks the test sets."""
    world = World(tmp_path)
    yield world
    world.close()
