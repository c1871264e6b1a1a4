"""How long a rollout engine stands still around an update whose bytes come over a slow link.

A writer publishes versions into shared memory (the trainer's node), a server sends them over loopback sockets, a mirror
pulls them into another file (the rollout's node) while the engine generates. The engine loads at its next step.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
import uuid
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.reference import ReferenceEngine
from mindspeed_asyncflow.records import GenRequest, SamplingSpec, WeightManifest
from mindspeed_asyncflow.reshard.relay_mirror import RelayMirror
from mindspeed_asyncflow.reshard.relay_server import RelayServer
from tests.reshard.whole_writer import WholeWriter

SLOWER = 10
VOCAB = 8192
TOKENS = 4000  # more than any measurement lasts
SECRET = b"benchmark"
TIMEOUT_S = 120.0


def measure(layers: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` updates: seconds without a step around an update, seconds of a bare load of the same bytes
    on an idle engine, and of the transfer that went on meanwhile."""
    name = f"/dev/shm/asyncflow-benchmark-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="reshard-") as folder:
        weights = _model(folder, layers)
        with WholeWriter(f"{name}-trainer") as writer, RelayMirror(f"{name}-rollout", SECRET) as mirror:
            return _updates(folder, weights, writer, mirror, repeats)


def _model(folder: str, layers: int) -> dict[str, torch.Tensor]:
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=768, num_hidden_layers=layers, num_attention_heads=12, num_key_value_heads=4,
        intermediate_size=2048, max_position_embeddings=TOKENS + 64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    return {n: t.detach() for n, t in model.named_parameters()}


class _Steps:
    """When the engine was inside a step."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self.spans: list[tuple[float, float]] = []
        backend = engine._backend  # a step has no name outside; a measurement must see it
        inner = backend.step

        def step() -> Any:
            began = time.monotonic()
            try:
                return inner()
            finally:
                self.spans.append((began, time.monotonic()))

        backend.step = step  # type: ignore[method-assign]

    def idle(self, begin: float, end: float) -> float:
        """Seconds between steps from `begin` to `end`, those that lie around them included, less what lies between as
        many undisturbed steps."""
        gaps = [(a[1], b[0]) for a, b in pairwise(self.spans)]
        ordinary = statistics.median(stop - start for start, stop in gaps)
        around = [stop - start for start, stop in gaps if stop > begin and start < end]
        return sum(around) - ordinary * len(around)


def _updates(
    folder: str, weights: dict[str, torch.Tensor], writer: WholeWriter, mirror: RelayMirror, repeats: int
) -> dict[str, Any]:
    nbytes = sum(t.numel() * t.element_size() for t in weights.values())
    manifest = writer.publish(1, weights.items())
    with RelayServer(writer.path, SECRET) as fast:
        began = time.monotonic()
        mirror.pull(manifest, fast.address, TIMEOUT_S)
        link = nbytes / (time.monotonic() - began)
    settings = RolloutConfig(engine="reference", timeout_s=600)
    engine = ReferenceEngine(
        folder, settings, dtype="float32", max_model_len=TOKENS + 64, seed=0, stop_token_ids=(VOCAB - 1,)
    )
    try:
        with RelayServer(writer.path, SECRET, bytes_per_s=link / SLOWER) as slow:
            seen = _compare(engine, weights, writer, mirror, slow.address, repeats)
    finally:
        engine.close()
    return seen | {"mb": nbytes / 1e6, "link_mb_per_s": link / 1e6, "slow_mb_per_s": link / SLOWER / 1e6}


def _compare(
    engine: ReferenceEngine, weights: dict[str, torch.Tensor], writer: WholeWriter, mirror: RelayMirror, address: str,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    steps = _Steps(engine)
    loads, idles, pulls, ratios = [], [], [], []
    for turn in range(repeats):
        version = 2 + turn
        del steps.spans[:]
        generating = _Generation(engine, version)
        generating.a_few_more_steps(steps)
        began = time.monotonic()
        manifest = writer.publish(version, weights.items())
        local = mirror.pull(manifest, address, TIMEOUT_S)
        pulled = time.monotonic()
        engine.update(local)
        ended = time.monotonic()
        generating.a_few_more_steps(steps)
        idles.append(steps.idle(began, ended))
        pulls.append(pulled - began)
        generating.stop()
        loads.append(min(_bare_load(engine, local) for _ in range(2)))
        ratios.append(idles[-1] / loads[-1])
    return {
        "exposed_over_load": statistics.median(ratios), "idle_s": statistics.median(idles),
        "load_s": statistics.median(loads), "pull_s": statistics.median(pulls),
    }  # fmt: skip


def _bare_load(engine: ReferenceEngine, local: WeightManifest) -> float:
    began = time.monotonic()
    engine.update(local)
    return time.monotonic() - began


class _Generation:
    """Requests that run until they are stopped."""

    def __init__(self, engine: ReferenceEngine, seed: int) -> None:
        self._engine = engine
        spec = SamplingSpec(max_tokens=TOKENS)
        prompt = np.arange(8, dtype=np.int32)
        requests = [GenRequest(f"{seed}-{i}", prompt, spec, seed=seed * 100 + i) for i in range(4)]
        self._answers = engine.generate(requests, TIMEOUT_S)
        self._thread = threading.Thread(target=lambda: list(self._answers), daemon=True)
        self._thread.start()

    def a_few_more_steps(self, steps: _Steps) -> None:
        wanted, until = len(steps.spans) + 3, time.monotonic() + TIMEOUT_S
        while len(steps.spans) < wanted:
            if time.monotonic() > until:
                raise TimeoutError(f"the engine made no step within {TIMEOUT_S} s after an update")
            time.sleep(0.005)

    def stop(self) -> None:
        self._engine.abort()
        self._thread.join(TIMEOUT_S)
