"""What an engine is made with: everything that a user's class gets at its construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_asyncflow.config.schema import RolloutConfig, TrainerConfig
from mindspeed_asyncflow.platforms.base import Platform
from mindspeed_asyncflow.platforms.ports import HeldPort


@dataclass(frozen=True, slots=True)
class TrainSetup:
    """Of one trainer rank."""

    model_folder: str  # a Hugging Face folder with safetensors files
    trainer: TrainerConfig  # all of trainer.*
    dtype: str  # model.dtype, a torch name
    temperature: float  # divides the logits before log-probabilities are taken
    # (log-probabilities of `targets` [T], entropy [T], micro-batch) -> (loss *sum*, metric parts); see `PolicyLoss`
    loss_fn: Callable[..., Any]
    rank: int
    world_size: int
    master_address: str  # where ranks meet
    master_port: int
    seed: int
    timeout_s: float  # for the start
    platform: Platform
    held_port: HeldPort | None = None  # rank 0: that of `master_port`, held so far

    def join(self) -> None:
        """All ranks meet in one torch.distributed world, with the platform's backend."""
        from mindspeed_asyncflow.engines.training import join_world

        join_world(
            self.platform,
            rank=self.rank,
            world_size=self.world_size,
            address=self.master_address,
            port=self.master_port,
            timeout_s=self.timeout_s,
            held_port=self.held_port,
        )

    def learning_rate(self, step: int) -> float:
        """Of the optimizer step number `step` (0-based, skipped steps not counted), as trainer.lr* say."""
        from mindspeed_asyncflow.engines.training import learning_rate

        return learning_rate(step, self.trainer)


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """Of one replica."""

    model_folder: str  # as of `TrainSetup`
    rollout: RolloutConfig  # all of rollout.*
    dtype: str  # model.dtype, a torch name
    max_model_len: int  # tokens of the longest prompt and answer together
    seed: int
    stop_token_ids: tuple[int, ...]
    platform: Platform
    sleeps: bool = False  # its device is a trainer's in turn
