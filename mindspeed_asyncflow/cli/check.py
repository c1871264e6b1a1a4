"""`asyncflow check`: everything that can be known before a launch, without starting anything."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from mindspeed_asyncflow.cli import ascend, devices, preflight, settings
from mindspeed_asyncflow.config import Config, dump_resolved, feasibility, host_memory
from mindspeed_asyncflow.config.checks import Finding
from mindspeed_asyncflow.config.keys import all_paths
from mindspeed_asyncflow.config.load import changed_paths
from mindspeed_asyncflow.config.machine import MIB, Machine, assume, probe
from mindspeed_asyncflow.config.model import ModelShape
from mindspeed_asyncflow.config.parallel import TrainParallel
from mindspeed_asyncflow.errors import ConfigError, DataError
from mindspeed_asyncflow.reshard.relay_plan import write_plan
from mindspeed_asyncflow.reshard.train_layout import train_layout

NAME = "check"
HELP = "show what a configuration means and whether it can run here; starts nothing"
MOST_SHARDS = 100_000  # tensors x ranks that are planned for one line of a check
EXAMPLES = """  asyncflow check configs/qwen_tiny_cpu.yaml
  asyncflow check configs/qwen_tiny_cpu.yaml --set trainer.tensor_parallel=2
  asyncflow check configs/qwen_tiny_npu.yaml --platform npu --assume-devices 16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    settings.add_arguments(parser)
    parser.add_argument(
        "--platform",
        choices=("auto", "cpu", "npu"),
        help="put over run.platform; on npu the Ascend software is looked at too",
    )
    parser.add_argument(
        "--assume-devices",
        metavar="N",
        type=settings.at_least(1),
        help="check for a cluster of N NPUs as `cluster` describes it, in place of this machine: no software and no "
        "devices are looked at; nodes are taken to have the CPUs and free disk of this one",
    )
    parser.add_argument("--all", action="store_true", help="show all settings, also those that have their defaults")


def run(arguments: argparse.Namespace) -> int:
    if arguments.platform:
        arguments.overrides = [*arguments.overrides, f"run.platform={arguments.platform}"]
    config = settings.load(arguments)
    machine = preflight.surroundings(config)
    if arguments.assume_devices:
        if config.run.platform == "cpu":
            raise ConfigError("--assume-devices: NPUs are assumed, and run.platform is cpu; take --platform npu")
        machine = assume(arguments.assume_devices, config.cluster, probe(config.run.folder))
    node = preflight.look(config, machine)
    found = preflight.inspect(config, machine, node)
    data = _data(config, machine, found)
    print("== settings")
    print(_settings(config, arguments.all), end="")
    for title, lines in (("batch", _batch(config)), ("data", data), ("processes", _processes(config, machine))):
        print(f"== {title}")
        print("\n".join(lines))
    model = preflight.model_shape(config)
    if model is not None:
        print("== weights")
        print("\n".join(_weights(config, model)))
    print("== least host memory, MiB")
    for name, size in host_memory.memory_bytes(config, machine, model).items():
        print(f"{size / MIB:>10.0f}  {name}")
    if feasibility.on_npu(config, machine):
        print("== Ascend")
        print("\n".join(ascend.lines(config, node)))
    work = preflight.device_work(config, machine, found)
    if work is not None:
        print("== device memory, GB")
        print("\n".join(devices.memory_lines(config, work)))
        print("== expected step")
        print("\n".join(devices.expected_lines(config, work)))
    print("== findings")
    print("\n".join(map(str, found)) or f"none: this configuration can run {'there' if machine.assumed else 'here'}")
    return 2 if any(finding.level == "error" for finding in found) else 0


def _settings(config: Config, everything: bool) -> str:
    if everything:
        return dump_resolved(config)
    changed = changed_paths(config)
    others = f"# {len(all_paths()) - len(changed)} other settings have their defaults; --all shows them\n"
    return (dump_resolved(config, changed) if changed else "") + others


def _batch(config: Config) -> Iterator[str]:
    w, t = config.workflow, config.trainer
    samples = config.samples_per_step
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    yield f"{w.groups_per_step} prompt groups x {config.algorithm.group_size} answers = {samples} samples per step"
    yield f"{samples // t.data_parallel} samples per data-parallel rank ({t.data_parallel})"
    yield f"samples of at most {longest} tokens, {t.micro_batch_tokens // longest} or more in a micro-batch"
    yield f"at most {(w.max_lag + 1) * samples} samples between issue and training (max_lag {w.max_lag})"
    yield f"{t.steps} steps take {t.steps * w.groups_per_step} prompts"


def _data(config: Config, machine: Machine, found: list[Finding]) -> list[str]:
    """The first prompts and what was left out; what the run would refuse joins `found`."""
    wrong = {key for finding in found if finding.level == "error" for key in finding.keys}
    if any(key.startswith(("data", "model.source")) for key in wrong):
        return ["see the findings"]
    if machine.assumed and preflight.absent(config):
        return ["known where the files are"]
    try:
        return preflight.sample(config)
    except DataError as error:
        found.insert(0, Finding("error", ("data",), str(error)))
        return ["see the findings"]


def _weights(config: Config, model: ModelShape) -> Iterator[str]:
    """What moves at each version."""
    width = feasibility.DTYPE_BYTES[config.model.dtype]
    yield f"{model.parameters:,} parameters, {model.parameters * width / MIB:.1f} MiB a version ({config.model.dtype})"
    parallel = TrainParallel.of(config.trainer)
    if feasibility.in_place(config):
        yield f"trainer {parallel}: rank and replica of a device are one process, no relay between them"
        yield "in turn: the replicas are filled from the ranks and answer a batch, then the trainer takes a step"
        return
    try:
        share = _share(model, parallel, width)
    except ConfigError:  # a finding says why
        return
    kind = f" ({config.trainer.engine})" if config.trainer.own else ""
    yield f"trainer {parallel}{kind}: each rank writes {share} MiB of it to the relay"
    yield f"{config.workflow.keep_versions} versions are kept in the relay, which has memory for one more"
    if config.workflow.schedule == "colocated":
        yield "in turn: the replicas load the newest version and answer a batch, sleep, and the trainer takes a step"
        return
    native = config.rollout.native
    sent = f", sent by {native[0]} in buckets of {native[1] // MIB} MiB" if native else ""
    yield f"replicas load as {config.workflow.update} says{sent}"
    if config.workflow.lend:
        yield "those on the trainer's devices load at the begin of their turn, and sleep while it works"


def _share(model: ModelShape, parallel: TrainParallel, width: int) -> str:
    """MiB of a version that a trainer rank writes: by the plan, where that does not take longer than all the rest."""
    if len(model.tensors()) * parallel.world_size > MOST_SHARDS:
        return f"about {model.parameters * width / parallel.world_size / MIB:.0f}"
    plan = write_plan(train_layout(model, parallel))
    shares = [plan.elements(rank) * width / MIB for rank in range(parallel.world_size)]
    return f"{min(shares):.1f} to {max(shares):.1f}"


def _processes(config: Config, machine: Machine) -> Iterator[str]:
    t, r = config.trainer, config.rollout
    device = "NPU" if feasibility.on_npu(config, machine) else "CPU"
    yield "driver: workflow loops"
    yield "dock: controller and warehouse of this node"
    order = f"TP {t.tensor_parallel} x CP {t.context_parallel} x DP {t.data_parallel} x PP {t.pipeline_parallel}"
    ranks = f"{t.world_size} x {t.engine} on {device} ({order})"
    yield f"trainer: {ranks}, {t.threads} threads each"
    if config.critic_size:
        yield f"critic: {config.critic_size} ranks on {device}, cut like it, {config.critic.threads} threads each"
    where = f"the trainer's {device}s, in turn with it" if config.workflow.schedule == "colocated" else device
    yield f"rollout: {r.replicas} x {r.engine} on {where} (TP {r.tensor_parallel}), {r.threads} threads each"
    if config.workflow.lend:
        lent = feasibility.sharing_replicas(config)
        yield f"lent: {lent} x {r.engine} on the trainer's {device}s, while it waits for its next batch"
    yield f"scorers: {config.reward.workers}"
    yield f"dock port: {config.dock.port or 'any free one'}; all other ports are taken free when bound"
    where = "this machine" if machine.whole else "this node of a Ray cluster"
    if machine.assumed or machine.nodes > 1:
        where = f"{machine.nodes} {'assumed ' * machine.assumed}node{'s' * (machine.nodes > 1)}"
    yield f"{where}: {machine.cpus} CPUs, {machine.npus} NPUs, {machine.free_memory_bytes / MIB:.0f} MiB free"
