"""Completions as calls of the service interface: settings filled in and checked, then the pool of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import numpy as np

from mindspeed_asyncflow.data.tokenizers import load_tokenizer
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.records import GenRequest, SamplingSpec
from mindspeed_asyncflow.service.crossing import carried
from mindspeed_asyncflow.service.pool import Pool, Serving
from mindspeed_asyncflow.service.verbs import CompletionPart, CompletionRequest, ServedModel
from mindspeed_asyncflow.service.wiring import WorkerSpec

NAME = "policy"  # of the model in /v1/models
COLDEST = 0.01  # engines take a lower temperature for 0, or change it


class ServingSession(Serving, Protocol):
    spec: WorkerSpec

    @property
    def version(self) -> int: ...


class Completing:
    """`session` gives that of the run as long as replicas are up. May be called from any event loop; the pool lives in
    `loop`, that of the run."""

    def __init__(
        self, session: Callable[[], ServingSession | None], loop: asyncio.AbstractEventLoop, share: float, waiting: int
    ) -> None:
        self._session, self._loop = session, loop
        self.pool = Pool(session, share, waiting)
        self._model: ServedModel | None = None

    async def model(self, tenant: str) -> ServedModel:
        """See `Verbs.model`."""
        session = self._there()
        spec, version = session.spec, session.version
        if self._model is None:
            template = spec.config.data.chat_template
            tokenizer = await asyncio.to_thread(load_tokenizer, spec.model_folder, template)
            self._model = ServedModel(NAME, tokenizer, spec.max_model_len, spec.stop_ids, version)
        m = self._model
        return ServedModel(m.name, m.tokenizer, m.max_model_len, m.stop_token_ids, version)

    async def complete(
        self, tenant: str, requests: Sequence[CompletionRequest], timeout_s: float
    ) -> AsyncGenerator[CompletionPart]:
        """See `Verbs.complete`."""
        model = await self.model(tenant)
        rollout = self._there().config.rollout
        defaults = SamplingSpec(0, rollout.temperature, rollout.top_p, rollout.top_k, model.stop_token_ids)
        asked = [request_of(r, defaults, model.max_model_len, len(model.tokenizer)) for r in requests]
        async with contextlib.aclosing(carried(self._loop, self.pool.answers(asked, timeout_s))) as parts:
            async for part in parts:
                yield part

    def _there(self) -> ServingSession:
        session = self._session()
        if session is None:
            raise ServiceError(503, "no_replicas", "no replica is up: call init_engines, and wait until it is ready")
        return session


def request_of(r: CompletionRequest, defaults: SamplingSpec, max_model_len: int, token_count: int) -> GenRequest:
    """What the engines are asked; `defaults` are the run's. Raises `ServiceError` 400 that names the value."""
    room = max_model_len - len(r.prompt_ids)
    if not len(r.prompt_ids):
        raise _wrong("the prompt is empty")
    if room < 1:
        raise _wrong(
            f"the prompt has {len(r.prompt_ids)} tokens; prompt and answer together may have {max_model_len} "
            "(data.max_prompt_tokens and rollout.max_new_tokens of the run)"
        )
    outside = (r.prompt_ids < 0) | (r.prompt_ids >= token_count)
    if outside.any():
        raise _wrong(f"token id {r.prompt_ids[outside.argmax()]} of the prompt: there are ids 0 .. {token_count - 1}")
    most = room if r.max_tokens is None else r.max_tokens
    if not 1 <= most <= room:
        raise _wrong(
            f"max_tokens {most} with a prompt of {len(r.prompt_ids)} tokens: 1 .. {room} fit (together "
            f"{max_model_len}: data.max_prompt_tokens and rollout.max_new_tokens of the run)"
        )
    temperature = defaults.temperature if r.temperature is None else r.temperature
    if not math.isfinite(temperature) or temperature < 0 or 0 < temperature < COLDEST:
        raise _wrong(f"temperature {temperature:g}: 0, or at least {COLDEST:g}")
    top_p = defaults.top_p if r.top_p is None else r.top_p
    if not 0 < top_p <= 1:
        raise _wrong(f"top_p {top_p:g}: above 0, at most 1")
    top_k = defaults.top_k if r.top_k is None else r.top_k
    if top_k != -1 and not 1 <= top_k <= token_count:
        raise _wrong(f"top_k {top_k}: 1 .. {token_count}, or -1 for off")
    seed = secrets.randbits(63) if r.seed is None else r.seed
    if not 0 <= seed < 1 << 63:
        raise _wrong(f"seed {seed}: 0 .. 2**63-1")
    stops = tuple(sorted({*defaults.stop_token_ids, *r.stop_token_ids}))
    if stops[0] < 0 or stops[-1] >= 1 << 31:
        raise _wrong(f"stop_token_ids {list(r.stop_token_ids)}: ids of tokens")
    spec = SamplingSpec(most, temperature, top_p, top_k, stops)
    return GenRequest("", np.ascontiguousarray(r.prompt_ids, np.int32), spec, seed)


def _wrong(what: str) -> ServiceError:
    return ServiceError(400, "bad_request", what)
