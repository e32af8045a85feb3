"""Requests and replies get lost, servers stop and go on, nodes die at the worst instant: never two runs of one tick.

Each node has a proxy of its own, so that what it loses is decided for it alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from clustercron import schema, wire
from clustercron.claims import Claims, Tick, Won
from clustercron.clock import Clock
from clustercron.config import StoreSettings, parse_url
from clustercron.tick import utc_text
from tests.proxy import Proxy, commands, full_listener
from tests.rig import Fire, Fleet, Server, lines, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.proxy import How, Part

TICK = "2026-01-05T02:00:00Z"
EPOCH = "1767578400"


class Nodes:
    """A fleet whose nodes reach the server through a proxy each."""

    def __init__(self, server: Server, fleet: Fleet, stack: contextlib.ExitStack) -> None:
        self.server = server
        self.fleet = fleet
        self._stack = stack
        self.job, self.path = fleet.append_job()
        self.proxies: dict[str, Proxy] = {}

    def proxy(self, node: str) -> Proxy:
        if node not in self.proxies:
            self.proxies[node] = self._stack.enter_context(Proxy(self.server.socket))
        return self.proxies[node]

    def fire(self, node: str, *options: str, job: list[str] | None = None, tick: str = TICK) -> Fire:
        env = {"CLUSTERCRON_REDIS_URL": self.proxy(node).url, "CLUSTERCRON_STATE_DIR": str(self.fleet.folder / node)}
        line = ["--job", "billing", "--schedule", "* * * * *", "--tick", tick, *options, "--", *(job or self.job)]
        return self.fleet.start("run", *line, node=node, env=env)

    def waiting_job(self) -> tuple[list[str], Callable[[], object]]:
        """A job that notes its run and then waits, and what lets it go on."""
        fifo = self.fleet.folder / "go-on"
        os.mkfifo(fifo)
        job = [*self.job[:2], f"{self.job[2]}; read line < {fifo}"]
        return job, lambda: fifo.write_bytes(b"go on\n")

    @property
    def runs(self) -> list[str]:
        """The nodes that ran the job."""
        return [line.split()[1] for line in lines(self.path)]

    def record(self, field: str = EPOCH) -> dict[str, str]:
        text = self.server.client().hget("clustercron:{billing}:runs", field)
        return schema.decode(str(text), schema.RECORD_LETTERS) if text else {}

    def seen(self) -> set[str]:
        """The nodes that the store knows."""
        return set(self.server.client().hkeys("clustercron:{billing}:nodes"))


def _quiet(fire: Fire) -> tuple[int, str, str]:
    end = fire.end()
    return end.returncode, end.stdout, end.stderr


@pytest.fixture
def nodes(server: Server, fleet: Fleet) -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        yield Nodes(server, fleet, stack)
        for fire in fleet.fires:
            fire.kill()


@pytest.fixture
def own_nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Nodes on a server that may be stopped."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(tmp_path / "server"))
        fleet = Fleet(server.url, tmp_path)
        yield Nodes(server, fleet, stack)
        fleet.close()


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("how", ["reset", "fin"])
@pytest.mark.parametrize("part", ["request", "reply"])
@pytest.mark.parametrize("kind", ["claim", "start", "finish"])
def test_what_is_lost_is_sent_again_by_the_same_owner(
    nodes: Nodes, kind: str, part: Part, how: How, times: int
) -> None:
    nodes.proxy("node-1").lose(kind, part, how, times)
    assert _quiet(nodes.fire("node-1")) == (0, "", "")
    assert nodes.proxy("node-1").count(kind) == times + 1
    assert nodes.runs == ["node-1"]
    assert (nodes.record()["attempt"], nodes.record()["state"]) == ("1", "succeeded")
    assert nodes.record()["fencing_token"] == lines(nodes.path)[0].split()[2]


@pytest.mark.parametrize(("kind", "part"), [("claim", "request"), ("start", "reply")])
def test_silence_costs_one_try_and_not_the_budget(nodes: Nodes, kind: str, part: Part) -> None:
    nodes.proxy("node-1").lose(kind, part, "silence")
    assert _quiet(nodes.fire("node-1", "--store-timeout", "8s")) == (0, "", "")
    assert nodes.runs == ["node-1"]


@pytest.mark.parametrize("part", ["request", "reply"])
@pytest.mark.parametrize("kind", ["claim", "start"])
def test_five_nodes_that_lose_what_they_send_make_one_run(nodes: Nodes, kind: str, part: Part) -> None:
    names = [f"node-{number}" for number in range(5)]
    for number, name in enumerate(names):
        nodes.proxy(name).lose(kind, part, "reset" if number % 2 else "fin", times=1 + number % 3)
    ends = [_quiet(fire) for fire in [nodes.fire(name) for name in names]]
    assert ends == [(0, "", "")] * 5
    assert len(nodes.runs) == 1


def test_claims_that_reach_a_stopped_server_make_one_run_when_it_goes_on(own_nodes: Nodes) -> None:
    nodes = own_nodes
    names = [f"node-{number}" for number in range(5)]
    with nodes.server.stopped():
        fires = [nodes.fire(name) for name in names]
        wait_for(lambda: all(nodes.proxy(name).count("claim") for name in names), "every node has sent its claim")
    assert [_quiet(fire) for fire in fires] == [(0, "", "")] * 5
    assert len(nodes.runs) == 1


def test_a_start_that_reaches_a_stopped_server_is_carried_out_when_it_goes_on(own_nodes: Nodes) -> None:
    nodes = own_nodes
    start = nodes.proxy("node-1").hold("start")
    fire = nodes.fire("node-1", "--store-timeout", "8s")
    start.wait_until_reached()
    with nodes.server.stopped():
        start.release()
        # The first try has run out of time, and the start was sent again.
        wait_for(lambda: nodes.proxy("node-1").count("start") == 2, "the start is sent again")
    assert _quiet(fire) == (0, "", "")
    assert nodes.runs == ["node-1"]


def _give_up(nodes: Nodes, fire: Fire) -> None:
    end = fire.end()
    assert (end.returncode, end.stdout) == (75, "")


def _be_killed(nodes: Nodes, fire: Fire) -> None:
    wait_for(lambda: nodes.proxy("node-1").count("claim"), "the claim is sent")
    fire.kill()


@pytest.mark.parametrize("leave", [_give_up, _be_killed])
def test_a_claim_whose_sender_is_gone_is_refused_by_its_deadline(
    own_nodes: Nodes, leave: Callable[[Nodes, Fire], None]
) -> None:
    nodes = own_nodes
    with nodes.server.stopped():
        sent = time.monotonic()
        leave(nodes, nodes.fire("node-1", "--store-timeout", "1s", "--max-skew", "0.3s"))
        assert nodes.proxy("node-1").count("claim") == 1
        wait_for(lambda: time.monotonic() - sent > 1.6, "budget and skew are over")
    assert _quiet(nodes.fire("node-2")) == (0, "", "")
    assert nodes.runs == ["node-2"]
    # A claim that was carried out would have left its node's name.
    assert nodes.seen() == {"node-2"}
    assert nodes.proxy("node-2").trips[:2] == [("claim",), ("start",)]


def test_a_claim_past_its_deadline_changes_nothing(nodes: Nodes) -> None:
    nodes.proxy("node-1").lose("claim", "request", times=99)
    assert nodes.fire("node-1", "--store-timeout", "0.2s").end().returncode == 75
    ((*words,), *_) = commands(nodes.proxy("node-1").sent[-1]) or []
    node_now, deadline = (3 + int(words[2]) + place for place in (2, 3))
    now_ms = Clock().node_now_ms()
    words[node_now], words[deadline] = b"%d" % now_ms, b"%d" % (now_ms - 100)
    assert nodes.server.client().execute_command(*words)[0] == "stale"
    assert nodes.server.client().keys() == []
    words[deadline] = b"%d" % (now_ms + 10_000)
    assert nodes.server.client().execute_command(*words)[0] == "won"


def test_the_time_of_connecting_is_taken_from_a_requests_deadline(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreSettings(parse_url("redis://two-addresses"), "clustercron", 86_400_000, False)
    tick = Tick(int(EPOCH), TICK, "tick", 0, 86_400_000, "node-1", "", "* * * * *|UTC", "2026:0", "")
    with full_listener() as dead:
        places = [(socket.AF_INET, ("127.0.0.1", port)) for port in (dead, nodes.proxy("node-1").port)]
        monkeypatch.setattr(wire, "_resolve", lambda *unused: places)
        claims = Claims(store, "billing", Clock(), budget_ms=2_000, max_skew_ms=1_000)
        gives_up_ms = Clock().node_now_ms() + 2_000
        assert isinstance(claims.claim(tick), Won)
        claims.close()
    ((eval_, *_),) = map(commands, nodes.proxy("node-1").sent)
    deadline_ms = int(eval_[3 + int(eval_[2]) + 3])
    assert gives_up_ms - 200 <= deadline_ms - 1_000 <= gives_up_ms + 100


def test_a_start_whose_sender_is_gone_is_refused_by_its_deadline(own_nodes: Nodes) -> None:
    nodes = own_nodes
    start = nodes.proxy("node-1").hold("start")
    fire = nodes.fire("node-1", "--store-timeout", "1s", "--max-skew", "0.3s")
    start.wait_until_reached()
    fire.kill()
    with nodes.server.stopped():
        start.release()
        killed = time.monotonic()
        wait_for(lambda: time.monotonic() - killed > 1.5, "budget and skew are over")
    assert _quiet(nodes.fire("node-2")) == (0, "", "")
    assert nodes.runs == ["node-2"]


def test_a_claim_that_arrives_long_after_its_run_began_leaves_the_lease_as_it_is(nodes: Nodes) -> None:
    job, go_on = nodes.waiting_job()
    fire = nodes.fire("node-1", job=job)
    wait_for(lambda: nodes.runs, "it runs")
    before = nodes.record()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(nodes.server.socket))
        sock.sendall(nodes.proxy("node-1").sent[0])
        assert b"won" in sock.recv(1 << 16)
    assert nodes.record() == before
    go_on()
    assert _quiet(fire) == (0, "", "")


def test_a_winner_killed_before_its_start_is_replaced_by_a_node_that_saw_the_claim(nodes: Nodes) -> None:
    start = nodes.proxy("node-1").hold("start")
    winner = nodes.fire("node-1")
    start.wait_until_reached()
    other = nodes.fire("node-2")
    wait_for(lambda: nodes.proxy("node-2").count("claim"), "the other node asks")
    winner.kill()
    killed = time.monotonic()
    assert _quiet(other) == (0, "", "")
    assert time.monotonic() - killed < 6
    assert nodes.runs == ["node-2"]
    # And when the dead one's request arrives after all, it changes nothing.
    before = nodes.record()
    start.release()
    assert _quiet(nodes.fire("node-3")) == (0, "", "")
    assert (nodes.runs, nodes.record()) == (["node-2"], {**before, "tried": nodes.record()["tried"]})


def test_a_winner_that_sleeps_past_its_claim_stands_aside_for_who_took_it_over(nodes: Nodes) -> None:
    start = nodes.proxy("node-1").hold("start")
    winner = nodes.fire("node-1", "--store-timeout", "4s")
    start.wait_until_reached()
    os.kill(winner.process.pid, signal.SIGSTOP)
    job, go_on = nodes.waiting_job()
    other = nodes.fire("node-2", "--store-timeout", "4s", job=job)
    wait_for(lambda: nodes.runs, "the other node runs it")
    start.release()
    os.kill(winner.process.pid, signal.SIGCONT)
    assert _quiet(winner) == (0, "", "")
    go_on()
    assert _quiet(other) == (0, "", "")
    assert nodes.runs == ["node-2"]


def test_the_only_node_claims_again_when_its_claim_has_lapsed(nodes: Nodes) -> None:
    start = nodes.proxy("node-1").hold("start")
    winner = nodes.fire("node-1", "--store-timeout", "3s")
    start.wait_until_reached()
    lapsed = time.monotonic() + 1.2  # the claim's lease is a third of the budget, and at most 5 s
    wait_for(lambda: time.monotonic() > lapsed, "the claim lapses")
    start.release()
    assert _quiet(winner) == (0, "", "")
    assert nodes.runs == ["node-1"]
    assert [trip for trip in nodes.proxy("node-1").trips if trip[0] != "finish"] == [
        ("claim",),
        ("start",),
        ("claim",),
        ("start",),
    ]


def test_a_node_whose_start_never_arrives_gives_the_tick_to_one_that_waits(nodes: Nodes) -> None:
    nodes.proxy("node-1").lose("start", "request", times=99)
    start = nodes.proxy("node-1").hold("start")
    first = nodes.fire("node-1", "--store-timeout", "2s", "-v")
    start.wait_until_reached()
    second = nodes.fire("node-2")
    wait_for(lambda: nodes.proxy("node-2").count("claim"), "the other node asks")
    start.release()
    assert _quiet(second) == (0, "", "")
    end = first.end()
    # Which of the two comes first is open: the tick is given back, or the claim lapses and is taken over.
    assert end.returncode in (75, 0)
    assert nodes.runs == ["node-2"]


def test_a_node_whose_start_is_never_confirmed_gives_the_tick_back(nodes: Nodes) -> None:
    nodes.proxy("node-1").lose("start", "reply", times=99)
    end = nodes.fire("node-1", "--store-timeout", "1s").end()
    assert end.returncode == 75
    assert "cannot start 2026-01-05T02:00:00Z" in end.stderr
    assert nodes.record()["state"] == "abandoned"
    assert _quiet(nodes.fire("node-2")) == (0, "", "")
    assert nodes.runs == ["node-2"]
    assert nodes.record()["attempt"] == "1"


def test_a_tick_that_could_not_be_given_back_is_given_back_by_the_nodes_next_fire(nodes: Nodes) -> None:
    nodes.proxy("node-1").lose("start", "reply", times=99)
    nodes.proxy("node-1").lose("finish", "request", times=99)
    end = nodes.fire("node-1", "--store-timeout", "1s").end()
    assert end.returncode == 75
    assert nodes.record()["state"] == "running"
    assert _quiet(nodes.fire("node-2")) == (0, "", "")
    nodes.proxy("node-1").heal()
    assert _quiet(nodes.fire("node-1")) == (0, "", "")  # stands aside, and delivers what was kept
    assert (nodes.record()["state"], nodes.runs) == ("abandoned", [])
    assert _quiet(nodes.fire("node-2")) == (0, "", "")
    assert nodes.runs == ["node-2"]


def test_a_winner_needs_two_round_trips_before_its_command(nodes: Nodes) -> None:
    job, go_on = nodes.waiting_job()
    fire = nodes.fire("node-1", job=job)
    wait_for(lambda: nodes.runs, "it runs")
    assert nodes.proxy("node-1").trips == [("claim",), ("start",)]
    assert nodes.proxy("node-1").connections == 1

    assert _quiet(nodes.fire("node-2")) == (0, "", "")
    assert nodes.proxy("node-2").trips == [("claim",)], "a loser that finds the tick running leaves at once"
    go_on()
    assert _quiet(fire) == (0, "", "")
    assert nodes.proxy("node-1").trips[2:] == [("finish", "sadd")]

    assert _quiet(nodes.fire("node-3")) == (0, "", "")
    assert nodes.proxy("node-3").trips == [("claim",)], "a loser that finds the tick ended leaves at once"


def _lose_at_random(proxy: Proxy, chance: random.Random) -> None:
    """Lose a few things, so few that the budget lasts."""
    for kind in ("claim", "start", "finish"):
        if chance.random() < 0.4:
            part: Part = chance.choice(("request", "reply"))
            proxy.lose(kind, part, chance.choice(("reset", "fin")), chance.randint(1, 2), chance.randint(0, 1))
    if chance.random() < 0.15:
        proxy.lose(chance.choice(("claim", "start")), chance.choice(("request", "reply")), "silence")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_lost_stopped_and_killed_a_tick_has_one_run(own_nodes: Nodes, seed: int) -> None:
    nodes, chance = own_nodes, random.Random(seed)
    names = [f"node-{node}" for node in range(4)]
    for number in range(60):
        instant = int(EPOCH) + 60 * number
        tick = utc_text(instant)
        for name in names:
            nodes.proxy(name).heal()
            _lose_at_random(nodes.proxy(name), chance)
        with contextlib.ExitStack() as stack:
            stopped = chance.random() < 0.25
            if stopped:
                stack.enter_context(nodes.server.stopped())
            fires = [nodes.fire(name, "--store-timeout", "12s", tick=tick) for name in names]
            if stopped:
                wait_for(lambda: any(nodes.proxy(name).trips for name in names), "somebody asks")
                time.sleep(chance.random())  # for some random time: there is nothing to wait for
        killed = chance.choice(fires) if chance.random() < 0.4 else None
        if killed is not None:
            time.sleep(chance.random() * 0.3)
            killed.kill()
        for fire in fires:
            if fire is not killed:
                end = fire.end()
                assert (end.returncode, end.stdout, end.stderr) == (0, "", ""), (seed, number)
        if not any(line.startswith(tick) for line in lines(nodes.path)):
            assert killed is not None, (seed, number)
            assert nodes.record(str(instant))["state"] == "running", (seed, number)
    runs = [line.split() for line in lines(nodes.path)]
    assert len({tick for tick, _, _ in runs}) == len(runs)
    assert len({token for _, _, token in runs}) == len(runs)
