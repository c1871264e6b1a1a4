"""Everything that travels between the parts of a run: numpy arrays on the host, shape and unit beside each field."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One sample to generate. The `group_size` rows of one prompt share `group_id`."""

    group_id: int  # rises with issue order, unique in a run
    member: int  # 0 .. group_size-1
    group_size: int
    prompt_ids: np.ndarray  # int32 [P]
    truth: str  # what the scorer compares with; opaque to everybody else
    epoch: int = 0
    prompt_index: int = 0  # position in the prompt set
    fields: str = "{}"  # JSON object for scorers and environments: prompt, id, and what else the data has
    answer: Completion | None = None  # one that came about outside the run


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """How answers are drawn. Temperature is applied to logits, once."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Answer tokens [start, end) were sampled by policy version `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GenRequest:
    """One answer to generate. `seed` is unique per (step, prompt, sample)."""

    request_id: str
    prompt_ids: np.ndarray  # int32 [P]
    sampling: SamplingSpec
    seed: int
    resume_ids: np.ndarray | None = None  # int32 [K] tokens already sampled
    resume_logprobs: np.ndarray | None = None  # float32 [K]
    resume_spans: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. Invariant: `spans` tile [0, L); the final EOS token, if sampled, is part of the L tokens."""

    request_id: str
    token_ids: np.ndarray  # int32 [L]
    logprobs: np.ndarray  # float32 [L], of the distribution that was sampled from
    finish_reason: str  # stop | length | abort | error
    spans: tuple[VersionSpan, ...]
    fingerprint: str = ""  # of the version that sampled the last token
    mask: np.ndarray | None = None  # uint8 [L], 0 where an environment wrote the token; None: the policy sampled all

    @property
    def sampled(self) -> int:
        """Tokens of the policy."""
        return len(self.token_ids) if self.mask is None else int(self.mask.sum())

    @property
    def version_min(self) -> int:
        return min((s.version for s in self.spans), default=0)

    @property
    def version_max(self) -> int:
        return max((s.version for s in self.spans), default=0)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One scored answer as the trainer reads it."""

    row: int  # dock row handle
    group_id: int
    member: int
    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [L]
    rollout_logprobs: np.ndarray  # float32 [L]
    advantage: float | np.ndarray  # one for the answer, or float32 [L]
    version_min: int
    version_max: int
    ref_logprobs: np.ndarray | None = None  # float32 [L]
    loss_mask: np.ndarray | None = None  # uint8 [L]; None: every response token counts
    lags: np.ndarray | None = None  # int32 [L] trainer version minus the version that sampled the token
    values: np.ndarray | None = None  # float32 [L] of the critic, when the answer was scored
    returns: np.ndarray | None = None  # float32 [L]

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples packed back to back, T tokens in all, S samples; no sample sees another.

    Per-token fields are aligned with the token that is *predicted at* position t, i.e. index t speaks about
    `targets[t]`, the token that follows `input_ids[t]` inside the same sample.
    """

    input_ids: np.ndarray  # int64 [T]
    positions: np.ndarray  # int64 [T], 0-based inside each sample
    cu_seqlens: np.ndarray  # int32 [S+1]
    targets: np.ndarray  # int64 [T], next token; 0 at the last position of a sample
    loss_mask: np.ndarray  # float32 [T], 1 where targets[t] is a trained response token
    rollout_logprobs: np.ndarray  # float32 [T], 0 where loss_mask is 0
    advantages: np.ndarray  # float32 [T], 0 where loss_mask is 0
    sample_index: np.ndarray  # int32 [T], 0 .. S-1
    rows: np.ndarray  # int64 [S] dock row handles; -1 marks padding rows of weight zero
    ref_logprobs: np.ndarray | None = None  # float32 [T]
    lags: np.ndarray | None = None  # float32 [T], 0 where loss_mask is 0
    values: np.ndarray | None = None  # float32 [T], 0 where loss_mask is 0
    returns: np.ndarray | None = None  # float32 [T], 0 where loss_mask is 0

    @property
    def num_valid_tokens(self) -> float:
        return float(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class ShardMeta:
    """One contiguous block of a version: a box of a tensor, row after row, and the trainer rank that writes it."""

    box: tuple[int, int, int, int]  # rows [r0, r1), columns [c0, c1) of the tensor seen as a matrix
    offset: int  # bytes from the start of the version's payload
    nbytes: int
    writer: int = 0


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One tensor under its Hugging Face name. Shards are sorted by first row, then first column."""

    name: str
    dtype: str  # torch name without prefix, e.g. "float32", "bfloat16"
    shape: tuple[int, ...]
    shards: tuple[ShardMeta, ...]


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """One published weight version in the relay: where its bytes are and how to check them."""

    version: int
    path: str  # shared-memory file that every process of this node can map
    nbytes: int  # payload of one whole version
    params: tuple[ParamMeta, ...]  # what `path` holds of the version: all tensors, or the subset that was pulled
    checksums: tuple[int, ...]  # crc32 of every shard of `params`, in order
    fingerprint: str  # hex, over names, boxes and checksums of the whole version


@dataclass(frozen=True, slots=True)
class UpdateReport:
    version: int
    load_s: float
    fingerprint: str  # of the bytes that were loaded


@dataclass(frozen=True, slots=True)
class OptimReport:
    """What one optimizer step did. Reduced over all ranks."""

    applied: bool  # False: skipped because a gradient was not finite
    grad_norm: float  # before clipping; nan when not finite
    lr: float
    bad_tensor: str = ""  # first tensor with a non-finite gradient, when skipped
