"""A GRPO run that is driven through every verb: own prompts, own rewards, own advantages, own trajectories."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import numpy as np

from mindspeed_asyncflow import Client
from mindspeed_asyncflow.service.verbs import Prompt, Trajectory, TrajectoryGroup


@dataclass
class Driven:
    """What came of it. `rewards`: the mean of the first and of the last quarter of all rows that were scored."""

    steps: int = 0
    rows: int = 0
    size: int = 0
    seconds: float = 0.0
    saved: bool = False  # a checkpoint was made and exported
    rewards: list[float] = field(default_factory=list)


def reward(answer: str, truth: str) -> float:
    """Share of the digits in their place, and a point for all of them."""
    return sum(a == t for a, t in zip(answer, truth)) / len(truth) + float(answer == truth)


def drive(url: str, token: str, client: Client, steps: int, midway: Callable[[], None]) -> Driven:
    """`client` has begun the run. Half-way there are an evaluation, a checkpoint, an export, and one group of the
    replicas' own completions as trajectories; and `midway` is called, while the run waits for rewards."""
    began, draw, found = time.perf_counter(), random.Random(0), Driven()
    facts = client.init_engines({"trainer.steps": steps})  # again: tells what the run is like
    groups, ahead, found.size = facts["groups_per_step"], facts["max_lag"], facts["group_size"]
    records: list[dict] = []
    listening = threading.Thread(target=lambda: records.extend(Client(url, token).metrics()), daemon=True)
    listening.start()
    saved: list[str] = []
    saving = threading.Thread(target=_save, args=(url, token, saved), daemon=True)
    seen: list[float] = []
    for step in range(steps + ahead):
        if step < steps:
            count = groups
            if step == steps // 2:
                client.weight_sync_notify(step - ahead, timeout_s=300.0)  # older answers would be too old
                own, scored = _trajectories(url, token, _digits(draw), found.size)
                client.put_trajectories([own])
                seen += scored
                count = groups - 1
            client.put_prompts_data([_prompt(_digits(draw)) for _ in range(count)], last=step + 1 == steps)
        if step < ahead:
            continue
        left = groups - (1 if step - ahead == steps // 2 else 0)
        while left:
            left -= _score(client, left, seen)
        if step - ahead == steps // 2:
            client.weight_sync_notify(step - ahead, timeout_s=300.0)
            print(f"  evaluate: {str(client.evaluate())[:200]}", flush=True)
            saving.start()  # it comes between two steps, and the next one has begun: it waits for rewards
            midway()
    saving.join(600.0)
    listening.join(600.0)
    found.steps, found.rows = len(records), len(seen)
    quarter = max(1, len(seen) // 4)
    found.rewards = [float(np.mean(seen[:quarter])), float(np.mean(seen[-quarter:]))]
    found.seconds = time.perf_counter() - began
    found.saved = not saving.is_alive() and bool(saved)
    return found


def _save(url: str, token: str, saved: list[str]) -> None:
    with Client(url, token) as client:
        print(f"  checkpoint: {client.checkpoint()}", flush=True)
        saved.append(client.export()["path"])
        print(f"  export: {saved}", flush=True)


def _digits(draw: random.Random) -> str:
    return "".join(draw.choices("0123456789", k=4))


def _prompt(digits: str) -> Prompt:
    return Prompt(f"{digits}>", "".join(sorted(digits)))


def _score(client: Client, groups: int, seen: list[float]) -> int:
    batch = client.get_experience_data("reward", ["response", "truth"], groups=groups, timeout_s=120.0)
    if not batch.claim:
        raise RuntimeError(f"nothing to be scored came within 120 s: {client.status()}")
    rewards = np.array([reward(*pair) for pair in zip(batch.columns["response"], batch.columns["truth"])], np.float32)
    means = {group: rewards[batch.groups == group].mean() for group in set(batch.groups.tolist())}
    advantages = rewards - np.array([means[group] for group in batch.groups.tolist()], np.float32)
    client.put_experience_data(batch.claim, batch.rows, {"rewards": rewards, "advantages": advantages})
    seen += rewards.tolist()
    return len(means)


def _trajectories(url: str, token: str, digits: str, size: int) -> tuple[TrajectoryGroup, list[float]]:
    """One group of completions of the newest weights, as an agent would get them."""
    asked = {
        "model": "policy",
        "prompt": f"{digits}>",
        "n": size,
        "max_tokens": 5,
        "logprobs": 0,
        "return_token_ids": True,
    }
    headers = {"authorization": f"Bearer {token}"}
    names = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).json()
    asked["model"] = names["data"][0]["id"]
    answer = httpx.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=300.0, trust_env=False)
    answer.raise_for_status()
    prompt, answers, rewards = _prompt(digits), [], []
    for choice in answer.json()["choices"]:
        logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        ids, finished = np.array(choice["token_ids"], np.int32), choice["finish_reason"] == "stop"
        answers.append(Trajectory(ids, logprobs, choice["version"], finished=finished))
        rewards.append(reward(choice["text"], prompt.truth))
    return TrajectoryGroup(prompt, answers, np.array(rewards, np.float32)), rewards
