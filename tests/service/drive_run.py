"""A client in a thread beside a run (`serve`), and what it saw as JSON: the run of test_api_runs.py, in two lives.

python drive_run.py FOLDER first|second
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path

import numpy as np

from mindspeed_asyncflow.config.load import load_config
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.service.serving import serve
from mindspeed_asyncflow.service.verbs import Prompt, Trajectory, TrajectoryGroup

CONFIG = Path(__file__).parents[2] / "configs" / "qwen_tiny_cpu.yaml"
SETTINGS = [
    *("rollout.engine=reference", "workflow.groups_per_step=4", "algorithm.group_size=4", "evaluation.prompts=8"),
    *("service.prompts=client", "service.rewards=client", "service.weight_sync=client", "service.masks=true"),
    *("service.linger_s=30", "service.client_timeout_s=60"),
]
ME = "alice"


def prompts(count, first):
    digits = [f"{(7919 * (first + i)) % 10000:04d}" for i in range(count)]
    return [Prompt(f"{d}>", "".join(sorted(d)), {"number": first + i}) for i, d in enumerate(digits)]


async def refusal(work):
    try:
        await work
    except ServiceError as error:
        return [error.status, error.code]
    return None


async def scored(api, groups):
    """Rewards for so many groups; the last claim."""
    found = None
    while groups > 0:
        columns = ["prompt", "response", "truth", "fields", "response_ids", "rollout_logprobs"]
        found = await api.get_experience_data(ME, "reward", columns, groups, 5.0)
        if not found.claim:
            continue
        pairs = zip(found.columns["response"], found.columns["truth"])
        rewards = np.array([sum(a == t for a, t in zip(r, truth)) / len(truth) for r, truth in pairs])
        await api.put_experience_data(ME, found.claim, found.rows, {"rewards": rewards})
        groups -= len(np.unique(found.groups))
    return found


def as_trajectories(claim, version):
    """The same answers once more, as if somebody else had got them; the policy did not write their last tokens."""
    for group in np.unique(claim.groups):
        places = np.flatnonzero(claim.groups == group)
        answers = []
        for i in places:
            ids, logprobs = claim.columns["response_ids"][i], claim.columns["rollout_logprobs"][i]
            mask = np.ones(len(ids), np.uint8)
            mask[1:] = 0
            answers.append(Trajectory(ids, logprobs, version, mask))
        rewards = np.arange(len(places), dtype=np.float32)
        prompt = Prompt(claim.columns["prompt"][places[0]], claim.columns["truth"][places[0]])
        yield TrajectoryGroup(prompt, answers, rewards)


async def version_made(api, version):
    while (await api.status(ME))["version"] < version:
        await asyncio.sleep(0.05)


async def first(api):
    saw = {"early": await refusal(api.put_prompts_data(ME, prompts(1, 0), False))}
    saw["bad_key"] = await refusal(anext(api.init_engines(ME, {"run.folder": "elsewhere"})))
    saw["init"] = [said async for said in api.init_engines(ME, {"trainer.steps": 9})]
    saw["second_owner"] = await refusal(anext(api.init_engines("bob", {})))
    saw["bob_stops"] = await refusal(api.stop("bob", True))
    saw["put"] = await api.put_prompts_data(ME, prompts(4, 0), False)
    claim = await scored(api, 4)
    await version_made(api, 1)
    saw["kept_back"] = (await api.status(ME))["published"]
    saw["notified"] = await api.weight_sync_notify(ME, 1, 60.0)
    saw["evaluated"] = (await api.evaluate(ME, 60.0))["version"]
    saw["checkpoint"] = await api.checkpoint(ME, 60.0)
    saw["exported"] = await api.export(ME, 60.0)
    saw["bob"] = await api.put_prompts_data("bob", prompts(1, 50), False)
    saw["bobs_rows"] = (await api.get_experience_data("bob", "rollout", ["truth"], 1, 5.0)).columns["truth"]
    groups = list(as_trajectories(claim, version=0))
    saw["trajectories"] = await api.put_trajectories(ME, groups)
    await api.put_prompts_data(ME, prompts(4 - len(groups), 4), False)
    await scored(api, 4 - len(groups))
    await version_made(api, 2)
    await api.weight_sync_notify(ME, None, 60.0)
    await api.put_prompts_data(ME, prompts(4, 8), False)
    saw["status"] = await api.status(ME)
    saw["stopped"] = await api.stop(ME, True)
    return saw


async def to_the_end(work):
    """Again and again, until the run has ended."""
    while await refusal(work()) != [409, "ended"]:
        await asyncio.sleep(0.05)


async def second(api):
    saw = {"init": [said async for said in api.init_engines(ME, {"trainer.steps": 9})]}
    saw["put"] = await api.put_prompts_data(ME, prompts(4, 12), True)
    scoring = asyncio.ensure_future(to_the_end(lambda: scored(api, 1)))
    notifying = asyncio.ensure_future(to_the_end(lambda: api.weight_sync_notify(ME, None, 60.0)))
    saw["steps"] = [record["step"] async for record in api.metrics(ME, 0)]
    await asyncio.gather(scoring, notifying)
    saw["late"] = await refusal(api.checkpoint(ME, 60.0))
    saw["stopped"] = await api.stop(ME, False)
    return saw


@contextlib.contextmanager
def offer(api):
    def work():
        try:
            saw = asyncio.run(globals()[sys.argv[2]](api))
            (Path(sys.argv[1]) / f"{sys.argv[2]}.json").write_text(json.dumps(saw, default=str), encoding="utf-8")
        except BaseException:
            traceback.print_exc()
            os._exit(3)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(30)


if __name__ == "__main__":
    config = load_config(CONFIG, SETTINGS)
    sys.exit(serve(config, Path(sys.argv[1]) / "run", offer=offer))
