"""One client over several pairs that share nothing: rows keep their bits and their order wherever they live."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.homes import named_home
from mindspeed_asyncflow.dock.ragged import Ragged
from mindspeed_asyncflow.dock.table import pair_numbers
from mindspeed_asyncflow.errors import (
    ClaimLost,
    DeadlineExceeded,
    DockError,
    DockFull,
    StaleHandle,
    WorkerLost,
)

SECRET = "a secret of this test"


def prompts(ids) -> dict:
    return {"prompt": [np.arange(4 + i % 5, dtype=np.int32) + i for i in ids]}


def homes(handles) -> np.ndarray:
    return pair_numbers(np.concatenate(handles) if isinstance(handles, list) else handles)


def put_one_each(dock, client: DockClient, partition: str = "p", first: int = 0) -> np.ndarray:
    """Rows of one group on each pair, in the order of the pairs."""
    found: dict[int, int] = {}
    group = first
    while len(found) < len(dock.servers):
        handle = client.put(partition, [group], [2], [1], values=prompts([group]))[0]
        found.setdefault(int(homes(handle)[0]), int(handle[0]))
        group += 1
    return np.array([found[n] for n in range(len(dock.servers))])


@pytest.mark.parametrize("count", [1, 3])
def test_a_put_has_the_same_defaults_whatever_the_number_of_pairs(docks, count):
    client = docks(count).client()
    one = client.put("p", [1, 2, 3], values=prompts([1, 2, 3]))
    assert [len(h) for h in one] == [1, 1, 1]
    two = client.put("p", np.array([4, 5]), counts=[2, 3], values=prompts([4, 5]))
    assert [len(h) for h in two] == [2, 3]
    (three,) = client.put("q", values={"x": [[7] * i for i in range(5)], "y": np.arange(5.0, dtype=np.float32)})
    assert three.shape == (5,) and len(set(three.tolist())) == 5
    got = client.read(three, ["x", "y"])
    assert [len(r) for r in got["x"]] == [0, 1, 2, 3, 4] and got["y"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DockError):
        client.put("p", [], values={"prompt": []})


def test_whole_groups_live_on_one_pair_and_pairs_get_equal_shares(docks):
    client = docks(4).client()
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 6, 200)
    handles = client.put("p", list(range(200)), counts, counts, values=prompts(range(200)))
    assert all(len(set(pair_numbers(h).tolist())) == 1 for h in handles)
    shares = np.bincount(homes(handles), minlength=4) / counts.sum()
    assert shares.max() < 0.28
    late = client.put("p", list(range(200, 260)), [1] * 60, [1] * 60, values=prompts(range(200, 260)))
    assert np.bincount(homes(late), minlength=4).min() >= 10


def test_members_of_a_group_that_come_late_from_anybody_meet_on_one_pair(docks):
    dock = docks(4)
    clients = [dock.client(home=i) for i in range(4)]
    for member in range(4):
        ids = list(range(40)) if member % 2 else list(range(39, -1, -1))
        handles = clients[member].put("p", ids, [4] * 40, [1] * 40, [member] * 40, prompts(ids))
        for group, handle in zip(ids, handles):
            assert int(pair_numbers(handle)[0]) == named_home("p", group, range(4))
        if member < 3:
            with pytest.raises(DeadlineExceeded):
                clients[0].claim("make", 1, partition="p", worker="w", unit="groups", timeout_s=0.0)
    got: list[int] = []
    while len(got) < 160:
        claim = clients[1].claim("make", 7, partition="p", worker="w", unit="groups")
        assert all((claim.group_ids == g).sum() == 4 for g in claim.group_ids)
        got += claim.rows.tolist()
    assert len(set(got)) == 160


def test_a_full_pair_is_passed_over_and_a_full_dock_is_waited_for(docks):
    dock = docks(2)
    client = dock.client()
    big = {"prompt": [np.zeros(250_000, np.int32)]}  # 1 MB; a pair takes 1.5 MB of puts
    first, second = client.put("p", [1], values=big)[0], client.put("p", [2], values=big)[0]
    assert {int(homes(first)[0]), int(homes(second)[0])} == {0, 1}
    with pytest.raises(DeadlineExceeded, match="bytes are in use"):
        client.put("p", [3], values=big, timeout_s=0.2)
    done: list = []
    thread = threading.Thread(target=lambda: done.append(client.put("p", [4], values=big, timeout_s=8.0)))
    thread.start()
    time.sleep(0.1)
    dock.client(home=1).free(np.concatenate([first, second]))
    thread.join(10.0)
    assert len(done[0][0]) == 1
    with pytest.raises(DockFull):
        client.put("p", [5], values={"prompt": [np.zeros(600_000, np.int32)]})


def test_a_put_over_several_pairs_is_there_wholly_or_not_at_all(docks):
    client = docks(2).client()
    wide = {"prompt": [np.zeros(200_000, np.int32)] * 2}
    client.put("p", [1, 2], values=wide)
    rows = client.stats()["partitions"]["p"]["rows"]
    with pytest.raises(DeadlineExceeded):
        lengths = (10, 150_000, 170_000, 190_000)
        client.put("p", [3, 4, 5, 6], values={"prompt": [np.zeros(n, np.int32) for n in lengths]}, timeout_s=0.1)
    assert client.stats()["partitions"]["p"]["rows"] == rows


def test_values_of_every_kind_come_back_to_the_bit_in_the_order_of_the_rows(docks):
    dock = docks(3)
    client, reader = dock.client(home=0), dock.client(home=2)
    n = 60
    rng = np.random.default_rng(3)
    values = {
        "x": [rng.integers(-9, 9, rng.integers(0, 70)).astype(np.int32) for _ in range(n)],
        "y": rng.random(n).astype(np.float32), "note": [f"row {i} \u00fc" * (i % 3) for i in range(n)],
        "turns": [[np.arange(k, dtype=np.int16) for k in range(i % 4)] for i in range(n)],
        "grid": [rng.random((i % 5, 2, 3)).astype(ml_dtypes.bfloat16) for i in range(n)],
    }  # fmt: skip
    handles = client.put("p", list(range(n)), values={"prompt": [np.array([i], np.int32) for i in range(n)]})
    rows = np.concatenate(handles)
    assert len(set(homes(rows).tolist())) == 3
    order = rng.permutation(n)
    span = np.arange(n, dtype=np.int32)
    cut = {k: [v[i] for i in order] if isinstance(v, list) else v[order] for k, v in values.items()}
    client.write(rows[order], cut, versions=(span[order], span[order] + 1))
    client.write(rows[order], cut)  # an equal second result changes nothing
    other = rng.permutation(n)
    got = reader.read(rows[other], ["prompt", *values])
    assert isinstance(got["x"], Ragged) and isinstance(got["note"], list) and got["y"].dtype == np.float32
    for place, i in enumerate(other.tolist()):
        assert got["prompt"][place].tolist() == [i]
        assert got["x"][place].tobytes() == values["x"][i].tobytes()
        assert got["y"][place] == values["y"][i] and got["note"][place] == values["note"][i]
        assert [t.tolist() for t in got["turns"][place]] == [t.tolist() for t in values["turns"][i]]
        assert got["grid"][place].tobytes() == values["grid"][i].tobytes()
    claim = reader.claim("learn", n, partition="p", worker="w", at_least=n, columns=("x", "y"))
    by_row = dict(zip(rows.tolist(), range(n)))
    for place, row in enumerate(claim.rows.tolist()):
        i = by_row[row]
        assert claim.values["x"][place].tobytes() == values["x"][i].tobytes()
        assert claim.version_min[place] == i and claim.version_max[place] == i + 1
    with pytest.raises(DockError, match="has a result already"):
        client.write(rows, {"y": np.zeros(n, np.float32)})


def test_done_release_drop_and_free_reach_rows_of_all_pairs_at_once(docks):
    dock = docks(3)
    client, other = dock.client(home=0), dock.client(home=1)
    rows = put_one_each(dock, client)
    total = client.stats()["partitions"]["p"]["rows"]
    claim = client.claim("make", total, partition="p", worker="w", at_least=total)
    assert set(rows.tolist()) <= set(claim.rows.tolist())
    other.done(task="make", rows=rows)
    with pytest.raises(ClaimLost if len(claim.rows) == 3 else DockError):
        other.done(claim.claim_id, rows=rows)
    others = claim.rows[~np.isin(claim.rows, rows)]
    if len(others):
        client.release(claim.claim_id)
    client.drop(rows[:2], reason="bad")
    client.free(rows[2:])
    assert client.stats()["drops"] == {"bad": 2}
    for row in rows:
        with pytest.raises(StaleHandle):
            other.read(np.array([row]), ["prompt"])


def test_groups_are_dropped_by_id_wherever_they_are_and_an_unknown_one_changes_nothing(docks):
    client = docks(3).client()
    client.put("p", list(range(9)), values=prompts(range(9)))
    with pytest.raises(DockError, match="99"):
        client.drop(group_ids=[0, 1, 2, 99], partition="p", reason="x")
    assert client.stats()["partitions"]["p"]["rows"] == 9
    client.drop(group_ids=np.array([0, 1, 2, 3, 4, 5]), partition="p", reason="x")
    assert client.stats()["drops"] == {"x": 6} and client.stats()["partitions"]["p"]["rows"] == 3


def test_a_claim_that_needs_more_than_one_pair_has_gathers_and_ends_everywhere_by_its_id(docks):
    dock = docks(4)
    client, second = dock.client(home=1), dock.client(home=3)
    (rows,) = client.put("p", values={"x": [np.full(3, i, np.int32) for i in range(40)]})
    assert len(set(homes(rows).tolist())) == 4
    claim = client.claim("use", 40, partition="p", worker="w", at_least=40, columns=("x",))
    assert sorted(claim.rows.tolist()) == sorted(rows.tolist())
    for row, value in zip(claim.rows.tolist(), claim.values["x"]):
        assert value.tolist() == [rows.tolist().index(row)] * 3
    second.release(claim.claim_id)
    with pytest.raises(ClaimLost):
        second.release(claim.claim_id)
    again = client.claim("use", 40, partition="p", worker="w", at_least=30)
    assert len(again.rows) >= 30
    part = again.rows[:10]
    second.done(again.claim_id, rows=part)
    second.done(again.claim_id)
    with pytest.raises(ClaimLost):
        client.done(again.claim_id)
    states = client.stats()["partitions"]["p"]["tasks"]["use"]
    assert states["done"] == len(again.rows) and states["claimed"] == 0


def test_listed_groups_come_in_the_order_of_the_list_from_all_pairs(docks):
    client = docks(3).client(home=2)
    ids = list(range(12))
    client.put("p", ids, [2] * 12, [2] * 12, values=prompts(ids))
    wanted = [7, 3, 11, 0, 5]
    claim = client.claim("make", 5, partition="p", worker="w", unit="groups", group_ids=wanted, at_least=5)
    assert claim.group_ids.tolist() == np.repeat(wanted, 2).tolist()
    with pytest.raises(DeadlineExceeded):
        client.claim("make", 2, partition="p", worker="w", unit="groups", group_ids=[7, 8], at_least=2, timeout_s=0.1)
    left = client.claim("make", 12, partition="p", worker="w", unit="groups", at_least=7)
    assert set(left.group_ids.tolist()) == set(ids) - set(wanted)


@pytest.mark.parametrize("timeout_s", [0.0, 0.3])
def test_what_was_gathered_is_given_back_at_the_deadline(docks, timeout_s):
    client = docks(3).client()
    client.put("p", values={"x": [np.zeros(1, np.int32)] * 12})
    with pytest.raises(DeadlineExceeded, match="12 of at least 13"):
        client.claim("use", 20, partition="p", worker="w", at_least=13, timeout_s=timeout_s)
    assert client.stats()["partitions"]["p"]["tasks"]["use"]["ready"] == 12
    assert len(client.claim("use", 20, partition="p", worker="w", at_least=12).rows) == 12


def test_a_claim_that_is_renewed_outlives_its_lease_on_every_pair(docks):
    dock = docks(3, lease_s=0.6)
    client = dock.client(home=0)
    rows = put_one_each(dock, client)
    claim = client.claim("make", len(rows), partition="p", worker="w", at_least=len(rows))
    until = time.monotonic() + 1.8
    while time.monotonic() < until:
        client.renew(claim.claim_id)
        time.sleep(0.05)
    assert client.stats()["leases_expired"] == 0
    client.done(claim.claim_id)
    with pytest.raises(ClaimLost):
        client.renew(claim.claim_id)


def test_a_gathered_claim_whose_lease_ran_out_on_one_pair_is_lost(docks):
    dock = docks(3, lease_s=0.4)
    client = dock.client()
    client.put("p", values={"x": [np.zeros(1, np.int32)] * 9})
    claim = client.claim("use", 9, partition="p", worker="w", at_least=9)
    dock.when(lambda: client.stats()["leases_expired"] == 3)
    with pytest.raises(ClaimLost, match="ran out"):
        client.done(claim.claim_id)
    assert client.forget_worker("w") == 0
    again = client.claim("use", 9, partition="p", worker="w", at_least=9)
    assert client.forget_worker("w") == 3
    with pytest.raises(ClaimLost, match="forgotten"):
        client.done(again.claim_id)


def test_a_claim_without_time_to_wait_looks_at_every_pair(docks):
    dock = docks(3)
    client = dock.client(home=0)
    rows = put_one_each(dock, client)
    total = client.stats()["partitions"]["p"]["rows"]
    got: list[int] = []
    while len(got) < total:
        got += client.claim("make", 100, partition="p", worker="w", timeout_s=0.0).rows.tolist()
    assert set(rows.tolist()) <= set(got)
    with pytest.raises(DeadlineExceeded):
        client.claim("make", 1, partition="p", worker="w", timeout_s=0.0)
    client.seal("p")
    assert client.claim("make", 1, partition="p", worker="w", timeout_s=0.0).sealed
    with pytest.raises(DeadlineExceeded):
        dock.client(home=1).claim("make", 1, partition="p", worker="another", timeout_s=0.0)


def test_a_partition_that_only_one_pair_knows_is_closed_and_an_unknown_one_is_refused(docks):
    client = docks(3).client()
    client.put("p", [1], values=prompts([1]))
    client.close_partition("p")
    assert client.stats()["partitions"] == {}
    with pytest.raises(DockError, match="no partition"):
        client.close_partition("p")
    client.put("p", [1], values=prompts([1]))


def test_tasks_added_at_run_time_see_the_rows_of_all_pairs(docks):
    client = docks(3).client()
    client.put("p", values={"x": [np.zeros(1, np.int32)] * 9})
    client.add_task("late", ["x"])
    client.add_task("late", ["x"])
    assert len(client.claim("late", 9, partition="p", worker="w", at_least=9).rows) == 9
    with pytest.raises(DockError):
        client.add_task("late", ["y"])


def test_a_lost_pair_is_named_its_groups_are_listed_and_the_others_go_on(docks):
    dock = docks(3)
    client, other, third = dock.client(home=0), dock.client(home=1), dock.client(home=2)
    ids = list(range(30))
    handles = client.put("p", ids, [2] * 30, [2] * 30, values=prompts(ids))
    freed = next(h for h in handles if pair_numbers(h)[0] == 2)
    client.free(freed)
    lost = [i for i, h in zip(ids, handles) if pair_numbers(h)[0] == 2 and h is not freed]
    dock.when(lambda: len(client.lost_groups(2)["p"]) == len(lost))
    dock.lose(2)
    rows = np.concatenate(handles)
    with pytest.raises(WorkerLost, match="pair 2"):
        client.read(rows, ["prompt"])
    with pytest.raises(WorkerLost, match="pair 2"):
        client.forget_worker("nobody")
    assert "pair 2" in client.stats()["lost"][0] and "pair 2" in client.describe()
    assert client.lost_groups(2)["p"].tolist() == lost
    again = client.put("p", [i + 100 for i in lost], [2] * len(lost), [2] * len(lost), values=prompts(lost))
    assert set(homes(again).tolist()) <= {0, 1}
    client.forget_pair(2)
    assert client.lost_groups(2)["p"].tolist() == lost
    for waiting in (client, other, third):  # the others hear of it when they find it gone
        waiting.seal("p")
        assert waiting.stats()["lost"] == []
    assert dock.client(home=0)._alive() == [0, 1]
    got: list[int] = []
    while not (claim := third.claim("make", 100, partition="p", worker="w")).sealed:
        got += claim.rows.tolist()
        third.done(claim.claim_id)
    expected = [h for h in handles if pair_numbers(h)[0] != 2] + again
    assert sorted(got) == sorted(np.concatenate(expected).tolist())


def test_the_groups_of_two_neighbours_are_known_after_the_first_was_forgotten(docks):
    dock = docks(4)
    client = dock.client(home=0)
    ids = list(range(40))
    handles = client.put("p", ids, values=prompts(ids))
    dock.lose(2)
    client.forget_pair(2)
    more = client.put("p", list(range(40, 60)), values=prompts(range(40, 60)))
    mine = [i for i, h in enumerate(handles + more) if pair_numbers(h)[0] == 1]
    dock.when(lambda: client.lost_groups(1)["p"].tolist() == mine)
    dock.lose(1)
    assert client.lost_groups(1)["p"].tolist() == mine
    with pytest.raises(DockError, match="no pair 7"):
        client.forget_pair(7)


def test_clients_without_a_pair_on_their_node_spread_over_the_pairs(docks):
    dock = docks(4)
    chosen = {
        DockClient(dock.addresses[0], SECRET, map_arena=False)._home for _ in range(24)
    }  # 4 * (3/4) ** 24: once in 250 runs of a thousand
    assert len(chosen) >= 3
    mapped = DockClient(dock.addresses[1], SECRET)
    assert mapped.mapped and mapped.addresses == dock.addresses
    mapped.close()


def test_pairs_that_are_a_dock_already_are_not_joined_to_another(docks):
    first, second = docks(2), docks(1)
    with pytest.raises(DockError, match="already"):
        DockClient([*first.addresses[::-1]], SECRET).close()
        first.client()._pair(0).join(1, first.addresses)
    assert second.client().addresses == second.addresses
