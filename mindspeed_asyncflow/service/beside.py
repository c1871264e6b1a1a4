"""What the owner of a run asks beside the five verbs: where it stands, evaluation, checkpoint, export.

Evaluation and checkpoint come between two steps (`workflow/between.py`), or at once while the run waits for prompts.
Everything but `records` runs in the run's event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.errors import CheckpointError, ServiceError
from mindspeed_asyncflow.observe import checkpoints
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.reshard.hf_folder import export_hf
from mindspeed_asyncflow.service.outside import Outside
from mindspeed_asyncflow.service.owner import Owner
from mindspeed_asyncflow.workflow.clock import in_time, now
from mindspeed_asyncflow.workflow.verdict import Verdict

LOOK_S = 0.2


async def status(outside: Outside) -> Mapping[str, Any]:
    session, prompts, rewards = outside.session, outside.prompts, outside.rewards
    found: dict[str, Any] = {"state": outside.state, "run": outside.folder.path.name, "phases": list(outside.phases)}
    run = None if session is None else session.run
    if session is None or run is None:
        return found
    window, book, sync = run.window, run.book, session.sync
    found |= {
        "step": run.job.step,
        "steps": outside.config.trainer.steps,
        "version": window.version,
        "published": window.published,
        "served": {f"rollout{i}": sync.served[i] for i in sorted(session.rollouts)},
        "open_groups": book.count(),
        "samples": {"issued": window.issued, "trained": window.trained, "dropped": dict(window.dropped)},
        "waiting_for_rewards": 0 if rewards is None else rewards.waiting,
        "silent_s": round(outside.presence.silent_s, 3),
        "stopping": outside.stopping,
    }
    if outside.loop is not None:
        found["completions"] = outside.completing().pool.describe()
    if prompts is not None:
        found["prompts"] = {"accepted": len(prompts.issues), "queued": prompts.queued, "last": prompts.last}
    return found


async def evaluate(outside: Outside, timeout_s: float) -> Mapping[str, Any]:
    owner = Owner(outside)
    run, evaluation = owner.running(), owner.session.evaluation
    if evaluation is None or not evaluation.count:
        raise ServiceError(
            409, "no_evaluation", "the server has no evaluation prompts: set evaluation.prompts and data.heldout"
        )

    async def work(step: int) -> Verdict | None:
        await evaluation.ended()
        if outside.gate is None:
            await run.window.wait_published(step)
        return await evaluation.between()

    verdict = await _between(outside, work, timeout_s, "evaluation")
    if verdict is None:
        raise ServiceError(503, "given_up", "versions passed faster than replicas could be held at one: try again")
    return verdict.plain()


async def checkpoint(outside: Outside, timeout_s: float) -> Mapping[str, Any]:
    session = Owner(outside).session

    async def work(step: int) -> int:
        if session.complete is None or session.complete[0] != step:
            await session.save(step)
        return step

    until = now() + timeout_s
    step = await _between(outside, work, timeout_s, "checkpoint")
    try:
        path = await in_time(session.saved(step), max(0.0, until - now()))
    except (TimeoutError, asyncio.TimeoutError):
        raise ServiceError(
            504, "timeout", f"the checkpoint of step {step} is not written in {timeout_s:g} s: it goes on, ask again"
        ) from None
    except CheckpointError as error:
        if session.unsaved:
            raise
        raise ServiceError(503, "recovering", f"{error}: the run begins again at an earlier one; ask again") from error
    return {"step": step, "path": str(path)}


async def _between(outside: Outside, work: Any, timeout_s: float, what: str) -> Any:
    run, until, waits = Owner(outside).running(), now() + timeout_s, ""
    asked = run.training.between.ask(work)
    try:
        while not asked.done() and not waits and (left := until - now()) > 0:
            await asyncio.wait([asked], timeout=min(left, LOOK_S))
            if outside.rewards is not None:
                waits = outside.rewards.unattended(run.training.lacks_scores)
    finally:
        if not asked.done():
            asked.cancel()
    if asked.cancelled() and waits:
        raise waits_for_you(what, waits)
    if asked.cancelled():
        raise ServiceError(
            504, "timeout", f"no {what} in {timeout_s:g} s: it comes between two steps, and step {run.job.step} goes on"
        )  # fmt: skip
    return asked.result()


def waits_for_you(what: str, waits: str) -> ServiceError:
    said = f"{what} waits for you: {waits}. Score them first, or beside this call, from another thread"
    return ServiceError(409, "waits_for_you", said)


def export(folder: RunFolder) -> Mapping[str, Any]:
    """In a thread."""
    found = checkpoints.newest_complete(folder.checkpoints, check=False)
    if found is None:
        raise ServiceError(409, "no_checkpoint", "the run has no complete checkpoint yet: call checkpoint first")
    step = checkpoints.verify(found).step
    out = folder.path / "export" / f"step_{step:06d}"
    whole = found / "hf"
    if whole.is_dir():
        out = whole
    elif not out.exists():
        export_hf(found / "trainer", out)
    return {"path": str(out), "version": step}


async def records(outside: Outside, since: int) -> AsyncIterator[Mapping[str, Any]]:
    """Lines of metrics.jsonl from step `since` on, as they come; in any event loop."""
    path, next_step, at = outside.folder.metrics, since, 0
    while True:
        over = outside.over.is_set()
        lines, end = await asyncio.to_thread(_lines_from, path, at)
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                if not at:
                    raise
                end, over = 0, False  # the file was cut back, and has grown beyond `at` meanwhile
                break
            if record["step"] >= next_step:
                next_step = record["step"] + 1
                yield record
        at = end
        if over:
            return
        await asyncio.sleep(LOOK_S)


def _lines_from(path: Path, at: int) -> tuple[list[bytes], int]:
    """Whole lines from byte `at` on, and where they end; from the beginning where the file has been cut back."""
    if not path.is_file():
        return [], 0
    with open(path, "rb") as file:
        if at > file.seek(0, 2):
            at = 0
        file.seek(at)
        found = file.read()
    whole = found[: found.rfind(b"\n") + 1]
    return whole.splitlines(), at + len(whole)
