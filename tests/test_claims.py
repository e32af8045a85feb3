"""The claim's protocol on a real server: what each request answers, sent once, twice, late, and by whom."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

import pytest

from clustercron import schema
from clustercron.claims import Claims, Ending, Lost, Tick, Won
from clustercron.clock import Clock
from clustercron.config import StoreSettings, parse_url
from clustercron.errors import ClockSkew, StoreRefused, StoreUnavailable, TooLate
from clustercron.tick import utc_text
from tests.rig import Server, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

T = 1_767_614_400  # 2026-01-05T12:00:00Z
KEYS = schema.JobKeys("clustercron", "billing")
DAY_MS = 86_400_000


class Cast:
    """Nodes that claim, each with an owner of its own."""

    def __init__(self, server: Server) -> None:
        self.store = StoreSettings(parse_url(server.url), "clustercron", 30 * DAY_MS, False)
        self.nodes: list[Claims] = []

    def node(self) -> Claims:
        self.nodes.append(Claims(self.store, "billing", Clock(), 3_000, 30_000))
        return self.nodes[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        for claims in self.nodes:
            claims.close()

    def claim(self, claims: Claims, tick: Tick) -> Won:
        won = claims.claim(tick)
        assert isinstance(won, Won)
        return won


@pytest.fixture
def cast(server: Server) -> Iterator[Cast]:
    with Cast(server) as cast:
        yield cast


@pytest.fixture
def client(server: Server) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


def a_tick(
    instant: int = T,
    node: str = "node-1",
    kind: str = "fire",
    definition: str = "0 12 * * *|UTC",
    max_age_ms: int = 0,
    ttl_ms: int = 30 * DAY_MS,
) -> Tick:
    return Tick(
        instant=instant,
        text=utc_text(instant),
        kind=kind,
        max_age_ms=max_age_ms,
        ttl_ms=ttl_ms,
        node=node,
        about=schema.encode(z="2026f", v="0.1.0", d=definition),
        definition=definition,
        rules="2026:00000000",
        fire=schema.encode(f=instant * 1000, w="daemon-child"),
    )


def record(client: redis.Redis, field: str = str(T)) -> dict[str, str]:
    text = client.hget(KEYS.runs, field)
    assert isinstance(text, str)
    return schema.decode(text, schema.RECORD_LETTERS)


def ended(outcome: str = "succeeded") -> Ending:
    return Ending(outcome, schema.encode(x=0), Clock().node_now_ms())


def test_claim_sent_twice_is_won_twice_with_the_same_token(cast: Cast) -> None:
    claims = cast.node()
    first, second = cast.claim(claims, a_tick()), cast.claim(claims, a_tick())
    assert (first.token, first.attempt) == (second.token, second.attempt)


def test_start_sent_twice_answers_the_same_instant(cast: Cast) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    first = claims.start(a_tick(), won, 60_000)
    assert isinstance(first, int)
    assert claims.start(a_tick(), won, 60_000) == first


def test_finish_sent_twice_changes_nothing_the_second_time(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.start(a_tick(), won, 60_000)
    ending = ended()
    assert claims.finish(a_tick(), won, ending, "") is True
    before = record(client)
    assert claims.finish(a_tick(), won, ending, "") is True
    assert record(client) == before
    assert record(client)["state"] == "succeeded"
    assert client.hget(KEYS.job, "live") == ""


def test_loser_is_told_state_and_node_and_is_noted_once(cast: Cast, client: redis.Redis) -> None:
    winner, loser = cast.node(), cast.node()
    won = cast.claim(winner, a_tick())
    winner.start(a_tick(), won, 60_000)
    for _ in range(2):
        lost = loser.claim(a_tick(node="node-2"))
        assert isinstance(lost, Lost)
        assert (lost.state, lost.node) == ("running", "node-1")
    number = schema.decode(client.hget(KEYS.nodes, "node-2") or "", schema.NODE_LETTERS)["number"]
    assert record(client)["tried"] == number


def test_claim_that_nobody_starts_is_taken_over_and_its_owner_can_start_nothing(
    cast: Cast, client: redis.Redis
) -> None:
    dead, other = cast.node(), cast.node()
    first = cast.claim(dead, a_tick())
    second = cast.claim(other, a_tick(node="node-2"))  # waits until the short lease is over
    assert second.attempt == "1"
    assert int(second.token) > int(first.token)
    lost = dead.start(a_tick(), first, 60_000)
    assert isinstance(lost, Lost)
    assert lost.node == "node-2"
    assert isinstance(other.start(a_tick(), second, 60_000), int)
    assert record(client)["node"] == "node-2"
    tried = record(client)["tried"].split(",")
    assert [
        schema.decode(client.hget(KEYS.nodes, name) or "", schema.NODE_LETTERS)["number"] for name in ("node-1",)
    ] == tried


def test_lapsed_claim_must_be_claimed_again_before_it_starts(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    text = client.hget(KEYS.runs, str(T)) or ""
    lease_until = schema.decode(text, schema.RECORD_LETTERS)["lease_until_ms"]
    client.hset(KEYS.runs, str(T), text.replace(f"l={lease_until}", "l=1"))
    assert claims.start(a_tick(), won, 60_000) is None
    again = cast.claim(claims, a_tick())
    assert again.token == won.token
    assert isinstance(claims.start(a_tick(), again, 60_000), int)


def test_claim_watched_for_a_whole_lease_has_lapsed_whatever_rediss_clock_says(cast: Cast, client: redis.Redis) -> None:
    # A server whose clock fell back an hour would hold the claim for an hour.
    first = cast.claim(cast.node(), a_tick())
    text = client.hget(KEYS.runs, str(T)) or ""
    lease_until = schema.decode(text, schema.RECORD_LETTERS)["lease_until_ms"]
    client.hset(KEYS.runs, str(T), text.replace(f"l={lease_until}", f"l={int(lease_until) + 3_600_000}"))
    second = cast.claim(cast.node(), a_tick(node="node-2"))
    assert int(second.token) > int(first.token)


def test_renewal_and_end_of_an_attempt_that_was_taken_over_change_nothing(cast: Cast, client: redis.Redis) -> None:
    old, new = cast.node(), cast.node()
    first = cast.claim(old, a_tick())
    second = cast.claim(new, a_tick(node="node-2"))
    new.start(a_tick(), second, 60_000)
    before = client.hget(KEYS.runs, str(T))
    assert old.renew(a_tick(), first, 60_000, "", 2) == "fenced"
    assert old.finish(a_tick(), first, ended("failed"), "") is False
    assert client.hget(KEYS.runs, str(T)) == before


def test_tick_given_back_is_free_for_the_next(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    assert claims.finish(a_tick(), won, ended("abandoned"), "") is True
    assert cast.node().known(a_tick())[0] == "abandoned"
    again = cast.claim(cast.node(), a_tick(node="node-2"))
    assert again.attempt == "1"
    assert claims.finish(a_tick(), won, ended("abandoned"), "") is False
    assert record(client)["state"] == "claimed"


def test_start_that_was_abandoned_does_not_come_true_later(cast: Cast) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.finish(a_tick(), won, ended("abandoned"), "")
    assert isinstance(claims.start(a_tick(), won, 60_000), Lost)


def test_failed_exec_leaves_the_tick_to_the_next_attempt(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.start(a_tick(), won, 60_000)
    claims.finish(a_tick(), won, ended("start-failed"), "")
    again = cast.claim(cast.node(), a_tick(node="node-2"))
    assert again.attempt == "2"
    assert record(client, f"{T}.1")["state"] == "start-failed"


@pytest.mark.parametrize(
    "gone",
    [
        ["claim"],
        ["runs", "claim"],
        ["runs", "ticks", "claim"],
        ["runs", "ticks"],
        ["ticks"],
    ],
    ids=" and ".join,
)
def test_taken_tick_stays_taken_when_the_server_evicts(cast: Cast, client: redis.Redis, gone: list[str]) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.start(a_tick(), won, 60_000)
    claims.finish(a_tick(), won, ended(), "")
    for name in gone:
        client.delete(KEYS.claim(utc_text(T)) if name == "claim" else getattr(KEYS, name))
    assert isinstance(cast.node().claim(a_tick(node="node-2")), Lost)


def test_older_free_tick_can_be_claimed_while_the_list_knows_it_is_free(cast: Cast) -> None:
    cast.claim(cast.node(), a_tick(T))
    won = cast.claim(cast.node(), a_tick(T - 86_400))
    assert not won.below


def test_list_of_taken_ticks_stays_sorted_whatever_the_order_of_claims(cast: Cast, client: redis.Redis) -> None:
    for offset in (3, 1, 7, 5, 0, 9, 4):
        cast.claim(cast.node(), a_tick(T + 60 * offset, kind="tick"))
    assert client.lrange(KEYS.ticks, 0, -1) == [str(T + 60 * offset) for offset in (0, 1, 3, 4, 5, 7, 9)]


def test_below_the_list_of_taken_ticks_the_claim_key_alone_decides(cast: Cast, client: redis.Redis) -> None:
    first = cast.node()
    won = cast.claim(first, a_tick(T))
    first.start(a_tick(T), won, 60_000)
    client.rpush(KEYS.ticks, *(str(T + 60 * n) for n in range(1, 1_030)))
    cast.claim(cast.node(), a_tick(T + 60 * 2_000))
    assert client.llen(KEYS.ticks) == 1_024
    assert client.lpos(KEYS.ticks, str(T)) is None
    assert isinstance(cast.node().claim(a_tick(T)), Lost)
    assert cast.claim(cast.node(), a_tick(T - 60)).below


def test_fencing_tokens_rise_also_when_redis_lost_everything(cast: Cast, client: redis.Redis) -> None:
    tokens = [int(cast.claim(cast.node(), a_tick(T + 60 * n)).token) for n in range(5)]
    client.flushall()
    # Five claims in a millisecond run ahead of the clock; nodes never do.
    wait_for(lambda: client.time()[0] * 1000 + client.time()[1] // 1000 > tokens[-1], "the clock passes the last token")
    tokens += [int(cast.claim(cast.node(), a_tick(T + 60 * n)).token) for n in range(5)]
    assert tokens == sorted(set(tokens))


def test_renewal_restores_what_redis_lost(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.start(a_tick(), won, 60_000)
    restorable = client.hget(KEYS.runs, str(T)) or ""
    client.flushall()
    assert claims.renew(a_tick(), won, 60_000, restorable, 2) == "restored"
    assert isinstance(cast.node().claim(a_tick(node="node-2")), Lost)
    assert claims.finish(a_tick(), won, ended(), "") is True
    assert record(client)["state"] == "succeeded"
    assert int(cast.claim(cast.node(), a_tick(T + 60)).token) > int(won.token)


def test_end_restores_what_redis_lost(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.start(a_tick(), won, 60_000)
    restorable = client.hget(KEYS.runs, str(T)) or ""
    client.flushall()
    assert claims.finish(a_tick(), won, ended("failed"), restorable) is True
    assert record(client)["state"] == "failed"
    assert isinstance(cast.node().claim(a_tick(node="node-2")), Lost)


def test_lost_record_with_a_new_owner_is_not_restored(cast: Cast, client: redis.Redis) -> None:
    old = cast.node()
    won = cast.claim(old, a_tick())
    old.start(a_tick(), won, 60_000)
    restorable = client.hget(KEYS.runs, str(T)) or ""
    client.flushall()
    new = cast.claim(cast.node(), a_tick(node="node-2"))
    assert old.renew(a_tick(), won, 60_000, restorable, 2) == "fenced"
    assert record(client)["fencing_token"] == new.token


def test_next_attempt_of_a_retry_is_the_same_when_asked_twice(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.start(a_tick(), won, 60_000)
    ending = ended("failed")
    first = claims.finish(a_tick(), won, ending, "", 60_000)
    second = claims.finish(a_tick(), won, ending, "", 60_000)
    assert isinstance(first, Won)
    assert isinstance(second, Won)
    assert (first.token, first.attempt) == (second.token, second.attempt)
    assert first.attempt == "2"
    assert int(first.token) > int(won.token)
    assert record(client, f"{T}.1")["state"] == "failed"
    assert record(client)["state"] == "running"


def test_next_attempt_that_its_owner_never_heard_of_is_taken_back_with_the_end(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.start(a_tick(), won, 60_000)
    ending = ended("failed")
    following = claims.finish(a_tick(), won, ending, "", 60_000)
    assert isinstance(following, Won)
    first = record(client, f"{T}.1")
    assert cast.node().finish(a_tick(), won, ending, "") is False, "another owner has no attempt here"
    for _ in range(2):
        assert claims.finish(a_tick(), won, ending, "") is True
        assert client.hkeys(KEYS.runs) == [str(T)]
        assert record(client) == first
        assert client.hget(KEYS.job, "live") == ""
    assert claims.finish(a_tick(), won, ending, "", 60_000) is False, "a request that was overtaken begins nothing"
    assert record(client) == first
    assert int(cast.claim(cast.node(), a_tick(T + 60)).token) > int(following.token)


def test_next_attempt_that_was_executed_is_not_taken_back(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.start(a_tick(), won, 60_000)
    following = claims.finish(a_tick(), won, ended("failed"), "", 60_000)
    assert isinstance(following, Won)
    assert claims.finish(a_tick(), following, ended(), "") is True
    assert claims.finish(a_tick(), won, ended("failed"), "") is False
    assert (record(client)["state"], record(client)["attempt"]) == ("succeeded", "2")


def test_request_for_a_next_attempt_has_a_deadline(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.start(a_tick(), won, 60_000)
    late = Claims(cast.store, "billing", Clock(-3_600_000), 3_000, 30_000, claims.owner)
    cast.nodes.append(late)
    with pytest.raises(ClockSkew):
        late.finish(a_tick(), won, ended("failed"), "", 60_000)
    assert (record(client)["state"], client.hlen(KEYS.runs)) == ("running", 1)
    assert late.finish(a_tick(), won, ended("failed"), "") is True, "an end is never too late"


def test_records_are_deleted_after_the_retention_but_the_newest_stays(cast: Cast, client: redis.Redis) -> None:
    for number in range(12):
        claims = cast.node()
        tick = a_tick(T + 60 * number, ttl_ms=1)
        won = cast.claim(claims, tick)
        claims.start(tick, won, 1)
        claims.finish(tick, won, ended(), "")
    newest = str(T + 60 * 11)
    fields = client.hkeys(KEYS.runs)
    assert newest in fields
    assert len(fields) <= 2
    assert client.lrange(KEYS.recent, 0, -1) == sorted(fields)
    assert isinstance(cast.node().claim(a_tick(T)), Lost)


def test_keys_have_the_names_and_lifetimes_of_the_layout(cast: Cast, client: redis.Redis) -> None:
    claims = cast.node()
    won = cast.claim(claims, a_tick())
    claims.start(a_tick(), won, 60_000)
    claims.finish(a_tick(), won, Ending("succeeded", "x=0", Clock().node_now_ms(), b"kept"), "")
    claim_key = "clustercron:{billing}:claim:2026-01-05T12:00:00Z"
    output_key = "clustercron:{billing}:output:2026-01-05T12:00:00Z.1"
    expiring = {key for key in client.keys("*") if client.pttl(key) > 0}
    lasting = {key for key in client.keys("*") if client.pttl(key) == -1}
    assert expiring == {claim_key, output_key}
    names = ("job", "ticks", "runs", "recent", "nodes")
    assert lasting == {"clustercron:jobs", *(f"clustercron:{{billing}}:{name}" for name in names)}
    assert client.get(claim_key) == claims.owner
    assert client.smembers("clustercron:jobs") == {"billing"}
    assert client.hget(KEYS.job, "layout") == "1"


def test_newer_layout_is_refused_and_nothing_is_written(cast: Cast, client: redis.Redis) -> None:
    client.hset(KEYS.job, "layout", "2")
    with pytest.raises(StoreRefused, match="layout 2, newer than this version reads"):
        cast.node().claim(a_tick())
    assert client.keys("*") == [KEYS.job]


def test_tick_older_than_its_limit_is_refused_only_while_it_is_free(cast: Cast) -> None:
    with pytest.raises(TooLate):
        cast.node().claim(a_tick(max_age_ms=60_000))
    won = cast.node()
    cast.claim(won, a_tick())
    won.start(a_tick(), cast.claim(won, a_tick()), 60_000)
    assert isinstance(cast.node().claim(a_tick(max_age_ms=60_000)), Lost)


def test_disagreement_of_nodes_is_recorded(cast: Cast, client: redis.Redis) -> None:
    cast.claim(cast.node(), a_tick())
    assert client.hget(KEYS.job, "differed") is None
    cast.claim(cast.node(), a_tick(T + 60, node="node-2", definition="0 13 * * *|Europe/Amsterdam"))
    assert int(client.hget(KEYS.job, "differed") or 0) > 0
    assert (client.hget(KEYS.job, "definitions") or "").splitlines() == [
        f"{T}|0 12 * * *|UTC",
        f"{T + 60}|0 13 * * *|Europe/Amsterdam",
    ]


def test_backfill_does_not_make_a_job_known_nor_change_its_schedule(cast: Cast, client: redis.Redis) -> None:
    cast.claim(cast.node(), a_tick(kind="tick"))
    assert client.hget(KEYS.job, "known") is None
    cast.claim(cast.node(), a_tick(T + 60))
    assert client.hget(KEYS.job, "known") is not None
    cast.claim(cast.node(), a_tick(T - 60, kind="tick", definition="5 5 * * *|UTC"))
    assert (client.hget(KEYS.job, "definitions") or "").splitlines() == [f"{T}|0 12 * * *|UTC"]


def test_all_keys_of_a_job_share_one_cluster_slot() -> None:
    keys = [KEYS.job, KEYS.ticks, KEYS.runs, KEYS.recent, KEYS.nodes, KEYS.claim("x"), KEYS.output("x", "1")]
    assert {key[key.index("{") + 1 : key.index("}")] for key in keys} == {"billing"}


def test_records_survive_any_text() -> None:
    nasty = "a b=c%20\n\x1b[31m ü \udcff [red]"
    assert schema.decode(schema.encode(n=nasty), schema.RECORD_LETTERS) == {"node": nasty.replace("\udcff", "\ufffd")}


@pytest.mark.parametrize("missing", ["set", "rpush", "linsert", "ltrim", "hincrby"])
def test_permission_missing_in_mid_script_never_makes_a_silent_loss(
    server: Server, client: redis.Redis, missing: str
) -> None:
    with Cast(server) as cast:
        cast.claim(cast.node(), a_tick(T + 60))  # so that the list has to be searched
    client.acl_setuser(
        "narrow", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all"], commands=[f"-{missing}"]
    )
    store = StoreSettings(parse_url(f"unix://narrow:pw@{server.socket}"), "clustercron", DAY_MS, False)
    try:
        for node in ("node-3", "node-4"):
            claims = Claims(store, "billing", Clock(), 3_000, 30_000)
            with contextlib.closing(claims), contextlib.suppress(StoreRefused):
                assert isinstance(claims.claim(a_tick(node=node)), Won)
        with Cast(server) as cast:
            cast.claim(cast.node(), a_tick(node="node-5"))
    finally:
        client.acl_deluser("narrow")


GARBAGE = [
    "s=running c=abc b=12.5 l=- n=x",
    "s=claimed l=nan",
    "s=claimed l=1e309",
    "",
    "\x00\xff",
    "s=start-failed a=abc",
]
GARBAGE += ["s=abandoned t=,,,x a=", "s=" + "y" * 100_000, "s=running l=99999999999999999999999 n=" + "z" * 2_000_000]


@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: text[:20])
def test_record_made_by_hand_is_lost_or_taken_and_no_accident(cast: Cast, client: redis.Redis, text: str) -> None:
    client.hset(KEYS.runs, str(T), text)
    client.rpush(KEYS.recent, str(T - 60))
    client.hset(KEYS.runs, str(T - 60), text)
    for node in ("node-1", "node-2"):
        answer = cast.node().claim(a_tick(node=node))
        assert isinstance(answer, Won | Lost)
        if isinstance(answer, Lost):
            assert len(answer.state + answer.node) <= 200
            break


@pytest.mark.parametrize("field", ["token", "newest", "live", "definitions", "rules", "nodes", "max_age", "known"])
@pytest.mark.parametrize("text", ["abc", "", "-1", "9" * 40, "a\nb|c"])
def test_state_made_by_hand_burns_no_tick(cast: Cast, client: redis.Redis, field: str, text: str) -> None:
    client.hset(KEYS.job, field, text)
    client.rpush(KEYS.ticks, "abc", text)
    claims = cast.node()
    try:
        won = cast.claim(claims, a_tick())
    except StoreRefused:
        # Said aloud, and said again: nobody takes the tick for taken.
        with pytest.raises(StoreRefused):
            cast.node().claim(a_tick(node="node-2"))
        return
    assert isinstance(claims.start(a_tick(), won, 60_000), int)
    assert claims.finish(a_tick(), won, ended(), "") is True


def test_stopped_server_that_goes_on_carries_out_nothing_for_a_sender_that_gave_up(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with Server(tmp_path_factory.mktemp("ghost")) as server:
        store = StoreSettings(parse_url(server.url), "clustercron", DAY_MS, False)
        claims = Claims(store, "billing", Clock(), 300, 0)
        with server.stopped(), pytest.raises(StoreUnavailable, match="no answer in time"):
            claims.claim(a_tick())
        with server.client() as client:
            wait_for(lambda: client.info("commandstats").get("cmdstat_eval"), "the late claim is carried out")
            assert client.exists(KEYS.claim(utc_text(T))) == 0


def test_start_that_arrives_after_its_sender_gave_up_starts_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with Server(tmp_path_factory.mktemp("ghost")) as server, server.client() as client:
        store = StoreSettings(parse_url(server.url), "clustercron", DAY_MS, False)
        # The claim's own lease is longer than the deadline of the start.
        claims = Claims(store, "billing", Clock(), 15_000, 20)
        won = claims.claim(a_tick())
        assert isinstance(won, Won)
        claims.restart_budget(0.3)
        with server.stopped():
            over_ms = Clock().node_now_ms() + 300 + 20
            with pytest.raises(StoreUnavailable):
                claims.start(a_tick(), won, 60_000)
            wait_for(lambda: Clock().node_now_ms() > over_ms + 50, "the deadline has passed")
        wait_for(lambda: client.info("commandstats")["cmdstat_eval"]["calls"] > 1, "the late start is carried out")
        assert record(client)["state"] == "claimed"
