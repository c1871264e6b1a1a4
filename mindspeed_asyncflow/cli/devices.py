"""What the devices of a run hold, and how long a step is expected to take: the planner, for one configuration.

It is used before a launch on NPUs; on a CPU "devices" are cores of one memory, which `config/host_memory.py` counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mindspeed_asyncflow.config import Config, feasibility
from mindspeed_asyncflow.config.checks import Finding
from mindspeed_asyncflow.errors import ConfigError, PlatformError
from mindspeed_asyncflow.planner import memory
from mindspeed_asyncflow.planner.estimate import Estimate, estimate
from mindspeed_asyncflow.planner.work import Work
from mindspeed_asyncflow.planner.workload import Workload
from mindspeed_asyncflow.platforms.communicators import (
    BUFFER_ENV,
    TRAINER_COMMUNICATORS,
    buffer_limit_mb,
    communicator_bytes,
)

TRAINER, ROLLOUT = "a trainer rank", "a rollout rank"
HOST_OPERATIONS_PER_S = 1e12  # a matrix multiplication by plain torch on a server's cores, in order of magnitude
SLOW_REFERENCE_S = 60.0  # of a step: less is beside the point
LABEL = "simulated, not run on NPUs"
KNOBS = {
    TRAINER: (
        *("trainer.micro_batch_tokens", "trainer.recompute", "trainer.distributed_optimizer"),
        *("trainer.tensor_parallel", "trainer.pipeline_parallel", "trainer.expert_parallel"),
    ),
    ROLLOUT: ("rollout.kv_cache_mb", "rollout.max_running", "rollout.tensor_parallel"),
}


def held_bytes(config: Config, work: Work) -> dict[str, dict[str, float]]:
    """Bytes by kind on the fullest device of each side. Where both share devices they take turns: neither adds to the
    other."""
    return {TRAINER: memory.trainer_bytes(config, work), ROLLOUT: memory.rollout_bytes(config, work)}


def findings(config: Config, work: Work) -> Iterator[Finding]:
    """What does not fit on a device, and what is not on one."""
    usable = memory.usable_bytes(config)
    for side, kinds in held_bytes(config, work).items():
        need = sum(kinds.values())
        if need > usable:
            listing = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in kinds.items())
            text = f"{side} takes {need / 1e9:.1f} GB ({listing}), a device of cluster.preset={config.cluster.preset} "
            yield Finding("error", KNOBS[side], f"{text}has {usable / 1e9:.1f} GB to use: lower these, or cut more")
    yield from _reference(config, work)


def _reference(config: Config, work: Work) -> Iterator[Finding]:
    """The policy that the KL term refers to has no device: its forward passes take the time of host CPUs."""
    weights = sum(work.layer_active) + work.vocabulary
    seconds = 2 * weights * Workload.of(config).step_tokens / HOST_OPERATIONS_PER_S
    if config.algorithm.kl_coef > 0 and seconds > SLOW_REFERENCE_S:
        text = f"the reference policy is computed on host CPUs: {weights / 1e9:.1f} billion weights for each token "
        rate = f"take about {seconds / 60:.0f} minutes a step at {HOST_OPERATIONS_PER_S:.0e} operations a second"
        yield Finding("warning", ("algorithm.kl_coef",), f"{text}{rate}; 0 is without it")


def communicator_findings(config: Config, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Buffers of HCCL's groups that do not fit what a device leaves to libraries. No allocator counts them, and they
    stay while the other side has the device. `environ`: that of the run."""
    own = config.placement.trainer_env
    for key, given in (("placement.trainer_env", own), ("run.platform", environ)):
        try:
            buffer_limit_mb(given)
        except PlatformError as error:
            yield Finding("error", (key,), str(error))
            return
    reserve, set_by = "cluster.memory_reserve", "placement.trainer_env" if BUFFER_ENV in own else BUFFER_ENV
    limit, mb = buffer_limit_mb({**environ, **own}), config.rollout.ascend.hccl_buffer_mb
    key, rollout_mb = "rollout.ascend.hccl_buffer_mb" if mb else BUFFER_ENV, mb or buffer_limit_mb(environ)
    native = config.rollout.native is not None
    trainer = [_buffers(limit, set_by, TRAINER_COMMUNICATORS, TRAINER)]
    if native:  # senders are on the trainer's devices
        senders = -(-config.rollout.replicas // config.trainer.world_size)
        trainer.append(_buffers(rollout_mb, key, senders, "senders beside it"))
    groups = (2 if config.rollout.tensor_parallel > 1 else 0) + native  # world and tensor group; weights
    rollout = [_buffers(rollout_mb, key, groups, ROLLOUT)] if groups else []
    left = config.cluster.device.memory_gb * 1e9 * config.cluster.memory_reserve
    for together in [[*trainer, *rollout]] if feasibility.sharing_replicas(config) else [trainer, rollout]:
        need = sum(size for _, _, size in together)
        if need > left:
            words = [said for _, said, _ in together]
            keys = (reserve, *(key for key, *_ in together if key != BUFFER_ENV))
            text = f"groups of HCCL take {need / 1e9:.1f} GB of a device ({' + '.join(words)}), "
            yield Finding(
                "error",
                keys,
                f"{text}and {left / 1e9:.1f} GB are left to libraries: raise the reserve, or lower buffers",
            )


def _buffers(mb: int, set_by: str, groups: int, side: str) -> tuple[str, str, int]:
    """What sets the size, in words, and bytes."""
    size = communicator_bytes(mb, groups)
    return set_by, f"twice {mb} MiB ({set_by}) for each of {groups} of {side}: {size / 1e9:.1f} GB", size


def memory_lines(config: Config, work: Work) -> Iterator[str]:
    """By side and kind, in GB."""
    usable = memory.usable_bytes(config) / 1e9
    for side, kinds in held_bytes(config, work).items():
        yield f"{sum(kinds.values()) / 1e9:>10.2f}  {side}, of {usable:.1f} usable"
        for kind, size in kinds.items():
            yield f"{size / 1e9:>14.2f}  {kind}"


def expected(config: Config, work: Work) -> tuple[Estimate, float]:
    """The step that the planner expects, and tokens (prompts and answers) a second. Raises `ConfigError` for what it
    cannot price."""
    from mindspeed_asyncflow.config.rules_critic import refuse_priced
    from mindspeed_asyncflow.simulation.pricing import gather_s, priced

    refuse_priced(config)
    settled, costs = priced(config, work, reshard=gather_s)
    workload = Workload.of(config)
    found = estimate(settled, costs, workload)
    return found, workload.step_tokens / found.step_s


def expected_lines(config: Config, work: Work) -> Iterator[str]:
    """In words, with the label that every figure of an NPU has here."""
    try:
        found, tokens_per_s = expected(config, work)
    except ConfigError as error:
        yield f"not estimated: {error}"
        return
    yield f"{found.step_s:.3g} s a step, {tokens_per_s:.4g} tokens/s ({LABEL}); it waits for {found.limit}"
    yield f"training {found.train_s:.3g} s, generation {found.generate_s:.3g} s of it"
