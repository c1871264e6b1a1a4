"""A service interface without a run: groups are answered at once, three scored groups are a training step.

`state()` is everything that a call may change, so that a test can say that a refused call changed nothing. What goes
wrong is refused as the real one refuses it: `ServiceError` with a status below 500.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.data.char_tokenizer import make_char_tokenizer
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.service.verbs import (
    Column,
    CompletionPart,
    CompletionRequest,
    Experience,
    Prompt,
    ServedModel,
    TrajectoryGroup,
)

OWNER, GUEST = "owner", "guest"
GROUP_SIZE, STEP_GROUPS, MAX_MODEL_LEN = 2, 3, 64
CHANGEABLE = {"trainer.steps": int, "rollout.temperature": float}
TASKS = ("rollout", "reward", "reference", "value", "train")
_NEXT = {"rollout": "reward", "reward": "train"}  # of rows that are not the run's
READABLE = (
    "reward",
    "prompt_ids",
    "response_ids",
    "rollout_logprobs",
    "finish",
    "truth",
    "fields",
    "prompt",
    "response",
)


class _Store:
    """Rows of one tenant: [{"group", "member", columns...}], which of them a task still waits for, and open claims."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        self.waiting: dict[str, list[int]] = {task: [] for task in TASKS}  # group ids
        self.claims: dict[int, tuple[str, list[int]]] = {}  # task, row ids
        self.changed = asyncio.Condition()
        self.numbers, self.groups = itertools.count(1000), itertools.count()

    def add(self, members: Sequence[dict[str, Any]], tasks: Sequence[str]) -> None:
        group = next(self.groups)
        for member, columns in enumerate(members):
            self.rows[next(self.numbers)] = {"group": group, "member": member, **columns}
        for task in tasks:
            self.waiting[task].append(group)

    def state(self) -> Any:
        rows = {row: {name: _plain(value) for name, value in columns.items()} for row, columns in self.rows.items()}
        return rows, {task: list(groups) for task, groups in self.waiting.items()}, dict(self.claims)


class FakeVerbs:
    """`Verbs` over lists. Tokens of an answer are its prompt's, backwards; of a completion 7, 8, 9, ..."""

    def __init__(self, tokenizer: Any = None, patience_s: float = 3600.0) -> None:
        self.owner: str | None = None
        self.overrides: dict[str, Any] = {}
        self.version, self.last, self.ended = 0, False, False
        self.records: list[dict[str, Any]] = []
        self.scored = 0
        self.calls: list[tuple[str, str]] = []  # that were carried out: tenant, verb
        self.completed = asyncio.Event()  # a completion's iterator was closed before its end
        self._stores: dict[str, _Store] = {}
        self._numbers = itertools.count(1)
        self._stepped = asyncio.Condition()
        self._tokenizer = tokenizer
        self._patience_s = patience_s  # no wait is longer, whatever the caller says

    def state(self) -> Any:
        stores = {tenant: store.state() for tenant, store in self._stores.items() if store.rows}
        facts = (self.owner, dict(self.overrides), self.version, self.last, self.ended, self.scored, len(self.records))
        return facts, stores

    # ---- the five ----------------------------------------------------------------------------------------------------

    async def init_engines(self, tenant: str, overrides: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        if self.owner is not None:
            raise ServiceError(409, "already_running", "this server has a run already; status tells of it")
        for key, value in overrides.items():
            if key not in CHANGEABLE:
                raise ServiceError(400, "unknown_setting", f"{key!r} cannot be set here; {sorted(CHANGEABLE)} can")
            if not isinstance(value, CHANGEABLE[key]) or isinstance(value, bool):
                raise ServiceError(400, "bad_setting", f"{key} is {CHANGEABLE[key].__name__}, got {value!r}")
        self.owner, self.overrides = tenant, dict(overrides)
        self.calls.append((tenant, "init_engines"))
        for phase in ("starting Ray", "loading model"):
            yield {"phase": phase}
            await asyncio.sleep(0)
        yield {"ready": True, "version": 0, "group_size": GROUP_SIZE}

    async def put_prompts_data(self, tenant: str, prompts: Sequence[Prompt], last: bool) -> Mapping[str, Any]:
        run = self._run_of(tenant)
        if run and self.last:
            raise ServiceError(409, "closed", "the last prompts were given already")
        store, first = self._store(tenant), len(self._store(tenant).rows) // GROUP_SIZE
        for prompt in prompts:
            columns = _prompt_columns(prompt)
            answer = {"response_ids": columns["prompt_ids"][::-1], "response": str(columns["prompt"])[::-1]}
            answer["rollout_logprobs"] = np.full(len(answer["response_ids"]), -0.5, np.float32)
            answer["finish"] = np.uint8(0)
            store.add([columns | (answer if run else {})] * GROUP_SIZE, ["reward"] if run else ["rollout"])
        self.last = self.last or (run and last)
        await self._tell(store)
        self.calls.append((tenant, "put_prompts_data"))
        return {"accepted": len(prompts), "first": first, "queued": len(store.waiting["reward" if run else "rollout"])}

    async def get_experience_data(
        self, tenant: str, task: str, columns: Sequence[str], groups: int, timeout_s: float
    ) -> Experience:
        run = self._run_of(tenant)
        if task not in TASKS or (run and task != "reward"):
            raise ServiceError(400, "unknown_task", f"no task {task!r} is open to you; of a run: reward")
        for name in columns:
            if name not in READABLE:
                raise ServiceError(400, "unknown_column", f"no column {name!r}; there are {', '.join(READABLE)}")
        store = self._store(tenant)
        async with store.changed:
            if not await self._came(store.changed, lambda: bool(store.waiting[task]), timeout_s):
                return Experience(0, np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int32), {})
            taken = store.waiting[task][:groups]
            del store.waiting[task][:groups]
        rows = [row for row, values in store.rows.items() if values["group"] in taken]
        claim = next(self._numbers)
        store.claims[claim] = (task, rows)
        self.calls.append((tenant, "get_experience_data"))
        values = {name: _column([store.rows[row].get(name) for row in rows], name) for name in columns}
        at = [store.rows[row] for row in rows]
        members = np.array([row["member"] for row in at], np.int32)
        return Experience(
            claim, np.array(rows, np.int64), np.array([r["group"] for r in at], np.int64), members, values
        )

    async def put_experience_data(
        self, tenant: str, claim: int, rows: np.ndarray, columns: Mapping[str, Column]
    ) -> Mapping[str, Any]:
        run, store = self._run_of(tenant), self._store(tenant)
        if claim not in store.claims:
            raise ServiceError(404, "unknown_claim", f"claim {claim} is not yours, or has ended")
        task, held = store.claims[claim]
        if sorted(rows.tolist()) != held:
            raise ServiceError(400, "wrong_rows", f"claim {claim} has other rows than those given")
        for name, values in columns.items():
            if run and name not in ("rewards", "advantages"):
                raise ServiceError(400, "unknown_column", f"column {name!r} is not written here; rewards, advantages")
            if len(values) != len(rows):
                raise ServiceError(400, "wrong_length", f"column {name!r} has {len(values)} values, {len(rows)} rows")
        if run and "rewards" not in columns:
            raise ServiceError(400, "missing_column", "column 'rewards' is missing")
        for name, values in columns.items():
            for row, value in zip(rows.tolist(), values):
                store.rows[row][name] = value
        del store.claims[claim]
        self.calls.append((tenant, "put_experience_data"))
        if not run and task in _NEXT:
            store.waiting[_NEXT[task]] += sorted({store.rows[row]["group"] for row in rows.tolist()})
            await self._tell(store)
        if run and task == "reward":
            self.scored += len({store.rows[row]["group"] for row in rows.tolist()})
            await self._train()
        return {"written": len(rows)}

    async def put_trajectories(self, tenant: str, groups: Sequence[TrajectoryGroup]) -> Mapping[str, Any]:
        run, store = self._run_of(tenant), self._store(tenant)
        for group in groups:
            if len(group.answers) != GROUP_SIZE:
                raise ServiceError(400, "group_size", f"{len(group.answers)} answers, algorithm.group_size is 2")
        first = len(store.rows) // GROUP_SIZE
        for group in groups:
            columns = _prompt_columns(group.prompt)
            answers = [
                {"response_ids": a.response_ids, "rollout_logprobs": a.rollout_logprobs, "version": a.version}
                for a in group.answers
            ]
            store.add([columns | answer for answer in answers], ["reward"] if run else TASKS[1:])
        await self._tell(store)
        self.calls.append((tenant, "put_trajectories"))
        return {"accepted": len(groups), "first": first, "queued": 0}

    async def weight_sync_notify(self, tenant: str, version: int | None, timeout_s: float) -> Mapping[str, Any]:
        self._own(tenant)
        wanted = self.version if version is None else version
        async with self._stepped:
            if not await self._came(self._stepped, lambda: self.version >= wanted, timeout_s):
                raise ServiceError(408, "timeout", f"version {wanted} was not made in {timeout_s:g} s")
        self.calls.append((tenant, "weight_sync_notify"))
        return {"version": wanted, "fingerprint": f"{wanted:016x}", "replicas": 1}

    # ---- beside them -------------------------------------------------------------------------------------------------

    async def status(self, tenant: str) -> Mapping[str, Any]:
        state = "waiting" if self.owner is None else "ended" if self.ended else "running"
        if tenant != self.owner:
            return {"state": state, "rows": len(self._store(tenant).rows)}
        return {"state": state, "version": self.version, "step": len(self.records)}

    async def metrics(self, tenant: str, since: int) -> AsyncIterator[Mapping[str, Any]]:
        self._own(tenant)
        at = since
        while True:
            for record in self.records[at:]:
                yield record
            at = max(at, len(self.records))
            async with self._stepped:
                while len(self.records) <= at and not self.ended:
                    await self._stepped.wait()
                if self.ended and len(self.records) <= at:
                    return

    async def evaluate(self, tenant: str, timeout_s: float) -> Mapping[str, Any]:
        self._own(tenant)
        return {"version": self.version, "score": 0.5}

    async def checkpoint(self, tenant: str, timeout_s: float) -> Mapping[str, Any]:
        self._own(tenant)
        return {"step": len(self.records), "path": "checkpoints/step_000001"}

    async def export(self, tenant: str, timeout_s: float) -> Mapping[str, Any]:
        self._own(tenant)
        return {"path": "export", "version": self.version}

    async def stop(self, tenant: str, now: bool) -> Mapping[str, Any]:
        self._own(tenant)
        self.ended = True
        async with self._stepped:
            self._stepped.notify_all()
        self.calls.append((tenant, "stop"))
        return {"steps": len(self.records), "now": now}

    # ---- the replicas ------------------------------------------------------------------------------------------------

    async def complete(
        self, tenant: str, requests: Sequence[CompletionRequest], timeout_s: float
    ) -> AsyncIterator[CompletionPart]:
        self._own(tenant)
        done = 0
        try:
            for index, request in enumerate(requests):
                most = request.max_tokens or MAX_MODEL_LEN - len(request.prompt_ids)
                for token in range(7, 7 + most):
                    await asyncio.sleep(0)
                    end = "stop" if token in request.stop_token_ids else None
                    end = end or ("length" if token == 6 + most else None)
                    ids, logprobs = np.array([token], np.int32), np.array([-0.25], np.float32)
                    yield CompletionPart(index, ids, logprobs, self.version, end)
                    if end:
                        break
                done += 1
        finally:
            if done < len(requests):
                self.completed.set()

    async def model(self, tenant: str) -> ServedModel:
        self._own(tenant)
        if self._tokenizer is None:
            self._tokenizer = make_char_tokenizer()
        stops = (int(self._tokenizer.eos_token_id),)
        return ServedModel("policy", self._tokenizer, MAX_MODEL_LEN, stops, self.version)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _store(self, tenant: str) -> _Store:
        return self._stores.setdefault(tenant, _Store())

    def _own(self, tenant: str) -> None:
        if self.owner is None:
            raise ServiceError(409, "not_started", "there is no run yet; call init_engines")
        if tenant != self.owner:
            raise ServiceError(404, "no_run", "you have no run")

    def _run_of(self, tenant: str) -> bool:
        """Whether the tenant's rows are those of the run."""
        if self.owner is None:
            raise ServiceError(409, "not_started", "there is no run yet; call init_engines")
        if tenant == self.owner and self.ended:
            raise ServiceError(409, "ended", "the run has ended")
        return tenant == self.owner

    async def _came(self, changed: asyncio.Condition, there: Callable[[], bool], timeout_s: float) -> bool:
        if there():
            return True
        try:
            return await asyncio.wait_for(changed.wait_for(there), min(timeout_s, self._patience_s))
        except (TimeoutError, asyncio.TimeoutError):
            return False

    async def _tell(self, store: _Store) -> None:
        async with store.changed:
            store.changed.notify_all()

    async def _train(self) -> None:
        while self.scored >= STEP_GROUPS * (len(self.records) + 1):
            self.records.append({"step": len(self.records), "reward/mean": 0.5})
            self.version += 1
        self.ended = self.ended or (self.last and not self._store(str(self.owner)).waiting["reward"])
        async with self._stepped:
            self._stepped.notify_all()


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    text = prompt.prompt
    ids = text.astype(np.int32) if isinstance(text, np.ndarray) else np.frombuffer(str(text).encode(), np.uint8)
    shown = text if isinstance(text, str) else " ".join(map(str, ids))
    return {"prompt_ids": ids.astype(np.int32), "prompt": shown, "truth": prompt.truth, "fields": str(prompt.fields)}


def _column(values: list[Any], name: str) -> Column:
    if name in ("truth", "fields", "prompt", "response"):
        return [value or "" for value in values]
    if name == "finish":
        return np.array([value or 0 for value in values], np.uint8)
    dtype = np.float32 if name == "rollout_logprobs" else np.int32
    return [np.zeros(0, dtype) if value is None else value for value in values]


def _plain(value: Any) -> Any:
    return (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value
