"""Two worker processes behind one vLLM engine give what one gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engines.bench import TOLERANCE, Bench, House, ask, prompt

pytestmark = pytest.mark.slow
PAIR = (prompt(*range(40)), prompt(3, 1, 4, 1, 5, 9, 2, 6))


@pytest.fixture(scope="module")
def two_workers(house: House) -> Bench:
    return house.bench("vllm", "dense", tensor_parallel=2)


def test_no_name_of_the_workers_shared_memory_is_left(two_workers: Bench) -> None:
    """What has a name while the engine lives would outlive it after a hard kill."""
    assert two_workers.engine.state == "RUNNING"
    assert list(Path("/dev/shm").glob("*-tp:0-*-cpushm_*")) == []


def test_two_workers_agree_with_the_full_model(two_workers: Bench) -> None:
    """Contract test 10."""
    requests = [ask(f"r{i}", prompt(i, 7, i + 2), 20, seed=i) for i in range(8)]
    for request, done in zip(requests, two_workers.answer(*requests), strict=True):
        expected = two_workers.policies["a"].logprobs(request.prompt_ids, done.token_ids)
        assert np.abs(done.logprobs - expected).max() < TOLERANCE


def test_both_workers_take_every_update(two_workers: Bench) -> None:
    """Contract tests 3-5 on shards: a half-updated pair would match neither policy."""
    engine = two_workers.engine
    (before,) = engine.score([PAIR])
    stream = engine.generate([ask("r", PAIR[0], 60, seed=2)], 60.0)
    engine.score([PAIR])
    for name in ("b", "a", "b"):
        report = two_workers.serve(name)
        (score,) = engine.score([PAIR])
        assert np.abs(score - two_workers.policies[name].logprobs(*PAIR)).max() < TOLERANCE
        assert report.fingerprint and report.version == engine.version
    (done,) = stream
    assert len(done.token_ids) == 60 and done.spans[-1].end == 60
    two_workers.serve("a")
    (after,) = engine.score([PAIR])
    assert after.tolist() == before.tolist()
