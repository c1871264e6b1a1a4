"""A transformers causal language model whose weights can be replaced in place. Ids come from the host and logits go
there, whichever device it computes on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch

from mindspeed_asyncflow.config.model import HEAD
from mindspeed_asyncflow.engines.step_backend import WantedWeight
from mindspeed_asyncflow.engines.weights import read_folder
from mindspeed_asyncflow.errors import DataError, WeightSyncError
from mindspeed_asyncflow.platforms.memory import GENERATION_WEIGHTS, KV_CACHE, DeviceMemory, HostPool
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.relay import feed
from mindspeed_asyncflow.reshard.swap import HostSwap

_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight")


class HostModel:
    """The model of `folder` in `dtype` (torch name), for inference. All its tensors have storages in `memory`, and it
    computes on the device of these.

    Embeddings may have more rows than the vocabulary (padding): the rows behind its end are never looked at.
    """

    def __init__(self, folder: str, dtype: str, memory: DeviceMemory) -> None:
        self.weights = read_folder(folder)
        model = _read_model(folder, dtype, self.weights.embedding_rows)
        self._device = memory.platform.device()
        self._model = model.eval().requires_grad_(False)
        # transformers 5.2x renamed the argument and warns at every call with the old name.
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._memory = memory
        self._swap = HostSwap(memory, HostPool(memory.platform))
        self._parameters: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)
        weights = {id(t): t for t in self._parameters.values()}
        self._weights = [t for t in weights.values() if t.numel()]
        constants = [b for b in self._model.buffers() if id(b) not in weights]
        self._constants = [b for b in constants if b.numel()]  # rotary frequencies
        for tensor in [*self._weights, *self._constants]:
            # Not as loaded: those storages may map the file, or be shared.
            place = memory.tensor(GENERATION_WEIGHTS, tensor.shape, tensor.dtype)
            tensor.data = place.copy_(tensor)

    def new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *, cache: Any = None, keep: int = 0) -> torch.Tensor:
        """[B, keep, V] logits of the last `keep` positions (all, if 0) of left-padded `ids` [B, T]; V: the vocabulary.

        `mask` [B, T + cached] is 1 on real tokens; positions count real tokens only. All three are on the host.
        """
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        output = self._model(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            position_ids=positions.to(self._device),
            use_cache=cache is not None,
            logits_to_keep=keep,
            **{self._cache_name: cache},
        )
        self._account(cache)
        return output.logits[..., : self.weights.vocab_size].to("cpu")

    def select(self, cache: Any, rows: torch.Tensor) -> None:
        """Keep these `rows` [R] of a cache."""
        cache.batch_select_indices(rows.to(self._device))
        self._account(cache)

    def _account(self, cache: Any) -> None:
        layers = () if cache is None else cache.layers
        self._memory.adopt(KV_CACHE, [t for x in layers if x.is_initialized for t in (x.keys, x.values)])

    @torch.no_grad()
    def load(self, manifest: WeightManifest) -> str:
        """Copy one relay version over the weights and return its fingerprint. Raises `WeightSyncError`."""
        if any(t.untyped_storage().nbytes() == 0 for t in self._weights):
            raise WeightSyncError("the weights have no memory to be loaded into; restart the engine")

        def copy(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in tensors:
                self._target(name).copy_(tensor)

        return feed(manifest, copy)

    def weights_wanted(self) -> tuple[WantedWeight, ...]:
        wanted = []
        for name, shape in self.weights.shapes.items():
            if not (name == HEAD and self.weights.tied):
                wanted.append(WantedWeight(name, self._dtype_of(name), shape))
        return tuple(wanted)

    def _dtype_of(self, name: str) -> str:
        owner = self._parameters.get(name, self._model.get_input_embeddings().weight)  # experts: like the embedding
        return str(owner.dtype).removeprefix("torch.")

    def buffers(self) -> dict[str, torch.Tensor]:
        """The weights that `weights_wanted` names; writing them changes the model."""
        return {wanted.name: self._target(wanted.name).detach() for wanted in self.weights_wanted()}

    def sleep(self, *, keep_weights: bool) -> None:
        """Free all device memory; what is kept goes to the host."""
        if keep_weights:
            self._swap.out({GENERATION_WEIGHTS: [*self._weights, *self._constants]})
        else:
            self._swap.out({GENERATION_WEIGHTS: self._constants})
            for tensor in self._weights:
                self._memory.release(tensor)

    def wake(self) -> None:
        """Device memory as before; contents of weights that were not kept are undefined. All of it or none: when there
        is no room for a weight, those before it are given back."""
        self._swap.back()
        restored: list[torch.Tensor] = []
        try:
            with self._memory.one_change():
                for tensor in self._weights:
                    if tensor.untyped_storage().nbytes() == 0:
                        self._memory.restore(tensor, tensor.numel() * tensor.element_size())
                        restored.append(tensor)
        except Exception:  # boundary: nothing stays half restored, and the error goes on
            for tensor in restored:
                self._memory.release(tensor)
            raise

    def device_bytes(self) -> int:
        """Bytes of weights and caches in the device memory that this model lives in."""
        usage = self._memory.usage()
        return usage[GENERATION_WEIGHTS] + usage[KV_CACHE]

    def close(self) -> None:
        """Free the weights. The model cannot be used again."""
        for tensor in [*self._weights, *self._constants]:
            tensor.data = torch.empty(0, dtype=tensor.dtype)

    def _target(self, name: str) -> torch.Tensor:
        """Where the tensor of this Hugging Face name lives. transformers 5 keeps all experts of a layer in one tensor:
        gate and up [E, 2I, H], down [E, H, I]."""
        if name in self._parameters:
            return self._parameters[name]
        if name == HEAD and self.weights.tied:
            return self._model.get_input_embeddings().weight
        match = _EXPERT.fullmatch(name)
        fused = match and ("down_proj" if match["part"] == "down" else "gate_up_proj")
        if not match or f"{match['layer']}.{fused}" not in self._parameters:
            raise WeightSyncError(f"the reference engine has no place for weight {name!r}")
        expert = self._parameters[f"{match['layer']}.{fused}"][int(match["index"])]
        if match["part"] == "down":
            return expert
        gate, up = expert.chunk(2, dim=0)
        return gate if match["part"] == "gate" else up


def _read_model(folder: str, dtype: str, rows: int) -> Any:
    """The transformers model with `rows` embedding rows. Raises `DataError`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        config.vocab_size = max(config.vocab_size, rows)
        return AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} cannot be loaded as a causal language model: {error}") from error
