"""What pairs do for each other: consumers of one are served by all, each row once, and streams end where rows do."""

import contextlib
import itertools
import threading
import time
from collections import Counter

import numpy as np
import pytest

from mindspeed_asyncflow.dock import peers
from mindspeed_asyncflow.dock.homes import named_home
from mindspeed_asyncflow.dock.link import Link
from mindspeed_asyncflow.dock.pair import PairClient
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.dock.wire import Message, Verb
from mindspeed_asyncflow.errors import AsyncFlowError, ClaimLost, DeadlineExceeded, DockError, WorkerLost

SECRET = "a secret of this test"


class Put:
    """Rows that are put on the pair of one's choice."""

    def __init__(self, dock) -> None:
        self.pairs = [PairClient(a, SECRET, 10.0, map_arena=False) for a in dock.addresses]
        self._ids = itertools.count(1)
        self.handles: list[int] = []

    def on(self, pair: int, rows: int = 1, partition: str = "p", tokens: int = 3, size: int = 1) -> np.ndarray:
        ids = [next(self._ids) for _ in range(rows // size)]
        values = {"prompt": [np.full(tokens, i, np.int32) for i in ids]}
        found = self.pairs[pair].put(partition, ids, [size] * len(ids), [size] * len(ids), values=values)
        self.handles += np.concatenate(found).tolist()
        return np.concatenate(found)

    def seal(self, partition: str = "p") -> None:
        for pair in self.pairs:
            pair.seal(partition)

    def close(self) -> None:
        for pair in self.pairs:
            pair.close()


@pytest.fixture
def put(docks):
    made = []

    def make(dock) -> Put:
        made.append(Put(dock))
        return made[-1]

    yield make
    for each in made:
        each.close()


def in_threads(*actions, wait_s: float = 20.0) -> list:
    """Results, or the errors, of actions that run at the same time."""
    found: list = [None] * len(actions)

    def run(i: int) -> None:
        try:
            found[i] = actions[i]()
        except AsyncFlowError as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(wait_s)
        assert not thread.is_alive(), "a consumer still waits"
    return found


def waiting(dock, *pairs: int) -> bool:
    return all(dock.member(n).node.controller.waiting for n in pairs)


def quiet(dock) -> bool:
    """Nobody waits anywhere and nothing of a wait is left behind."""
    members = [server._member for server in dock.servers]
    left = [(len(m.node.controller.waiting), m._callers, m.peers._asks, m._team_asks, m._held) for m in members]
    parked = [c.parked for s in dock.servers for c in s._connections.values()]
    calls = [link._waiting for m in members for link in m.peers.links.values()]
    return not any(map(any, left)) and not any(parked) and not any(calls) and not any(s._callers for s in dock.servers)


@pytest.mark.parametrize("pair", [0, 1, 2])
def test_a_waiting_consumer_is_served_by_whichever_pair_gets_the_rows(docks, put, pair):
    dock = docks(3)
    client, source = dock.client(home=0), put(dock)
    got: list = []
    thread = threading.Thread(
        target=lambda: got.append(client.claim("make", 4, partition="p", worker="w", columns=("prompt",)))
    )
    thread.start()
    dock.when(lambda: waiting(dock, 0, 1, 2))
    rows = source.on(pair, 2)
    thread.join(5.0)
    assert got[0].rows.tolist() == rows[: len(got[0])].tolist()
    assert got[0].values["prompt"][0].tolist() == [1, 1, 1]
    client.done(got[0].claim_id)
    dock.when(lambda: quiet(dock))


def test_rows_that_come_to_all_pairs_at_once_go_to_each_waiter_once_and_none_is_lost(docks, put):
    dock = docks(4)
    source = put(dock)
    clients = [dock.client(home=i % 4) for i in range(6)]
    taken: list[list[int]] = [[] for _ in clients]

    def consume(i: int) -> None:
        while True:
            claim = clients[i].claim("make", 3, partition="p", worker=f"w{i}")
            if claim.sealed:
                return
            taken[i] += claim.rows.tolist()
            clients[i].done(claim.claim_id)

    def produce(pair: int) -> None:
        for burst in range(30):
            source.on(pair, 1 + burst % 4)
            time.sleep(0.002 * (burst % 3))

    consumers = [threading.Thread(target=consume, args=(i,), daemon=True) for i in range(len(clients))]
    producers = [threading.Thread(target=produce, args=(i,)) for i in range(4)]
    for thread in (*consumers, *producers):
        thread.start()
    for thread in producers:
        thread.join()
    source.seal()
    for thread in consumers:
        thread.join(20.0)
        assert not thread.is_alive()
    assert Counter(itertools.chain(*taken)) == Counter(source.handles)
    assert sum(dock.stats(n)["peers"]["steals"] for n in range(4)) > 0
    dock.when(lambda: quiet(dock))


def test_grants_of_several_pairs_for_one_waiter_are_given_back_but_one(docks, put):
    dock = docks(4)
    client, source = dock.client(home=0), put(dock)
    for _ in range(15):
        result: list = []
        thread = threading.Thread(target=lambda: result.append(client.claim("make", 9, partition="p", worker="w")))  # noqa: B023
        thread.start()
        dock.when(lambda: waiting(dock, 0, 1, 2, 3))
        in_threads(*[lambda n=n: source.on(n) for n in (1, 2, 3)])
        thread.join(5.0)
        client.done(result[0].claim_id)
        for _ in range(2):
            rest = client.claim("make", 9, partition="p", worker="w", timeout_s=2.0)
            client.done(rest.claim_id)
    assert dock.stats(0)["peers"]["steals_returned"] > 0
    assert client.stats()["partitions"]["p"]["tasks"]["make"] | {"whole_groups": 0} == {
        "waiting": 0, "ready": 0, "claimed": 0, "done": 45, "whole_groups": 0,
    }  # fmt: skip
    dock.when(lambda: quiet(dock))


def test_an_asker_that_disconnects_or_runs_out_of_time_takes_no_row_of_any_pair(docks, put):
    dock = docks(3)
    source, client = put(dock), dock.client(home=0)
    with pytest.raises(DeadlineExceeded, match=r"'w' waited 0\.1 s"):
        client.claim("make", 1, partition="p", worker="w", timeout_s=0.1)
    dock.when(lambda: quiet(dock))
    leaver = PairClient(dock.addresses[0], SECRET, 10.0, map_arena=False, restart_s=0.0)
    thread = threading.Thread(target=lambda: in_threads(lambda: leaver.claim("make", 1, partition="p", worker="gone")))
    thread.start()
    dock.when(lambda: waiting(dock, 0, 1, 2))
    server = dock.servers[0]
    for connection in list(server._connections.values()):
        if connection.parked:
            connection.socket.shutdown(2)
    thread.join(5.0)
    dock.when(lambda: quiet(dock))
    rows = source.on(1, 2)
    assert client.claim("make", 2, partition="p", worker="w").rows.tolist() == rows.tolist()
    leaver.close()


@pytest.mark.slow
def test_thousands_of_waits_that_are_called_off_leave_the_link_open(docks):
    dock = docks(2)
    client = dock.client(home=0)
    link = dock.member(0).peers.links[1]
    fd = link.fd
    for _ in range(270):
        with contextlib.suppress(DeadlineExceeded):
            client.claim("make", 1, partition="p", worker="w", timeout_s=0.001)
    assert link.up and link.fd == fd
    dock.when(lambda: quiet(dock))


def test_hundreds_of_waiters_of_one_pair_wait_at_the_others_too(docks, put):
    dock = docks(2)
    source = put(dock)
    clients = [dock.client(home=0) for _ in range(3)]
    actions = [
        lambda i=i: clients[i % 3].claim("make", 1, partition="p", worker=f"w{i}", timeout_s=15.0) for i in range(300)
    ]
    feeder = threading.Timer(0.5, lambda: source.on(1, 300))
    feeder.start()
    found = in_threads(*actions)
    feeder.join()
    rows = [int(c.rows[0]) for c in found if not isinstance(c, AsyncFlowError)]
    assert len(rows) == len(set(rows)) == 300


# -- the end of a stream -----------------------------------------------------------------------------------------------


def test_a_stream_ends_for_all_consumers_exactly_when_the_last_row_is_done_anywhere(docks, put):
    dock = docks(3)
    source = put(dock)
    first, second = dock.client(home=0), dock.client(home=1)
    rows = source.on(2, 2)
    source.seal()
    held = first.claim("make", 1, partition="p", worker="first")
    also = second.claim("make", 1, partition="p", worker="second")
    assert held.rows.tolist() + also.rows.tolist() == rows.tolist()
    # who asks while another holds a row waits; that row may come back
    with pytest.raises(DeadlineExceeded, match=r"pairs 2 at .* have more, or do not answer"):
        first.claim("make", 1, partition="p", worker="first", timeout_s=0.2)
    second.release(also.claim_id)
    again = first.claim("make", 1, partition="p", worker="first", timeout_s=2.0)
    assert again.rows.tolist() == also.rows.tolist()
    # nobody waits for rows that are one's own, wherever they are
    assert first.claim("make", 1, partition="p", worker="first", timeout_s=2.0).sealed
    ended = []
    thread = threading.Thread(target=lambda: ended.append(second.claim("make", 1, partition="p", worker="second")))
    thread.start()
    dock.when(lambda: waiting(dock, 1))
    first.done(held.claim_id)
    time.sleep(0.05)
    assert not ended
    first.done(again.claim_id)
    thread.join(5.0)
    assert ended[0].sealed and not len(ended[0].rows)
    dock.when(lambda: quiet(dock))


def test_rows_that_come_back_here_or_there_while_a_stream_seems_over_are_served(docks, put):
    dock = docks(2, lease_s=0.5)
    source, client, holder = put(dock), dock.client(home=0), dock.client(home=1)
    for pair in (0, 1):
        source.on(pair)
    source.seal()
    for _ in range(2):
        holder.claim("make", 1, partition="p", worker="dead")
    got: list[int] = []
    while not (claim := client.claim("make", 1, partition="p", worker="w", timeout_s=5.0)).sealed:
        got += claim.rows.tolist()
        client.done(claim.claim_id)
    assert sorted(got) == sorted(source.handles)


def test_a_pair_that_starts_again_is_asked_again_whether_its_stream_has_ended(docks, put, tmp_path):
    dock = docks(1)  # for its columns only
    schema = dock.member(0).node.schema
    columns, tasks = list(schema.columns.values()), list(schema.tasks.values())
    servers = [
        DockServer(
            columns, tasks, arena_mb=1, secret=SECRET, host=f"127.0.0.{7 + i}", arena_path=str(tmp_path / f"a{i}")
        ).start()
        for i in range(3)
    ]
    dock.addresses = [s.address for s in servers]
    client = dock.client(home=0)
    source = put(dock)
    lost, kept = source.on(1), source.on(2)
    source.seal()
    mine = client.claim("make", 1, partition="p", worker="w", unit="groups", group_ids=[1])
    other = client.claim("make", 1, partition="p", worker="another")
    assert (mine.rows.tolist(), other.rows.tolist()) == (lost.tolist(), kept.tolist())
    got: list = []
    thread = threading.Thread(target=lambda: got.append(client.claim("make", 2, partition="p", worker="w")))
    thread.start()
    asks = servers[0]._member.peers._asks
    dock.when(lambda: [ask.ended for ask in asks.values()] == [{1}])  # only the row of another is missing
    # the pair is killed: its thread stops, its memory stays; with it goes the claim that its stream had ended for
    host, port = dock.addresses[1].split(":")
    old = servers[1]
    old._stop = True
    old._wake_send.send(b"x")
    old._thread.join(5.0)
    for sock in (old._listener, old._local_listener, old._wake_send, old._wake_receive):
        sock.close()
    dock.when(lambda: not servers[0]._member.peers.links[1].up)
    client.done(other.claim_id)
    time.sleep(0.1)
    assert not got
    servers[1] = DockServer(
        columns, tasks, secret=SECRET, host=host, port=int(port), arena_path=old.arena_path, restart=True
    ).start()
    thread.join(10.0)
    assert got[0].rows.tolist() == lost.tolist() and not got[0].sealed
    with pytest.raises(ClaimLost):
        client.done(mine.claim_id)
    assert client._pair(1).stats()["starts"] == 2 and servers[1]._member.peers.index == 1
    client.done(got[0].claim_id)
    assert client.claim("make", 2, partition="p", worker="w", timeout_s=5.0).sealed
    for server in servers:
        server.close()
        assert server.failure is None


def test_a_lost_pair_holds_up_ends_only_until_it_is_forgotten(docks, put):
    dock = docks(3)
    source, client = put(dock), dock.client(home=0)
    source.on(2)
    source.seal()
    dock.lose(2)
    dock.when(lambda: not dock.member(0).peers.links[2].up)
    with pytest.raises(DeadlineExceeded, match="pairs 2 at 127"):
        client.claim("make", 1, partition="p", worker="w", timeout_s=0.2)
    found = in_threads(
        lambda: client.claim("make", 1, partition="p", worker="w", timeout_s=5.0),
        lambda: time.sleep(0.1) or dock.client(home=1).forget_pair(2),
    )
    assert found[0].sealed


@pytest.mark.parametrize("seed", range(2))
def test_a_gathered_claim_means_the_rows_that_its_client_has_and_no_late_grant(docks, put, seed, monkeypatch):
    dock = docks(4)
    source, client = put(dock), dock.client(home=seed)
    for n in range(4):
        source.on(n, 10)
        for link in dock.member(n).peers.links.values():  # late grants are given back much later

            def call(verb, message, then=None, call=link.call):
                return 0 if verb is Verb.RELEASE else call(verb, message, then)

            monkeypatch.setattr(link, "call", call)
    claim = client.claim("make", 40, partition="p", worker="w", at_least=11)
    dock.client(home=0).done(claim.claim_id)
    states = client.stats()["partitions"]["p"]["tasks"]["make"]
    assert states["done"] == len(claim.rows) and states["done"] + states["claimed"] + states["ready"] == 40


def test_a_grant_for_a_gathered_claim_that_is_lost_on_its_way_is_asked_for_again(docks, put):
    dock = docks(3)
    source, client = put(dock), dock.client(home=0)
    divide, refused = dock.member(1)._own[Verb.DIVIDE], []

    def refuse(message, now):
        if len(refused) < 1:
            refused.append(message.whole("claim_id"))
            raise ClaimLost("its lease ran out")
        return divide(message, now)

    dock.member(1)._own[Verb.DIVIDE] = refuse
    source.on(0)

    def feed() -> None:
        source.on(1, 2)
        dock.when(lambda: refused)
        source.pairs[1].release(refused[0])

    found = in_threads(lambda: client.claim("make", 3, partition="p", worker="w", at_least=3), feed)
    assert sorted(found[0].rows.tolist()) == sorted(source.handles)
    client.done(found[0].claim_id)


@pytest.mark.parametrize("gathered", [False, True])
def test_what_a_dead_pair_had_been_granted_and_brought_nobody_is_offered_again_at_once(docks, put, gathered):
    dock = docks(2, lease_s=600.0)
    source, other = put(dock), dock.client(home=0)
    taken = []
    dock.member(1).peers._answer = lambda *grant: taken.append(grant)  # as one that froze before it could tell
    how = {"partition": "p", "worker": "w", "at_least": 2 if gathered else 1}
    lost = dock.client(home=1)

    def ask() -> None:
        with contextlib.suppress(AsyncFlowError):
            lost.claim("make", 2, **how)

    asking = threading.Thread(target=ask)
    asking.start()
    dock.when(lambda: waiting(dock, 0, 1))
    rows = source.on(0, 2)
    dock.when(lambda: taken)
    with pytest.raises(DeadlineExceeded):
        other.claim("make", 2, partition="p", worker="v", timeout_s=0.0)
    dock.lose(1)
    assert sorted(other.claim("make", 2, partition="p", worker="v", at_least=2).rows) == sorted(rows)
    asking.join(20)


@pytest.mark.parametrize("gathered", [False, True])
def test_a_claim_that_is_used_outlives_the_pair_that_brought_it(docks, put, gathered):
    dock = docks(2)
    source, client = put(dock), dock.client(home=1)
    rows = source.on(0, 2)
    claim = client.claim("make", 2, partition="p", worker="w", at_least=2 if gathered else 1)
    client.write(rows[:1], {"x": [np.ones(1, np.int32)]}, claim_id=claim.claim_id, done=True)
    dock.lose(1)
    dock.when(lambda: not dock.member(0).peers.links[1].up)
    source.pairs[0].done(claim.claim_id)


# -- teams -------------------------------------------------------------------------------------------------------------


def team_home(pairs: int, away: bool) -> tuple[str, int, int]:
    """A team name, its home, and a pair where rows are put: elsewhere if `away`."""
    for n in range(50):
        home = named_home("p", f"team t{n}", range(pairs))
        if home == 0:
            return f"t{n}", 0, 1 if away else 0
    raise AssertionError("no name has its home on pair 0")


class Reset:
    """A socket of a peer that has died."""

    def recv(self, size):
        raise ConnectionResetError

    send = recv

    def close(self):
        pass


def test_a_call_of_a_pair_that_has_just_died_is_no_error_of_the_caller_and_is_answered_when_that_is_noticed():
    changed, answers = [], []
    watcher = type("Watcher", (), {"watch_link": lambda *a: None, "unwatch_link": lambda *a: None})()
    link = Link(1, "127.0.0.1:1", b"", watcher, changed.append)
    link._socket, link._greeted, link.up = Reset(), True, True
    link.call(Verb.CANCEL, {"request": 1}, answers.append)
    assert not changed and not answers  # outside of any call
    link.serve()
    assert changed == [link] and link.down and isinstance(answers[0], WorkerLost)


class Wire:
    """A link whose answers the test gives, in the order of the calls."""

    number, up, down, next_attempt = 1, True, False, 0.0

    def __init__(self) -> None:
        self.sent: list[tuple[Verb, dict]] = []
        self.then: list = []

    def call(self, verb, message, then=lambda reply: None) -> int:
        self.sent.append((verb, dict(message)))
        self.then.append(then)
        return len(self.sent)


def test_an_end_that_was_seen_while_a_late_grant_was_on_its_way_is_asked_for_again():
    """Its rows are the consumer's own in the eyes of the pair that granted them, and then offered again."""
    answers: list = []
    asker, link = peers.Peers(b"", None, lambda key, call, reply: answers.append((key, reply)), dict), Wire()
    asker.links = {1: link}
    ask = {"partition": "p", "task": "make", "worker": "w"}
    nothing = Message(claim_id=0, sealed=True, ready=0, grant=np.empty((6, 0), np.int64), dropped_groups=[])
    grant = Message(claim_id=77, sealed=False, ready=0, grant=np.arange(12).reshape(6, 2), dropped_groups=[])
    asker.parked("first", ask, 10.0)
    asker.answered("first")  # by another pair
    asker.parked("other", ask | {"worker": "v"}, 10.0)
    asker.parked("next", ask, 10.0)
    for key in ("other", "next"):
        asker.ended_here(key)
    link.then[0](grant)
    assert [verb for verb, _ in link.sent] == [Verb.CLAIM, Verb.CANCEL, Verb.CLAIM, Verb.CLAIM, Verb.RELEASE]
    link.then[2](nothing)
    assert [key for key, _ in answers] == ["other"], "for another consumer the late rows were not its own"
    link.then[3](nothing)
    assert len(answers) == 1 and link.sent[5] == (Verb.CLAIM, ask | {"timeout_s": 11.0})
    link.then[5](nothing)
    assert [key for key, _ in answers] == ["other", "next"] and answers[1][1]["sealed"]


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("split", ["same", "tokens", "fifo"])
def test_a_team_gets_its_rounds_wherever_the_rows_are_and_all_ranks_end_together(docks, put, split, away):
    dock = docks(2)
    source = put(dock)
    team, _, pair = team_home(2, away)
    clients = [dock.client(home=i % 2) for i in range(3)]
    got: list[list[list[int]]] = [[], [], []]

    def rank(number: int) -> None:
        while True:
            claim = clients[number].claim("make", 2, partition="p", worker=f"r{number}", team=team, rank=number,
                                          ranks=3, split=split)  # fmt: skip
            if claim.sealed:
                return
            got[number].append(claim.rows.tolist())
            if claim.claim_id and (split != "same" or number == 0):
                clients[number].done(claim.claim_id)

    def feed() -> None:
        for _ in range(8):
            source.on(pair, 3, tokens=1 + int(time.monotonic() * 1000) % 7)
            time.sleep(0.01)
        source.seal()

    for error in in_threads(*[lambda n=n: rank(n) for n in range(3)], feed):
        assert error is None, error
    if split == "same":
        assert got[0] == got[1] == got[2]
        assert Counter(itertools.chain(*got[0])) == Counter(source.handles)
    else:
        assert Counter(itertools.chain(*itertools.chain(*got))) == Counter(source.handles)
        assert len(got[0]) == len(got[1]) == len(got[2])
    states = clients[0].stats()["partitions"]["p"]["tasks"]["make"]
    assert states["done"] == 24 and states["claimed"] == states["ready"] == 0
    dock.when(lambda: quiet(dock))


def test_a_rank_that_leaves_while_it_asks_for_its_team_leaves_the_asking_to_another(docks, put):
    dock = docks(2)
    source = put(dock)
    team, _, pair = team_home(2, True)
    client = dock.client(home=0)

    def ask(rank: int, timeout_s: float):
        return client.claim("make", 2, partition="p", worker=f"r{rank}", team=team, rank=rank, ranks=2, split="fifo",
                            timeout_s=timeout_s)  # fmt: skip

    found = in_threads(
        lambda: ask(0, 0.2), lambda: time.sleep(0.05) or ask(1, 8.0), lambda: time.sleep(0.4) or source.on(pair, 4)
    )
    assert isinstance(found[0], DeadlineExceeded)
    late = ask(0, 5.0)
    assert sorted(found[1].rows.tolist() + late.rows.tolist()) == sorted(source.handles)


def test_a_rank_that_takes_over_the_asking_hears_of_the_end_too(docks, put):
    dock = docks(2)
    source = put(dock)
    team, _, pair = team_home(2, True)
    client, holder = dock.client(home=0), dock.client(home=1)
    source.on(pair)
    source.seal()
    held = holder.claim("make", 1, partition="p", worker="another")

    def ask(rank: int, timeout_s: float):
        return client.claim("make", 2, partition="p", worker=f"r{rank}", team=team, rank=rank, ranks=2, split="fifo",
                            timeout_s=timeout_s)  # fmt: skip

    found = in_threads(
        lambda: ask(0, 0.3), lambda: time.sleep(0.1) or ask(1, 8.0),
        lambda: time.sleep(0.45) or holder.done(held.claim_id),
    )  # fmt: skip
    assert isinstance(found[0], DeadlineExceeded) and found[1].sealed
    assert ask(0, 2.0).sealed


def test_a_team_whose_round_was_lost_with_its_pair_asks_the_others(docks, put):
    dock = docks(3)
    source = put(dock)
    team, _, _ = team_home(3, True)
    client = dock.client(home=0)

    def ask(rank: int):
        return client.claim("make", 1, partition="p", worker=f"r{rank}", team=team, rank=rank, ranks=2, split="fifo",
                            timeout_s=8.0)  # fmt: skip

    def lose() -> None:
        dock.when(lambda: waiting(dock, 0, 1, 2))
        dock.lose(1)
        dock.when(lambda: not dock.member(0).peers.links[1].up)
        source.on(2, 2)

    found = in_threads(lambda: ask(0), lambda: ask(1), lose)
    assert sorted(found[0].rows.tolist() + found[1].rows.tolist()) == sorted(source.handles)


def test_a_team_whose_round_cannot_be_divided_any_more_asks_again(docks, put):
    dock = docks(3)
    source = put(dock)
    team, _, _ = team_home(3, True)
    client = dock.client(home=0)
    refused: list = []

    def refuse(message, now):
        refused.append(message.whole("claim_id"))
        raise ClaimLost("its lease ran out")

    dock.member(1)._own[Verb.DIVIDE] = refuse

    def ask(rank: int):
        return client.claim("make", 1, partition="p", worker=f"r{rank}", team=team, rank=rank, ranks=2, split="fifo",
                            timeout_s=8.0)  # fmt: skip

    def feed() -> None:
        source.on(1, 2)
        dock.when(lambda: refused)
        source.on(2, 2)

    found = in_threads(lambda: ask(0), lambda: ask(1), feed)
    assert sorted(found[0].rows.tolist() + found[1].rows.tolist()) == sorted(source.handles[2:])


def test_a_closed_partition_takes_a_round_that_is_on_its_way_with_it(docks, put):
    dock = docks(2)
    source = put(dock)
    team, _, pair = team_home(2, True)
    client = dock.client(home=0)
    source.on(0)
    client.done(client.claim("make", 1, partition="p", worker="x").claim_id)

    def ask(rank: int):
        return client.claim("make", 1, partition="p", worker=f"r{rank}", team=team, rank=rank, ranks=2, split="fifo",
                            timeout_s=1.0)  # fmt: skip

    def shut() -> None:
        for _ in range(20):
            source.on(pair, 2)
            source.pairs[0].close_partition("p")
            source.on(0)
            source.pairs[0].free(np.array(source.handles[-1:]))

    in_threads(lambda: ask(0), lambda: ask(1), shut)
    assert all(server.failure is None for server in dock.servers)


# -- neighbours --------------------------------------------------------------------------------------------------------


def test_a_put_is_answered_after_the_next_pair_knows_its_groups(docks, put):
    dock = docks(3)
    source = put(dock)
    time.sleep(0.05)
    for _ in range(20):
        source.on(1, 5)
        assert len(dock.member(2).peers.groups_of(1)["p"]) == len(source.handles)
    assert dock.stats(1)["peers"]["unmirrored_puts"] == 0
    dock.member(1).peers.now = 0.0  # a pair that was idle for long: its neighbour is waited for all the same
    source.on(1, 5)
    assert len(dock.member(2).peers.groups_of(1)["p"]) == len(source.handles)


def test_puts_that_waited_for_room_together_are_all_known_to_the_next_pair(docks, put):
    dock = docks(2)
    source = put(dock)
    filler = source.on(0, 1, tokens=350_000)
    found = in_threads(
        lambda: source.on(0, 2, tokens=20_000), lambda: source.on(0, 3, tokens=20_000),
        lambda: time.sleep(0.3) or source.pairs[0].free(filler),
    )  # fmt: skip
    assert not any(isinstance(f, AsyncFlowError) for f in found)
    assert len(dock.member(1).peers.groups_of(0)["p"]) == 5


def test_a_neighbour_that_does_not_answer_is_waited_for_once(docks, put, monkeypatch):
    dock = docks(2)
    source = put(dock)
    link = dock.member(0).peers.links[1]
    call = link.call
    answers: list = []

    def lost(verb, message, then=None):
        if then is not None:
            answers.append(then)
        return call(verb, message, None)

    monkeypatch.setattr(link, "call", lost)
    monkeypatch.setattr(peers, "MIRROR_S", 0.3)
    start = time.monotonic()
    source.on(0)
    assert 0.25 < time.monotonic() - start < 2.0
    start = time.monotonic()
    for _ in range(5):
        source.on(0)
    assert time.monotonic() - start < 0.3
    assert dock.stats(0)["peers"]["unmirrored_puts"] == 6


def test_a_neighbour_that_comes_back_is_told_everything_again(docks, put):
    dock = docks(2)
    source = put(dock)
    source.on(0, 3)
    known = dock.member(1).peers
    known._noted.clear()
    with pytest.raises(DockError, match="never heard"):
        known.groups_of(0)
    for connection in list(dock.servers[1]._connections.values()):
        connection.socket.shutdown(2)
    dock.when(lambda: 0 in known._noted and len(known.groups_of(0).get("p", ())) == 3)
    source.on(0, 2)
    assert len(known.groups_of(0)["p"]) == 5


def test_a_lost_pair_stalls_nobody_else(docks, put):
    dock = docks(3)
    source = put(dock)
    clients = [dock.client(home=n) for n in (0, 1)]
    dock.lose(2)
    start = time.monotonic()
    for n in (0, 1):
        rows = source.on(n, 4)
        claim = clients[1 - n].claim("make", 4, partition="p", worker="w", timeout_s=3.0)
        assert claim.rows.tolist() == rows.tolist()
        clients[n].done(claim.claim_id)
    assert time.monotonic() - start < 3.0
    with pytest.raises(WorkerLost, match="pair 2"):
        clients[0].read(np.array([2 << 55 | 1]), ["prompt"])


@pytest.mark.slow
def test_doubling_the_pairs_halves_the_busiest_ones_bytes_and_messages(docks):
    shares = {}
    for count in (1, 2, 4):
        dock = docks(count, arena_mb=8)
        clients = [dock.client(home=n) for n in range(count)]
        before = [dock.stats(n)["messages"] for n in range(count)]
        for batch in range(24):
            ids = list(range(batch * 64, batch * 64 + 64))
            clients[batch % count].put("p", ids, values={"prompt": [np.zeros(200, np.int32)] * 64})
        stored = max(dock.stats(n)["payload_bytes"] for n in range(count))
        for client in clients:
            rows = 0
            while rows < 24 * 64 // count:
                claim = client.claim("make", 16, partition="p", worker=f"w{client._home}")
                client.read(claim.rows, ["prompt"])
                client.done(claim.claim_id)
                rows += len(claim)
        after = [dock.stats(n)["messages"] for n in range(count)]
        shares[count] = (stored, max(b - a for a, b in zip(before, after)))
    for count in (2, 4):
        assert shares[count][0] <= 1.15 * shares[1][0] / count
    # a put is cut into one message per pair; claims, reads and dones are shared out
    assert shares[2][1] < 0.75 * shares[1][1] and shares[4][1] < 0.75 * shares[2][1]
