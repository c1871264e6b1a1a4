"""What rollout engines hold on the device, what sleep takes away, and how their weights are filled in place."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.reference import ReferenceEngine
from mindspeed_asyncflow.errors import EngineError, PlatformError, WeightSyncError
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.memory import GENERATION_WEIGHTS, KINDS, KV_CACHE, DeviceMemory
from mindspeed_asyncflow.reshard.fingerprint import fingerprint_of
from tests.engines.bench import MAX_LEN, TOLERANCE, Bench, House, Policy, ask, prompt

PAIR = (prompt(*range(40)), prompt(3, 1, 4, 1, 5, 9, 2, 6))
NOTHING = dict.fromkeys(KINDS, 0)


class Arena:
    """A reference engine of one family in books of its own."""

    def __init__(self, policies: dict[str, Policy]) -> None:
        self.policies = policies
        self.memory = DeviceMemory(CpuPlatform())
        self.engine = ReferenceEngine(
            policies["a"].folder,
            RolloutConfig(max_running=8, timeout_s=30.0),
            dtype="float32",
            max_model_len=MAX_LEN,
            seed=0,
            stop_token_ids=(),
            memory=self.memory,
        )

    def census(self) -> int:
        """Bytes of all live tensors of this process."""
        gc.collect()
        return self.memory.census()

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30.0
        while not reached():
            assert time.monotonic() < deadline, "the engine did not get there within 30 s"
            time.sleep(0.001)

    def usage(self) -> dict[str, int]:
        return self.memory.usage()

    def score(self) -> list[float]:
        return self.engine.score([PAIR])[0].tolist()

    def fill(self, name: str, version: int) -> str:
        """Carry out an update in place; returns the fingerprint."""
        buffers = self.engine.generation_buffers()
        for weight, tensor in self.policies[name].tensors():
            buffers[weight].copy_(tensor)
        return self.engine.loaded(version).fingerprint


@pytest.fixture
def arena(request: pytest.FixtureRequest, policies: dict[str, dict[str, Policy]]) -> Iterator[Arena]:
    arena = Arena(policies[getattr(request, "param", "dense")])
    yield arena
    arena.engine.close()


with_experts = pytest.mark.parametrize("arena", ["dense", "experts"], indirect=True)


def weight_bytes(policy: Policy) -> int:
    return sum(t.numel() * t.element_size() for _, t in policy.tensors())


@with_experts
def test_weights_and_caches_are_what_is_on_the_device(arena: Arena) -> None:
    """Cache of one request after n tokens: 2 (keys, values) * 2 layers * 2 heads * 32 * 4 bytes * positions fed."""
    weights = arena.usage()[GENERATION_WEIGHTS]
    constants = weights - weight_bytes(arena.policies["a"])
    assert 0 <= constants <= 2 * 4 * 32  # rotary frequencies
    assert arena.usage() == {**NOTHING, GENERATION_WEIGHTS: weights}
    (done,) = arena.engine.generate([ask("r", prompt(1, 2, 3), 6)], 30.0)
    assert len(done.token_ids) == 6
    assert arena.usage() == {**NOTHING, GENERATION_WEIGHTS: weights}
    assert arena.memory.peak == weights + 2 * 2 * 2 * 32 * 4 * (3 + 5)
    arena.engine.close()
    assert arena.usage() == NOTHING


def test_a_running_request_holds_its_cache_until_it_is_dropped(arena: Arena) -> None:
    stream = arena.engine.generate([ask("r", prompt(*range(50)), 140)], 30.0)
    arena.until(lambda: arena.usage()[KV_CACHE] > 0)
    arena.engine.pause("keep", clear_cache=False)
    held = arena.usage()[KV_CACHE]
    assert held >= 2 * 2 * 2 * 32 * 4 * 50
    arena.engine.reset_prefix_cache()
    assert arena.usage()[KV_CACHE] == 0
    arena.engine.abort()
    list(stream)


@pytest.mark.slow
@with_experts
def test_sleep_2_leaves_nothing_and_only_an_update_brings_the_engine_back(arena: Arena) -> None:
    """0 bytes of generation weights and caches, by the books and by what the process holds; then DIRTY."""
    arena.fill("a", 1)
    before, bytes_before = arena.score(), arena.usage()
    wanted = arena.engine.weights_wanted()
    arena.engine.pause()
    awake = arena.census()
    arena.engine.sleep(2)
    assert (arena.usage(), arena.engine.residual_bytes()) == (NOTHING, 0)
    assert awake - arena.census() == bytes_before[GENERATION_WEIGHTS]
    assert arena.engine.weights_wanted() == wanted
    arena.engine.wake()
    assert (arena.engine.state, arena.usage()) == ("DIRTY", bytes_before)
    refused = [
        arena.engine.resume,
        arena.score,
        lambda: arena.engine.generate([ask("x", prompt(1), 1)], 1.0),
        lambda: arena.engine.sleep(1),
    ]
    for verb in refused:
        with pytest.raises(EngineError, match="DIRTY"):
            verb()
    arena.fill("a", 2)
    assert (arena.engine.state, arena.engine.version) == ("PAUSED", 2)
    arena.engine.resume()
    assert arena.score() == before


@with_experts
def test_sleep_1_takes_everything_to_the_host_and_back(arena: Arena) -> None:
    fingerprint = arena.fill("b", 7)
    before, bytes_before = arena.score(), arena.usage()
    for _ in range(2):
        arena.engine.pause()
        arena.engine.sleep(1)
        assert (arena.usage(), arena.engine.residual_bytes()) == (NOTHING, 0)
        arena.engine.wake()
        assert (arena.engine.state, arena.engine.version) == ("PAUSED", 7)
        assert arena.engine.fingerprint == fingerprint
        arena.engine.resume()
    assert arena.usage() == bytes_before
    assert arena.score() == before


def test_a_request_that_arrives_asleep_is_answered_with_the_new_weights(arena: Arena) -> None:
    arena.engine.pause()
    arena.engine.sleep(2)
    stream = arena.engine.generate([ask("r", PAIR[0], 8, seed=2)], 30.0)
    fingerprint = arena.fill("b", 3)  # wakes the engine by itself
    arena.engine.resume()
    (done,) = stream
    assert ([s.version for s in done.spans], done.fingerprint) == ([3], fingerprint)
    assert np.abs(done.logprobs - arena.policies["b"].logprobs(PAIR[0], done.token_ids)).max() < TOLERANCE


@with_experts
def test_buffers_are_the_weights_themselves(arena: Arena) -> None:
    """Names, types and shapes are those of the folder, experts one by one; nothing is allocated for a fill."""
    tensors = dict(arena.policies["b"].tensors())
    bytes_before = arena.usage()
    buffers = arena.engine.generation_buffers()
    assert arena.engine.state == "UPDATING"
    assert {n: (str(t.dtype), tuple(t.shape)) for n, t in buffers.items()} == {
        n: (f"torch.{dtype}", shape) for n, dtype, shape in arena.engine.weights_wanted()
    }
    assert {n: tuple(t.shape) for n, t in buffers.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
    pieces = sorted((t.data_ptr(), t.numel() * 4) for t in buffers.values())
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(pieces))  # no two overlap
    for name, tensor in tensors.items():
        buffers[name].copy_(tensor)
    report = arena.engine.loaded(4, fingerprint_of(tensors))
    assert (report.version, report.fingerprint) == (4, fingerprint_of(tensors))
    assert arena.usage() == bytes_before
    expected = arena.policies["b"].logprobs(*PAIR)
    assert np.abs(np.float32(arena.score()) - expected).max() < TOLERANCE


def test_a_fill_under_running_requests_cuts_their_answers_like_an_update(arena: Arena) -> None:
    stream = arena.engine.generate([ask("r", PAIR[0], 150, seed=1)], 30.0)
    buffers = arena.engine.generation_buffers()
    cut = arena.engine._backend.progress()["r"]
    late = arena.engine.generate([ask("late", PAIR[0], 3)], 30.0)
    with pytest.raises(EngineError, match="UPDATING"):
        arena.engine.pause()
    for weight, tensor in arena.policies["b"].tensors():
        buffers[weight].copy_(tensor)
    assert arena.engine._backend.progress() == {"r": cut}
    arena.engine.loaded(1)
    (done,), (queued,) = stream, late
    spans = [(s.version, s.end) for s in done.spans]
    assert spans == ([(0, cut), (1, 150)] if cut else [(1, 150)])
    assert [s.version for s in queued.spans] == [1]
    expected = arena.policies["b"].logprobs(PAIR[0], done.token_ids)[cut:]
    assert np.abs(done.logprobs[cut:] - expected).max() < TOLERANCE


@pytest.mark.parametrize("how", ["given up", "other bytes", "older version"])
def test_a_fill_that_fails_leaves_dirty_until_a_complete_one(arena: Arena, how: str) -> None:
    arena.fill("a", 5)
    before = arena.score()
    stream = arena.engine.generate([ask("r", PAIR[0], 150)], 30.0)
    buffers = arena.engine.generation_buffers()
    next(iter(buffers.values())).zero_()
    if how == "given up":
        arena.engine.load_failed("a rank died")
    else:
        version, fingerprint = (6, "0" * 16) if how == "other bytes" else (4, "")
        with pytest.raises(WeightSyncError, match=rf"taking over weight version {version} failed .* DIRTY"):
            arena.engine.loaded(version, fingerprint)
    (done,) = stream
    assert (arena.engine.state, arena.engine.version, done.finish_reason) == ("DIRTY", 5, "abort")
    with pytest.raises(EngineError, match="DIRTY"):
        arena.engine.generate([ask("x", prompt(1), 1)], 1.0)
    arena.fill("a", 6)
    assert (arena.engine.state, arena.score()) == ("RUNNING", before)


def test_filling_verbs_need_their_state(arena: Arena) -> None:
    for verb in (lambda: arena.engine.loaded(1), lambda: arena.engine.load_failed("no")):
        with pytest.raises(EngineError, match="needs UPDATING"):
            verb()
    arena.engine.generation_buffers()
    with pytest.raises(EngineError, match="UPDATING"):
        arena.engine.generation_buffers()
    arena.engine.loaded(0)


def test_a_fill_overtakes_a_pause_that_waits(arena: Arena) -> None:
    """Otherwise the pause would find an engine that is neither running nor paused."""
    stream = arena.engine.generate([ask("r", PAIR[0], 150)], 30.0)
    drained: list[BaseException] = []

    def wait() -> None:
        try:
            arena.engine.pause("wait")
        except EngineError as error:
            drained.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    arena.until(lambda: arena.engine._draining is not None)
    buffers = arena.engine.generation_buffers()
    waiter.join(30.0)
    assert "a weight load overtook it" in str(drained[0])
    for weight, tensor in arena.policies["b"].tensors():
        buffers[weight].copy_(tensor)
    arena.engine.loaded(1)
    assert len(list(stream)) == 1


def test_weights_without_memory_are_never_loaded_into(house: House) -> None:
    """Writing into a released storage would end the process."""
    bench = house.bench("reference", "dense")
    manifest, model = bench.publish("b"), bench.engine._backend._model
    model.sleep(keep_weights=False)
    with pytest.raises(WeightSyncError, match="no memory to be loaded into"):
        bench.engine.update(manifest)
    model.wake()
    bench.serve("b")


def test_a_sleep_that_fails_half_way_leaves_dirty(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = arena.memory.release, 0

    def broken(tensor: torch.Tensor) -> int:
        nonlocal count
        count += 1
        if count == 5:
            raise PlatformError("the device went away")
        return real(tensor)

    arena.engine.pause()
    monkeypatch.setattr(arena.memory, "release", broken)
    with pytest.raises(EngineError, match=r"sleep\(2\) failed \(the device went away\); the engine is DIRTY"):
        arena.engine.sleep(2)
    monkeypatch.undo()
    with pytest.raises(EngineError, match="DIRTY"):
        arena.engine.resume()
    arena.fill("b", 1)
    arena.engine.resume()
    assert np.abs(np.float32(arena.score()) - arena.policies["b"].logprobs(*PAIR)).max() < TOLERANCE


def test_an_engine_that_finds_no_room_to_wake_holds_nothing(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = arena.memory.restore, 0

    def full(tensor: torch.Tensor, nbytes: int) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise PlatformError("the device is full")
        real(tensor, nbytes)

    arena.engine.pause()
    arena.engine.sleep(2)
    monkeypatch.setattr(arena.memory, "restore", full)
    asleep = arena.usage()
    with pytest.raises(PlatformError, match="the device is full"):
        arena.engine.wake()
    assert (arena.engine.state, arena.usage()[KV_CACHE]) == ("SLEEPING", 0)
    assert arena.usage()[GENERATION_WEIGHTS] - asleep[GENERATION_WEIGHTS] < 4096  # constants of the rotary embedding
    monkeypatch.undo()
    arena.fill("b", 1)
    arena.engine.resume()
    assert np.abs(np.float32(arena.score()) - arena.policies["b"].logprobs(*PAIR)).max() < TOLERANCE


def test_vllm_on_a_cpu_frees_nothing_and_says_how_much(house: House, kind: str) -> None:
    """The lifecycle is that of every engine; the bytes that stay are reported as such."""
    bench = house.bench(kind, "dense")
    if kind == "reference":
        assert "in_place" in bench.engine.capabilities().transports
        return
    held = bench.engine.residual_bytes()
    assert held >= weight_bytes(bench.policies["a"]) + RolloutConfig().kv_cache_mb * 2**20 * 0.9
    with pytest.raises(EngineError, match="give it a relay version by update"):
        bench.engine.generation_buffers()
    assert bench.engine.state == "RUNNING"
    wanted = {w.name: tuple(w.shape) for w in bench.engine.weights_wanted()}
    assert wanted == {n: tuple(t.shape) for n, t in bench.policies["a"].tensors()}


def test_every_engine_is_dirty_after_sleep_2(bench: Bench) -> None:
    (before,) = bench.engine.score([PAIR])
    bench.engine.pause()
    bench.engine.sleep(2)
    assert bench.engine.residual_bytes() == 0 or bench.kind == "vllm"
    bench.engine.wake()
    assert bench.engine.state == "DIRTY"
    with pytest.raises(EngineError, match="DIRTY"):
        bench.engine.generate([ask("x", prompt(1), 1)], 1.0)
    report = bench.serve("a")
    bench.engine.resume()
    (after,) = bench.engine.score([PAIR])
    assert after.tolist() == before.tolist()
    assert bench.engine.fingerprint == report.fingerprint
