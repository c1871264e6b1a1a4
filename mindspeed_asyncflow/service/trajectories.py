"""Answers of a client to what the feed loop issues in the place of prompts: all is checked before any is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ServiceError
from mindspeed_asyncflow.records import Completion, VersionSpan
from mindspeed_asyncflow.service.experience import floats
from mindspeed_asyncflow.service.verbs import Trajectory, TrajectoryGroup
from mindspeed_asyncflow.workflow.given import Given


def given_of(group: TrajectoryGroup, prompt_ids: np.ndarray, config: Config, vocabulary: int, newest: int) -> Given:
    """`newest`: the newest version that can have sampled something. Raises `ServiceError`."""
    size = config.algorithm.group_size
    if len(group.answers) != size:
        raise _wrong(f"a group has {len(group.answers)} answers; algorithm.group_size is {size}")
    room = config.data.max_prompt_tokens + config.rollout.max_new_tokens - len(prompt_ids)
    answers = tuple(_answer(i, answer, vocabulary, room, newest) for i, answer in enumerate(group.answers))
    answers = _with_masks(answers, config)
    rewards = None if group.rewards is None else floats("rewards", group.rewards, size)
    advantages = None if group.advantages is None else floats("advantages", group.advantages, size)
    if advantages is not None:
        a = config.algorithm
        if rewards is None:
            raise _wrong("advantages are given without rewards: the trainer's figures need both")
        if a.token_level or a.batch_level:
            raise _wrong(f"algorithm.advantage {a.advantage} makes advantages itself: give rewards only")
        if not np.isfinite(advantages[~np.isnan(rewards)]).all():
            raise _wrong("advantages are finite numbers where there is a reward")
    negative = config.algorithm.advantage == "maxrl" and rewards is not None and (rewards < 0).any()
    if rewards is not None and (np.isinf(rewards).any() or negative):
        raise _wrong("rewards are finite numbers or NaN (and not negative with maxrl)")
    return Given(answers, rewards, advantages)


def _answer(place: int, answer: Trajectory, vocabulary: int, room: int, newest: int) -> Completion:
    ids, count = np.asarray(answer.response_ids), len(answer.response_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not count or not 0 <= ids.min() <= ids.max() < vocabulary:
        raise _wrong(f"answer {place}: response_ids are whole numbers from 0 to {vocabulary - 1}, at least one")
    if count > room:
        raise _wrong(
            f"answer {place} has {count} tokens and room is for {room}: prompt and answer together may have "
            "data.max_prompt_tokens + rollout.max_new_tokens"
        )
    logprobs = floats(f"rollout_logprobs of answer {place}", answer.rollout_logprobs, count)
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        raise _wrong(f"answer {place}: rollout_logprobs are finite and not above 0")
    if not 0 <= answer.version <= newest:
        raise _wrong(f"answer {place}: version {answer.version} cannot have sampled it; the newest is {newest}")
    return Completion(
        "",
        ids.astype(np.int32),
        logprobs.astype(np.float32),
        "stop" if answer.finished else "length",
        (VersionSpan(int(answer.version), 0, count),),
        mask=_mask(place, answer.response_mask, count),
    )


def _mask(place: int, mask: Any, count: int) -> np.ndarray | None:
    if mask is None:
        return None
    found = np.asarray(mask)
    if found.shape != (count,) or found.dtype.kind not in "iub" or not np.isin(found, (0, 1)).all() or not found.any():
        raise _wrong(f"answer {place}: response_mask has a 0 or 1 for each of {count} tokens, and a 1 somewhere")
    return found.astype(np.uint8)


def _with_masks(answers: Sequence[Completion], config: Config) -> tuple[Completion, ...]:
    """All of a run's answers have masks, or none has."""
    if config.masked:
        return tuple(
            answer if answer.mask is not None else _masked(answer, np.ones(len(answer.token_ids), np.uint8))
            for answer in answers
        )
    if any(answer.mask is not None and not answer.mask.all() for answer in answers):
        raise _wrong("some tokens were not written by the policy (response_mask): set service.masks true at the server")
    return tuple(_masked(answer, None) for answer in answers)


def _masked(answer: Completion, mask: np.ndarray | None) -> Completion:
    return Completion("", answer.token_ids, answer.logprobs, answer.finish_reason, answer.spans, mask=mask)


def _wrong(message: str) -> ServiceError:
    return ServiceError(422, "trajectory", message)
