"""From a configuration to the costs of its simulated run: the planner's model, and what sharing devices adds."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.planner.analytic import WIDTH, Speeds, analytic_costs
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.profile import Profile
from mindspeed_asyncflow.planner.work import Work


def priced(config: Config, work: Work, profile: Profile | None = None) -> tuple[Config, Costs]:
    """The configuration to simulate, and its costs; measured blocks of `profile` replace analytic ones.

    Colocated, the reference policy has no devices of its own either: its forward passes are time of the trainer, and
    there is no `reference` task.
    """
    analytic = analytic_costs(config, work, reshard_s(config, work))
    costs = analytic if profile is None else profile.costs(config, work)
    if config.workflow.schedule != "colocated":
        return config, costs
    passes = 4 if config.trainer.recompute else 3
    more = (passes + 1) / passes if config.algorithm.kl_coef > 0 else 1.0
    costs = costs.scaled(train=config.simulation.colocated_scale)
    costs = replace(
        costs, train_token_s=costs.train_token_s * more, train_square_s=costs.train_square_s * more,
        train_micro_s=costs.train_micro_s * more,
    )  # fmt: skip
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_coef": 0.0})}), costs


def reshard_s(config: Config, work: Work) -> float:
    """In place: every device gathers its rollout shard from the ranks of one copy of the model."""
    if config.workflow.schedule != "colocated":
        return 0.0
    t, width = config.trainer, WIDTH[config.model.dtype]
    copy = t.tensor_parallel * t.pipeline_parallel
    shard = work.parameters * width / config.rollout.tensor_parallel
    missing = shard * (1 - 1 / max(1, copy // config.rollout.tensor_parallel))
    return missing / Speeds.of(config.hardware, width).link(copy)
