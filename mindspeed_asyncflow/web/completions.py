"""OpenAI's completion calls, answered by the replicas of the run with its newest weights.

Beside what that interface has, an answer says which policy `version` sampled it (the oldest of its tokens), and with
`return_token_ids` the very ids, so that an agent can give its trajectories back (`put_trajectories`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from mindspeed_asyncflow.data.tokenizers import encode_prompts
from mindspeed_asyncflow.errors import DataError, ServiceError
from mindspeed_asyncflow.service.verbs import ServedModel, Verbs
from mindspeed_asyncflow.web import wire
from mindspeed_asyncflow.web.calls import ClientGone, as_service_error, body_schema, read_json, tenant_of, unless_gone
from mindspeed_asyncflow.web.choices import Choice, News, chat_logprobs, text_logprobs, usage
from mindspeed_asyncflow.web.completion_bodies import ChatBody, CompletionBody, Sampled
from mindspeed_asyncflow.web.door import error_body

GRACE_S = 5.0  # beyond the caller's deadline, which the replicas keep
EVENTS = "text/event-stream"


def router(verbs: Verbs) -> APIRouter:
    api = APIRouter(prefix="/v1", tags=["OpenAI's calls"])

    @api.get("/models", summary="The policy that is trained.", response_class=Response)
    async def models(request: Request) -> Response:
        model = await verbs.model(tenant_of(request))
        return _json({"object": "list", "data": [_card(model)]})

    @api.get("/models/{name}", summary="The same, by its name.", response_class=Response)
    async def one_model(request: Request, name: str) -> Response:
        return _json(_card(_named(await verbs.model(tenant_of(request)), name)))

    @api.post(
        "/completions",
        summary="Go on with texts or token ids.",
        response_class=Response,
        openapi_extra=body_schema(CompletionBody),
    )
    async def completions(request: Request) -> Response:
        body = await read_json(request, CompletionBody)
        model = _named(await verbs.model(tenant_of(request)), body.model)
        return await _answered(request, verbs, await asyncio.to_thread(_TextCall, body, model))

    @api.post(
        "/chat/completions",
        summary="Answer a conversation.",
        response_class=Response,
        openapi_extra=body_schema(ChatBody),
    )
    async def chat(request: Request) -> Response:
        body = await read_json(request, ChatBody)
        model = _named(await verbs.model(tenant_of(request)), body.model)
        return await _answered(request, verbs, await asyncio.to_thread(_ChatCall, body, model))

    return api


def _card(model: ServedModel) -> dict[str, Any]:
    facts = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "asyncflow"}
    return facts | {"max_model_len": model.max_model_len, "version": model.version}


def _named(model: ServedModel, name: str | None) -> ServedModel:
    if name not in (None, model.name):
        raise ServiceError(404, "model_not_found", f"there is no model {str(name)[:80]!r}; there is {model.name!r}")
    return model


# ---- one call --------------------------------------------------------------------------------------------------------


class _Call:
    """What is asked, and how it is told. `prefix` begins its id; `kind` and `chunk_kind` are the objects' names."""

    prefix = kind = chunk_kind = ""

    def __init__(self, body: Sampled, model: ServedModel, prompts: Sequence[np.ndarray], before: Sequence[str]) -> None:
        self.body, self.model, self.prompts = body, model, prompts
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self.choices = [
            Choice(body, model, body.request(ids, p * body.n + i), p * body.n + i, before[p])
            for p, ids in enumerate(prompts)
            for i in range(body.n)
        ]

    def document(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        newest = max(choice.newest for choice in self.choices)
        facts = {"id": self.id, "object": kind, "created": self.created, "model": self.model.name}
        return facts | {"system_fingerprint": f"version-{newest}", "choices": choices}

    def whole(self) -> dict[str, Any]:
        oldest = min((c.version for c in self.choices if c.version is not None), default=self.model.version)
        document = self.document([self.choice(c.whole()) | self.ids(c.whole()) for c in self.choices], self.kind)
        return document | {"usage": self.usage(), "version": oldest}

    def chunk(self, news: News) -> dict[str, Any]:
        return self.document([self.delta(news) | self.ids(news)], self.chunk_kind) | self.no_usage()

    def last_chunk(self) -> dict[str, Any] | None:
        """With the usage, where it was asked for."""
        if self.body.stream_options is None or not self.body.stream_options.include_usage:
            return None
        return self.document([], self.chunk_kind) | {"usage": self.usage()}

    def no_usage(self) -> dict[str, Any]:
        return {} if self.last_chunk() is None else {"usage": None}

    def usage(self) -> dict[str, int]:
        return usage([len(ids) for ids in self.prompts], self.choices)

    def ids(self, news: News) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        prompt = news.choice.request.prompt_ids.tolist()
        return {"token_ids": [token.token_id for token in news.tokens], "prompt_token_ids": prompt}

    def choice(self, news: News) -> dict[str, Any]:
        """Of a whole answer."""
        raise NotImplementedError

    def delta(self, news: News) -> dict[str, Any]:
        """Of a part."""
        raise NotImplementedError


class _TextCall(_Call):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, body: CompletionBody, model: ServedModel) -> None:
        self._logprobs = body.logprobs is not None
        prompts = [_encoded(model, p, chat=False) if isinstance(p, str) else _array(p) for p in body.prompts]
        before = [_shown(model, p) if body.echo else "" for p in body.prompts]
        super().__init__(body, model, prompts, before)

    def choice(self, news: News) -> dict[str, Any]:
        logprobs = text_logprobs(news.tokens) if self._logprobs else None
        return news.facts() | {"text": news.text, "logprobs": logprobs}

    delta = choice


class _ChatCall(_Call):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, model: ServedModel) -> None:
        self._logprobs = bool(body.logprobs)
        self._begun: set[int] = set()  # choices whose role is told
        messages = [message.made() for message in body.messages]
        super().__init__(body, model, [_encoded(model, messages, chat=True)], [""])

    def choice(self, news: News) -> dict[str, Any]:
        return self._told(news) | {"message": {"role": "assistant", "content": news.text, "refusal": None}}

    def delta(self, news: News) -> dict[str, Any]:
        role = {} if news.choice.index in self._begun else {"role": "assistant"}
        self._begun.add(news.choice.index)
        return self._told(news) | {"delta": role | {"content": news.text}}

    def _told(self, news: News) -> dict[str, Any]:
        return news.facts() | {"logprobs": chat_logprobs(news.tokens) if self._logprobs else None}


def _encoded(model: ServedModel, prompt: str | list[dict[str, Any]], chat: bool) -> np.ndarray:
    try:
        return encode_prompts(model.tokenizer, [prompt], chat)[0]
    except DataError as error:
        raise ServiceError(400, "bad_prompt", str(error)) from None


def _array(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, np.int32)


def _shown(model: ServedModel, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, clean_up_tokenization_spaces=False)


# ---- answers ---------------------------------------------------------------------------------------------------------


async def _answered(request: Request, verbs: Verbs, call: _Call) -> Response:
    limit_s = call.body.timeout_s
    news = _news(verbs, tenant_of(request), call.choices, limit_s)
    try:
        if call.body.stream:
            first = await unless_gone(request, _first(news), limit_s + GRACE_S)  # a fault before it has a status
            return StreamingResponse(_events(call, first, news), media_type=EVENTS)
        await unless_gone(request, _all(news), limit_s + GRACE_S)
    except ClientGone:
        await news.aclose()
        return Response(status_code=204)
    except BaseException:
        await news.aclose()
        raise
    return _json(call.whole())


async def _first(news: AsyncIterator[News]) -> News | None:
    return await anext(news, None)


async def _all(news: AsyncIterator[News]) -> None:
    async for _ in news:
        pass


async def _events(call: _Call, first: News | None, news: AsyncGenerator[News]) -> AsyncIterator[bytes]:
    def event(document: Any) -> bytes:
        return b"data: " + wire.to_json(document) + b"\n\n"

    keep_all = call.body.return_token_ids or getattr(call.body, "logprobs", None)
    async with contextlib.aclosing(news):
        try:
            item = first
            while item is not None:
                if item.text or item.finish_reason or keep_all:
                    yield event(call.chunk(item))
                item = await anext(news, None)
            if (last := call.last_chunk()) is not None:
                yield event(last)
        except Exception as error:  # boundary: the headers are gone, so the fault is told in the stream
            yield event(error_body(as_service_error(error), "/v1/"))
            return
    yield b"data: [DONE]\n\n"


async def _news(verbs: Verbs, tenant: str, choices: Sequence[Choice], limit_s: float) -> AsyncGenerator[News]:
    """What comes of all choices, each asked for by itself, so that one whose text has met a stop string ends alone."""
    mailbox: asyncio.Queue[News | BaseException | None] = asyncio.Queue()

    async def follow(choice: Choice) -> None:
        parts: Any = verbs.complete(tenant, [choice.request], limit_s)
        async with contextlib.aclosing(parts):
            async for part in parts:
                mailbox.put_nowait(choice.take(part))
                if choice.finish_reason is not None:
                    return
        raise ServiceError(503, "no_answer", "the replicas gave an answer without an end")

    def ended(task: asyncio.Task[None]) -> None:
        mailbox.put_nowait(None if task.cancelled() else task.exception())

    tasks = [asyncio.ensure_future(follow(choice)) for choice in choices]
    for task in tasks:
        task.add_done_callback(ended)
    try:
        left = len(tasks)
        while left:
            item = await mailbox.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _json(document: dict[str, Any]) -> Response:
    return Response(wire.to_json(document), media_type=wire.JSON)
