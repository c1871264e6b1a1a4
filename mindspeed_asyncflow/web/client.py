"""Clients of the service interface for Python: `Client` waits, `AsyncClient` has the same methods to be awaited.

with Client("http://127.0.0.1:8000", token_file="runs/service.token") as client:
    client.init_engines({"trainer.steps": 20})
    client.put_prompts_data(["1+1=", "2+3="])
    batch = client.get_experience_data("reward", ["response_ids"])
    client.put_experience_data(batch.claim, batch.rows, {"rewards": [1.0] * len(batch.rows)})
    client.weight_sync_notify()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from mindspeed_asyncflow.errors import ConfigError, DeadlineExceeded, PlatformError, ServiceError, Unanswered
from mindspeed_asyncflow.service.verbs import Column, Prompt, TrajectoryGroup
from mindspeed_asyncflow.web import bodies, requests
from mindspeed_asyncflow.web.requests import Call, Ended, TimedOut, answer_of, columns_of, line_of, post
from mindspeed_asyncflow.web.security import is_loopback

LONGEST_WAIT_S = bodies.LONGEST_WAIT_S
CONNECT_S = 10.0
SILENCE_S = 60.0  # longest without a line in a stream, in which the server says every few seconds that it is there
PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0)  # before a call that was not carried out is sent again
NOT_NOW = (429, 503)  # refused before anything was done

Prompts = Sequence["Prompt | str | Mapping[str, Any] | list[dict[str, Any]] | np.ndarray"]
Progress = Callable[[Mapping[str, Any]], None]


class _Methods:
    """What both have. Every method returns what `Verbs` says, or raises:

    `ServiceError` (the server refused it: `status`, `code`), `DeadlineExceeded` (408), `PlatformError` (no server is
    there), `Unanswered` (the connection broke: whether the call was carried out is not known). A call that cannot have
    been carried out is sent again for some seconds; others only if they change nothing.
    """

    def _do(self, call: Call) -> Any:
        raise NotImplementedError

    def put_prompts_data(self, prompts: Prompts, last: bool = False) -> Any:
        """{"accepted", "first", "queued"}. `last`: the run ends when these are trained."""
        told = {"prompts": [requests.prompt_of(prompt) for prompt in prompts], "last": last}
        return self._do(post("put_prompts_data", told, LONGEST_WAIT_S))

    def get_experience_data(
        self, task: str = "reward", columns: Sequence[str] = ("response_ids",), groups: int = 1, timeout_s: float = 60.0
    ) -> Any:
        """An `Experience` with up to `groups` groups that wait for `task`. Its claim is 0 where none came in time."""
        told = {"task": task, "columns": list(columns), "groups": groups, "timeout_s": timeout_s}
        return self._do(post("get_experience_data", told, timeout_s, requests.experience_of))

    def put_experience_data(
        self, claim: int, rows: np.ndarray | Sequence[int], columns: Mapping[str, Column | Sequence[float]]
    ) -> Any:
        """Write columns of the claim's rows and end it."""
        told = {"claim": claim, "rows": np.asarray(rows, np.int64), "columns": columns_of(columns)}
        return self._do(post("put_experience_data", told, LONGEST_WAIT_S))

    def put_trajectories(self, groups: Sequence[TrajectoryGroup]) -> Any:
        """{"accepted", "first", "queued"}"""
        told = {"groups": [requests.group_of(group) for group in groups]}
        return self._do(post("put_trajectories", told, LONGEST_WAIT_S))

    def weight_sync_notify(self, version: int | None = None, timeout_s: float = 600.0) -> Any:
        """{"version", "fingerprint", "replicas"}, once every replica serves it."""
        return self._do(post("weight_sync_notify", {"version": version, "timeout_s": timeout_s}, timeout_s))

    def status(self) -> Any:
        return self._do(Call("GET", "/api/status", again=True))

    def evaluate(self, timeout_s: float = LONGEST_WAIT_S) -> Any:
        return self._do(post("evaluate", {"timeout_s": timeout_s}, timeout_s))

    def checkpoint(self, timeout_s: float = LONGEST_WAIT_S) -> Any:
        """{"step", "path"}, once it is complete."""
        return self._do(post("checkpoint", {"timeout_s": timeout_s}, timeout_s))

    def export(self, timeout_s: float = LONGEST_WAIT_S) -> Any:
        """{"path", "version"} of a Hugging Face folder on the server's disk."""
        return self._do(post("export", {"timeout_s": timeout_s}, timeout_s))

    def stop(self, now: bool = False, timeout_s: float = LONGEST_WAIT_S) -> Any:
        """The run's summary."""
        return self._do(post("stop", {"now": now, "timeout_s": timeout_s}, timeout_s))


class Client(_Methods):
    """Calls that wait. May be used by several threads."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        token: str | None = None,
        *,
        token_file: str | Path | None = None,
        verify: bool | str = True,
    ) -> None:
        """`token`, or the file with it; neither for a server with --no-token. `verify`: a file with the certificates
        to be trusted, or False for none to be checked."""
        self._http = httpx.Client(**_settings(url, token, token_file, verify))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def init_engines(
        self,
        overrides: Mapping[str, Any] | None = None,
        timeout_s: float = LONGEST_WAIT_S,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Start the run and wait until it is ready. `progress` is told of every phase."""
        last: dict[str, Any] = {}
        try:
            for last in self._stream(_init(overrides, timeout_s)):
                if progress is not None:
                    progress(last)
        except TimedOut:
            raise DeadlineExceeded(_not_ready(timeout_s, last)) from None
        return _ready(last)

    def metrics(self, since: int = 0) -> Iterator[dict[str, Any]]:
        """The record of every step from `since` on, as they come, until the run ends; broken connections are made
        again."""
        failures = 0
        while True:
            try:
                for record in self._stream(_metrics(since)):
                    since, failures = int(record.get("step", since)) + 1, 0
                    yield record
                return
            except TimedOut:
                continue
            except Unanswered:
                if failures == len(PAUSES_S):
                    raise
                time.sleep(PAUSES_S[failures])
                failures += 1

    def _do(self, call: Call) -> Any:
        for pause_s in (*PAUSES_S, None):
            try:
                response = self._http.request(
                    call.method, call.path, content=call.content, headers=call.headers, timeout=_timeout(call.wait_s)
                )
                if response.status_code not in NOT_NOW or pause_s is None:
                    return _meant(call, response, response.content)
            except httpx.HTTPError as error:
                _raise_unless_again(error, call, pause_s)
            time.sleep(pause_s or 0.0)
        raise AssertionError("the last try returns or raises")

    def _stream(self, call: Call) -> Iterator[dict[str, Any]]:
        """Begun again for some seconds where the server is not there, or not ready, and nothing has come."""
        begun = False
        for pause_s in (*PAUSES_S, None):
            try:
                for told in self._lines(call):
                    begun = True
                    yield told
                return
            except (PlatformError, ServiceError) as error:
                if pause_s is None or begun or not _not_now(error):
                    raise
                time.sleep(pause_s)

    def _lines(self, call: Call) -> Iterator[dict[str, Any]]:
        try:
            with self._http.stream(
                call.method, call.path, content=call.content, headers=call.headers, timeout=_timeout(SILENCE_S)
            ) as response:
                if response.status_code >= 400:
                    _meant(call, response, response.read())
                for line in response.iter_lines():
                    if (told := line_of(line)) is not None:
                        yield told
        except Ended:
            return
        except httpx.HTTPError as error:
            raise _in_words(error, call) from error
        raise Unanswered(f"{call.path}: the stream broke off before its last line")


class AsyncClient(_Methods):
    """As `Client`; its methods are awaited, `metrics` is iterated with `async for`."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        token: str | None = None,
        *,
        token_file: str | Path | None = None,
        verify: bool | str = True,
    ) -> None:
        self._http = httpx.AsyncClient(**_settings(url, token, token_file, verify))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def init_engines(
        self,
        overrides: Mapping[str, Any] | None = None,
        timeout_s: float = LONGEST_WAIT_S,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """As `Client.init_engines`."""
        last: dict[str, Any] = {}
        try:
            async for last in self._stream(_init(overrides, timeout_s)):
                if progress is not None:
                    progress(last)
        except TimedOut:
            raise DeadlineExceeded(_not_ready(timeout_s, last)) from None
        return _ready(last)

    async def metrics(self, since: int = 0) -> AsyncIterator[dict[str, Any]]:
        """As `Client.metrics`."""
        failures = 0
        while True:
            try:
                async for record in self._stream(_metrics(since)):
                    since, failures = int(record.get("step", since)) + 1, 0
                    yield record
                return
            except TimedOut:
                continue
            except Unanswered:
                if failures == len(PAUSES_S):
                    raise
                await asyncio.sleep(PAUSES_S[failures])
                failures += 1

    async def _do(self, call: Call) -> Any:
        for pause_s in (*PAUSES_S, None):
            try:
                response = await self._http.request(
                    call.method,
                    call.path,
                    content=call.async_content,
                    headers=call.headers,
                    timeout=_timeout(call.wait_s),
                )
                if response.status_code not in NOT_NOW or pause_s is None:
                    return _meant(call, response, response.content)
            except httpx.HTTPError as error:
                _raise_unless_again(error, call, pause_s)
            await asyncio.sleep(pause_s or 0.0)
        raise AssertionError("the last try returns or raises")

    async def _stream(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        begun = False
        for pause_s in (*PAUSES_S, None):
            try:
                async for told in self._lines(call):
                    begun = True
                    yield told
                return
            except (PlatformError, ServiceError) as error:
                if pause_s is None or begun or not _not_now(error):
                    raise
                await asyncio.sleep(pause_s)

    async def _lines(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._http.stream(
                call.method, call.path, content=call.async_content, headers=call.headers, timeout=_timeout(SILENCE_S)
            ) as response:
                if response.status_code >= 400:
                    _meant(call, response, await response.aread())
                async for line in response.aiter_lines():
                    if (told := line_of(line)) is not None:
                        yield told
        except Ended:
            return
        except httpx.HTTPError as error:
            raise _in_words(error, call) from error
        raise Unanswered(f"{call.path}: the stream broke off before its last line")


def _settings(url: str, token: str | None, token_file: str | Path | None, verify: bool | str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a service; it looks like http://127.0.0.1:8000")
    if token_file is not None:
        try:
            token = Path(token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"the token cannot be read: {error}") from error
    local = is_loopback(parts.hostname)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    pool = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    return {"base_url": url, "headers": headers, "verify": verify, "trust_env": not local, "limits": pool}


def _timeout(wait_s: float) -> httpx.Timeout:
    return httpx.Timeout(wait_s, connect=CONNECT_S)


def _init(overrides: Mapping[str, Any] | None, timeout_s: float) -> Call:
    return post("init_engines", {"overrides": dict(overrides or {}), "timeout_s": timeout_s}, timeout_s)


def _metrics(since: int) -> Call:
    return Call("GET", f"/api/metrics?since={int(since)}")


def _not_ready(timeout_s: float, last: Mapping[str, Any]) -> str:
    return f"the run was not ready in {timeout_s:g} s; it was at: {last.get('phase', 'its start')}"


def _ready(last: dict[str, Any]) -> dict[str, Any]:
    if not last.get("ready"):
        raise ServiceError(409, "ended", f"the run is not ready: it is {last.get('state', 'unknown')}")
    return last


def _meant(call: Call, response: httpx.Response, content: bytes) -> Any:
    try:
        return answer_of(call, response.status_code, response.headers.get("content-type", ""), content)
    except ServiceError as error:
        if error.status in (408, 504):
            raise DeadlineExceeded(f"{call.path}: {error}") from error
        raise


def _not_now(error: Exception) -> bool:
    """Whether the server is not there, or refused the call before anything was done."""
    return isinstance(error, PlatformError) or (isinstance(error, ServiceError) and error.status in NOT_NOW)


def _raise_unless_again(error: httpx.HTTPError, call: Call, pause_s: float | None) -> None:
    unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    if pause_s is None or not (unsent or call.again):
        raise _in_words(error, call) from error


def _in_words(error: httpx.HTTPError, call: Call) -> Exception:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return PlatformError(f"no service answers at {error.request.url}: {error}; is `asyncflow serve` running?")
    return Unanswered(f"{call.path} got no answer ({type(error).__name__}: {error}); it may have been carried out")
