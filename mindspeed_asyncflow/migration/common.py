"""What the tables share: sizes that their files leave open, and words about what has no equivalent anywhere."""

from __future__ import annotations

import os
from typing import Any

from mindspeed_asyncflow.migration.foreign import Foreign
from mindspeed_asyncflow.migration.table import Outcome, shown

KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "k3+": "k3+"}
ENTROPY = "there is no entropy bonus"
LORA = "all weights are trained, there are no adapters"
SAMPLING = (
    "training answers are sampled from the whole distribution, else log-probabilities would not match the trainer's"
)
OFFLOAD = "sides that share devices swap by themselves (workflow.schedule: colocated)"
CACHE = "a share of a device; here rollout.kv_cache_mb has a size in MiB: `asyncflow check` says what fits"


def whole(value: Any) -> int | None:
    """A positive whole number, else None: other systems write -1, 0 or null for `not limited` and `not set`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        return None
    return int(value) if value > 0 else None


def longest(out: Outcome) -> int | None:
    """Tokens of the longest sample; None where a length is no number."""
    sizes = out.value("data.max_prompt_tokens", 512), out.value("rollout.max_new_tokens", 512)
    return sum(sizes) if all(isinstance(size, int) for size in sizes) else None


def expanded(path: Any) -> str:
    """`~` is known to shells and other systems, not here."""
    return os.path.expanduser(str(path))


def take_warmup(share: Any, key: str, out: Outcome) -> None:
    """`trainer.lr_warmup_steps` from a share of the steps."""
    steps = out.value("trainer.steps", None)
    if isinstance(share, int | float) and (isinstance(steps, int) or not share):
        out.put("trainer.lr_warmup_steps", round(share * steps) if isinstance(steps, int) else 0, f"from {key}")
    else:
        out.undecided.append(("trainer.lr_warmup_steps", f"{shown(share)} of trainer.steps ({key})"))


def take_sampling(file: Foreign, out: Outcome, keys: dict[str, Any]) -> None:
    """Keys that narrow what is sampled, each with the value that switches it off."""
    for key, off in keys.items():
        value = file.get(key, off)
        if value != off:
            out.lost.append((f"{key}: {shown(value)}", SAMPLING))


def take_model(path: Any, key: str, out: Outcome) -> None:
    if not isinstance(path, str) or not path:
        out.undecided.append(("model.source", f"{key} is not given: name the Hugging Face folder of the model"))
        return
    out.put("model.source", expanded(path), f"from {key}")
    if not path.startswith(("/", ".", "~")):
        out.undecided.append(
            ("model.source", f"{path!r} must be a folder here: download the model, nothing is fetched")
        )


def take_files(files: Any, key: str, out: Outcome) -> None:
    """Training data: one file, or a list of them."""
    names = [files] if isinstance(files, str) else files if isinstance(files, list) else []
    names = [expanded(name) for name in names if name]
    if not names:
        out.undecided.append(("data.task", f"{key} is not given: name the prompts, file:PATH"))
        return
    if len(names) == 1:
        out.put("data.task", f"file:{names[0]}", f"from {key}")
    else:
        out.put("data.mix", [{"task": f"file:{name}"} for name in names], f"from {key}")
    if not all(name.endswith((".parquet", ".json", ".jsonl", ".ndjson", ".csv", ".tsv")) for name in names):
        out.undecided.append(
            ("data.task", f"{', '.join(names)}: prompts are files here (.parquet, .jsonl, .json, .csv)")
        )
    out.put("data.size", 1_000_000, "rows to read at most")


def take_kl(coefficient: Any, kind: Any, place: str, keys: tuple[str, str], out: Outcome) -> None:
    """`place`: loss or reward; `keys`: theirs of the coefficient and of the kind."""
    if not isinstance(coefficient, int | float) or coefficient <= 0:
        out.put("algorithm.kl_coef", 0.0, f"from {keys[0]}")
        return
    out.put("algorithm.kl_coef", coefficient, f"from {keys[0]}")
    out.put("algorithm.kl_in", place, f"from {keys[0]}")
    ours = KL_TYPES.get(kind) if isinstance(kind, str) else None
    if ours is None or (place, ours) in {("loss", "k1"), ("reward", "k3+")}:
        out.put("algorithm.kl_type", "k3" if place == "loss" else "k1", f"in place of {keys[1]}: {shown(kind)}")
        out.undecided.append((f"{keys[1]}: {shown(kind)}", f"does not work in the {place} here; see algorithm.kl_type"))
    else:
        out.put("algorithm.kl_type", ours, f"from {keys[1]}")


def take_ranks(devices: int | None, sizes: dict[str, int], key: str, out: Outcome) -> None:
    """`trainer.data_parallel` from the devices of the trainer and the sizes of the other dimensions."""
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        out.undecided.append(("trainer.data_parallel", f"sizes {shown(sizes)} are no numbers"))
        return
    each = sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("context", 1)
    if devices is None:
        out.undecided.append(("trainer.data_parallel", f"{key} is not given"))
    elif devices % each:
        out.undecided.append(("trainer.data_parallel", f"{devices} devices ({key}) cannot be cut into parts of {each}"))
    else:
        out.put("trainer.data_parallel", devices // each, f"what is left of {devices} devices ({key})")


def take_replicas(devices: int | None, each: Any, key: str, out: Outcome) -> None:
    if devices is None or not isinstance(each, int) or each < 1 or devices % each:
        out.undecided.append(
            ("rollout.replicas", f"{devices or 'unknown'} devices ({key}), {shown(each)} for each replica")
        )
    else:
        out.put("rollout.replicas", devices // each, f"{devices} devices ({key}), {each} for each")
