"""vLLM's v1 engine core, held in this process and stepped by hand: requests in as token ids, tokens out."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_asyncflow.config.model import HEAD
from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.engines.base import EngineCaps
from mindspeed_asyncflow.engines.lifecycle import PAUSE_MODES
from mindspeed_asyncflow.engines.step_backend import Finished, WantedWeight
from mindspeed_asyncflow.engines.vllm import guards, versions
from mindspeed_asyncflow.engines.vllm.arguments import engine_args, sampling_params
from mindspeed_asyncflow.engines.vllm.native import NativeTransfer, Rendezvous
from mindspeed_asyncflow.engines.weights import FolderWeights
from mindspeed_asyncflow.errors import EngineError, WeightSyncError
from mindspeed_asyncflow.records import GenRequest, SamplingSpec, WeightManifest
from mindspeed_asyncflow.reshard.relay import manifest_to_json

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
RESUME_SEED_STRIDE = 0x9E3779B97F4A7C15  # resumed answers draw fresh noise, still a function of (seed, position)


@dataclass(slots=True)
class _Row:
    """One running request."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class VLLMBackend:
    """See `StepBackend`. One instance per process: vLLM keeps its parallel groups in globals."""

    def __init__(
        self,
        model_folder: str,
        weights: FolderWeights,
        rollout: RolloutConfig,
        *,
        dtype: str,
        max_model_len: int,
        seed: int,
        stop_token_ids: tuple[int, ...],
        cpu: bool,
        sleep_enabled: bool,
        native: tuple[str, int] | None = None,
    ) -> None:
        """`native`: backend and bucket bytes of vllm-ascend's own weight transfer, in place of the relay."""
        import torch
        import torch._dynamo
        import vllm
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        torch.set_num_threads(rollout.threads)
        self._graphs = rollout.ascend.graphs and not cpu
        torch._dynamo.config.disable = not self._graphs  # torch may have read the environment before we wrote it
        self._native = NativeTransfer(*native, versions.ascend_shape_for(vllm.__version__)) if native else None
        if cpu:
            self._shape = versions.shape_for(vllm.__version__, experts=weights.has_experts)
        else:
            self._shape = versions.ascend_shape_for(vllm.__version__)
            guards.check_npu_settings(os.environ, rollout, self._shape, sleep=sleep_enabled, native=self._native)
        self._weights = weights
        self._dtype = dtype
        self._sleeps_for_real = sleep_enabled and not cpu
        self.token_count = weights.token_count
        self._asleep = 0  # sleep level; 2 also while only the cache is still asleep
        self._max_model_len = max_model_len
        self._stop_token_ids = stop_token_ids
        args = engine_args(
            model_folder,
            rollout,
            dtype=dtype,
            max_model_len=max_model_len,
            seed=seed,
            cpu=cpu,
            sleep=sleep_enabled,
            transfer=self._transfer,
            cache_parts=weights.cache_parts,
        )
        config = args.create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        versions.check_verbs(self._core.collective_rpc, self._shape, vllm.__version__)
        self.chunks: Iterable[dict[str, Any]] | None = None  # of the native update under way, where it needs any
        if self._transfer == versions.RELAY_ENGINE:
            self._core.collective_rpc("init_weight_transfer_engine", args=({},))
        if cpu:
            self._core.collective_rpc("seed_every_row")
        if cpu and rollout.tensor_parallel > 1:
            self._unlink_collective_memory()
        self._rows: dict[str, _Row] = {}  # engine id -> row; engine ids are never used twice
        self._ids: dict[str, str] = {}  # request id -> engine id
        self._count = 0
        self._params: dict[SamplingSpec, Any] = {}
        self._score_params = sampling_params(SamplingSpec(max_tokens=1), (), prompt_logprobs=0)
        self._scores: dict[str, np.ndarray | None] = {}
        self._spill: list[Finished] = []  # finished while scoring
        self.caps = EngineCaps(
            name=f"vllm {vllm.__version__}",
            pause_modes=PAUSE_MODES,
            sleep_levels=(1, 2) if cpu or sleep_enabled else (),
            transports=(self._native.backend if self._native else "relay",),
            expert_parallel=not cpu,
            notes="sleep frees no memory on CPU: see residual_bytes" if cpu else "",
        )

    @property
    def _transfer(self) -> str | None:
        """Name of vLLM's transfer engine that weights come by."""
        if self._native is not None:
            return self._native.backend
        return versions.RELAY_ENGINE if self._shape.transfer_engine else None

    def _unlink_collective_memory(self) -> None:
        """Take away the names of the memory that the workers reduce over. All have mapped it by now, and vLLM itself
        never removes the names, not even in an orderly end."""
        prefixes: list[str] = self._core.collective_rpc("collective_prefix")
        for prefix in set(prefixes):
            for file in SHARED_MEMORY.glob(f"{prefix}-*-cpushm_*"):
                file.unlink(missing_ok=True)

    # ---- requests --------------------------------------------------------------------------------------------------

    def check(self, request: GenRequest) -> None:
        self._base_params(request.sampling)
        length = len(request.prompt_ids) + request.sampling.max_tokens
        if length > self._max_model_len:
            raise EngineError(
                f"request {request.request_id}: prompt of {len(request.prompt_ids)} plus max_tokens "
                f"{request.sampling.max_tokens} exceeds the model length {self._max_model_len}"
            )
        self._weights.check_ids(request.request_id, request.prompt_ids)

    def admit(self, requests: Sequence[GenRequest]) -> None:
        for request in requests:
            prompt = request.prompt_ids.tolist()
            resumed = 0 if request.resume_ids is None else len(request.resume_ids)
            params = copy.copy(self._base_params(request.sampling))
            if resumed and request.resume_ids is not None:
                prompt += request.resume_ids.tolist()
                params.max_tokens = request.sampling.max_tokens - resumed
            params.seed = (request.seed + resumed * RESUME_SEED_STRIDE) & (2**63 - 1)
            engine_id = self._add(prompt, params)
            self._rows[engine_id] = _Row(request.request_id)
            self._ids[request.request_id] = engine_id

    def _base_params(self, spec: SamplingSpec) -> Any:
        """vLLM's form of `spec`. Raises `EngineError` for values that vLLM refuses or silently changes."""
        params = self._params.get(spec)
        if params is None:
            from vllm.exceptions import VLLMValidationError

            try:
                params = sampling_params(spec, spec.stop_token_ids or self._stop_token_ids)
            except (ValueError, VLLMValidationError) as error:  # the second is not always a ValueError
                raise EngineError(f"vLLM cannot sample like {spec}: {error}") from error
            if params.temperature != spec.temperature:
                raise EngineError(f"vLLM would sample at temperature {params.temperature}, not {spec.temperature}")
            self._params[spec] = params
        return params

    def _add(self, prompt: list[int], params: Any) -> str:
        from vllm.v1.engine import EngineCoreRequest

        engine_id = str(self._count)
        self._count += 1
        request = versions.core_request(
            EngineCoreRequest,
            request_id=engine_id,
            prompt_token_ids=prompt,
            sampling_params=params,
            arrival_time=time.time(),
        )
        self._core.add_request(*self._core.preprocess_add_request(request))
        return engine_id

    def step(self) -> list[Finished]:
        return self._advance()

    def _advance(self) -> list[Finished]:
        outputs, _ = self._core.step()
        finished, self._spill = self._spill, []
        for output in outputs[0].outputs if outputs else ():
            row = self._rows.get(output.request_id)
            if row is None:
                self._take_score(output)
                continue
            row.token_ids += output.new_token_ids
            if output.new_token_ids and output.new_logprobs is not None:  # one row, the sampled token first
                row.logprobs.append(output.new_logprobs.logprobs[0, 0])
            if output.finish_reason is not None:
                del self._rows[output.request_id], self._ids[row.request_id]
                finished.append(Finished(row.request_id, row.token_ids, row.logprobs, str(output.finish_reason)))
        return finished

    def progress(self) -> dict[str, int]:
        return {row.request_id: len(row.token_ids) for row in self._rows.values()}

    def sampled(self, since: Mapping[str, int]) -> list[Finished]:
        rows = [(self._rows[self._ids[name]], n) for name, n in since.items() if name in self._ids]
        return [Finished(row.request_id, row.token_ids[n:], row.logprobs[n:], "running") for row, n in rows]

    def abort(self, request_ids: Sequence[str]) -> list[Finished]:
        engine_ids = [self._ids.pop(i) for i in request_ids if i in self._ids]
        self._core.abort_requests(engine_ids)
        rows = [self._rows.pop(i) for i in engine_ids]
        done, self._spill = [f for f in self._spill if f.request_id in request_ids], []
        return done + [Finished(r.request_id, r.token_ids, r.logprobs, "abort") for r in rows]

    # ---- weights ---------------------------------------------------------------------------------------------------

    def check_manifest(self, manifest: WeightManifest) -> None:
        self._weights.check(manifest)

    def load(self, manifest: WeightManifest) -> str:
        rpc = self._core.collective_rpc
        if self._native is not None:
            fingerprints = set(self._native.receive(rpc, manifest, self.chunks))
        else:
            fingerprints = set(versions.update_weights(rpc, self._shape, manifest_to_json(manifest)))
        if self._graphs:
            guards.check_addresses(rpc("moved_weights"))
        if len(fingerprints) != 1:
            raise WeightSyncError(f"workers of one replica loaded different bytes: {sorted(fingerprints)}")
        if self._asleep == 2:  # it would have been in the way of the load
            self._core.model_executor.wake_up(["kv_cache"])
            self._asleep = 0
        return fingerprints.pop()

    def join(self, rendezvous: Rendezvous | None) -> None:
        """Meet the sender of native weight transfers."""
        if self._native is None:
            raise EngineError("this engine takes weights from the relay and meets no sender")
        self._native.join(self._core.collective_rpc, rendezvous)

    def weights_wanted(self) -> tuple[WantedWeight, ...]:
        optional = {HEAD} if self._weights.tied else set()
        return tuple(WantedWeight(n, self._dtype, s) for n, s in self._weights.shapes.items() if n not in optional)

    def generation_buffers(self) -> dict[str, torch.Tensor]:
        raise EngineError("vLLM keeps weights in layouts of its own kernels; give it a relay version by update")

    def buffers_fingerprint(self) -> str:
        raise EngineError("vLLM has no generation buffers")

    def clear_caches(self) -> None:
        if not self._core.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM refused to reset its prefix cache")
        self._core.reset_encoder_cache()

    # ---- scoring ---------------------------------------------------------------------------------------------------

    def score(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """float32 [L] each. Prompt log-probs are those of the raw logits, i.e. temperature 1."""
        lengths = [len(prompt) + len(response) for prompt, response in sequences]
        if max(lengths, default=0) > self._max_model_len:
            raise EngineError(f"a sequence of {max(lengths)} tokens exceeds the model length {self._max_model_len}")
        ids = []
        for prompt, response in sequences:
            ids.append(self._add(np.concatenate([prompt, response]).tolist(), self._score_params))
        self._scores = dict.fromkeys(ids)
        spill: list[Finished] = []
        while any(value is None for value in self._scores.values()):
            spill += self._advance()
        self._spill = spill
        scores, self._scores = self._scores, {}
        return [_tail(scores[i], len(response)) for i, (_, response) in zip(ids, sequences, strict=True)]

    def _take_score(self, output: Any) -> None:
        tensors = output.new_prompt_logprobs_tensors
        if tensors is not None and output.request_id in self._scores:
            self._scores[output.request_id] = tensors.logprobs[:, 0].numpy().copy()

    # ---- memory ----------------------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        rpc = self._core.collective_rpc
        rpc("keep_weights")
        held: list[int] = rpc("storage_bytes")
        before: list[int] = rpc("free_bytes") if self._sleeps_for_real else []
        self._core.model_executor.sleep(level)
        self._asleep = level
        if self._sleeps_for_real:
            guards.check_freed(held, before, rpc("free_bytes"))

    def wake(self) -> None:
        """After level 2 the cache stays asleep until the weights are loaded."""
        self._core.model_executor.wake_up(["weights"] if self._asleep == 2 else None)
        self._core.collective_rpc("put_weights_back")
        self._asleep = 2 if self._asleep == 2 else 0

    def residual_bytes(self) -> int:
        """Summed over the workers. Where sleep works, vLLM's allocator has unmapped everything behind the storages."""
        if self._asleep and self._sleeps_for_real:
            return 0
        return sum(self._core.collective_rpc("storage_bytes"))

    def close(self) -> None:
        self._core.shutdown()


def _tail(values: np.ndarray | None, count: int) -> np.ndarray:
    assert values is not None
    return values[len(values) - count :]
