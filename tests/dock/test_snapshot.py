"""A cut of the whole dock on disk and back: nothing is lost, in mid-epoch, into any number of pairs."""

import threading
import time
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import ColumnSpec, TaskSpec
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import DeadlineExceeded, DockError

SECRET = "snapshot"
COLUMNS = (
    ColumnSpec("prompt", "int32", "ragged", shared=True, tokens=True),
    ColumnSpec("truth", "uint8", "text", shared=True),
    ColumnSpec("answer", "int32", "ragged", tokens=True),
    ColumnSpec("hidden", "bfloat16", "ragged", shape=(3,)),
    ColumnSpec("turns", "int16", "nested"),
    ColumnSpec("blob", "uint8", "bytes"),
    ColumnSpec("scores", "float32", "scalar", shape=(2,)),
    ColumnSpec("note", "int32", "ragged", shape=(2,), renewable=True),
)
TASKS = (TaskSpec("rollout", ("prompt",)), TaskSpec("train", ("prompt", "answer", "scores")))


@pytest.fixture
def dock() -> Iterator[Callable[..., DockClient]]:
    """dock(n): a client of a fresh dock of n pairs."""
    servers: list[DockServer] = []
    clients: list[DockClient] = []

    def make(pairs: int) -> DockClient:
        mine = [
            DockServer(COLUMNS, TASKS, arena_mb=4, secret=SECRET, host=f"127.0.0.{2 + i}").start() for i in range(pairs)
        ]
        servers.extend(mine)
        clients.append(DockClient([s.address for s in mine], SECRET, wait_s=10.0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
    for server in servers:
        server.close()
        assert server.failure is None


def answers(rng: np.random.Generator, n: int) -> dict:
    sizes = rng.integers(0, 9, n)
    return {
        "answer": [rng.integers(0, 99, size, np.int32) for size in sizes],
        "hidden": [rng.standard_normal((size, 3)).astype(ml_dtypes.bfloat16) for size in sizes],
        "turns": [[rng.integers(0, 9, k, np.int16) for k in rng.integers(0, 4, size % 4)] for size in sizes],
        "blob": [rng.bytes(size) for size in sizes],
        "scores": rng.standard_normal((n, 2)).astype(np.float32),
    }


def in_use(client: DockClient, groups: int, seed: int) -> None:
    """A dock in mid-epoch: some groups unclaimed, some claimed, some answered, some trained, some gone."""
    rng = np.random.default_rng(seed)
    client.put(
        "train", range(groups), [3] * groups, [3] * groups, list(range(3)) * groups,
        {
            "prompt": [rng.integers(0, 99, 1 + g % 5, np.int32) for g in range(groups)],
            "truth": [f"Antwort {g} ü" for g in range(groups)],
        },
    )  # fmt: skip
    client.put("eval", [7], [2], [1], [1], {"prompt": [np.arange(3, dtype=np.int32)], "truth": [""]})
    client.add_task("late", ("answer",))
    for version in range(2):
        claim = client.claim("rollout", groups // 2, partition="train", worker="r", unit="groups", at_least=2)
        index = np.sort(rng.permutation(len(claim.rows))[: 2 * len(claim.rows) // 3])
        versions = (np.full(len(index), version, np.int32), np.full(len(index), version + 1, np.int32))
        notes = [rng.integers(0, 99, (n, 2), np.int32) for n in rng.integers(0, 4, len(claim.rows))]
        client.write(claim.rows, {"note": notes[::-1]}, claim_id=claim.claim_id)
        client.write(claim.rows, {"note": notes}, claim_id=claim.claim_id)
        client.write(claim.rows[index], answers(rng, len(index)), claim_id=claim.claim_id, versions=versions, done=True)
    trained = client.claim("train", 5, partition="train", worker="t")
    client.done(trained.claim_id)
    gone = client.claim("train", 2, partition="train", worker="t")
    client.free(gone.rows)
    client.done(gone.claim_id)
    client.seal("eval")


def contents(client: DockClient) -> dict:
    """Everything that a cut must keep, by (partition, group, member); free of handles and of claims."""
    found: dict = {}
    for pair in client.pairs():
        for name in pair.stats()["partitions"]:
            about = pair.export(name)
            ids = np.repeat(about.ints("ids"), about.ints("counts"))
            sizes = np.repeat(about.ints("sizes"), about.ints("counts"))
            for i, row in enumerate(about.ints("rows")):
                written = [c for c, bit in client.schema.bit.items() if about.ints("ready")[i] & int(bit)]
                values = client.read(np.array([row]), written)
                found[name, int(ids[i]), int(about["members"][i])] = (
                    int(sizes[i]),
                    {c: plain(v[0]) for c, v in values.items()},
                    (int(about["version_min"][i]), int(about["version_max"][i])),
                    [t for k, t in enumerate(about["tasks"]) if about[f"done{k}"][i]],
                )
    return found


def plain(value) -> object:
    if isinstance(value, list):
        return [plain(v) for v in value]
    return (value.dtype.name, value.tolist()) if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 2)])
def test_a_cut_in_mid_epoch_comes_back_equal_also_into_another_number_of_pairs(dock, tmp_path, before, after):
    first = dock(before)
    in_use(first, 24, seed=before)
    expected = contents(first)
    open_claims = first.stats()["claims"]
    manifest = first.snapshot(tmp_path / "cut")
    assert manifest["partitions"]["train"]["rows"] == sum(name == "train" for name, _, _ in expected)
    assert contents(first) == expected and first.stats()["claims"] == open_claims, "a snapshot changes nothing"
    second = dock(after)
    second.restore(tmp_path / "cut")
    assert contents(second) == expected
    assert second.stats()["claims"] == 0
    assert second.stats()["partitions"]["eval"]["sealed"] and not second.stats()["partitions"]["train"]["sealed"]
    assert "late" in second.stats()["partitions"]["train"]["tasks"]
    ready = {k for k, (_, values, _, done) in expected.items() if "rollout" not in done and k[0] == "train"}
    got = second.claim("rollout", 1000, partition="train", worker="x", at_least=len(ready))
    assert {("train", int(g), int(m)) for g, m in zip(got.group_ids, got.members)} == ready


def test_while_one_client_has_frozen_the_dock_the_calls_of_others_wait_and_then_go_on(dock, tmp_path):
    mine = dock(2)
    other = DockClient(mine.addresses, SECRET, wait_s=10.0)
    try:
        for pair in mine.pairs():
            pair.freeze(10.0)
        finished = threading.Event()

        def put() -> None:
            other.put("p", values={"answer": [np.arange(3, dtype=np.int32)]})
            finished.set()

        thread = threading.Thread(target=put)
        thread.start()
        assert not finished.wait(0.3)
        assert not mine.stats()["partitions"], "nothing of others happens meanwhile"
        for pair in mine.pairs():
            pair.thaw()
        assert finished.wait(5.0)
        thread.join()
        assert mine.stats()["partitions"]["p"]["rows"] == 1
    finally:
        other.close()


def test_a_freeze_ends_by_itself_when_its_time_is_over(dock):
    mine = dock(1)
    other = DockClient(mine.addresses, SECRET, wait_s=5.0)
    try:
        next(mine.pairs()).freeze(0.3)
        began = time.monotonic()
        other.put("p", values={"answer": [np.arange(3, dtype=np.int32)]})
        assert 0.1 < time.monotonic() - began < 4.0
        with pytest.raises(DockError, match="not frozen"):
            next(mine.pairs()).thaw()
    finally:
        other.close()


def test_a_lease_does_not_run_out_while_the_dock_is_frozen_and_parked_claims_get_nothing(dock):
    mine = dock(1)
    other = DockClient(mine.addresses, SECRET, wait_s=5.0)
    try:
        got: list = []
        thread = threading.Thread(
            target=lambda: got.append(other.claim("train", 1, partition="p", worker="w", timeout_s=5.0))
        )
        thread.start()
        time.sleep(0.1)
        pair = next(mine.pairs())
        pair.freeze(5.0)
        rng = np.random.default_rng(0)
        rows = mine.put("p", [1], [1], [1], [0], {"prompt": [np.arange(2, dtype=np.int32)], "truth": ["t"]})[0]
        mine.write(rows, answers(rng, 1))
        time.sleep(0.2)
        assert not got
        pair.thaw()
        thread.join(5.0)
        assert len(got[0]) == 1
    finally:
        other.close()


def test_a_snapshot_appears_whole_or_not_at_all(dock, tmp_path, monkeypatch):
    client = dock(1)
    in_use(client, 12, seed=0)
    monkeypatch.setattr(np, "savez", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(DockError, match="No space left"):
        client.snapshot(tmp_path / "cut")
    assert list(tmp_path.iterdir()) == []
    client.put("after", values={"answer": [np.arange(2, dtype=np.int32)]})  # and the dock is not frozen


@pytest.mark.parametrize("damage", ["no manifest", "cut file", "other columns", "there already"])
def test_what_cannot_be_restored_is_refused_by_name(dock, tmp_path, damage):
    client = dock(1)
    in_use(client, 12, seed=3)
    client.snapshot(tmp_path / "cut")
    target = dock(1)
    manifest = tmp_path / "cut" / "manifest.json"
    match = "no whole snapshot"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "cut file":
        file = next((tmp_path / "cut").glob("*.npz"))
        file.write_bytes(file.read_bytes()[:-200])
        match = "damaged"
    elif damage == "other columns":
        manifest.write_text(manifest.read_text().replace('"bfloat16"', '"float16"'))
        match = "other columns"
    else:
        target = client
        match = "already"
    with pytest.raises(DockError, match=match):
        target.restore(tmp_path / "cut")
    with pytest.raises(DeadlineExceeded):
        target.claim("train", 1000, partition="nothing", worker="w", timeout_s=0.0)  # answered: not frozen
