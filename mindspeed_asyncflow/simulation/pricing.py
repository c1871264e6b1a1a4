"""From a configuration to the costs of its simulated run: the planner's model, and what sharing devices adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from mindspeed_asyncflow.config.cluster import ClusterConfig
from mindspeed_asyncflow.config.model import ModelShape
from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.planner.analytic import WIDTH, Speeds, analytic_costs
from mindspeed_asyncflow.planner.costs import Costs
from mindspeed_asyncflow.planner.profile import Profile
from mindspeed_asyncflow.planner.work import Work
from mindspeed_asyncflow.reshard.cost import LinkSpeeds, modelled_seconds
from mindspeed_asyncflow.reshard.plan import make_plan
from mindspeed_asyncflow.reshard.rollout_layout import rollout_layout
from mindspeed_asyncflow.reshard.topology import Topology
from mindspeed_asyncflow.reshard.train_layout import train_layout

BUCKET_BYTES = 1 << 30
Reshard = Callable[[Config, Work], float]
MESSAGE_S = 20e-6  # of one message between two devices, an assumption


def priced(
    config: Config, work: Work, profile: Profile | None = None, *, reshard: Reshard | None = None
) -> tuple[Config, Costs]:
    """The configuration to simulate, and its costs; measured blocks of `profile` replace analytic ones.

    Colocated, the reference policy has no devices of its own either: its forward passes are time of the trainer, and
    there is no `reference` task. `reshard`: seconds of moving weights in place there (default: `reshard_s`).
    """
    shared = config.workflow.schedule == "colocated"
    analytic = analytic_costs(config, work, (reshard or reshard_s)(config, work) if shared else 0.0)
    costs = analytic if profile is None else profile.costs(config, work)
    if not shared:
        return config, costs
    passes = 4 if config.trainer.recompute else 3
    more = (passes + 1) / passes if config.algorithm.kl_coef > 0 else 1.0
    costs = costs.scaled(train=config.simulation.colocated_scale)
    costs = replace(
        costs, train_token_s=costs.train_token_s * more, train_square_s=costs.train_square_s * more,
        train_micro_s=costs.train_micro_s * more,
    )  # fmt: skip
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_coef": 0.0})}), costs


def gather_s(config: Config, work: Work) -> float:
    """In place, by a formula for many candidates: every device gathers its rollout shard from one copy of the model."""
    t, width = config.trainer, WIDTH[config.model.dtype]
    copy = t.tensor_parallel * t.pipeline_parallel
    shard = work.parameters * width / config.rollout.tensor_parallel
    missing = shard * (1 - 1 / max(1, copy // config.rollout.tensor_parallel))
    return missing / Speeds.of(config.cluster, width).link(copy)


def reshard_s(config: Config, work: Work) -> float:
    """In place, by the plan from the trainer's layout to rollout's (`reshard/plan.py`) and the model of its time
    (`reshard/cost.py`). Copies of the model reshard each within itself, so one of them is planned."""
    t, tensor = config.trainer, config.rollout.tensor_parallel
    data = max(1, t.expert_parallel // t.context_parallel)
    train = TrainParallel.of(t.model_copy(update={"data_parallel": data}))
    if train.world_size % tensor:  # a replica is larger than one copy of the model
        return gather_s(config, work)
    rollout = RolloutParallel(tensor=tensor, replicas=train.world_size // tensor)
    return _planned_s(work.shape, train, rollout, config.cluster, WIDTH[config.model.dtype])


@cache
def _planned_s(
    shape: ModelShape, train: TrainParallel, rollout: RolloutParallel, cluster: ClusterConfig, width: int
) -> float:
    speeds = Speeds.of(cluster, width)
    links = LinkSpeeds(
        speeds.node, speeds.network, speeds.network, speeds.memory / 2, MESSAGE_S
    )  # copies read and write
    ranks = range(train.world_size)
    topology = Topology(tuple(rank // speeds.per_node for rank in ranks), (0,) * train.world_size)
    plan = make_plan(
        train_layout(shape, train),
        rollout_layout(shape, rollout),
        itemsize=width,
        bucket_bytes=BUCKET_BYTES,
        topology=topology,
    )
    return modelled_seconds(plan, links)
