"""A transformers causal language model on the host whose weights can be replaced in place from the relay."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch

from mindspeed_asyncflow.engines.weights import TIED_HEAD, read_folder
from mindspeed_asyncflow.errors import DataError, WeightSyncError
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.relay import RelayReader

_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.weight")


class HostModel:
    """The model of `folder` in `dtype` (torch name), for inference."""

    def __init__(self, folder: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.weights = read_folder(folder)
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder} cannot be loaded as a causal language model: {error}") from error
        self._model = model.eval().requires_grad_(False)
        # transformers 5.2x renamed the argument and warns at every call with the old name.
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._parameters: dict[str, torch.Tensor] = dict(self._model.named_parameters())

    def new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, mask: torch.Tensor, *, cache: Any = None, keep: int = 0) -> torch.Tensor:
        """[B, keep, V] logits of the last `keep` positions (all, if 0) of left-padded `ids` [B, T].

        `mask` [B, T + cached] is 1 on real tokens; positions count real tokens only.
        """
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=cache is not None,
            logits_to_keep=keep,
            **{self._cache_name: cache},
        )
        return output.logits

    @torch.no_grad()
    def load(self, manifest: WeightManifest) -> str:
        """Copy one relay version over the weights and return its fingerprint. Raises `WeightSyncError`."""
        reader = RelayReader(manifest)
        fingerprint = reader.verify()
        for name, tensor in reader:
            self._target(name).copy_(tensor)
        reader.check()  # the writer must not have recycled the slot while we copied
        return fingerprint

    def _target(self, name: str) -> torch.Tensor:
        """Where the tensor of this Hugging Face name lives. transformers 5 keeps all experts of a layer in one tensor:
        gate and up [E, 2I, H], down [E, H, I]."""
        if name in self._parameters:
            return self._parameters[name]
        if name == TIED_HEAD and self.weights.tied:
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
