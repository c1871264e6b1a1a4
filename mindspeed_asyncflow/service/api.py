"""The calls of `verbs.py` over a real run, which is in the event loop of the main thread; callers are in others.

who             what                                          where
the owner       all calls: whoever came first                 owner.py
other tenants   a partition of the dock for each              partitions.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from mindspeed_asyncflow.config.load import dump_resolved, parse_config
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.config.service import override_lines
from mindspeed_asyncflow.errors import (
    AsyncFlowError,
    ClaimLost,
    DeadlineExceeded,
    DockFull,
    PlatformError,
    ServiceError,
    WeightSyncError,
    WorkerLost,
)
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service import beside, resuming
from mindspeed_asyncflow.service.outside import FAILED, RUNNING, STARTING, WAITING, Outside
from mindspeed_asyncflow.service.owner import Owner
from mindspeed_asyncflow.service.partitions import TenantStore
from mindspeed_asyncflow.service.verbs import (
    Column,
    CompletionPart,
    CompletionRequest,
    Experience,
    Prompt,
    ServedModel,
    TrajectoryGroup,
)

T = TypeVar("T")
LOOK_S = 0.1  # how often somebody in another thread looks where the run stands


class RunApi:
    """`Verbs` over one run. `check` raises `ConfigError` for settings that cannot work; `config`: the server's;
    `folder`: that of an earlier run, which goes on for its owner only."""

    def __init__(
        self, config: Config, check: Callable[[Config], None] = lambda config: None, folder: RunFolder | None = None
    ) -> None:
        self.config, self._check = config, check
        self.begun_by = _owner(folder) if folder is not None else None
        self.owner: str | None = None
        self.overrides: dict[str, Any] = {}
        self.outside: Outside | None = None
        self.asked = threading.Event()  # the run shall begin, or nothing ever
        self.stopped = threading.Event()  # nobody needs the server any more
        self.refused = ""  # why the run did not begin
        self._deciding, self._exporting = threading.Lock(), threading.Lock()

    # ---- the driver's side -------------------------------------------------------------------------------------------

    def begin(self, tenant: str, overrides: Mapping[str, Any]) -> None:
        """`tenant` owns the engines from now on, and the run shall begin. Raises `ServiceError`."""
        with self._deciding:
            if self.owner not in (None, tenant) or self.begun_by not in (None, tenant):
                raise ServiceError(409, "engines_in_use", "the engines of this server belong to somebody else")
            if self.owner is not None:
                if overrides and dict(overrides) != self.overrides:
                    raise ServiceError(
                        409, "initialised", f"the run has begun with other settings: {json.dumps(self.overrides)}"
                    )
                return
            self.config = self._changed(overrides)
            self.owner, self.overrides = tenant, dict(overrides)
        self.asked.set()

    def _changed(self, overrides: Mapping[str, Any]) -> Config:
        if refused := list(override_lines(overrides)):
            raise ServiceError(422, "settings", "\n".join(refused))
        try:
            lines = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
            changed = parse_config(dump_resolved(self.config), lines, name="settings")
            self._check(changed)
        except (AsyncFlowError, ValueError, TypeError) as error:
            raise ServiceError(422, "settings", str(error)) from error
        return changed

    def driven(self, start: resuming.Start) -> Outside:
        assert self.owner is not None
        if not start.complete:
            _belongs(start.folder, self.owner)
        self.outside = Outside(self.config, start.folder)
        self.outside.presence.name = self.owner
        return self.outside

    # ---- crossing ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self.outside is not None:
            return self.outside.state
        return FAILED if self.refused else STARTING if self.owner is not None else WAITING

    def _running(self, tenant: str) -> Outside:
        """The run of `tenant`. Raises `ServiceError` where there is none that can be asked."""
        self._owned(tenant)
        outside = self.outside
        if outside is None or outside.state == STARTING:
            raise ServiceError(503, "starting", "the engines are starting: init_engines tells when they are ready")
        if outside.state != RUNNING or outside.loop is None:
            why = f": {outside.error}" if outside.error else ""
            raise ServiceError(409, "ended", f"the run has ended{why}; status, metrics, export and stop still answer")
        return outside

    def _place(self, tenant: str) -> tuple[Outside, TenantStore | None]:
        """Where rows of `tenant` are: in the run, or in a store of its own."""
        if self.owner in (None, tenant):
            return self._running(tenant), None
        outside = self.outside
        if outside is None or outside.state != RUNNING or outside.loop is None:
            raise ServiceError(503, "no_dock", "the server has no dock at the moment: try again later")
        store = outside.stores.get(tenant)
        if store is None:
            store = outside.stores.setdefault(tenant, TenantStore(tenant, outside))
        return outside, store

    def _begun(self, tenant: str) -> Outside:
        """The run of `tenant`, also when it is over."""
        self._owned(tenant)
        if self.outside is None:
            raise ServiceError(503, "starting", "the engines are starting: init_engines tells when they are ready")
        return self.outside

    def _owned(self, tenant: str) -> None:
        if self.owner is None:
            raise ServiceError(409, "not_initialised", "there is no run yet: call init_engines first")
        if tenant != self.owner:
            raise ServiceError(404, "no_run", "you have no run: the engines of this server belong to somebody else")

    async def _in_run(
        self,
        outside: Outside,
        tenant: str,
        work: Coroutine[Any, Any, T],
        undo: Callable[[T], Awaitable[None]] | None = None,
    ) -> T:
        """What `work` gives, which runs in the run's loop. `undo` of its result where the caller is gone meanwhile."""
        loop = outside.loop
        if loop is None:
            work.close()
            raise ServiceError(409, "ended", "the run has ended")
        handed: list[Any] = []

        def dropped(task: asyncio.Task[T]) -> None:
            """The call was given up as its result came."""
            if undo is not None and handed and handed[0].cancelled() and _has_result(task):
                asyncio.run_coroutine_threadsafe(_awaited(undo(task.result())), loop)

        watched = _watched(work, dropped)
        try:
            asked = asyncio.run_coroutine_threadsafe(watched, loop)
        except RuntimeError:  # its loop was closed in this moment
            watched.close()
            work.close()
            raise ServiceError(409, "ended", "the run has ended") from None
        handed.append(asked)
        waiting = asyncio.wrap_future(asked)
        try:
            with outside.presence.calling() if tenant == self.owner else contextlib.nullcontext():
                return await waiting
        except asyncio.CancelledError:
            if outside.loop is None and not _cancelled():
                raise ServiceError(409, "ended", f"the run has ended: {outside.error or 'no more steps'}") from None
            if undo is not None and _has_result(asked):
                asyncio.run_coroutine_threadsafe(_awaited(undo(asked.result())), loop)
            raise
        except AsyncFlowError as error:
            raise told(error) from error

    # ---- the five ----------------------------------------------------------------------------------------------------

    async def init_engines(self, tenant: str, overrides: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any]]:
        await asyncio.to_thread(self.begin, tenant, overrides)
        given = 0
        while True:
            outside = self.outside
            if outside is not None:
                for phase in outside.phases[given:]:
                    given += 1
                    yield {"phase": phase}
                if outside.state == RUNNING:
                    yield {"ready": True, **await self._in_run(outside, tenant, Owner(outside).facts())}
                    return
                if outside.over.is_set():
                    if outside.error:
                        raise ServiceError(500, "failed", f"the run has failed: {outside.error}")
                    yield {"ready": False, "state": outside.state, "summary": outside.summary}
                    return
            if self.refused:
                raise ServiceError(422, "settings", self.refused)
            await asyncio.sleep(LOOK_S)

    async def put_prompts_data(self, tenant: str, prompts: Sequence[Prompt], last: bool) -> Mapping[str, Any]:
        outside, store = self._place(tenant)
        work = store.put_prompts(prompts) if store else Owner(outside).put_prompts(prompts, last)
        return await self._in_run(outside, tenant, work)

    async def get_experience_data(
        self, tenant: str, task: str, columns: Sequence[str], groups: int, timeout_s: float
    ) -> Experience:
        outside, store = self._place(tenant)
        place = store or Owner(outside)

        async def undo(found: Experience) -> None:
            await place.release(found.claim)

        found = await self._in_run(outside, tenant, place.get(task, columns, groups, timeout_s), undo)
        return found if found.claim else replace(found, columns={name: [] for name in columns})

    async def put_experience_data(
        self, tenant: str, claim: int, rows: np.ndarray, columns: Mapping[str, Column]
    ) -> Mapping[str, Any]:
        outside, store = self._place(tenant)
        return await self._in_run(outside, tenant, (store or Owner(outside)).put(claim, rows, columns))

    async def put_trajectories(self, tenant: str, groups: Sequence[TrajectoryGroup]) -> Mapping[str, Any]:
        outside, store = self._place(tenant)
        return await self._in_run(outside, tenant, (store or Owner(outside)).put_trajectories(groups))

    async def weight_sync_notify(self, tenant: str, version: int | None, timeout_s: float) -> Mapping[str, Any]:
        outside = self._running(tenant)
        return await self._in_run(outside, tenant, Owner(outside).weight_sync(version, timeout_s))

    # ---- beside them -------------------------------------------------------------------------------------------------

    async def status(self, tenant: str) -> Mapping[str, Any]:
        outside = self.outside
        if outside is None or tenant != self.owner:
            mine = tenant == self.owner
            found: dict[str, Any] = {"state": self.state if self.owner is None or mine else "no_run"}
            if outside is not None and not mine and outside.state == RUNNING:
                store = self._place(tenant)[1]
                assert store is not None
                found["partition"] = await self._in_run(outside, tenant, store.status())
            return found
        if outside.state == RUNNING and outside.loop is not None:
            return await self._in_run(outside, tenant, beside.status(outside))
        return {**await beside.status(outside), "error": outside.error, "summary": outside.summary}

    async def metrics(self, tenant: str, since: int) -> AsyncGenerator[Mapping[str, Any]]:
        outside = self._begun(tenant)
        with outside.presence.calling():
            async for record in beside.records(outside, since):
                yield record

    async def evaluate(self, tenant: str, timeout_s: float) -> Mapping[str, Any]:
        outside = self._running(tenant)
        return await self._in_run(outside, tenant, beside.evaluate(outside, timeout_s))

    async def checkpoint(self, tenant: str, timeout_s: float) -> Mapping[str, Any]:
        outside = self._running(tenant)
        return await self._in_run(outside, tenant, beside.checkpoint(outside, timeout_s))

    async def export(self, tenant: str, timeout_s: float) -> Mapping[str, Any]:
        folder = self._begun(tenant).folder
        exporting = asyncio.ensure_future(asyncio.to_thread(self._export, folder))
        try:
            return await asyncio.wait_for(asyncio.shield(exporting), timeout_s)
        except asyncio.TimeoutError:
            raise ServiceError(504, "timeout", f"the export goes on, and is not done in {timeout_s:g} s") from None
        except AsyncFlowError as error:
            raise told(error) from error

    def _export(self, folder: RunFolder) -> Mapping[str, Any]:
        with self._exporting:
            return beside.export(folder)

    # ---- the replicas ------------------------------------------------------------------------------------------------

    async def complete(
        self, tenant: str, requests: Sequence[CompletionRequest], timeout_s: float
    ) -> AsyncGenerator[CompletionPart]:
        outside = self._running(tenant)
        with outside.presence.calling():
            parts = outside.completing().complete(tenant, requests, timeout_s)
            async with contextlib.aclosing(parts):
                async for part in parts:
                    yield part

    async def model(self, tenant: str) -> ServedModel:
        return await self._running(tenant).completing().model(tenant)

    # ---- the end -----------------------------------------------------------------------------------------------------

    async def stop(self, tenant: str, now: bool) -> Mapping[str, Any]:
        self._owned(tenant)
        outside = self.outside
        while outside is None and not self.refused:
            await asyncio.sleep(LOOK_S)
            outside = self.outside
        if outside is None:
            self.stopped.set()
            return {"state": FAILED, "error": self.refused}
        asked = False
        with outside.presence.calling():
            while not outside.over.is_set():
                if outside.loop is not None and not asked:
                    outside.loop.call_soon_threadsafe(outside.stop, now)
                    asked = True
                waits = outside.rewards.unattended() if outside.rewards is not None and not now else ""
                if waits and outside.loop is not None:
                    raise beside.waits_for_you("stop", waits)
                await asyncio.sleep(LOOK_S)
        self.stopped.set()
        return {"state": outside.state, "exit_code": outside.code, "error": outside.error, "summary": outside.summary}


def told(error: AsyncFlowError) -> ServiceError:
    """What a caller is told of an error inside the run."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, DeadlineExceeded):
        return ServiceError(504, "timeout", str(error))
    if isinstance(error, DockFull):
        return ServiceError(507, "full", str(error))
    if isinstance(error, WorkerLost | WeightSyncError):
        return ServiceError(503, "recovering", str(error))
    if isinstance(error, ClaimLost):
        return ServiceError(409, "claim_lost", str(error))
    return ServiceError(422, "refused", str(error))


def _owner(folder: RunFolder) -> str | None:
    """Raises `PlatformError`."""
    try:
        return folder.owner.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise PlatformError(f"it cannot be read whose run {folder.path} is: {error}") from error


def _belongs(folder: RunFolder, owner: str) -> None:
    try:
        folder.owner.write_text(owner + "\n", encoding="utf-8")
    except OSError as error:
        raise PlatformError(f"the run folder cannot be written: {error}") from error


def _cancelled() -> bool:
    """Whether the running task itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _has_result(done: Any) -> bool:
    return done.done() and not done.cancelled() and done.exception() is None


async def _watched(work: Coroutine[Any, Any, T], ended: Callable[[asyncio.Task[T]], None]) -> T:
    """`ended` is called after the result was handed over: whoever does that is asked first."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(ended)
    return await work


async def _awaited(work: Awaitable[T]) -> T:
    return await work
