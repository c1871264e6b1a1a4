"""A policy as a Hugging Face folder, out of the train state that its ranks saved. Numpy only, no device, no ranks."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from mindspeed_asyncflow.errors import CheckpointError
from mindspeed_asyncflow.observe.checkpoints import explained
from mindspeed_asyncflow.reshard import tensor_file
from mindspeed_asyncflow.reshard.state_files import WEIGHT, StateFiles, whole_tensor

MODEL = "model"  # beside the ranks' files: what a Hugging Face folder has beside weights
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
LARGEST_FILE = 5 << 30  # bytes of weights in one file, as transformers writes them
_CHUNK = 64 << 20  # bytes of a tensor in memory at once


def export_hf(state: Path, out: Path) -> None:
    """Write the weights of the train state in `state` to `out`, a new folder that `transformers` loads.

    Appears whole or not at all. Raises `CheckpointError` where `out` exists or cannot be written, or `state` is not
    whole.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already; name a new folder")
    files = StateFiles(state)
    partial = out.with_name(f".{out.name}.partial")
    with explained(out, "written"):
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(state / MODEL, partial) if (state / MODEL).is_dir() else partial.mkdir(parents=True)
        _write_weights(files, partial)
        partial.rename(out)


def _write_weights(files: StateFiles, folder: Path) -> None:
    groups = _by_file(files)
    index: dict[str, str] = {}
    for number, entries in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensor_file.write(folder / name, entries, {"format": "pt"})
        index |= {entry.name: name for entry in entries}
    if len(groups) > 1:
        total = sum(entry.nbytes for entries in groups for entry in entries)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _by_file(files: StateFiles) -> list[list[tensor_file.Entry]]:
    """All tensors of the model in order, cut into files."""
    groups: list[list[tensor_file.Entry]] = [[]]
    size = 0
    for name, shape in files.tensors.items():
        entry = tensor_file.Entry(name, files.dtype(WEIGHT, name), shape, lambda name=name: _parts(files, name))  # type: ignore[misc]
        if groups[-1] and size + entry.nbytes > LARGEST_FILE:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    return groups


def _parts(files: StateFiles, name: str) -> Iterator[bytes]:
    row = math.prod(files.tensors[name][1:]) * tensor_file.WIDTHS[files.dtype(WEIGHT, name)]
    for rows in whole_tensor(files, WEIGHT, name, max(1, _CHUNK // row)):
        yield rows.tobytes()
