"""megatron's GPTModel with heads that compute the trained positions only: log-probabilities, or values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch.utils.checkpoint import checkpoint

from mindspeed_asyncflow.engines.megatron.logprobs import token_logprobs
from mindspeed_asyncflow.platforms.modules import NoRotary

LOGITS_PER_CHUNK = 1 << 25  # rows x vocabulary held at once (fp32: 128 MiB); more rows are computed in turn


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of this context-parallel rank's positions are scored, N in all."""

    index: torch.Tensor  # int64 [N], ascending, into [0, T/cp)
    targets: torch.Tensor  # int64 [N]


class PackedModel(GPTModel):
    """GPTModel over packed samples, whose last stage gives numbers of chosen positions: float32 [K, N] with
    `labels=Selection`. A model says which with `_score`; where each tensor-parallel rank computes a part of them,
    `SPLIT` is true and the gradient of the last hidden states is summed over these ranks."""

    SPLIT = True

    def __init__(self, *args: Any, inv_freq: torch.Tensor | None = None, **kwargs: Any) -> None:
        """inv_freq: float32 [D/2], rotary frequencies in place of those that follow from the base."""
        super().__init__(*args, **kwargs)
        if inv_freq is not None:
            self.rotary_pos_emb = NoRotary(inv_freq)
            return
        if self.config.multi_latent_attention:  # each of megatron's layers has a table of its own; ours have none
            rope = RotaryEmbedding(self.config.qk_pos_emb_head_dim, 1.0, rotary_base=self.config.rotary_base)
        else:
            rope = self.rotary_pos_emb  # type: ignore[has-type]
        self.rotary_pos_emb = NoRotary(rope.inv_freq)

    def _postprocess(  # type: ignore[override]
        self, hidden_states: torch.Tensor, *args: Any, labels: Selection | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # positions are picked from the gathered sequence, so the gather, and the reduction of its gradient, happen
            # before the head instead of inside it
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=self.SPLIT, group=self.pg_collection.tp
            )
        if labels is None:
            return self._whole(hidden_states)
        hidden = hidden_states
        if len(labels.index) != len(hidden):  # else all are trained, or the last layer has picked them already
            hidden = hidden.index_select(0, labels.index)  # [N, 1, H]
        return self._score(hidden, labels.targets)

    def _whole(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the model gives without a selection."""
        raise NotImplementedError

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[N, 1, H], int64 [N] -> float32 [K, N]"""
        raise NotImplementedError


class PolicyModel(PackedModel):
    """Log-probabilities and entropies, [2, N]; without a selection the logits of all positions, [T/cp, 1, V/tp]."""

    def __init__(self, *args: Any, temperature: float, true_vocab: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature, self.true_vocab = temperature, true_vocab
        if self.post_process and self.config.sequence_parallel:
            self.output_layer.sequence_parallel = False
            self.output_layer.disable_grad_reduce = True

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = max(1, LOGITS_PER_CHUNK // self.output_layer.output_size_per_partition)
        if len(hidden) <= rows:
            return self._score_rows(hidden, targets)
        parts = [
            checkpoint(self._score_rows, h, t, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(hidden.split(rows), targets.split(rows))
        ]
        return torch.cat(parts, dim=1)

    def _whole(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, weight=weight)[0]

    def _score_rows(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self._whole(hidden).squeeze(1)  # [N, V/tp]
        group = self.pg_collection.tp
        return torch.stack(
            token_logprobs(
                logits,
                targets,
                temperature=self.temperature,
                vocab_size=self.true_vocab,
                vocab_start=group.rank() * logits.shape[1],
                group=group if group.size() > 1 else None,
            )
        )


class ValueHead(torch.nn.Module):
    """The same on all tensor-parallel ranks, in float32 whatever the model is. It begins at 0: the first values are
    exactly 0, and the first step moves the head alone."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [N, H] -> float32 [N]
        return torch.nn.functional.linear(hidden.float(), self.weight, self.bias).squeeze(1)


class ValueModel(PackedModel):
    """Values of the states before the targets, [1, N]. It has no vocabulary head, and its own one from `add_head` on,
    so that a model folder is loaded without it."""

    SPLIT = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer = None

    def add_head(self, device: torch.device) -> None:
        if self.post_process:
            self.output_layer = ValueHead(self.config.hidden_size, device)  # type: ignore[assignment]

    def _whole(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.output_layer(hidden.squeeze(1))[None]  # type: ignore[misc]

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._whole(hidden)
