"""One training run in this process, with an exact lag: the parts of a real run, without Ray, dock and relay.

The batch of step t is sampled by version max(0, t - lag): the worst that `workflow.max_lag` allows, at every step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learning_jobs import lagged

from mindspeed_asyncflow.algorithms.advantages import group_advantages
from mindspeed_asyncflow.algorithms.aggregate import loss_denominator
from mindspeed_asyncflow.algorithms.moments import Moments, rescale
from mindspeed_asyncflow.algorithms.overlong import overlong_penalty
from mindspeed_asyncflow.config.load import load_config
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.data.builtin_models import ensure_model
from mindspeed_asyncflow.data.prompts import Prompt, PromptSet
from mindspeed_asyncflow.data.sources import make_sources
from mindspeed_asyncflow.data.stream import PromptStream
from mindspeed_asyncflow.data.tokenizers import load_tokenizer
from mindspeed_asyncflow.engines.hf_model import HostModel
from mindspeed_asyncflow.engines.reference import pad_left
from mindspeed_asyncflow.engines.sampling import sample
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.memory import DeviceMemory
from mindspeed_asyncflow.platforms.ports import hold_port
from mindspeed_asyncflow.records import MicroBatch, SamplingSpec, TrainSample
from mindspeed_asyncflow.rewards.registry import Spec, build
from mindspeed_asyncflow.workflow.batcher import RowInfos, pack, plan
from mindspeed_asyncflow.workflow.score_worker import answer_of
from mindspeed_asyncflow.workflow.workers import sample_seed

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "qwen_tiny_cpu.yaml"
START_SEED = 0  # of weights and of the split into training and held-out prompts: all runs start from the same
REFILLS = 4  # more batches sampled for one step at most where groups without a difference are replaced
LAST = 10  # steps whose mean reward is the final one


@dataclass(frozen=True, slots=True)
class Drawn:
    """One sampled answer."""

    group: int
    member: int
    prompt: Prompt
    ids: np.ndarray  # int32 [L]
    logprobs: np.ndarray  # float32 [L]
    finished: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains: the answers, their rewards and advantages, and the version that sampled them."""

    version: int
    rows: list[Drawn]
    advantages: np.ndarray  # float64 [n]
    rewards: np.ndarray  # float64 [n], punishments included
    score: float  # mean score of all answers that were sampled for it, those that were dropped included


class Sampler:
    """The reference engine's model and its sampling rule, on answers of a few tokens."""

    def __init__(self, folder: str, config: Config, eos: int) -> None:
        self.model = HostModel(folder, config.model.dtype, DeviceMemory(CpuPlatform()))
        self.targets = self.model.buffers()
        self.config, self.eos = config, eos

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.targets:
                self.targets[name].copy_(tensor)

    def draw(self, prompts: Sequence[tuple[int, int, Prompt]], seed: int, temperature: float = 1.0) -> list[Drawn]:
        """One answer for each (group, member, prompt)."""
        longest = self.config.rollout.max_new_tokens
        specs = [SamplingSpec(longest, temperature)] * len(prompts)
        seeds = [sample_seed(seed, group, member) for group, member, _ in prompts]
        firsts = [i for i, row in enumerate(prompts) if i == 0 or row[0] != prompts[i - 1][0]]
        copies = torch.tensor(np.diff([*firsts, len(prompts)]))  # of each prompt, side by side
        ids, mask = pad_left([prompts[i][2].ids.tolist() for i in firsts])
        cache = self.model.new_cache()
        tokens, logprobs = [], []
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        for place in range(longest):
            logits = self.model.forward(ids, mask, cache=cache, keep=1)[:, 0]
            if place == 0:  # a prompt is read once for all of its answers
                each = torch.arange(len(firsts)).repeat_interleave(copies)
                logits, mask = logits[each], mask[each]
                self.model.select(cache, each)
            token, logprob = sample(logits, specs, seeds, [place] * len(prompts))
            tokens.append(token)
            logprobs.append(logprob)
            ended |= token == self.eos
            if ended.all():
                break
            ids, mask = token[:, None], torch.cat([mask, torch.ones(len(prompts), 1, dtype=torch.long)], dim=1)
        answers = torch.stack(tokens, dim=1).numpy().astype(np.int32)  # [B, L]
        scores = torch.stack(logprobs, dim=1).numpy()
        is_end = answers == self.eos
        lengths = np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, answers.shape[1])
        return [
            Drawn(group, member, prompt, answers[i, :n].copy(), scores[i, :n].copy(), bool(is_end[i, n - 1]))
            for i, ((group, member, prompt), n) in enumerate(zip(prompts, lengths.tolist()))
        ]


_starts: dict[str, tuple[str, Any, PromptSet]] = {}


def _start(config: Config) -> tuple[str, Any, PromptSet]:
    """Model folder, tokenizer and prompts; made once in a process."""
    key = config.model.model_dump_json() + config.data.model_dump_json()
    if key not in _starts:
        folder = ensure_model(config.model, config.data, START_SEED, lambda text: None)
        tokenizer = load_tokenizer(folder)
        _starts[key] = (
            folder,
            tokenizer,
            PromptSet.build(make_sources(config.data), tokenizer, config.data, START_SEED),
        )
    return _starts[key]


class Run:
    """Everything of one run."""

    def __init__(self, settings: Sequence[str], lag: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.config = config = load_config(CONFIG, settings)
        self.lag, self.seed = lag, seed
        self.folder, self.tokenizer, self.prompts = _start(config)
        self.stream = PromptStream(
            self.prompts, seed, config.data.epochs, config.data.drop_last, config.workflow.groups_per_step
        )
        self.scorer = build(Spec.of(config.data, config.reward))
        self.sampler = Sampler(self.folder, config, self.tokenizer.eos_token_id)
        self.trainer = self._trainer()
        self.critic = self._critic() if config.algorithm.advantage == "gae" else None
        self.groups = 0  # issued so far
        self.surplus: list[list[tuple[Drawn, float]]] = []
        self.texts: dict[bytes, str] = {}

    def _trainer(self) -> Any:
        from mindspeed_asyncflow.algorithms.policy_loss import make_policy_loss
        from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap

        config = self.config
        bootstrap("cpu", 1)  # changes torch, so it comes before megatron is imported
        from mindspeed_asyncflow.engines.megatron.engine import MegatronTrainEngine

        port = hold_port()
        return MegatronTrainEngine(
            self.folder,
            config.trainer,
            dtype=config.model.dtype,
            temperature=config.rollout.temperature,
            loss_fn=make_policy_loss(config.algorithm, config.correction),
            rank=0,
            world_size=1,
            master_port=port.port,
            seed=self.seed,
            timeout_s=60.0,
            platform="cpu",
            held_port=port,
        )

    def _critic(self) -> Any:
        from learning_critic import Critic

        return Critic(self.folder, self.config, self.seed)

    def evaluate(self) -> float:
        """Share of held-out prompts that are answered rightly, greedily."""
        chosen = self.prompts.heldout[: self.config.evaluation.prompts]
        drawn = self.sampler.draw([(i, 0, prompt) for i, prompt in enumerate(chosen)], 0, temperature=0.0)
        return float(np.mean(self._scores(drawn)))

    def _scores(self, drawn: Sequence[Drawn]) -> np.ndarray:
        """[n]; a failing scorer ends the benchmark."""
        found = []
        for row in drawn:
            key = row.ids.tobytes()
            if key not in self.texts:
                ids = row.ids[:-1] if row.finished else row.ids
                self.texts[key] = self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            answer = answer_of(self.texts[key], row.prompt.truth, row.finished, row.prompt.fields, len(row.ids))
            result = self.scorer.result(answer, {})
            if result.value is None:
                raise RuntimeError(f"no score for {answer.text!r}: {result.error}")
            found.append(result.value)
        return np.array(found)

    def _groups(self) -> list[list[tuple[Drawn, float]]]:
        """One batch of scored groups of the sampler's present version."""
        size = self.config.algorithm.group_size
        wanted = [
            (self.groups + i, member, prompt)
            for i, (_, _, prompt) in enumerate(next(self.stream))
            for member in range(size)
        ]
        drawn = self.sampler.draw(wanted, self.seed, self.config.rollout.temperature)
        scored = list(zip(drawn, self._scores(drawn).tolist()))
        self.groups += len(wanted) // size
        return [scored[i : i + size] for i in range(0, len(scored), size)]

    def make(self, version: int) -> Batch:
        """Sample, score and compare; with dynamic sampling, until enough groups differ or `REFILLS` is reached."""
        self.sampler.load(self.trainer.export_weights())
        config, wanted = self.config, self.config.workflow.groups_per_step
        groups = self._groups()
        score = float(np.mean([value for group in groups for _, value in group]))
        if config.algorithm.dynamic_sampling:
            useful, self.surplus = self.surplus + _telling(groups), []
            for _ in range(REFILLS):
                if len(useful) >= wanted:
                    break
                useful += _telling(self._groups())
            # surplus would be of an older version in the next step: it is dropped, so that the lag stays exact
            groups = useful[:wanted] or groups
        rows = [row for group in groups for row, _ in group]
        rewards = np.array([value for group in groups for _, value in group])
        r = config.reward
        if r.overlong_buffer is not None:
            lengths = np.array([len(row.ids) for row in rows])
            rewards = rewards + overlong_penalty(
                lengths, config.rollout.max_new_tokens, r.overlong_buffer, r.overlong_factor, r.overlong_beyond
            )
        found = group_advantages(rewards, [row.group for row in rows], config.algorithm)
        return Batch(version, rows, found.values, rewards, score)

    def train(self, step: int, batch: Batch) -> None:
        """One optimizer step of the policy, and of the critic where there is one."""
        a, lag = self.config.algorithm, step - batch.version
        samples = [
            TrainSample(
                row=i,
                group_id=row.group,
                member=row.member,
                prompt_ids=row.prompt.ids,
                response_ids=row.ids,
                rollout_logprobs=row.logprobs,
                advantage=float(batch.advantages[i]),
                version_min=batch.version,
                version_max=batch.version,
                lags=np.full(len(row.ids), lag, np.int32),
            )
            for i, row in enumerate(batch.rows)
        ]
        infos = RowInfos(
            np.arange(len(samples)),
            np.array([s.group_id for s in samples]),
            np.array([s.member for s in samples], np.int32),
            np.array([s.tokens for s in samples]),
        )
        cut = plan(infos, 1, self.config.trainer.micro_batch_tokens)[0]
        if self.critic is not None:
            samples = self.critic.value(samples, batch.rewards, cut)
            self.critic.train(samples, cut)
        if a.batch_level:
            tokens = np.concatenate([np.broadcast_to(s.advantage, len(s.response_ids)) for s in samples])
            shift, factor = rescale(a, Moments.of(tokens), Moments.of(batch.rewards))
            samples = [_moved(s, shift, factor) for s in samples]
        sums = self.trainer.forward_backward(packed(samples, cut))
        denominator = loss_denominator(
            a.aggregation,
            sums["actor/loss_tokens_count"],
            sums["actor/loss_sequences_count"],
            a.loss_horizon,
        )
        report = self.trainer.optim_step(denominator)
        if not math.isfinite(report.grad_norm):
            raise RuntimeError(f"gradient of step {step} is not finite in {report.bad_tensor}")

    def close(self) -> None:
        if self.critic is not None:
            self.critic.close()
        self.trainer.close()
        self.sampler.model.close()


def _telling(groups: list[list[tuple[Drawn, float]]]) -> list[list[tuple[Drawn, float]]]:
    """Groups whose scores differ."""
    return [group for group in groups if np.ptp([value for _, value in group]) > 0]


def _moved(sample: TrainSample, shift: float, factor: float) -> TrainSample:
    return dataclasses.replace(sample, advantage=(np.asarray(sample.advantage, np.float64) - shift) * factor)


def packed(samples: Sequence[TrainSample], cut: Sequence[Sequence[int]]) -> list[MicroBatch]:
    return [pack([samples[row] for row in rows]) for rows in cut]


def train_once(settings: Sequence[str], lag: int, seed: int) -> dict[str, Any]:
    """Mean sampled score of each step's batch, and the greedy held-out score at both ends."""
    run = Run(settings, lag, seed)
    try:
        before = run.evaluate()
        scores = []
        for step, batch in lagged(run.make, run.config.trainer.steps, lag):
            scores.append(batch.score)
            run.train(step, batch)
        run.sampler.load(run.trainer.export_weights())
        return {"scores": scores, "heldout": [before, run.evaluate()]}
    finally:
        run.close()
