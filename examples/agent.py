r"""Train an agent of your own: it asks the policy as OpenAI's chat completions, and gives its trajectories back.

    asyncflow serve configs/qwen_tiny_cpu.yaml --set service.prompts=client --set data.chat=true \
        --set data.chat_template=examples/plain_chat.jinja
    python examples/agent.py --token-file runs/service.token

The agent is asked to sort four digits. Every answer comes from the newest weights, with the ids, log-probabilities and
policy version of its tokens; what the agent makes of it is its reward, and all answers to one task are a group.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

import numpy as np
from openai import AsyncOpenAI

from mindspeed_asyncflow import AsyncClient
from mindspeed_asyncflow.service.verbs import Prompt, Trajectory, TrajectoryGroup

LONGEST = 5  # tokens: four digits and the end


def reward(answer: str, digits: str, finished: bool) -> float:
    """Share of digits that are in their place."""
    wanted = "".join(sorted(digits))
    return float(finished and len(answer) == len(wanted)) * np.mean([a == w for a, w in zip(answer, wanted)] or [0.0])


async def episode(policy: AsyncOpenAI, digits: str, tries: int) -> TrajectoryGroup:
    """One task, tried several times."""
    messages = [{"role": "user", "content": f"{digits}>"}]
    asked = {"messages": messages, "n": tries, "max_tokens": LONGEST, "logprobs": True}
    answer = await policy.chat.completions.create(model="policy", **asked, extra_body={"return_token_ids": True})
    answers, rewards = [], []
    for choice in answer.choices:
        logprobs = np.array([token.logprob for token in choice.logprobs.content], np.float32)
        finished = choice.finish_reason == "stop"
        ids = np.array(choice.token_ids, np.int32)
        answers.append(Trajectory(ids, logprobs, choice.version, finished=finished))
        rewards.append(reward(choice.message.content, digits, finished))
    return TrajectoryGroup(Prompt(messages), answers, np.array(rewards, np.float32))


async def main(url: str, token: str, steps: int) -> None:
    draw = random.Random(0)
    async with AsyncClient(url, token) as run, AsyncOpenAI(base_url=f"{url}/v1", api_key=token) as policy:
        facts = await run.init_engines({"trainer.steps": steps})
        for step in range(steps):
            tasks = [f"{draw.randrange(10000):04d}" for _ in range(facts["groups_per_step"])]
            groups = await asyncio.gather(*(episode(policy, task, facts["group_size"]) for task in tasks))
            await run.put_trajectories(groups)
            print(f"step {step}: reward {np.mean([g.rewards for g in groups]):.3f}", flush=True)
            if step + 1 < steps:
                await run.weight_sync_notify(step + 1)
        async for record in run.metrics(steps - 1):
            print(f"trained {record['step'] + 1} steps")
        print(await run.stop())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--token-file", type=Path, default=Path("runs/service.token"))
    parser.add_argument("--steps", type=int, default=20)
    told = parser.parse_args()
    asyncio.run(main(told.url, told.token_file.read_text(encoding="utf-8").strip(), told.steps))
