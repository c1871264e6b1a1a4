"""The critic of PPO beside the trainer, in the same process: values, advantages and its own step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from megatron.core import parallel_state

from mindspeed_asyncflow.algorithms.gae import gae, token_rewards
from mindspeed_asyncflow.algorithms.value_loss import make_value_loss
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.engines.megatron.critic import MegatronCritic
from mindspeed_asyncflow.platforms.ports import hold_port
from mindspeed_asyncflow.records import TrainSample
from mindspeed_asyncflow.workflow.batcher import pack


class Critic:
    """To be made after the trainer, and closed before it."""

    def __init__(self, folder: str, config: Config, seed: int) -> None:
        # The trainer has its groups in hand: one rank alone is in all of them, so the critic's may take their places.
        parallel_state.destroy_model_parallel()
        self.config = config
        with hold_port() as port:
            self.engine = MegatronCritic(
                folder,
                config.critic_ranks,
                dtype=config.model.dtype,
                loss_fn=make_value_loss(config.critic),
                rank=0,
                world_size=1,
                master_port=port.port,
                seed=seed,
                timeout_s=60.0,
                platform="cpu",
            )

    def value(self, samples: Sequence[TrainSample], rewards: np.ndarray, cut: list[list[int]]) -> list[TrainSample]:
        """The samples with values, advantages and returns of the critic as it is."""
        a = self.config.algorithm
        batches = [pack([samples[row] for row in rows]) for rows in cut]
        of_row: dict[int, np.ndarray] = {}
        for rows, batch, values in zip(cut, batches, self.engine.values(batches)):
            lengths = [len(samples[row].response_ids) for row in rows]
            of_row |= dict(zip(rows, np.split(values[batch.loss_mask > 0], np.cumsum(lengths)[:-1])))
        found = []
        for i, sample in enumerate(samples):
            mask = np.ones(len(sample.response_ids), np.uint8)
            per_token = token_rewards(float(rewards[i]), None, 0.0, mask)
            advantages, returns = gae(per_token, of_row[i], mask, a.gamma, a.gae_lambda)
            found.append(
                dataclasses.replace(
                    sample,
                    advantage=advantages.astype(np.float32),
                    values=of_row[i].astype(np.float32),
                    returns=returns.astype(np.float32),
                )
            )
        return found

    def train(self, samples: Sequence[TrainSample], cut: list[list[int]]) -> None:
        sums = self.engine.forward_backward([pack([samples[row] for row in rows]) for rows in cut])
        self.engine.optim_step(sums["critic/tokens_count"])

    def close(self) -> None:
        self.engine.close()
