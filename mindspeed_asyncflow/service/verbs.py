"""The service interface as calls: what HTTP (app.py) offers, and what a run (service/api.py) does for it.

The five verbs are those that AsyncFlow publishes (arXiv 2507.01663, section 5); the rest is what somebody who drives a
run from outside needs beside them. A *tenant* is whoever holds one token. The one who calls `init_engines` first owns
the engines and the run; the rows of every other tenant lie in a partition of their own, where nobody else sees them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Column = np.ndarray | list[np.ndarray] | list[str]  # one value per row: numbers, arrays of any lengths, texts


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to be answered `algorithm.group_size` times: a text, chat messages, or token ids."""

    prompt: str | list[dict[str, Any]] | np.ndarray
    truth: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)  # JSON values, for scorers and environments


@dataclass(frozen=True, slots=True)
class Experience:
    """Rows of one claim. `claim` 0: nothing came in time, and there are no rows."""

    claim: int
    rows: np.ndarray  # int64 [n]
    groups: np.ndarray  # int64 [n], rows of one prompt share it
    members: np.ndarray  # int32 [n], 0 .. group_size-1
    columns: Mapping[str, Column]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One answer that somebody else got, for instance an agent from /v1/chat/completions."""

    response_ids: np.ndarray  # int32 [L]
    rollout_logprobs: np.ndarray  # float32 [L]
    version: int  # oldest policy version that sampled a token of it
    response_mask: np.ndarray | None = None  # uint8 [L], 0 where the policy did not write the token
    finished: bool = True  # it ended by itself, not by a limit


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """All `algorithm.group_size` answers to one prompt. `rewards`: [group_size], None: the run's scorer finds them."""

    prompt: Prompt
    answers: Sequence[Trajectory]
    rewards: np.ndarray | None = None  # float32
    advantages: np.ndarray | None = None  # float32; None: from the rewards, by algorithm.advantage


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """For the replicas, outside the dock. Unset values are those of the run's `rollout` settings."""

    prompt_ids: np.ndarray  # int32 [P]
    max_tokens: int | None = None  # unset, or beyond the room: as many as prompt and answer together may have
    temperature: float | None = None  # 0: the likeliest token
    top_p: float | None = None
    top_k: int | None = None  # -1: off
    seed: int | None = None  # 0 .. 2**63-1; unset: another one each time
    stop_token_ids: tuple[int, ...] = ()  # besides those that end an answer in the run


@dataclass(frozen=True, slots=True)
class CompletionPart:
    """What is new of one answer: tokens, and at its end the reason. Tokens are never taken back."""

    index: int  # of the request in the call
    token_ids: np.ndarray  # int32 [l]
    logprobs: np.ndarray  # float32 [l], of the distribution that was sampled from
    version: int  # policy version that sampled these tokens; at the end of an answer without new ones: that serves
    finish_reason: str | None = None  # stop | length


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What somebody needs to know to ask the replicas. The name is that of /v1/models."""

    name: str
    tokenizer: Any  # of transformers, with the run's chat template
    max_model_len: int  # tokens of prompt and answer together
    stop_token_ids: tuple[int, ...]  # they end an answer, and are no part of its text
    version: int  # newest policy version that is published; -1: none yet


class Verbs(Protocol):
    """May be called from any event loop. Every call ends at its `timeout_s` or a deadline of its own.

    Raises `ServiceError`, whose `status` is that of the HTTP answer, and which never tells one tenant of another.
    """

    # ---- the five ----------------------------------------------------------------------------------------------------

    def init_engines(self, tenant: str, overrides: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Start the run of the server's settings, changed by `overrides` ({"trainer.steps": 20}; only keys that
        `config/service.py` lists). Yields {"phase": text} as it goes on, at last {"ready": True, "version": 0, ...}."""
        ...

    async def put_prompts_data(self, tenant: str, prompts: Sequence[Prompt], last: bool) -> Mapping[str, Any]:
        """Hand over prompts, which are answered in this order; waits while too many are queued. `last`: no more will
        come, and the run ends when these are trained. Returns {"accepted": n, "first": index of the first one,
        "queued": ...}."""
        ...

    async def get_experience_data(
        self, tenant: str, task: str, columns: Sequence[str], groups: int, timeout_s: float
    ) -> Experience:
        """Claim up to `groups` whole groups that wait for `task`; waits for the first. Of the run: `reward`, where
        service.rewards is `client`. In a partition of one's own: every task of the dock."""
        ...

    async def put_experience_data(
        self, tenant: str, claim: int, rows: np.ndarray, columns: Mapping[str, Column]
    ) -> Mapping[str, Any]:
        """Write columns of claimed rows and end their claim. For `reward`: `rewards` [n], NaN for a row that cannot be
        scored, and `advantages` [n] unless algorithm.advantage shall make them."""
        ...

    async def put_trajectories(self, tenant: str, groups: Sequence[TrajectoryGroup]) -> Mapping[str, Any]:
        """Answers that came about outside: they are trained in the place of prompts. As `put_prompts_data`."""
        ...

    async def weight_sync_notify(self, tenant: str, version: int | None, timeout_s: float) -> Mapping[str, Any]:
        """Let version `version` (None: the newest that training has made) be published and wait until every replica
        serves it. Returns {"version", "fingerprint", "replicas"}."""
        ...

    # ---- beside them -------------------------------------------------------------------------------------------------

    async def status(self, tenant: str) -> Mapping[str, Any]: ...

    def metrics(self, tenant: str, since: int) -> AsyncIterator[Mapping[str, Any]]:
        """The record of every step from `since` on, as they come, until the run ends."""
        ...

    async def evaluate(self, tenant: str, timeout_s: float) -> Mapping[str, Any]: ...

    async def checkpoint(self, tenant: str, timeout_s: float) -> Mapping[str, Any]:
        """Between the running step and the next one; returns when it is complete: {"step", "path"}."""
        ...

    async def export(self, tenant: str, timeout_s: float) -> Mapping[str, Any]:
        """The newest checkpoint as a Hugging Face folder: {"path", "version"}."""
        ...

    async def stop(self, tenant: str, now: bool) -> Mapping[str, Any]:
        """End the run in order (what is issued is trained), or at `now`. Returns its summary."""
        ...

    # ---- the replicas ------------------------------------------------------------------------------------------------

    def complete(
        self, tenant: str, requests: Sequence[CompletionRequest], timeout_s: float
    ) -> AsyncIterator[CompletionPart]:
        """Answers by the newest weights of whichever replica has most room. Closing the iterator ends them."""
        ...

    async def model(self, tenant: str) -> ServedModel:
        """Raises `ServiceError` 503 before the engines are initialised."""
        ...
