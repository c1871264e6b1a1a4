"""The verbs of one pair over real sockets, with the arena mapped and with all bytes in frames."""

import itertools
import threading
import time

import numpy as np
import pytest

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import Ragged
from mindspeed_asyncflow.errors import (
    ClaimLost,
    DeadlineExceeded,
    DockError,
    DockFull,
    StaleHandle,
    WorkerLost,
)
from mindspeed_asyncflow.records import PromptRow

NO_WAIT = {"partition": "train", "worker": "w", "timeout_s": 0.0}


def answers(rows: np.ndarray, length: int = 3) -> dict:
    """Columns whose values tell the row they belong to."""
    ids = [np.full(1 + int(row) % length, row % 1009, np.int32) for row in rows]
    return {
        "response_ids": ids,
        "rollout_logprobs": [i.astype(np.float32) / 7 for i in ids],
        "finish": (rows % 4).astype(np.uint8),
    }


def test_a_sample_travels_from_prompt_to_training(client, prompts):
    handles = client.put_groups("train", prompts(3, size=2))
    assert [len(h) for h in handles] == [2, 2, 2]
    claim = client.claim("rollout", 6, **NO_WAIT)
    assert claim.rows.tolist() == np.concatenate(handles).tolist()
    assert (claim.group_ids.tolist(), claim.members.tolist()) == ([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    assert claim.tokens.tolist() == [6] * 6 and claim.version_min.tolist() == [-1] * 6
    read = client.read(claim.rows, ["prompt_ids", "truth"])
    assert [p.tolist() for p in read["prompt_ids"]] == [[g] * 6 for g in claim.group_ids]
    assert [read["truth"].text(i) for i in range(6)] == [f"truth {g}" for g in claim.group_ids]
    written = answers(claim.rows)
    versions = (np.full(6, 3), np.full(6, 5))
    client.write(claim.rows, written, claim_id=claim.claim_id, versions=versions, done=True)
    with pytest.raises(ClaimLost):
        client.done(claim.claim_id)
    reward = client.claim("reward", 3, unit="groups", **NO_WAIT)
    scores = {"reward": np.ones(6, np.float32), "advantage": np.zeros(6, np.float32)}
    client.write(reward.rows, scores, claim_id=reward.claim_id)
    client.done(reward.claim_id)
    train = client.claim("train", 3, unit="groups", policy="in_order", min_version=3, **NO_WAIT)
    assert (train.version_min.tolist(), train.version_max.tolist()) == ([3] * 6, [5] * 6)
    got = client.read(train.rows, list(written), copy=True)
    assert all(np.array_equal(a, b) for a, b in zip(got["response_ids"], written["response_ids"]))
    assert all(np.array_equal(a, b) for a, b in zip(got["rollout_logprobs"], written["rollout_logprobs"]))
    assert got["finish"].dtype == np.uint8 and np.array_equal(got["finish"], written["finish"])
    assert train.tokens.tolist() == [6 + len(i) for i in written["response_ids"]]
    client.done(task="train", rows=train.rows)
    client.free(train.rows)
    stats = client.stats()
    assert stats["used_bytes"] == stats["payload_bytes"] == stats["claims"] == 0
    assert "train: 0 rows" in client.describe()


@pytest.mark.parametrize("tokens", [0, 5, 30_000])
def test_ragged_values_come_back_to_the_bit_small_or_large(client, tokens):
    """Small values travel in the frame, large ones through the arena; both may hold empty rows and NaNs."""
    rng = np.random.default_rng(tokens)
    group = [PromptRow(1, m, 4, rng.integers(0, 1 << 31, tokens).astype(np.int32), "é" * tokens) for m in range(4)]
    rows = client.put_groups("train", [group])[0]
    read = client.read(rows[::-1], ["prompt_ids", "truth"])
    assert all(np.array_equal(p, group[0].prompt_ids) for p in read["prompt_ids"])
    assert read["truth"].text(2) == "é" * tokens
    logprobs = [rng.integers(0, 1 << 32, n, np.uint32).view(np.float32) for n in (tokens, 0, 1, tokens // 2)]
    client.write(rows, {"rollout_logprobs": logprobs})
    got = client.read(rows, ["rollout_logprobs"])["rollout_logprobs"]
    assert [g.tobytes() for g in got] == [p.tobytes() for p in logprobs]
    assert [g.tobytes() for g in got.take([3, 0]).packed()] == [logprobs[3].tobytes(), logprobs[0].tobytes()]


def test_values_stay_with_their_row_through_reordered_claims_and_drops(client, prompts):
    """B39: drop a group, write and read in shuffled orders: every column still matches its row."""
    rng = np.random.default_rng(0)
    rows = np.concatenate(client.put_groups("train", prompts(6, size=2)))
    for column in ("response_ids", "rollout_logprobs", "finish"):
        order = rng.permutation(rows)
        client.write(order[:5], {column: answers(order[:5])[column]})
        client.write(order[5:], {column: answers(order[5:])[column]})
    client.drop(group_ids=[2], partition="train", reason="zero variance")
    left = np.setdiff1d(rows, rows[4:6])
    claim = client.claim("reward", 12, **NO_WAIT)
    assert sorted(claim.rows.tolist()) == sorted(left.tolist())
    shuffled = rng.permutation(claim.rows)
    expected, got = answers(shuffled), client.read(shuffled, ["response_ids", "rollout_logprobs", "finish"])
    for name in ("response_ids", "rollout_logprobs"):
        assert [v.tolist() for v in got[name]] == [v.tolist() for v in expected[name]]
    assert np.array_equal(got["finish"], expected["finish"])
    assert client.stats()["drops"] == {"zero variance": 2}


def test_a_second_result_is_refused_unless_it_is_equal_and_changes_nothing(client, prompts):
    rows = client.put_groups("train", prompts(1, size=3))[0]
    first = answers(rows)
    client.write(rows[:2], {k: v[:2] for k, v in first.items()})
    used = client.stats()["payload_bytes"]
    client.write(rows[:2], {k: v[:2] for k, v in first.items()})
    assert client.stats()["payload_bytes"] == used
    other = dict(first, finish=first["finish"] + 1)
    with pytest.raises(DockError, match="'finish' of 2 rows has a result already"):
        client.write(rows, other)
    with pytest.raises(DockError, match="not written yet"):
        client.read(rows, ["response_ids"])
    client.write(rows, first)  # two equal, one new
    assert np.array_equal(client.read(rows, ["finish"])["finish"], first["finish"])
    client.free(rows)
    assert client.stats()["used_bytes"] == 0


def test_a_call_repeated_under_its_identity_is_carried_out_once(connect, prompts, monkeypatch):
    """A broken connection after the server has acted: the client asks again, the server remembers the answer."""
    from mindspeed_asyncflow.dock import channel

    client = connect()
    decode, broken = channel.wire.decode_header, []

    def lose_once(raw, most, bulk):
        header = decode(raw, most, bulk)
        if len(broken) < 2 and header.verb in (channel.Verb.PUT, channel.Verb.CLAIM) and header.verb not in broken:
            broken.append(header.verb)
            raise channel.WireError("lost on the way")
        return header

    ours = threading.get_ident()
    monkeypatch.setattr(
        channel.wire,
        "decode_header",
        lambda *args: (lose_once if threading.get_ident() == ours else decode)(*args),
    )
    rows = client.put_groups("train", prompts(2, size=2))
    claim = client.claim("rollout", 2, **NO_WAIT)
    assert len(broken) == 2
    stats = client.stats()
    assert stats["partitions"]["train"]["rows"] == 4 and stats["claims"] == 1
    assert claim.rows.tolist() == rows[0].tolist()


def test_a_write_is_atomic_over_its_columns(client, prompts):
    rows = client.put_groups("train", prompts(1))[0]
    good = answers(rows)
    for wrong in (
        dict(good, finish=good["finish"][:3]),
        dict(good, response_ids=good["response_ids"][:3]),
        dict(good, prompt_ids=good["response_ids"]),
    ):
        with pytest.raises(DockError):
            client.write(rows, wrong)
    assert client.stats()["partitions"]["train"]["tasks"]["reward"]["waiting"] == 4
    with pytest.raises(DockError, match="not written yet"):
        client.read(rows, ["finish"])


def test_stale_handles_are_typed_errors_on_every_verb(client, prompts):
    rows = client.put_groups("train", prompts(1))[0]
    client.free(rows)
    client.put_groups("train", prompts(1, first=1))
    for call in (
        lambda: client.read(rows, ["prompt_ids"]),
        lambda: client.write(rows, answers(rows)),
        lambda: client.free(rows),
        lambda: client.drop(rows, reason="x"),
    ):
        with pytest.raises(StaleHandle):
            call()


def test_a_late_result_of_an_expired_lease_is_refused_and_the_new_owner_is_served(server, connect, prompts):
    client = connect()
    rows = client.put_groups("train", prompts(1))[0]
    late = client.claim("rollout", 4, **NO_WAIT)
    assert client.forget_worker("w") == 1
    new = client.claim("rollout", 4, **NO_WAIT)
    with pytest.raises(ClaimLost, match="forgotten"):
        client.write(rows, answers(rows), claim_id=late.claim_id)
    client.write(rows, answers(rows), claim_id=new.claim_id, done=True)


def test_shared_columns_are_stored_once_and_freed_with_the_last_row_of_the_group(client, prompts):
    handles = client.put_groups("train", prompts(2, size=8, tokens=100))
    prompt_bytes = 400 + len("truth 0") + len("{}")
    assert client.stats()["payload_bytes"] == 2 * prompt_bytes
    client.free(handles[0][:7])
    assert client.stats()["payload_bytes"] == 2 * prompt_bytes
    client.free(handles[0][7:])
    assert client.stats()["payload_bytes"] == prompt_bytes
    assert client.read(handles[1], ["prompt_ids"])["prompt_ids"][7].tolist() == [1] * 100
    client.free(handles[1])
    assert client.stats()["used_bytes"] == 0


def test_late_members_share_the_prompt_of_their_group_and_another_prompt_is_refused(client, prompts):
    group = prompts(1, size=4)[0]
    client.put_groups("train", [group[:3]])
    before = client.stats()["payload_bytes"]
    wrong = PromptRow(0, 3, 4, np.full(6, 99, np.int32), "truth 0")
    with pytest.raises(DockError, match="other values"):
        client.put_groups("train", [[wrong]])
    late = client.put_groups("train", [group[3:]])[0]
    assert client.stats()["payload_bytes"] == before
    assert client.read(late, ["prompt_ids"])["prompt_ids"][0].tolist() == [0] * 6
    assert len(client.claim("rollout", 1, unit="groups", **NO_WAIT)) == 4


def test_a_full_arena_makes_puts_wait_until_rows_are_freed(client, prompts):
    handles = [client.put_groups("train", prompts(1, first=g, tokens=1 << 18))[0] for g in range(2)]  # 1 MiB each
    with pytest.raises(DeadlineExceeded, match=r"1\.?\d* s|free bytes in the dock"):
        client.put_groups("train", prompts(2, first=5, tokens=260_000), timeout_s=0.05)
    threading.Timer(0.1, lambda: client.free(handles[0])).start()
    begun = time.monotonic()
    client.put_groups("train", prompts(2, first=5, tokens=260_000), timeout_s=5.0)
    assert 0.05 < time.monotonic() - begun < 4.0
    assert client.stats()["back_pressure_s"] > 0.05


def test_answers_find_room_when_prompts_have_filled_their_share(client, prompts):
    rows = client.put_groups("train", prompts(1, tokens=720_000))[0]  # 2.75 of 4 MiB, puts may take 3
    with pytest.raises(DeadlineExceeded):
        client.put_groups("train", prompts(1, first=1, tokens=100_000), timeout_s=0.0)
    client.write(rows[:1], {"response_ids": [np.zeros(150_000, np.int32)]}, timeout_s=0.0)


def test_what_can_never_fit_is_refused_at_once(client, prompts):
    with pytest.raises(DockFull, match=r"dock\.arena_mb"):
        client.put_groups("train", prompts(1, tokens=1 << 20), timeout_s=60.0)
    rows = client.put_groups("train", prompts(1))[0]
    with pytest.raises(DockFull, match=r"dock\.arena_mb"):
        client.write(rows[:1], {"response_ids": [np.zeros(1 << 21, np.int32)]}, timeout_s=60.0)
    client.free(rows)
    assert client.stats()["used_bytes"] == 0


def test_views_are_read_only_and_live_as_long_as_the_claim(connect, prompts):
    client = connect()
    client.put_groups("train", prompts(1))
    claim = client.claim("rollout", 4, **NO_WAIT)
    view = client.read(claim.rows, ["prompt_ids"])["prompt_ids"]
    with pytest.raises(ValueError, match="read-only"):
        view[0][0] = 5
    client.drop(claim.rows, reason="x")
    client.put_groups("train", prompts(50, first=1))
    assert view[3].tolist() == [0] * 6
    client.release(claim.claim_id)
    assert client.stats()["partitions"]["train"]["rows"] == 200


def test_a_parked_waiter_is_woken_across_clients_and_delays_nobody(connect, prompts):
    """33 parked claims; a put is still answered in a moment, and wakes the one that it satisfies."""
    client, parked, got = connect(), connect(), {}

    def wait_for(task: str, partition: str, name: str) -> None:
        got[name] = parked.claim(task, 4, partition=partition, worker=name, at_least=4, timeout_s=10.0)

    waiters = [threading.Thread(target=wait_for, args=("train", "other", str(i))) for i in range(32)]
    waiters.append(threading.Thread(target=wait_for, args=("rollout", "train", "chosen")))
    for thread in waiters:
        thread.start()
    while len(client.stats()["waiting"]) < len(waiters):
        time.sleep(0.005)
    begun = time.monotonic()
    client.put_groups("train", prompts(1))
    waiters[-1].join()
    assert time.monotonic() - begun < 5.0, "neither waited for the deadline of the others"
    assert len(got["chosen"]) == 4 and len(got) == 1
    client.seal("other")
    for thread in waiters:
        thread.join()
    assert all(got[str(i)].sealed for i in range(32))


def test_concurrent_consumers_get_disjoint_and_complete_rows(connect, prompts):
    producer, taken = connect(), [[] for _ in range(4)]

    def consume(mine: list) -> None:
        with DockClient(producer.address, "a secret of this test", wait_s=10.0) as own:
            while not (claim := own.claim("rollout", 7, partition="train", worker=str(id(mine)))).sealed:
                mine.extend(claim.rows.tolist())
                own.done(claim.claim_id)

    threads = [threading.Thread(target=consume, args=(t,)) for t in taken]
    for thread in threads:
        thread.start()
    rows = [r for i in range(20) for h in producer.put_groups("train", prompts(5, first=5 * i)) for r in h.tolist()]
    producer.seal("train")
    for thread in threads:
        thread.join(20.0)
    assert sorted(itertools.chain(*taken)) == sorted(rows) and len(set(rows)) == 400


def test_calls_with_impossible_arguments_are_answered_and_the_client_goes_on(client, prompts):
    rows = client.put_groups("train", prompts(1))[0]
    assert client.put_groups("train", []) == []
    for call, message in (
        (lambda: client.claim("rolout", 1, **NO_WAIT), "did you mean 'rollout'"),
        (lambda: client.read(rows, ["promt_ids"]), "did you mean 'prompt_ids'|promt_ids"),
        (lambda: client.read(np.empty(0, np.int64), ["truth"]), "at least one"),
        (lambda: client.put_groups("train", prompts(1)), "cannot take 4 more"),
        (lambda: client.drop(group_ids=[9], partition="train", reason="x"), r"groups \[9\] are not"),
        (lambda: client.done(), "needs a claim"),
        (lambda: client.write(rows, {"truth": Ragged.from_text(["x"] * 4)}), "shared columns"),
        (
            lambda: client.write(rows, {"finish": np.zeros(4, np.uint8)}, versions=([2] * 4, [1] * 4)),
            "oldest <= newest",
        ),
    ):
        with pytest.raises(DockError, match=message):
            call()
    assert len(client.claim("rollout", 4, **NO_WAIT)) == 4


def test_a_server_that_is_gone_is_named(server, connect):
    client, ended = connect(restart_s=0.3), []

    def wait() -> None:
        try:
            client.claim("rollout", 1, partition="p", worker="w")
        except WorkerLost as error:
            ended.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not client.stats()["waiting"]:
        time.sleep(0.005)
    server.close()
    waiting.join(5.0)
    assert ended and client.address in ended[0], "a parked call ends with its server"
    with pytest.raises(WorkerLost, match=client.address):
        client.stats()


def test_tasks_are_added_rows_finished_and_partitions_closed_while_the_dock_runs(client, prompts):
    rows = np.concatenate(client.put_groups("train", prompts(3, size=2)))
    client.add_task("grade", ["prompt_ids", "truth"])
    client.add_task("grade", ["prompt_ids", "truth"])
    with pytest.raises(DockError, match="grade"):
        client.add_task("grade", ["prompt_ids"])
    client.finish("grade", rows[:2])
    client.finish("grade", rows[:0])
    claim = client.claim("grade", 9, **NO_WAIT)
    assert claim.rows.tolist() == rows[2:].tolist() and claim.ready == 0
    client.close_partition("train")
    with pytest.raises(DockError, match="closed"):
        client.put_groups("train", prompts(1, first=9))
    client.release(claim.claim_id)
    stats = client.stats()
    assert stats["used_bytes"] == 0 and "train" not in stats["partitions"]
    with pytest.raises(StaleHandle):
        client.read(rows, ["truth"])
    assert len(client.put_groups("train", prompts(1))) == 1
    with pytest.raises(DockError, match="no partition"):
        client.close_partition("other")


def test_rows_put_without_groups_are_groups_of_their_own_that_nobody_named(client):
    values = {"prompt_ids": [[1], [2, 2]], "truth": Ragged.from_text(["a", "b"]), "finish": [0, 1]}
    first, second = (client.put("train", values=values)[0] for _ in range(2))
    claim = client.claim("rollout", 4, unit="groups", **NO_WAIT)
    assert claim.rows.tolist() == [*first, *second]
    assert bool((claim.group_ids < 0).all()) and len(set(claim.group_ids.tolist())) == 4
    assert client.read(second, ["finish"])["finish"].tolist() == [0, 1]


def test_a_claim_can_bound_the_age_and_draw_by_seed(client, prompts):
    old = np.concatenate(client.put_groups("train", prompts(1)))
    time.sleep(0.05)
    new = np.concatenate(client.put_groups("train", prompts(1, first=1)))
    claim = client.claim("rollout", 8, max_age_s=0.04, **NO_WAIT)
    assert set(claim.rows.tolist()) <= set(new.tolist()) and claim.dropped[0][2] == "stale"
    assert claim.dropped[0][1].tolist() == old.tolist()
    drawn = []
    for seed in (1, 1, 2):
        rows = np.concatenate(client.put_groups(f"p{len(drawn)}", prompts(16, size=1)))
        got = client.claim("rollout", 8, policy="random", seed=seed, partition=f"p{len(drawn)}", worker="w")
        drawn.append(np.searchsorted(rows, got.rows).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
