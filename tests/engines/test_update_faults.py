"""Weight updates that go wrong, or that engines have been seen to get wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.base import EngineCaps
from mindspeed_asyncflow.engines.lifecycle import PAUSE_MODES
from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.engines.vllm import versions
from mindspeed_asyncflow.engines.vllm.backend import VLLMBackend
from mindspeed_asyncflow.errors import EngineError, WeightSyncError
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard import relay
from tests.engines.bench import Bench, House, Policy, ask, make_engine, prompt
from tests.reshard.whole_writer import WholeWriter

PAIR = (prompt(*range(40)), prompt(3, 1, 4, 1, 5, 9, 2, 6))


def weights(bench: Bench) -> dict[str, torch.Tensor]:
    """Copies of what the reference engine computes with."""
    return {name: tensor.clone() for name, tensor in bench.engine._backend.generation_buffers().items()}


def assert_bit_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32)), name


@pytest.mark.parametrize("family", ["dense", "experts"])
def test_engine_weights_are_those_published_bit_for_bit(house: House, family: str) -> None:
    """The same weights three times, then A, B, A."""
    bench = house.bench("reference", family)
    start = weights(bench)
    assert_bit_equal(start, dict(bench.policies["a"].tensors()))
    for _ in range(3):
        bench.serve("a")
        assert_bit_equal(weights(bench), start)
    for name in "ba":
        bench.serve(name)
        assert_bit_equal(weights(bench), dict(bench.policies[name].tensors()))


def test_a_push_that_fails_at_any_tensor_is_healed_by_the_next(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = house.bench("reference", "experts")
    good = relay.RelayReader.__iter__
    count = len(bench.policies["b"].tensors())
    for position in range(0, count, 5):

        def broken(self: relay.RelayReader, position: int = position) -> Iterator[tuple[str, torch.Tensor]]:
            for index, item in enumerate(good(self)):
                if index == position:
                    raise OSError("the link broke")
                yield item

        with monkeypatch.context() as patch:
            patch.setattr(relay.RelayReader, "__iter__", broken)
            with pytest.raises(WeightSyncError, match="the link broke"):
                bench.serve("b")
        assert bench.engine.state == "DIRTY"
        bench.serve("a")
        assert bench.engine.state == "RUNNING"
        assert_bit_equal(weights(bench), dict(bench.policies["a"].tensors()))


def test_a_version_that_is_recycled_during_a_load_is_not_served(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was copied last is of a newer version then; the next update heals it."""
    bench = house.bench("reference", "dense")
    manifest = bench.publish("b")
    good = relay.RelayReader.__iter__

    def overtaken(self: relay.RelayReader) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(good(self)):
            if index == 5:
                for _ in range(4):
                    bench.publish("a")
            yield item

    with monkeypatch.context() as patch:
        patch.setattr(relay.RelayReader, "__iter__", overtaken)
        with pytest.raises(WeightSyncError, match=rf"version {manifest.version} is not in the relay"):
            bench.engine.update(manifest)
    assert bench.engine.state == "DIRTY"
    bench.serve("b")
    assert_bit_equal(weights(bench), dict(bench.policies["b"].tensors()))


@pytest.mark.parametrize("running", [False, True], ids=["idle", "a request running"])
def test_answers_after_an_update_are_those_of_a_fresh_engine(house: House, running: bool) -> None:
    """B67: same prompt before and after; 1e-5."""
    bench = house.bench("reference", "dense")
    fresh = make_engine("reference", bench.policies["b"].folder, RolloutConfig())
    background = bench.engine.generate([ask("background", PAIR[0], 150)] if running else [], 60.0)
    try:
        for round_ in range(3):
            bench.serve("a")
            bench.answer(ask(f"before{round_}", PAIR[0], 3, seed=round_))
            bench.serve("b")
            (done,) = bench.answer(ask(f"after{round_}", PAIR[0], 10, seed=round_))
            (wanted,) = fresh.generate([ask("r", PAIR[0], 10, seed=round_)], 60.0)
            assert done.token_ids.tolist() == wanted.token_ids.tolist()
            assert np.abs(done.logprobs - wanted.logprobs).max() < 1e-5
        bench.engine.abort()
        assert len(list(background)) == running
    finally:
        fresh.close()


def test_a_cache_that_cannot_be_reset_is_not_served(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """B67: the weights are new but the keys and values are not."""

    def refuse() -> None:
        raise EngineError("blocks are in use")

    monkeypatch.setattr(bench.engine._backend, "clear_caches", refuse)
    with pytest.raises(WeightSyncError, match=r"blocks are in use.*DIRTY"):
        bench.serve("b")
    monkeypatch.undo()
    assert bench.engine.state == "DIRTY"


def test_vllm_is_told_to_reset_running_requests_too_and_its_answer_counts() -> None:
    """B67: the reset answers False, or does nothing, while requests run."""
    calls: list[bool] = []

    def reset(reset_running_requests: bool) -> bool:
        calls.append(reset_running_requests)
        return False

    backend = object.__new__(VLLMBackend)
    backend._core = SimpleNamespace(reset_prefix_cache=reset)
    with pytest.raises(EngineError, match="refused to reset its prefix cache"):
        backend.clear_caches()
    assert calls == [True]


def test_answers_name_the_weights_that_sampled_their_last_token(bench: Bench) -> None:
    """Before, across and after an update, and when an answer ends right after one without a new token."""
    first = bench.serve("a").fingerprint
    bench.hold()
    across = bench.engine.generate([ask("across", PAIR[0], 9)], 60.0)
    cut_off = bench.engine.generate([ask("cut off", PAIR[0], 9)], 60.0)
    bench.advance(4)
    second = bench.serve("b").fingerprint
    bench.engine.abort(["cut off"])
    (done,) = cut_off
    assert (len(done.token_ids), done.fingerprint) == (4, first)
    bench.release()
    (done,) = across
    assert ([s.end for s in done.spans], done.fingerprint) == ([4, 9], second)
    assert second != first
    (done,) = bench.answer(ask("after", PAIR[0], 2))
    assert done.fingerprint == bench.engine.fingerprint == second
    assert bench.serve("a").fingerprint == first


def test_the_folders_weights_have_no_fingerprint(house: House) -> None:
    """Nobody published them, so there is nothing to compare with."""
    engine = make_engine("reference", house.bench("reference", "dense").policies["a"].folder, RolloutConfig())
    (done,) = engine.generate([ask("r", prompt(1), 2)], 60.0)
    engine.close()
    assert (done.fingerprint, engine.fingerprint) == ("", "")


class TransposingWorker:
    """A worker that keeps experts [E, out, in] transposed for its kernels, the way vLLM's layers do on an NPU.

    `restores`: its start of an update brings the load layout back; one that forgets it loads into the kernel layout.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], restores: bool = True) -> None:
        self.experts = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.restores = restores
        self.kernel_layout = False
        self.conversions = 0
        self.loaded = ""
        self._convert()

    def _convert(self) -> None:
        self.experts = {name: w.transpose(-1, -2).contiguous() for name, w in self.experts.items()}
        self.kernel_layout = not self.kernel_layout
        self.conversions += self.kernel_layout

    def rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        return [getattr(self, method)(*args)]

    def relay_begin(self) -> None:
        if not self.kernel_layout:  # the last update broke off
            self._convert()

    def start_weight_update(self, *args: bool) -> None:
        if self.restores:
            self._convert()

    def update_weights(self, info: dict[str, str]) -> None:
        reader = relay.RelayReader(relay.manifest_from_json(info["manifest"]))
        for name, tensor in reader:
            if self.experts[name].shape != tensor.shape:
                raise WeightSyncError(f"{name!r}: shape {tuple(tensor.shape)} into {tuple(self.experts[name].shape)}")
            self.experts[name].copy_(tensor)
        self.loaded = reader.verify()

    def finish_weight_update(self) -> None:
        self._convert()

    def relay_load(self, manifest: str) -> None:
        self.start_weight_update()
        self.update_weights({"manifest": manifest})
        self.finish_weight_update()

    def relay_end(self) -> str:
        return self.loaded


class TransposingBackend:
    """The part of a backend that updates use, on top of a `TransposingWorker`."""

    caps = EngineCaps("transposing", PAUSE_MODES, (), ("relay",), True)
    token_count = 1

    def __init__(self, worker: TransposingWorker, shape: versions.CallShape) -> None:
        self._worker, self._shape = worker, shape

    def check_manifest(self, manifest: WeightManifest) -> None:
        """Everything fits."""

    def load(self, manifest: WeightManifest) -> str:
        (loaded,) = versions.update_weights(self._worker.rpc, self._shape, relay.manifest_to_json(manifest))
        return str(loaded)

    def progress(self) -> dict[str, int]:
        return {}

    def clear_caches(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing is held."""


def experts(seed: int, square: bool) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {f"layers.{i}.w13": torch.randn(4, 8, 8 if square else 6, generator=made) for i in range(2)}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "relay")


def transposing_engine(worker: TransposingWorker, shape: versions.CallShape) -> SteppedEngine:
    backend: Any = TransposingBackend(worker, shape)
    return SteppedEngine("transposing", lambda: backend, start_timeout_s=10.0, command_timeout_s=10.0)


@pytest.mark.parametrize("square", [False, True], ids=["oblong", "square"])
@pytest.mark.parametrize("shape", versions.ASCEND, ids=lambda s: ".".join(map(str, s.first)))
def test_experts_that_the_engine_transposes_are_converted_once_per_update(
    shape: versions.CallShape, square: bool, path: str
) -> None:
    """B69: w three times, then w', then w; for the calls of every vLLM release. Square experts fit either way round,
    so only their bits tell."""
    first, second = experts(1, square), experts(2, square)
    worker = TransposingWorker({name: tuple(w.shape) for name, w in first.items()})
    engine = transposing_engine(worker, shape)
    with WholeWriter(path, keep=2) as writer:
        for version, wanted in enumerate([first, first, first, second, first], start=1):
            before = worker.conversions
            engine.update(writer.publish(version, wanted.items()))
            assert worker.kernel_layout and worker.conversions == before + 1
            assert_bit_equal(worker.experts, {n: w.transpose(1, 2).contiguous() for n, w in wanted.items()})
    engine.close()


@pytest.mark.parametrize("shape", versions.ASCEND, ids=lambda s: ".".join(map(str, s.first)))
def test_an_update_into_the_kernels_layout_is_an_error(shape: versions.CallShape, path: str) -> None:
    """B69: the engine forgot to bring its load layout back. It is DIRTY then, and the next update does not count the
    half-converted weights as loaded."""
    wanted = experts(1, square=False)
    worker = TransposingWorker({name: tuple(w.shape) for name, w in wanted.items()}, restores=False)
    engine = transposing_engine(worker, shape)
    with WholeWriter(path, keep=2) as writer:
        with pytest.raises(WeightSyncError, match=r"shape \(4, 8, 6\) into \(4, 6, 8\)"):
            engine.update(writer.publish(1, wanted.items()))
        assert engine.state == "DIRTY"
        worker.restores = True
        engine.update(writer.publish(2, wanted.items()))
        assert_bit_equal(worker.experts, {n: w.transpose(1, 2).contiguous() for n, w in wanted.items()})
    engine.close()


def padded_model(folder: Path, tied: bool, fill: float) -> tuple[str, str]:
    """(folder with 1003 rows, the same with 1024 rows in its files): config.vocab_size is 1003 in both.

    `fill`: what other weights of the head are replaced with; nan leaves them. Padding rows are +-50.
    """
    import transformers
    from safetensors.torch import load_file, save_file

    torch.manual_seed(3)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=1003)
    config = transformers.Qwen2Config(**sizes, num_key_value_heads=1, tie_word_embeddings=tied)
    exact, padded = folder / "exact", folder / "padded"
    model = transformers.Qwen2ForCausalLM(config)
    if not math.isnan(fill):
        model.get_output_embeddings().weight.data.fill_(fill)
    for target in (exact, padded):
        model.save_pretrained(target)
    tensors = load_file(padded / "model.safetensors")
    signs = torch.tensor([1.0, -1.0]).repeat(11)[:21, None].expand(21, 32)  # one of them wins whatever the state is
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = torch.cat([tensors[name], 50.0 * signs])
    save_file(tensors, padded / "model.safetensors", metadata={"format": "pt"})
    return str(exact), str(padded)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_padding_rows_are_never_sampled_and_weigh_nothing(tied: bool, tmp_path: Path) -> None:
    """B71: vocabulary 1003 in 1024 rows, padding rows that would win every draw."""
    exact, padded = padded_model(tmp_path, tied, math.nan)
    policy, engine = Policy(exact), make_engine("reference", padded, RolloutConfig())
    rows = [ask(f"r{i}", prompt(i, 7), 40, seed=i) for i in range(4)] + [ask("greedy", prompt(1), 40, temperature=0.0)]
    for done in engine.generate(rows, 60.0):
        ids = next(r.prompt_ids for r in rows if r.request_id == done.request_id)
        assert int(done.token_ids.max()) < 1003
        assert np.abs(done.logprobs - policy.logprobs(ids, done.token_ids)).max() < 1e-5
    (score,) = engine.score([PAIR])
    assert np.abs(score - policy.logprobs(*PAIR)).max() < 1e-5
    with pytest.raises(EngineError, match=r"outside \[0, 1003\)"):
        engine.generate([ask("pad", prompt(1003), 1)], 60.0)
    engine.close()


def test_a_uniform_policy_has_the_vocabularys_own_probability(tmp_path: Path) -> None:
    """B71: -ln 1003 = -6.91075, not -ln 1024."""
    _, padded = padded_model(tmp_path, tied=False, fill=0.0)
    engine = make_engine("reference", padded, RolloutConfig())
    (done,) = engine.generate([ask("r", prompt(1), 20)], 60.0)
    engine.close()
    assert np.allclose(done.logprobs, -6.91075, atol=1e-5)


def test_vllms_own_padding_is_never_sampled(bench: Bench) -> None:
    """B71: vLLM rounds the vocabulary of 57 up to 64 rows inside; the reference engine has no such rows."""
    if bench.kind == "vllm":
        bench.engine._backend._core.collective_rpc(raise_padding)
    rows = [ask(f"r{i}", prompt(i), 40, seed=i) for i in range(8)]
    for request, done in zip(rows, bench.answer(*rows), strict=True):
        assert int(done.token_ids.max()) < 57
        expected = bench.policies["a"].logprobs(request.prompt_ids, done.token_ids)
        assert np.abs(done.logprobs - expected).max() < 2e-4


def raise_padding(worker: Any) -> None:
    """In vLLM's worker: rows of the output head behind the vocabulary become huge."""
    for name, weight in worker.model_runner.model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            assert weight.shape[0] == 64
            weight.data[57::2] = 50.0
            weight.data[58::2] = -50.0
