"""Does the run fit this machine: devices, cores, memory, ports, files, libraries. Estimates err on the low side, so
that a refusal is right; what the run really takes is measured in its metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from mindspeed_asyncflow.config.machine import MIB, Machine
from mindspeed_asyncflow.config.model import ModelShape
from mindspeed_asyncflow.config.parallel import RolloutParallel, check_rollout
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]

# Head sizes for which vLLM's CPU attention has a kernel.
VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# More processes than this per core make no progress worth having: start-up alone passes every deadline.
MAX_PROCESSES_PER_CPU = 8
MODEL_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
ROW_BYTES = 512  # per sample beside its tokens: truth, status, allocator rounding


def on_npu(config: Config, machine: Machine) -> bool:
    """Whether the run will use NPUs."""
    return config.run.platform == "npu" or (config.run.platform == "auto" and machine.npus > 0)


def in_place(config: Config) -> bool:
    """Whether trainer rank and replica of a device are one process, and weights go straight from one to the other."""
    return config.workflow.schedule == "colocated" and config.rollout.engine == "reference"


def own_replicas(config: Config) -> int:
    """Replicas with devices of their own: indices from 0."""
    return 0 if config.workflow.schedule == "colocated" else config.rollout.replicas


def sharing_replicas(config: Config) -> int:
    """Replicas on devices of trainer ranks, whose indices follow those with devices of their own."""
    if config.workflow.schedule == "colocated":
        return config.rollout.replicas
    return config.trainer.world_size // config.rollout.tensor_parallel if config.workflow.lend else 0


def devices(config: Config) -> int:
    """Of trainer, critic and rollout; what they share counts once."""
    return config.trainer.world_size + config.critic_size + own_replicas(config) * config.rollout.tensor_parallel


def needed_replicas(config: Config) -> int:
    """Replicas with devices of their own that must be up before the run starts."""
    return min(config.rollout.min_replicas or own_replicas(config), own_replicas(config))


def arena_bytes(config: Config) -> int:
    """Upper bound of the payload that one warehouse holds: every sample under way at its longest."""
    # Prompt ids, then per answer token: id, rollout log-prob, reference log-prob (4 bytes each) and the loss mask;
    # where tokens have advantages, these; with a critic, values and returns.
    a = config.algorithm
    per_token = 13 + 4 * a.token_level + 8 * a.with_critic
    per_sample = 4 * config.data.max_prompt_tokens + per_token * config.rollout.max_new_tokens + ROW_BYTES
    return config.most_samples_open * per_sample


def model_config(config: Config) -> dict[str, Any] | None:
    """The Hugging Face config of a model folder; None where the model is generated or comes from a package.

    Raises ConfigError where the folder or its config.json is missing or unreadable.
    """
    source = config.model.source
    if source.startswith(("builtin:", "package:")):
        return None
    path = Path(source) / "config.json"
    if not path.parent.is_dir():
        raise ConfigError(f"{source}: no such folder; give a Hugging Face model folder, builtin:NAME or package:NAME")
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: {source} is not a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    missing = [key for key in MODEL_KEYS if not isinstance(model, dict) or not isinstance(model.get(key), int)]
    if missing:
        raise ConfigError(f"{path} names no {', '.join(missing)}: it is not the config of a decoder")
    return model


def findings(config: Config, machine: Machine, model: ModelShape | None) -> Iterator[Raw]:
    """Errors and warnings as (level, keys, message); `model` where it is known."""
    yield from _files(config)
    if machine.whole:
        yield from _devices(config, machine)
    yield from _libraries(config, machine)
    yield from _replica_node(config, machine)
    if config.dock.port and not machine.port_is_free(config.dock.port):
        message = f"port {config.dock.port} is in use; take another, or 0 for any free one"
        yield "error", ("dock.port",), message
    if in_place(config) and on_npu(config, machine):
        message = "in place the plain-torch engine answers, slowly on NPUs; with vllm weights come through the relay"
        yield "warning", ("workflow.schedule", "rollout.engine"), message
    if model is not None:
        yield from _rollout_split(config, model)
        yield from _cache(config, model)
        if config.rollout.ascend.expert_parallel and model.experts is None and on_npu(config, machine):
            keys = ("rollout.ascend.expert_parallel", "model.source")
            yield "warning", keys, "has no use: the model has no experts; leave it out"
    if model is not None and config.rollout.engine == "vllm" and not on_npu(config, machine):
        size = model.head_dim
        if model.latent is None and size not in VLLM_CPU_HEADS:
            yield (
                "error",
                ("model.source", "rollout.engine"),
                f"head size {size} has no vLLM kernel on CPU ({', '.join(map(str, VLLM_CPU_HEADS))}); "
                "rollout.engine: reference takes any",
            )


def _rollout_split(config: Config, model: ModelShape) -> Iterator[Raw]:
    try:
        check_rollout(model, RolloutParallel(tensor=config.rollout.tensor_parallel))
    except ConfigError as error:
        yield "error", ("rollout.tensor_parallel",), str(error)


def _files(config: Config) -> Iterator[Raw]:
    for key, folder in (("run.folder", config.run.folder), ("model.cache", config.model.cache)):
        blocked = [p for p in (Path(folder), *Path(folder).parents) if p.exists() and not p.is_dir()]
        there = next((p for p in (Path(folder).absolute(), *Path(folder).absolute().parents) if p.is_dir()), Path("/"))
        if blocked:
            yield "error", (key,), f"{blocked[0]} is a file; name another folder"
        elif not os.access(there, os.W_OK):
            yield "error", (key,), f"{folder} cannot be made: {there} cannot be written; name another folder"


def _devices(config: Config, machine: Machine) -> Iterator[Raw]:
    t, r = config.trainer, config.rollout
    sharing = 0 if in_place(config) else sharing_replicas(config)  # processes beside those of the trainer ranks
    keys = (
        *(f"trainer.{axis}_parallel" for axis in ("tensor", "pipeline", "context", "data")),
        "rollout.replicas",
        "rollout.tensor_parallel",
    )
    critics = config.critic_size
    trained = f"{t.world_size} trainer ranks" + (f" + {critics} critic ranks" if critics else "")
    keys = (*keys, "algorithm.advantage") if critics else keys
    made_of = f"{trained} + {own_replicas(config)} rollout replicas x {r.tensor_parallel}"
    if on_npu(config, machine):
        ranks = t.world_size + critics + needed_replicas(config) * r.tensor_parallel
        if ranks > machine.npus:
            text = f"{ranks} NPUs wanted ({made_of}), {machine.npus} available; lower these sizes"
            yield "error", ("run.platform", *keys), text
        named = config.cluster.devices if "devices" in config.cluster.model_fields_set else ranks
        if ranks > named:
            text = (
                f"cluster.devices is {named}, and {ranks} NPUs are wanted ({made_of}); raise it, or lower these sizes"
            )
            yield "error", ("cluster.devices", *keys), text
        return
    rollout_ranks = (own_replicas(config) + sharing) * r.tensor_parallel
    for key, threads in (("trainer.threads", t.threads), ("rollout.threads", r.threads)):
        if threads > machine.cpus:
            text = f"{threads} CPUs wanted by each process, {machine.cpus} available; set it to {machine.cpus} or less"
            yield "error", (key,), text
    if config.model.dtype == "bfloat16" and not machine.bfloat16:
        text = "is bfloat16, of which the CPUs here multiply matrices tens of times slower than of float32; set float32"
        yield "warning", ("model.dtype",), text
    if r.engine == "vllm" and r.tensor_parallel > machine.cpus:
        yield (
            "error",
            ("rollout.tensor_parallel",),
            f"vLLM wants a CPU for each of {r.tensor_parallel} tensor-parallel workers, {machine.cpus} are available; "
            f"set it to {machine.cpus} or less",
        )
    if config.run.ray_cpus and config.run.ray_cpus > machine.cpus:
        text = f"{config.run.ray_cpus:g} CPUs wanted, {machine.cpus} available; leave it out, or set it to that"
        yield "error", ("run.ray_cpus",), text
    limit = MAX_PROCESSES_PER_CPU * machine.cpus
    processes = t.world_size + critics + rollout_ranks + config.reward.workers
    if processes > limit:
        shared = f" + {sharing} on the trainer's devices x {r.tensor_parallel}" if sharing else ""
        yield (
            "error",
            (*keys, "reward.workers"),
            f"{processes} processes wanted ({made_of}{shared} + {config.reward.workers} scorers), at most {limit} make "
            f"sense on the {machine.cpus} CPUs available; lower one of these",
        )
    own = own_replicas(config) * r.tensor_parallel
    wanted = t.world_size * t.threads + critics * config.critic.threads + own * r.threads
    if machine.cpus < wanted <= limit:
        parts = [f"{t.world_size} trainer ranks x {t.threads} threads"]
        if critics:
            parts.append(f"{critics} critic ranks x {config.critic.threads} threads")
        if own:
            parts.append(f"{own_replicas(config)} rollout replicas x {r.tensor_parallel} ranks x {r.threads} threads")
        others = f"; the {sharing} on the trainer's devices wait while it works" if sharing else ""
        text = f"{wanted} CPUs wanted ({' + '.join(parts)}{others}), {machine.cpus} available: they take turns"
        yield "warning", keys, text


def _libraries(config: Config, machine: Machine) -> Iterator[Raw]:
    here = config.rollout.engine == "vllm" and config.placement.rollout_python is None
    wanted = [("rollout.engine", "vllm", "or set rollout.engine: reference")] if here else []
    kind, _, name = config.model.source.partition(":")
    if kind == "package":
        wanted.append(("model.source", name, "scripts/launch_qwen_grpo.sh installs it on demand"))
    if config.data.task.startswith("reasoning_gym:"):
        wanted.append(("data.task", "reasoning_gym", "scripts/launch_qwen_grpo.sh installs it on demand"))
    for key, module, fix in wanted:
        if not machine.has_module(module):
            yield "error", (key,), f"the Python module {module} is not installed here; {fix}"


def _replica_node(config: Config, machine: Machine) -> Iterator[Raw]:
    """The processes of a replica are started by one worker, on its node."""
    size, per_node = config.rollout.tensor_parallel, config.cluster.device.devices_per_node
    if on_npu(config, machine) and size > per_node:
        yield (
            "warning" if machine.assumed else "error",
            ("rollout.tensor_parallel", "cluster.devices_per_node"),
            f"a replica of {size} devices lies across nodes of {per_node}; all its processes are started on one node, "
            f"so a run does not start like this; set it to {per_node} or less",
        )


def _cache(config: Config, model: ModelShape) -> Iterator[Raw]:
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    per_token = model.layers * model.cached_per_token * DTYPE_BYTES[config.model.dtype]
    if longest * per_token > config.rollout.kv_cache_mb * MIB:
        yield (
            "error",
            ("rollout.kv_cache_mb", "data.max_prompt_tokens", "rollout.max_new_tokens"),
            f"one sample of {longest} tokens needs {longest * per_token / MIB:.0f} MiB of key/value cache, "
            f"{config.rollout.kv_cache_mb} are given; set kv_cache_mb to {-(-longest * per_token // MIB)} or more",
        )
