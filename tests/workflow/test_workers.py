import numpy as np
import pytest

from mindspeed_asyncflow.errors import EngineError
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.records import Completion, SamplingSpec, VersionSpan
from mindspeed_asyncflow.workflow.workers import RolloutWorker, RowBatch, sample_seed


def test_every_sample_of_a_run_has_its_own_seed_whatever_replica_answers_it():
    """B83: the seed depends on run seed, prompt issue and member only; 4 x 20,000 samples never share one."""
    seeds = {sample_seed(run, group, member) for run in (0, 1) for group in range(5000) for member in range(8)}
    assert len(seeds) == 2 * 5000 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_neighbouring_samples_have_unrelated_seeds():
    a, b = sample_seed(7, 3, 0), sample_seed(7, 3, 1)
    assert bin(a ^ b).count("1") > 15


class Aborting:
    """An engine whose weights failed to load while it answered."""

    version, state = 3, "DIRTY"

    def generate(self, requests, timeout_s, stream=None):
        for request in requests:
            ids, spans = np.array([5], np.int32), (VersionSpan(3, 0, 1),)
            yield Completion(request.request_id, ids, np.zeros(1, np.float32), "abort", spans)


class ReadOnlyDock:
    def read(self, rows, columns):
        empty = {name: [np.empty(0, np.int32)] * len(rows) for name in columns}
        return empty | {"prompt_ids": [np.array([1, 2], np.int32) for _ in rows]}


def test_a_part_of_an_answer_is_never_handed_on_as_a_whole_one():
    """A load that fails ends running answers; the run stops and nothing is written for them."""
    worker = RolloutWorker(
        Aborting(),
        ReadOnlyDock(),
        SamplingSpec(4),
        name="rollout0",
        seed=0,
        commit_groups=1,
        timeout_s=1.0,
        tracer=Tracer("", "test", enabled=False),
    )
    batch = RowBatch(np.array([7]), np.array([0]), np.array([0], np.int32))
    with pytest.raises(EngineError, match=r"rollout0: .*'abort' after 1 tokens .engine DIRTY, version 3"):
        worker.generate(1, batch)
