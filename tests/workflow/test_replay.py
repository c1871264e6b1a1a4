"""What a run records, and the same run again from the record: over an engine whose bits depend on every row and on the
order in which rows are summed."""

import asyncio
import contextlib
import json
import os
import secrets

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.config.model import FullTensor
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, Ragged, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import RecordError
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.records import OptimReport
from mindspeed_asyncflow.reshard.boxes import whole
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment
from mindspeed_asyncflow.reshard.relay import RelayWriter, assemble
from mindspeed_asyncflow.reshard.relay_plan import write_plan
from mindspeed_asyncflow.workflow import batcher
from mindspeed_asyncflow.workflow.events import EventLog
from mindspeed_asyncflow.workflow.publisher import Publisher
from mindspeed_asyncflow.workflow.record import read_record, recorded_steps
from mindspeed_asyncflow.workflow.replay import Replay
from mindspeed_asyncflow.workflow.sample_log import SampleLog, file_of, read_step
from mindspeed_asyncflow.workflow.train_worker import TrainWorker
from tests.workflow.fakes import QUIET, FakeTrain, Local

REPLICAS = 2
GROUPS = 4  # of two rows each


def layout():
    """Two tensors, one in each rank."""
    tensors = [FullTensor(f"w{rank}", (4,), 0) for rank in range(REPLICAS)]
    held = tuple((LocalParam(t.name, t.shape, (Segment(t.name, whole(t.shape)),)),) for t in tensors)
    return Layout({t.name: t for t in tensors}, held)


class Summing(FakeTrain):
    """Its weight, one of two, takes in every number of a micro-batch, one after the other, in float32."""

    def __init__(self, rank, start=1.0):
        super().__init__()
        self.name = f"w{rank}"
        self.weight.fill_(start)
        self.gradient = torch.zeros_like(self.weight)

    def shards(self):
        return {self.name: self.weight}

    def forward_backward(self, micro_batches):
        for batch in micro_batches:
            for token, advantage, logprob in zip(batch.targets, batch.advantages, batch.rollout_logprobs):
                self.gradient = self.gradient * 1.01 + float(token) * 0.1 + float(advantage) * 3.3 + float(logprob)
        return {"actor/tokens_count": sum(b.num_valid_tokens for b in micro_batches), "actor/loss_sum": float("nan")}

    def optim_step(self, denominator):
        if not denominator:
            return OptimReport(False, 0.0, 0.1)
        norm = float(self.gradient.norm() / denominator)
        self.weight -= self.gradient / denominator
        self.gradient.zero_()
        return OptimReport(True, norm, 0.1)


class Bench:
    """A dock and the trainer ranks of two data-parallel replicas, each with its own relay as on two nodes."""

    def __init__(self, config, stack, engines=None, logs=(None, None)):
        engines = engines or [Summing(0), Summing(1)]
        secret = secrets.token_bytes(8)
        server = DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=4, lease_s=30.0, secret=secret).start()
        stack.callback(server.close)
        self.dock = DockClient(server.address, secret, 5.0)
        stack.callback(self.dock.close)
        plan = write_plan(layout())
        self.table = plan.table(layout(), "float32")
        self.path = f"/dev/shm/asyncflow-{os.getpid()}-test{secrets.token_hex(4)}"
        self.trainers = []
        for replica, (engine, log) in enumerate(zip(engines, logs)):
            relay = RelayWriter(f"{self.path}-{replica}", self.table, replica, (replica,))
            publisher = Publisher(
                engine.shards,
                plan.ranks[replica],
                relay,
                platform=CpuPlatform(),
                device=torch.device("cpu"),
                name=f"trainer{replica}",
                timeout_s=5.0,
                tracer=QUIET,
            )
            worker = TrainWorker(
                engine,
                self.dock,
                config.algorithm,
                name=f"trainer{replica}",
                replica=replica,
                publisher=publisher,
                tracer=QUIET,
                samples=log,
            )
            stack.callback(publisher.close)
            if log is not None:
                stack.callback(log.close)
            self.trainers.append(Local(worker, aside=("published",)))

    async def all(self, method, *args):
        return await asyncio.gather(*(getattr(t, method)(*args) for t in self.trainers))


def settings(**workflow):
    return Config.model_validate(
        {
            "trainer": {"data_parallel": REPLICAS, "micro_batch_tokens": 12},
            "algorithm": {"group_size": 2},
            "workflow": {"groups_per_step": GROUPS, "max_lag": 1, "watchdog_s": 5.0} | workflow,
        }
    )


def rows_of(step, rng, oldest=0, newest=0):
    """Columns of a step as rollout and scorer write them; `oldest` sampled the first token, `newest` the others."""
    count = 2 * GROUPS
    lengths = rng.integers(1, 6, count)
    return {
        "prompt_ids": Ragged.from_rows([np.array([step + 1, g], np.int32) for g in range(GROUPS)], "int32"),
        "response_ids": Ragged.from_rows([rng.integers(1, 50, n).astype(np.int32) for n in lengths], "int32"),
        "rollout_logprobs": Ragged.from_rows([rng.normal(size=n).astype(np.float32) for n in lengths], "float32"),
        "response_spans": Ragged.from_flat(*spans_of(oldest, newest, lengths)),
        "finish": np.zeros(count, np.uint8),
        "reward": rng.normal(size=count).astype(np.float32),
        "advantage": rng.normal(size=count).astype(np.float32),
    }


def sampled(step, config):
    """(oldest, newest) version of the rows of a step: in runs that mask, the first token is older than allowed."""
    newest = max(0, step - 1)
    return max(0, newest - (config.workflow.stale == "mask")), newest


def spans_of(oldest, newest, lengths):
    rows = [[[oldest, 0, 1], [newest, 1, n]] if n > 1 else [[oldest, 0, 1]] for n in lengths.tolist()]
    return np.array([span for row in rows for span in row], np.int32), np.cumsum([0, *map(len, rows)])


async def train(bench, config, events):
    """A run of three steps of two chunks and a fourth one without rows, as the loops do it."""
    rng = np.random.default_rng(7)
    events.note("begun", config="trainer: {}")
    await bench.all("start", 0, [])

    async def publish(version):
        shards = await bench.all("published", version)
        events.note("published", manifest=assemble(version, bench.table, bench.path, [s.checksums for s in shards]))

    await publish(0)
    for step in range(4):
        if step < 3:
            put(bench, step, config, rng)
        tokens = samples = 0
        for _ in range(2 if step < 3 else 0):
            sums = await train_chunk(bench, step, config, events)
            tokens += int(sum(s["actor/tokens_count"] for s in sums))
            samples += GROUPS
        finish = await bench.all("finish", step + 1, tokens, samples)
        events.note("finished", version=step + 1, tokens=tokens, samples=samples, optim=finish[0].optim)
        await publish(step + 1)


def put(bench, step, config, rng):
    ids, (oldest, newest) = np.arange(GROUPS) + step * GROUPS, sampled(step, config)
    values = rows_of(step, rng, oldest, newest)
    versions = tuple(np.full(2 * GROUPS, version, np.int32) for version in (oldest, newest))
    bench.dock.put("train", ids, [2] * GROUPS, [2] * GROUPS, [0, 1] * GROUPS, values, versions=versions)


async def train_chunk(bench, step, config, events):
    claim = bench.dock.claim("train", 2, partition="train", worker="trainer", unit="groups", at_least=2)
    infos = batcher.RowInfos(claim.rows, claim.group_ids, claim.members, claim.tokens)
    plan = batcher.plan(infos, REPLICAS, config.trainer.micro_batch_tokens)
    versions = dict(zip(claim.rows.tolist(), zip(claim.version_min.tolist(), claim.version_max.tolist())))
    groups = dict(zip(claim.rows.tolist(), zip(claim.group_ids.tolist(), claim.members.tolist())))
    law = step - config.workflow.max_lag if config.workflow.stale == "mask" else None
    sums = [r.sums for r in await bench.all("train", plan, versions, groups, 0, law)]
    events.note("trained", step=step, plan=plan, groups=groups, versions=versions, sums=sums, oldest_allowed=law)
    bench.dock.done(claim.claim_id)
    bench.dock.free(claim.rows)
    return sums


def record(folder, config):
    with contextlib.ExitStack() as stack:
        bench = Bench(config, stack, logs=[SampleLog(folder, replica, 1 << 20) for replica in range(REPLICAS)])

        async def main():
            events = EventLog(folder / "events.jsonl")
            await train(bench, config, events)
            events.close()

        asyncio.run(main())


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The folder of events of a run."""
    folder = tmp_path_factory.mktemp("run") / "events"
    record(folder, settings())
    return folder


@pytest.fixture
def recorded(original, tmp_path):
    """A copy of it that a test may change."""
    folder = tmp_path / "events"
    folder.mkdir()
    for file in original.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def replay(folder, config=None, engines=None, steps=None):
    config = config or settings()
    found = read_record(folder / "events.jsonl")
    there = recorded_steps(found, folder, REPLICAS)
    said = []
    with contextlib.ExitStack() as stack:
        bench = Bench(config, stack, engines)
        again = Replay(config, found, folder, bench.dock, bench.trainers, [0, 1], bench.path, bench.table, said.append)
        verdict = asyncio.run(again.run(there if steps is None else steps))
        assert verdict.difference or bench.dock.stats()["used_bytes"] == 0
    assert len(said) == verdict.repeated
    return verdict


def edit_events(folder, change):
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(event) + "\n" for event in change(events)))


def edit_samples(folder, step, replica, change):
    path = file_of(folder, step, replica)
    with np.load(path) as file:
        arrays = {name: file[name].copy() for name in file.files}
    change(arrays)
    np.savez(path, **arrays)


def test_a_recorded_run_is_repeated_bit_for_bit(recorded):
    verdict = replay(recorded)
    assert (verdict.repeated, verdict.difference) == (4, "")


def test_only_the_first_steps_where_so_many_are_asked_for(recorded):
    assert replay(recorded, steps=2).repeated == 2


def test_a_changed_advantage_is_found_in_the_step_that_trained_it_with_the_tensor_that_it_moved(recorded):
    def change(arrays):
        arrays["value.advantage"][1] += 0.01

    edit_samples(recorded, 1, 1, change)
    verdict = replay(recorded)
    assert verdict.repeated == 1
    assert verdict.difference == "version 2: 'w1' rows 0 to 4, columns 0 to 1 has other bytes; 1 of 2 shards differ"


def test_other_starting_weights_are_named_before_anything_is_trained(recorded):
    verdict = replay(recorded, engines=[Summing(0), Summing(1, start=1.5)])
    assert verdict.repeated == 0
    assert verdict.difference.startswith("version 0: 'w1' rows 0 to") and "1 of 2 shards" in verdict.difference


def test_rows_in_another_order_are_other_bits(recorded):
    def change(events):
        for event in events:
            if event["kind"] == "trained" and event["step"] == 2:
                event["plan"][0][0].reverse()
        return events

    edit_events(recorded, change)
    verdict = replay(recorded)
    assert verdict.repeated == 2 and verdict.difference.startswith("version 3")


def test_a_changed_metric_is_named_with_both_values(recorded):
    def change(events):
        next(e for e in events if e["kind"] == "finished")["lr"] = 0.2
        return events

    edit_events(recorded, change)
    assert replay(recorded).difference == "version 1: lr was 0.2 and is 0.1"


def test_a_row_that_is_trained_and_not_recorded_is_an_error(recorded):
    def change(events):
        next(e for e in events if e["kind"] == "trained")["plan"][0][0][0] = [99, 0]
        return events

    edit_events(recorded, change)
    with pytest.raises(RecordError, match=r"\(99, 0\), which is not among its samples"):
        replay(recorded)


def test_rows_older_than_the_law_allows_are_refused_as_they_would_be_in_a_run(recorded):
    edit_samples(recorded, 2, 0, lambda arrays: arrays["row.oldest"].fill(0))
    with pytest.raises(RecordError, match=r"step 2 trained group \d+ with tokens older than workflow.max_lag 1"):
        replay(recorded)


def test_a_run_that_masked_old_tokens_is_repeated_with_the_same_masks(tmp_path):
    record(tmp_path, settings(stale="mask"))
    assert replay(tmp_path, settings(stale="mask")).repeated == 4

    def change(events):
        next(e for e in events if e["kind"] == "trained" and e["step"] == 2)["oldest_allowed"] = 0
        return events

    edit_events(tmp_path, change)
    verdict = replay(tmp_path, settings(stale="mask"))
    assert verdict.repeated == 2 and "actor/tokens_count was" in verdict.difference


def test_a_step_without_recorded_samples_ends_what_can_be_repeated(recorded):
    file_of(recorded, 1, 1).unlink()
    assert replay(recorded).repeated == 1


def test_torn_samples_are_named(recorded):
    path = file_of(recorded, 1, 0)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RecordError, match=r"step_000001_replica_0\.npz is torn or changed"):
        replay(recorded)


def test_a_flipped_byte_in_the_samples_is_found_when_they_are_read(recorded):
    path = file_of(recorded, 0, 0)
    data = bytearray(path.read_bytes())
    data[data.index(b"NUMPY") + 128] ^= 1  # past the array's header
    path.write_bytes(data)
    with pytest.raises(RecordError, match="torn or changed"):
        replay(recorded)


def test_the_torn_last_line_of_a_killed_run_is_left_out(recorded):
    path = recorded / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    found = read_record(path)
    assert found.torn and [step.version for step in found.steps] == [1, 2, 3]
    assert replay(recorded).repeated == 3


def test_a_torn_line_before_others_is_an_error(recorded):
    path = recorded / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], lines[3][:10] + "\n", *lines[4:]]))
    with pytest.raises(RecordError, match="line 4 is torn or changed"):
        read_record(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda events: events[1:], "does not begin with the begin"),
        (lambda events: [events[0], *events], "begun twice"),
        (lambda events: events[:1], "nothing to repeat"),
        (lambda events: [events[0] | {"format": 9}, *events[1:]], "has format 9"),
        (lambda events: [*events[:2], {"kind": "trained", "step": 0}], "line 3: no event of this program"),
    ],
)
def test_records_that_cannot_be_repeated_say_why(recorded, change, words):
    edit_events(recorded, change)
    with pytest.raises(RecordError, match=words):
        read_record(recorded / "events.jsonl")


def test_samples_come_back_with_all_columns_and_versions(recorded):
    rng = np.random.default_rng(7)
    given = [rows_of(step, rng) for step in range(3)]
    step = read_step(recorded, 1, REPLICAS)
    order = np.lexsort((step.members, step.groups))
    assert list(zip(step.groups[order], step.members[order])) == [(g, m) for g in range(4, 8) for m in (0, 1)]
    for name in ("advantage", "reward", "finish"):
        np.testing.assert_array_equal(step.columns[name][order], given[1][name])
    for name in ("response_ids", "rollout_logprobs"):
        for got, expected in zip(step.columns[name].take(order), given[1][name], strict=True):
            np.testing.assert_array_equal(got, expected)
    assert set(step.versions[0].tolist()) == {0}


def chunk(size):
    return (
        np.array([5]),
        {5: (0, 0)},
        {5: (0, 0)},
        {"advantage": np.zeros(1, np.float32), "x": np.zeros(size, np.uint8)},
    )


def test_recording_stops_at_its_limit_and_says_from_which_step_on(tmp_path, caplog):
    log = SampleLog(tmp_path, 0, 1000)
    with caplog.at_level("WARNING", logger="asyncflow"):
        for version in (1, 2, 3):
            log.add(*chunk(450))
            log.finish(version)
    log.close()
    assert [f.name for f in sorted(tmp_path.iterdir())] == ["step_000000_replica_0.npz", "step_000001_replica_0.npz"]
    (said,) = caplog.messages
    assert "from step 2 on" in said and "observe.events_mb" in said


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path, caplog, monkeypatch):
    log = SampleLog(tmp_path, 0, 1000)
    monkeypatch.setattr(np, "savez", full)
    with caplog.at_level("WARNING", logger="asyncflow"):
        log.add(*chunk(1))
        log.finish(1)
        log.close()
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text


def full(*args, **arrays):
    raise OSError(28, "No space left on device")


def test_events_wait_in_memory_until_a_version_is_finished(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path, clock=lambda: 1.5)
    log.note("issued", batch=np.int64(3), groups=np.arange(2))
    assert path.read_text() == ""
    log.note("finished", version=1, tokens=2, samples=1, optim=OptimReport(False, float("nan"), 0.1, "w"))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"t": 1.5, "kind": "issued", "batch": 3, "groups": [0, 1]},
        {"t": 1.5, "kind": "finished", "version": 1, "tokens": 2, "samples": 1, "applied": False, "grad_norm": "nan",
         "lr": 0.1},
    ]  # fmt: skip
    log.close()
