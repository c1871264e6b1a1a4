"""What the contract tests stand on: tiny random models, a fresh forward to compare with, an engine and a relay."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import numpy as np
import torch

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.records import Completion, GenRequest, SamplingSpec, UpdateReport, WeightManifest
from tests.reshard.whole_writer import WholeWriter

VOCAB = 57  # not a multiple of 64: vLLM pads the vocabulary inside
MAX_LEN = 200
TOLERANCE = 2e-4  # fp32 on CPU, facts: worst seen 5.3e-5


def make_model(folder: Path, family: str, seed: int) -> str:
    """A random 2-layer model with head size 32 and distributions that are far from uniform."""
    import transformers

    common = dict(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LEN + 8,
        tie_word_embeddings=family == "dense",
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    if family == "dense":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
    else:
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**common, **experts))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


class Policy:
    """One set of weights: its folder, and the log-probabilities of a fresh training-style forward."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = folder
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        from safetensors.torch import load_file

        return list(load_file(f"{self.folder}/model.safetensors").items())

    def logits(self, prompt: np.ndarray, answer: np.ndarray) -> torch.Tensor:
        """float32 [L, V] logits from which each answer token is drawn."""
        ids = torch.from_numpy(np.concatenate([prompt, answer])).long()[None]
        with torch.no_grad():
            return self._model(ids).logits[0, len(prompt) - 1 : -1].float()

    def logprobs(self, prompt: np.ndarray, answer: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        logits = self.logits(prompt, answer) / temperature
        return logits.log_softmax(-1).gather(1, torch.from_numpy(answer).long()[:, None])[:, 0].numpy()


class Bench:
    """An engine of one kind, policies "a" and "b" of one family, and the relay between them."""

    def __init__(self, kind: str, family: str, policies: dict[str, Policy], tensor_parallel: int = 1) -> None:
        self.kind, self.policies = kind, policies
        rollout = RolloutConfig(tensor_parallel=tensor_parallel, max_running=64, timeout_s=60.0)
        self.engine = make_engine(kind, policies["a"].folder, rollout)
        self._relay = WholeWriter(f"/dev/shm/asyncflow-test-{uuid.uuid4().hex}")
        self._version = 0
        self._permits: int | None = None  # steps that answers may still take; None: free running
        self._step = self.engine._backend.step
        self.engine._backend.step = self._gated_step

    def _gated_step(self) -> list:
        if self._permits == 0:
            time.sleep(0.001)
            return []
        if self._permits is not None:
            self._permits -= 1
        return self._step()

    def hold(self) -> None:
        """From now on answers grow only by `advance`, so that a test decides where a cut falls."""
        self._permits = 0

    def advance(self, count: int) -> None:
        """Let every running answer grow by exactly `count` tokens."""
        deadline = time.monotonic() + 60.0
        self._permits = count
        while self._permits:
            assert time.monotonic() < deadline, "the engine thread took no steps for 60 s"
            time.sleep(0.001)
        self.engine.abort(())  # ends nothing, but returns after the last of these steps

    def release(self) -> None:
        self._permits = None

    def publish(self, name: str) -> WeightManifest:
        self._version += 1
        return self._relay.publish(self._version, self.policies[name].tensors())

    def serve(self, name: str) -> UpdateReport:
        return self.engine.update(self.publish(name))

    def serve_flat(self) -> UpdateReport:
        """Weights of zero: every token is as likely as any other, so that answers show the random numbers alone."""
        self._version += 1
        zeros = [(name, torch.zeros_like(value)) for name, value in self.policies["a"].tensors()]
        return self.engine.update(self._relay.publish(self._version, zeros))

    def restart_versions_at(self, version: int) -> None:
        self._version = version

    def ready(self) -> None:
        """Back to RUNNING with policy "a", whatever the last test left."""
        self.release()
        self.engine.abort()
        if self.engine.state == "SLEEPING":
            self.engine.wake()
        self.serve("a")
        if self.engine.state == "PAUSED":
            self.engine.resume()

    def answer(self, *requests: GenRequest) -> list[Completion]:
        """Completions in the order of the requests."""
        done = {c.request_id: c for c in self.engine.generate(requests, 60.0)}
        return [done[r.request_id] for r in requests]

    def close(self) -> None:
        self._relay.close()
        self.engine.close()


def make_engine(kind: str, folder: str, rollout: RolloutConfig):  # type: ignore[no-untyped-def]
    common = dict(dtype="float32", max_model_len=MAX_LEN, seed=0, stop_token_ids=())
    if kind == "vllm":
        from mindspeed_asyncflow.engines.vllm.engine import VLLMEngine

        return VLLMEngine(folder, rollout, **common)
    from mindspeed_asyncflow.engines.reference import ReferenceEngine

    return ReferenceEngine(folder, rollout, **common)


class House:
    """Keeps engines between tests; at most one vLLM engine lives, because vLLM keeps its groups in globals."""

    def __init__(self, policies: dict[str, dict[str, Policy]]) -> None:
        self._policies = policies
        self._benches: dict[tuple[str, str, int], Bench] = {}

    def bench(self, kind: str, family: str, tensor_parallel: int = 1) -> Bench:
        key = (kind, family, tensor_parallel)
        if key not in self._benches:
            for other in [k for k in self._benches if k[0] == kind == "vllm"]:
                self._benches.pop(other).close()
            self._benches[key] = Bench(kind, family, self._policies[family], tensor_parallel)
        bench = self._benches[key]
        bench.ready()
        return bench

    def close(self) -> None:
        for bench in self._benches.values():
            bench.close()


def prompt(*ids: int) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


def ask(name: str, ids: np.ndarray, max_tokens: int, seed: int = 0, **sampling: object) -> GenRequest:
    return GenRequest(name, ids, SamplingSpec(max_tokens, **sampling), seed)  # type: ignore[arg-type]
