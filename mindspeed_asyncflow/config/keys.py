"""All dotted keys of the settings, and the nearest right key for a wrong one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.config.section import Section

# What other toolkits call these settings. Only names that are not within a few letters of ours need to be here.
ALIASES = {
    "learning_rate": "trainer.lr",
    "warmup_steps": "trainer.lr_warmup_steps",
    "lr_scheduler_type": "trainer.lr_decay",
    "max_grad_norm": "trainer.grad_clip",
    "clip_grad": "trainer.grad_clip",
    "train_iters": "trainer.steps",
    "max_steps": "trainer.steps",
    "total_steps": "trainer.steps",
    "num_steps": "trainer.steps",
    "save_freq": "trainer.save_every",
    "save_interval": "trainer.save_every",
    "tp": "trainer.tensor_parallel",
    "pp": "trainer.pipeline_parallel",
    "dp": "trainer.data_parallel",
    "cp": "trainer.context_parallel",
    "ep": "trainer.expert_parallel",
    "tensor_model_parallel_size": "trainer.tensor_parallel",
    "pipeline_model_parallel_size": "trainer.pipeline_parallel",
    "context_parallel_size": "trainer.context_parallel",
    "expert_model_parallel_size": "trainer.expert_parallel",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "n": "algorithm.group_size",
    "rollout_n": "algorithm.group_size",
    "num_generations": "algorithm.group_size",
    "n_samples_per_prompt": "algorithm.group_size",
    "kl_coeff": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "beta": "algorithm.kl_coef",
    "adv_estimator": "algorithm.advantage",
    "epsilon": "algorithm.clip_low",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_high": "algorithm.clip_high",
    "loss_agg_mode": "algorithm.aggregation",
    "batch_size": "workflow.groups_per_step",
    "train_batch_size": "workflow.groups_per_step",
    "global_batch_size": "workflow.groups_per_step",
    "staleness": "workflow.max_lag",
    "max_staleness": "workflow.max_lag",
    "eta": "workflow.max_lag",
    "max_tokens": "rollout.max_new_tokens",
    "max_response_length": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_num_seqs": "rollout.max_running",
    "dataset": "data.task",
    "train_files": "data.task",
    "model_path": "model.source",
    "model_name_or_path": "model.source",
    "tokenizer_name_or_path": "model.source",
    "test_freq": "evaluation.every",
    "eval_steps": "evaluation.every",
    "eval_interval": "evaluation.every",
    "device": "run.platform",
    "output_dir": "run.folder",
}


@dataclass(frozen=True, slots=True)
class KeyDoc:
    """One setting, as the documentation and the resolved dump show it."""

    path: str
    type: str
    default: Any
    description: str


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is None:
        return getattr(annotation, "__name__", str(annotation))
    return str(annotation).replace("typing.", "").replace("NoneType", "null")


def sections() -> dict[str, type[Section]]:
    """Section name to its class, in the order of the schema."""
    return {name: type(field.default) for name, field in Config.model_fields.items()}


def describe_keys() -> list[KeyDoc]:
    """Every setting with type, default and description, in the order of the schema."""
    return [doc for section, cls in sections().items() for doc in _describe(section, cls)]


def _describe(path: str, section: type[Section]) -> Iterator[KeyDoc]:
    for name, field in section.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, Section):
            yield from _describe(f"{path}.{name}", type(default))
        else:
            yield KeyDoc(f"{path}.{name}", _type_name(field.annotation), default, field.description or "")


@cache
def choices() -> dict[str, tuple[str, ...]]:
    """The words, as YAML has them, of each setting that takes one of a few."""
    found = {}
    for path in all_paths():
        *_, name = parts = path.split(".")
        annotation = innermost(parts)[1].model_fields[name].annotation
        kinds = [kind for kind in (annotation, *get_args(annotation)) if kind is bool or get_origin(kind) is Literal]
        words = [word for kind in kinds for word in (("true", "false") if kind is bool else get_args(kind))]
        if words and not any(get_origin(kind) in (list, tuple, dict) for kind in (annotation, *get_args(annotation))):
            found[path] = tuple(map(str, dict.fromkeys(words)))
    return found


def innermost(parts: Sequence[str]) -> tuple[int, type[Section]]:
    """How many of `parts`, from the first on, name sections inside each other, and the class of the last of these."""
    section: type[Section] = Config
    for depth, part in enumerate(parts):
        field = section.model_fields.get(part)
        inner = field.get_default(call_default_factory=True) if field else None
        if not isinstance(inner, Section):
            return depth, section
        section = type(inner)
    return len(parts), section


@cache
def all_paths() -> tuple[str, ...]:
    return tuple(doc.path for doc in describe_keys())


def is_open_mapping(path: str) -> bool:
    """True where a setting is itself a mapping with free keys (`data.options`)."""
    parts = path.split(".")
    depth, section = innermost(parts)
    field = section.model_fields.get(parts[depth]) if 0 < depth == len(parts) - 1 else None
    return field is not None and any(get_origin(a) is dict for a in (field.annotation, *get_args(field.annotation)))


def _candidates(path: str) -> Iterator[str]:
    """Possible meanings of an unknown path, the most likely first."""
    section, _, rest = path.lower().replace("-", "_").rpartition(".")
    top = section.split(".")[0]
    own = [p for p in all_paths() if p.startswith(top + ".")] if top else []
    inner = [p for p in own if p.rpartition(".")[0] == section] if section != top else []
    if rest in ALIASES:
        # `tensor_parallel_size` under `trainer` means the trainer's own, whatever the alias says.
        yield from (p for p in own if p.rpartition(".")[2] == ALIASES[rest].rpartition(".")[2])
        yield ALIASES[rest]
    yield from (p for p in all_paths() if p.rpartition(".")[2] == rest)
    for pool in (inner, own, list(all_paths())):
        leaves = {p.rpartition(".")[2]: p for p in reversed(pool)}
        # Lower, and three letters that two short words share would make a guess.
        yield from (leaves[leaf] for leaf in difflib.get_close_matches(rest, list(leaves), n=1, cutoff=0.8))
        yield from (p for p in pool if _has_words(p.rpartition(".")[2], rest))
    yield from (ALIASES[name] for name in difflib.get_close_matches(rest, list(ALIASES), n=1, cutoff=0.8))


def _has_words(leaf: str, name: str) -> bool:
    """Whether `leaf` has every word of `name`, or one that begins so: `warmup` and `temp` of longer names."""
    words = [word for word in name.split("_") if word]
    return bool(words) and all(len(word) > 2 and any(own.startswith(word) for own in leaf.split("_")) for word in words)


def nearest(path: str, is_section: bool = False) -> str | None:
    """The valid path that `path` most likely means; None when nothing is close.

    `is_section`: the value under `path` is a mapping, so at the top level a section is meant.
    """
    names = list(sections())
    if is_section and "." not in path:
        return next(iter(difflib.get_close_matches(path.lower(), names, n=1, cutoff=0.6)), None)
    top, _, rest = path.partition(".")
    if rest and top not in sections():
        close = difflib.get_close_matches(top.lower(), names, n=1, cutoff=0.7)
        if close and f"{close[0]}.{rest}" in all_paths():
            return f"{close[0]}.{rest}"
    return next(_candidates(path), None)


def settings_page() -> str:
    """The text of `docs/configuration.md`."""
    lines = [
        "# Settings",
        "",
        "Generated from `mindspeed_asyncflow/config/schema.py`; write it again with",
        "`python -m mindspeed_asyncflow.config.keys > docs/configuration.md`.",
        "",
        "A settings file is YAML with one section per component; what it does not name keeps its default. Any key can",
        "be set on the command line: `--set workflow.max_lag=0`. A key that does not exist, a value of the wrong type",
        "and sizes that do not fit are refused before anything starts, with the nearest right key.",
        "`asyncflow check FILE` prints the settings that differ from these defaults (`--all`: all) and all findings.",
    ]
    section = ""
    for doc in describe_keys():
        here, name = doc.path.split(".", 1)
        if here != section:
            section = here
            lines += ["", f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        choices = re.sub(r"Literal\[([^]]*)]", lambda m: m[1].replace("'", "").replace(", ", " | "), doc.type)
        kind = choices.replace("|", "\\|")
        default = str(doc.default).replace("\n", "\\n")
        lines.append(f"| `{name}` | {kind} | `{default}` | {doc.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(settings_page(), end="")
