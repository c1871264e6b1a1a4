"""What the owner of the run asks for, carried out in the run's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mindspeed_asyncflow.errors import ServiceError, WorkerLost
from mindspeed_asyncflow.service.experience import NOTHING, columns_of, floats
from mindspeed_asyncflow.service.outside import Outside
from mindspeed_asyncflow.service.prompts import encoded
from mindspeed_asyncflow.service.session import Session
from mindspeed_asyncflow.service.trajectories import given_of
from mindspeed_asyncflow.service.verbs import Column, Experience, Prompt, TrajectoryGroup
from mindspeed_asyncflow.workflow.clock import in_time
from mindspeed_asyncflow.workflow.run import Run

LOOK_S = 0.05


class Owner:
    """Made for one call. Raises `ServiceError`."""

    def __init__(self, outside: Outside) -> None:
        self.outside, self.config = outside, outside.config

    @property
    def session(self) -> Session:
        assert self.outside.session is not None
        return self.outside.session

    def running(self) -> Run:
        """The loops."""
        run = self.session.run
        if run is None or run.over:
            raise ServiceError(503, "recovering", "no loop runs at the moment: the run begins, recovers or ends")
        return run

    async def facts(self) -> Mapping[str, Any]:
        c, session, prompts = self.config, self.session, self.outside.prompts
        return {
            "version": session.version,
            "run": self.outside.folder.path.name,
            "replicas": len(session.rollouts),
            "accepted": 0 if prompts is None else len(prompts.issues),
            "steps": c.trainer.steps,
            "groups_per_step": c.workflow.groups_per_step,
            "group_size": c.algorithm.group_size,
            "max_prompt_tokens": c.data.max_prompt_tokens,
            "max_new_tokens": c.rollout.max_new_tokens,
            "max_lag": c.workflow.max_lag,
        }

    # ---- prompts -----------------------------------------------------------------------------------------------------

    async def put_prompts(self, prompts: Sequence[Prompt], last: bool) -> Mapping[str, Any]:
        issues = await asyncio.to_thread(encoded, prompts, self.session.tokenizer, self.config.data)
        return await self._add(issues, last)

    async def _add(self, issues: Sequence[Any], last: bool) -> Mapping[str, Any]:
        given, most, limit_s = self.outside.prompts, self.config.service.max_queued, self.config.service.call_timeout_s
        if given is None:
            raise ServiceError(409, "prompts_of_data", "the prompts of this run are those of its data set; a server "
                               "with service.prompts client takes them from you")  # fmt: skip
        if len(issues) > most:
            raise ServiceError(413, "too_many", f"{len(issues)} prompts in one call; service.max_queued is {most}")
        try:
            await in_time(given.room(len(issues), most), limit_s)
        except asyncio.TimeoutError:
            raise ServiceError(
                503, "queue_full", f"{given.queued} prompts are queued (service.max_queued {most}) and none of these "
                f"{len(issues)} were taken in {limit_s:g} s (service.call_timeout_s): send them again later"
            ) from None  # fmt: skip
        if given.last or given.closed:
            raise ServiceError(409, "no_more", "the run takes no more prompts: `last` was said, or it is being stopped")
        first = given.add(issues, last)
        return {"accepted": len(issues), "first": first, "queued": given.queued}

    async def put_trajectories(self, groups: Sequence[TrajectoryGroup]) -> Mapping[str, Any]:
        config, run = self.config, self.running()
        if config.workflow.max_lag == 0:
            raise ServiceError(
                409, "on_policy", "with workflow.max_lag 0 the run samples every answer itself; set it to 1 or more"
            )  # fmt: skip
        prompts = [group.prompt for group in groups]
        issues = await asyncio.to_thread(encoded, prompts, self.session.tokenizer, config.data)
        words, newest = len(self.session.tokenizer), run.window.published
        given = [given_of(group, i.prompt_ids, config, words, newest) for group, i in zip(groups, issues)]
        old = min((g.oldest for g in given), default=newest)
        if old < run.window.oldest_allowed():
            raise ServiceError(
                409, "stale", f"version {old} is too old: training is at {run.window.version} and workflow.max_lag is "
                f"{config.workflow.max_lag}"
            )  # fmt: skip
        return await self._add([replace(i, given=g) for i, g in zip(issues, given)], last=False)

    # ---- rewards -----------------------------------------------------------------------------------------------------

    def _rewards(self) -> Any:
        rewards = self.outside.rewards
        if self.config.service.rewards != "client" or rewards is None:
            raise ServiceError(409, "rewards_of_scorer", "the answers of this run are scored by its scorers; a server "
                               "with service.rewards client gives them to you")  # fmt: skip
        return rewards

    async def get(self, task: str, columns: Sequence[str], groups: int, timeout_s: float) -> Experience:
        if task != "reward":
            raise ServiceError(404, "unknown_task", f"of this run you can get the task reward, not {task!r:.40}")
        rewards, read = self._rewards(), columns_of(columns, self.session)
        claim, waiting = await rewards.get(groups, timeout_s)
        if not waiting:
            return NOTHING
        try:
            rows = np.concatenate([group.rows for group in waiting])
            values = await read(rows)
        except BaseException:
            rewards.release(claim)
            raise
        ids = np.repeat([group.group for group in waiting], [len(group.rows) for group in waiting]).astype(np.int64)
        return Experience(claim, rows, ids, np.concatenate([group.members for group in waiting]), values)

    async def release(self, claim: int) -> None:
        if self.outside.rewards is not None:
            self.outside.rewards.release(claim)

    async def put(self, claim: int, rows: np.ndarray, columns: Mapping[str, Column]) -> Mapping[str, Any]:
        rewards, a = self._rewards(), self.config.algorithm
        if unknown := columns.keys() - {"rewards", "advantages"}:
            raise ServiceError(422, "columns", f"reward takes rewards and advantages, not {min(unknown)!r:.40}")
        if "rewards" not in columns:
            raise ServiceError(422, "columns", "`rewards` is missing: one number per row, NaN for none")
        given = floats("rewards", columns["rewards"], len(rows))
        if np.isinf(given).any() or (a.advantage == "maxrl" and (given < 0).any()):
            raise ServiceError(422, "rewards", "rewards are finite numbers or NaN (and not negative with maxrl)")
        advantages: list[float | None] = [None] * len(rows)
        if "advantages" in columns:
            if a.token_level or a.batch_level:
                raise ServiceError(
                    422, "advantages", f"algorithm.advantage {a.advantage} makes advantages of tokens, or of the whole "
                    "batch: give rewards only, or run the server with grpo"
                )  # fmt: skip
            found = floats("advantages", columns["advantages"], len(rows))
            if not np.isfinite(found[~np.isnan(given)]).all():
                raise ServiceError(422, "advantages", "advantages are finite numbers where there is a reward")
            advantages = [float(x) for x in found]
        return {"left": rewards.put(claim, rows, list(zip(given.tolist(), advantages)))}

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def weight_sync(self, version: int | None, timeout_s: float) -> Mapping[str, Any]:
        """Through a recovery too. A load that has begun goes on when the caller is gone."""
        steps = self.config.trainer.steps
        if version is not None and not 0 <= version <= steps:
            raise ServiceError(422, "version", f"this run makes versions 0 to {steps} (trainer.steps), not {version}")
        try:
            return await in_time(self._served(version), timeout_s)
        except asyncio.TimeoutError:
            run, wanted = self.session.run, "the newest version" if version is None else f"version {version}"
            stands = "no loop runs at the moment: the run recovers or ends"
            if run is not None and not run.over:
                made = f"training has made {run.window.version}, published is {run.window.published}"
                stands = f"{made}; {self.session.sync.describe()}"
            said = f"{wanted} is not served by all replicas after {timeout_s:g} s: {stands}"
            raise ServiceError(504, "timeout", said) from None

    async def _served(self, version: int | None) -> Mapping[str, Any]:
        """Every replica with devices of its own loads it at once if it has it not; the others in their turn."""
        run: Run | None = None
        wanted = 0
        while True:
            found = self.session.run
            if found is not None and not found.over:  # else it recovers, or ends, and this call with it
                if found is not run:
                    run, wanted = found, found.window.version if version is None else version
                    if self.outside.gate is not None:
                        self.outside.gate.permit(wanted)
                if found.window.published >= wanted and (served := await self._all_serve(found, wanted)):
                    newest = self.session.sync.newest
                    assert newest is not None
                    return {"version": newest.version, "fingerprint": newest.fingerprint, "replicas": served}
            await asyncio.sleep(LOOK_S)

    async def _all_serve(self, run: Run, wanted: int) -> dict[str, int] | None:
        """The versions that replicas serve, or None as long as one has not got `wanted`."""
        sync, own = self.session.sync, [i for i in self.session.rollouts if not self.session.turns.shares(i)]
        behind = [self._load(run, i) for i in own if sync.served[i] < wanted]
        if behind:
            await asyncio.wait(behind)
        if any(load.cancelled() or load.exception() is not None for load in behind):
            return None  # the run ends with it
        served = {f"rollout{i}": sync.served[i] for i in sorted(own)}
        return served if all(v >= wanted for v in served.values()) else None

    def _load(self, run: Run, index: int) -> asyncio.Task[None]:
        """In a task of the run, which ends with weights that are wrong, and does not break off with the caller."""
        loading = self.outside.loading.get(index)
        if loading is None or loading.done():
            loading = self.outside.loading[index] = run.job.spawn(self._bring_up(index))
        return loading

    async def _bring_up(self, index: int) -> None:
        with contextlib.suppress(WorkerLost):  # its loops are told by others
            await self.session.sync.bring_all_up([index])
