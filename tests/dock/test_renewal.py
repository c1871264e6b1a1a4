"""Renewable columns: what the holder of a row leaves for whoever claims it next."""

import numpy as np
import pytest

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, ColumnSpec, Schema, TaskSpec, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.dock.table import pair_numbers
from mindspeed_asyncflow.errors import ClaimLost, DockError

NO_WAIT = {"partition": "train", "worker": "w", "timeout_s": 0.0}
PARTIAL = ["partial_ids", "partial_logprobs", "partial_spans"]
ROWS = {"unit": "rows", "policy": "oldest"}


def partial(lengths, version=0) -> dict:
    """Answers of these lengths, all sampled by `version`."""
    return {
        "partial_ids": [np.arange(n, dtype=np.int32) + version for n in lengths],
        "partial_logprobs": [np.full(n, -version, np.float32) for n in lengths],
        "partial_spans": [np.array([[version, 0, n]] if n else np.empty((0, 3)), np.int32) for n in lengths],
    }


def stored(client, rows) -> list[tuple[list[int], list[list[int]]]]:
    read = client.read(rows, PARTIAL)
    assert [len(i) for i in read["partial_ids"]] == [len(i) for i in read["partial_logprobs"]]
    return [(i.tolist(), s.tolist()) for i, s in zip(read["partial_ids"], read["partial_spans"])]


@pytest.mark.parametrize("how", [{"kind": "scalar"}, {"shared": True}, {"tokens": True}])
def test_a_renewable_column_is_private_to_its_row_of_any_length_and_counts_no_tokens(how):
    with pytest.raises(DockError, match="'note' is renewable"):
        ColumnSpec("note", "int32", **({"kind": "ragged"} | how), renewable=True)


def test_no_task_waits_for_a_renewable_column(client, prompts):
    with pytest.raises(DockError, match="'late' cannot wait for the renewable columns partial_ids"):
        Schema(GRPO_COLUMNS, [TaskSpec("late", ("prompt_ids", "partial_ids"))])
    with pytest.raises(DockError, match="renewable"):
        client.add_task("late", ["partial_ids"])
    client.put_groups("train", prompts(1))
    before = client.stats()["partitions"]["train"]["tasks"]
    claim = client.claim("rollout", 4, **NO_WAIT)
    client.write(claim.rows, partial([3] * 4), claim_id=claim.claim_id)
    client.release(claim.claim_id)
    assert client.stats()["partitions"]["train"]["tasks"] == before


def test_a_renewable_column_is_empty_until_it_is_written_and_then_holds_the_newest_value(client, prompts):
    rows = np.concatenate(client.put_groups("train", prompts(3)))
    assert stored(client, rows) == [([], [])] * 12
    claim = client.claim("rollout", 12, **NO_WAIT)
    for version, lengths in enumerate(([2, 0, 300], [9, 4, 1], [700, 0, 5])):
        client.write(claim.rows[3:6], partial(lengths, version), claim_id=claim.claim_id, versions=([version] * 3,) * 2)
        found = stored(client, rows)
        assert [len(ids) for ids, _ in found[3:6]] == lengths
        assert found[5] == (list(range(version, version + lengths[2])), [[version, 0, lengths[2]]])
        assert found[:3] + found[6:] == [([], [])] * 9
    assert client.read(rows, ["prompt_ids", "partial_ids"])["prompt_ids"][11].tolist() == [2] * 6
    with pytest.raises(DockError, match="'response_ids' of 12 of 12 rows is not written yet"):
        client.read(rows, ["partial_ids", "response_ids"])


def test_renewals_take_no_more_room_than_the_newest_value_and_none_when_it_is_empty(client, prompts):
    client.put_groups("train", prompts(2))
    claim = client.claim("rollout", 8, **NO_WAIT)
    empty = client.stats()["used_bytes"]
    sizes = []
    for n in [*range(0, 3000, 100), 0, 2900] * 5:  # far more than the arena holds, in sum
        client.write(claim.rows, partial([n] * 8), claim_id=claim.claim_id)
        sizes.append(client.stats()["used_bytes"])
        assert 8 * 8 * n <= sizes[-1] - empty <= 8 * (8 * n + 12) + 3 * 64
    client.write(claim.rows, partial([0] * 8), claim_id=claim.claim_id)
    assert client.stats()["used_bytes"] == empty
    client.write(claim.rows, partial([50] * 8), claim_id=claim.claim_id, done=True)
    client.free(claim.rows)
    assert client.stats()["used_bytes"] == 0


def test_only_the_holder_of_a_claim_renews(client, prompts):
    client.put_groups("train", prompts(1))
    claim = client.claim("rollout", 4, **NO_WAIT)
    client.write(claim.rows, partial([3] * 4, 1), claim_id=claim.claim_id)
    with pytest.raises(DockError, match="renewed by the holder of a claim on its rows: give the claim_id"):
        client.write(claim.rows, partial([5] * 4, 2))
    client.release(claim.claim_id)
    again = client.claim("rollout", 2, **NO_WAIT)
    with pytest.raises(ClaimLost):
        client.write(claim.rows, partial([5] * 4, 2), claim_id=claim.claim_id)
    with pytest.raises(DockError, match="does not hold"):
        client.write(claim.rows[2:], partial([5] * 2, 2), claim_id=again.claim_id)
    assert stored(client, claim.rows) == [([1, 2, 3], [[1, 0, 3]])] * 4


def test_a_complete_answer_takes_the_place_of_its_part_in_one_write(client, prompts):
    client.put_groups("train", prompts(1, size=2))
    claim = client.claim("rollout", 2, **NO_WAIT)
    tokens = claim.tokens.tolist()
    client.write(claim.rows, partial([3, 4]), claim_id=claim.claim_id, versions=([0, 0], [0, 0]))
    client.release(claim.claim_id, claim.rows[:1])
    client.release(claim.claim_id, claim.rows[1:])
    claim = client.claim("rollout", 2, **NO_WAIT)
    assert claim.tokens.tolist() == tokens, "parts are not counted as tokens"
    assert claim.version_min.tolist() == [0, 0], "but their policy is known"
    whole = {
        "response_ids": [np.arange(5, dtype=np.int32)] * 2,
        "rollout_logprobs": [np.zeros(5, np.float32)] * 2,
        "finish": np.zeros(2, np.uint8),
        "response_spans": [np.array([[0, 0, 3], [2, 3, 5]], np.int32)] * 2,
    }
    client.write(
        claim.rows, whole | partial([0, 0]), claim_id=claim.claim_id, versions=([0, 0], [2, 2]), done=True
    )  # fmt: skip
    scored = client.claim("reward", 1, unit="groups", **NO_WAIT)
    assert scored.tokens.tolist() == [t + 5 for t in tokens] and scored.version_max.tolist() == [2, 2]
    assert client.stats()["column_bytes"]["partial_ids"] == 0
    assert client.read(scored.rows, ["response_spans"])["response_spans"][1].tolist() == [[0, 0, 3], [2, 3, 5]]


def test_rows_given_back_are_granted_before_others_and_oldest_first(client, prompts):
    rows = np.concatenate(client.put_groups("train", prompts(4)))
    first = client.claim("rollout", 8, **NO_WAIT, **ROWS)
    assert first.rows.tolist() == rows[:8].tolist()
    client.done(first.claim_id, rows=first.rows[[0, 3, 4]])
    client.release(first.claim_id, first.rows[[6, 7]])
    client.release(first.claim_id, first.rows[[5, 1]])
    client.release(first.claim_id)
    again = client.claim("rollout", 9, **NO_WAIT, **ROWS)
    assert again.rows.tolist() == rows[[1, 2, 5, 6, 7, 8, 9, 10, 11]].tolist()


def test_a_group_with_an_unfinished_member_is_whole_for_no_other_task(client, prompts):
    rows = np.concatenate(client.put_groups("train", prompts(2, size=2)))
    claim = client.claim("rollout", 4, **NO_WAIT, **ROWS)
    ids = [np.arange(3, dtype=np.int32)] * 3
    values = {
        "response_ids": ids, "rollout_logprobs": [i.astype(np.float32) for i in ids], "finish": np.zeros(3, np.uint8)
    }  # fmt: skip
    client.write(claim.rows[[0, 1, 3]], values, claim_id=claim.claim_id, done=True)
    client.write(claim.rows[2:3], partial([3]), claim_id=claim.claim_id)
    client.release(claim.claim_id)
    assert client.claim("reward", 2, unit="groups", **NO_WAIT).rows.tolist() == rows[:2].tolist()
    last = client.claim("rollout", 4, **NO_WAIT, **ROWS)
    assert last.rows.tolist() == rows[2:3].tolist()
    client.write(last.rows, {n: v[:1] for n, v in values.items()}, claim_id=last.claim_id, done=True)
    assert client.claim("reward", 2, unit="groups", **NO_WAIT).rows.tolist() == rows[2:].tolist()


def test_every_pair_grants_what_was_given_back_first_and_a_part_goes_on_wherever_it_is_claimed(two_pairs, prompts):
    """A consumer of one pair hands half-made answers back; a consumer of the other pair gets them, oldest first."""
    (near, far), _ = two_pairs
    rows = np.concatenate(near.put_groups("train", prompts(6, size=2)))
    held = near.claim("rollout", 99, at_least=12, **(NO_WAIT | {"timeout_s": 5.0}), **ROWS)
    assert sorted(held.rows.tolist()) == sorted(rows.tolist())
    near.write(held.rows, partial(range(1, len(held.rows) + 1), 3), claim_id=held.claim_id)
    given = dict(zip(held.rows.tolist(), range(1, len(held.rows) + 1)))
    near.release(held.claim_id)
    near.put_groups("train", prompts(6, size=2, first=6))
    seen: list[int] = []
    while len(seen) < 24:
        part = far.claim("rollout", 3, **NO_WAIT, **ROWS)
        lengths = [len(ids) for ids, _ in stored(far, part.rows)]
        assert lengths == [given.get(r, 0) for r in part.rows.tolist()]
        far.done(part.claim_id)
        seen += part.rows.tolist()
    of_pair = pair_numbers(np.array(seen))
    for pair in (0, 1):
        mine = [r for r, number in zip(seen, of_pair) if number == pair]
        assert len(mine) >= 6 and mine == sorted(mine)
        assert all(r in given for r in mine[: sum(r in given for r in mine)]), "new rows come after those given back"


def test_groups_with_unfinished_rows_are_named_when_their_pair_is_lost(two_pairs, prompts):
    (near, _), servers = two_pairs
    homes = {int(pair_numbers(rows[:1])[0]): g for g, rows in enumerate(near.put_groups("train", prompts(2, size=2)))}
    held = near.claim("rollout", 4, at_least=4, **(NO_WAIT | {"timeout_s": 5.0}), **ROWS)
    near.write(held.rows, partial([5] * 4), claim_id=held.claim_id)
    near.release(held.claim_id)
    servers[1].close()
    assert near.lost_groups(1)["train"].tolist() == [homes[1]]
    near.forget_pair(1)
    again = near.claim("rollout", 4, **NO_WAIT, **ROWS)
    assert stored(near, again.rows) == [(list(range(5)), [[0, 0, 5]])] * 2


@pytest.fixture
def two_pairs():
    """Clients of pair 0 and of pair 1 of one dock, and the pairs, which share no memory."""
    how = {"arena_mb": 2, "lease_s": 30.0, "secret": "s"}
    servers = [DockServer(GRPO_COLUMNS, grpo_tasks(False), host=f"127.0.0.{2 + i}", **how).start() for i in range(2)]
    addresses = [server.address for server in servers]
    clients = [DockClient(addresses, "s", home=i, wait_s=5.0, map_arena=False) for i in range(2)]
    yield clients, servers
    for client in clients:
        client.close()
    for server in servers:
        server.close()
        assert server.failure is None
