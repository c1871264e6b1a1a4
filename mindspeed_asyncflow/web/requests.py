"""Calls of the service interface as requests, and answers as what they mean: what both clients share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.service.verbs import Column, Experience, Prompt, Trajectory, TrajectoryGroup
from mindspeed_asyncflow.web import wire

ANSWER_S = 30.0  # beyond what the call itself may take
PIECE = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `again`: it may be sent a second time though it may have been carried out."""

    method: str
    path: str
    kind: str = wire.JSON
    parts: Sequence[Any] | None = None  # buffers of the body
    wait_s: float = 60.0
    again: bool = False
    read: Callable[[Any], Any] = lambda document: document

    @property
    def headers(self) -> dict[str, str]:
        told = {"accept": f"{wire.TENSORS}, {wire.JSON}, {wire.LINES}"}
        if self.parts is not None:
            told |= {"content-type": self.kind, "content-length": str(sum(map(len, self.parts)))}
        return told

    def pieces(self) -> Iterator[Any]:
        """The body in pieces that are sent whole: of a long buffer the rest would be copied after each packet."""
        for part in self.parts or ():
            view = memoryview(part)
            for at in range(0, len(view), PIECE):
                yield view[at : at + PIECE]

    @property
    def content(self) -> Any:
        """For httpx.Client."""
        return None if self.parts is None else self.pieces() if len(self.parts) > 1 else bytes(self.parts[0])

    @property
    def async_content(self) -> Any:
        """For httpx.AsyncClient."""

        async def pieces() -> AsyncIterator[Any]:
            for piece in self.pieces():
                yield piece

        return None if self.parts is None else pieces() if len(self.parts) > 1 else bytes(self.parts[0])


def post(verb: str, document: Mapping[str, Any], wait_s: float, read: Callable[[Any], Any] = lambda d: d) -> Call:
    kind, parts = wire.pack(document)
    if sum(map(len, parts)) <= PIECE:
        parts = [b"".join(parts)]
    return Call("POST", f"/api/{verb}", kind, parts, wait_s + ANSWER_S, read=read)


def prompt_of(prompt: Prompt | str | Sequence[Any] | np.ndarray | Mapping[str, Any]) -> dict[str, Any]:
    """A `Prompt`, or a text, chat messages, token ids; or a mapping with the fields of one."""
    if isinstance(prompt, Mapping):
        return dict(prompt)
    if not isinstance(prompt, Prompt):
        return {"prompt": prompt}
    return {"prompt": prompt.prompt, "truth": prompt.truth, "fields": dict(prompt.fields)}


def group_of(group: TrajectoryGroup) -> dict[str, Any]:
    told = {"prompt": prompt_of(group.prompt), "answers": [_answer(answer) for answer in group.answers]}
    for name in ("rewards", "advantages"):
        values = getattr(group, name)
        if values is not None:
            told[name] = np.asarray(values, np.float32)
    return told


def _answer(answer: Trajectory) -> dict[str, Any]:
    values = {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}
    return {name: value for name, value in values.items() if value is not None}


def columns_of(columns: Mapping[str, Column | Sequence[float]]) -> dict[str, Any]:
    """Sequences of plain numbers become arrays: they travel as they are, NaN too."""
    told: dict[str, Any] = {}
    for name, values in columns.items():
        rows = isinstance(values, np.ndarray) or wire.is_rows(values)
        texts = isinstance(values, list) and all(isinstance(value, str) for value in values)
        told[name] = values if rows or texts else np.asarray(values)
    return told


def experience_of(document: Mapping[str, Any]) -> Experience:
    def whole(name: str, dtype: Any) -> np.ndarray:
        return np.asarray(document[name], dtype)

    rows, groups, members = whole("rows", np.int64), whole("groups", np.int64), whole("members", np.int32)
    return Experience(document["claim"], rows, groups, members, document.get("columns", {}))


def answer_of(call: Call, status: int, kind: str, content: bytes | bytearray) -> Any:
    """What the call comes to. Raises the `ServiceError` that the server answered with."""
    kind = kind.partition(";")[0].strip().lower()
    if status >= 400:
        raise refusal(status, content)
    return call.read(wire.unpack(wire.TENSORS if kind == wire.TENSORS else wire.JSON, content))


def refusal(status: int, content: bytes | bytearray) -> ServiceError:
    try:
        told = json.loads(content)["error"]
        return ServiceError(status, str(told["code"]), str(told["message"]))
    except (ValueError, KeyError, TypeError):
        return ServiceError(status, "no_service", f"HTTP {status}, not from this service: {bytes(content[:200])!r}")


class Ended(Exception):
    """The stream is complete."""


class TimedOut(Exception):
    """The stream goes on in another call."""


def line_of(line: str) -> Any:
    """What a line of a stream says; None for one that says nothing. Raises `Ended`, `TimedOut`, `ServiceError`."""
    if not line.strip():
        return None
    told = json.loads(line)
    if "error" in told and set(told) == {"error"}:
        error = told["error"]
        raise ServiceError(int(error.get("status", 500)), str(error["code"]), str(error["message"]))
    if told == {"end": True}:
        raise Ended
    if told == {"timeout": True}:
        raise TimedOut
    return told
