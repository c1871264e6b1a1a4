"""megatron's GPTModel with a head that returns log-probabilities of the trained positions only."""

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


class PolicyModel(GPTModel):
    """GPTModel over packed samples. With `labels=Selection` the last stage returns float32 [2, N]: log-probabilities
    and entropies; without labels it returns the logits of all positions, [T/cp, 1, V/tp]."""

    def __init__(self, *args: Any, temperature: float, true_vocab: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.temperature, self.true_vocab = temperature, true_vocab
        if self.config.multi_latent_attention:  # each of megatron's layers has a table of its own; ours have none
            rope = RotaryEmbedding(self.config.qk_pos_emb_head_dim, 1.0, rotary_base=self.config.rotary_base)
        else:
            rope = self.rotary_pos_emb  # type: ignore[has-type]
        self.rotary_pos_emb = NoRotary(rope.inv_freq)
        if self.post_process and self.config.sequence_parallel:
            # positions are picked from the gathered sequence, so the gather, and the reduction of its gradient, happen
            # before the output layer instead of inside it
            self.output_layer.sequence_parallel = False
            self.output_layer.disable_grad_reduce = True

    def _postprocess(  # type: ignore[override]
        self, hidden_states: torch.Tensor, *args: Any, labels: Selection | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=self.pg_collection.tp
            )
        if labels is None:
            return self._logits(hidden_states)
        hidden = hidden_states
        if len(labels.index) != len(hidden):  # else all are trained, or the last layer has picked them already
            hidden = hidden.index_select(0, labels.index)  # [N, 1, H]
        rows = max(1, LOGITS_PER_CHUNK // self.output_layer.output_size_per_partition)
        if len(hidden) <= rows:
            return self._score(hidden, labels.targets)
        parts = [
            checkpoint(self._score, h, t, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(hidden.split(rows), labels.targets.split(rows))
        ]
        return torch.cat(parts, dim=1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, weight=weight)[0]

    def _score(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self._logits(hidden).squeeze(1)  # [N, V/tp]
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
