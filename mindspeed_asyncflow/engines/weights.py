"""What a Hugging Face model folder says about its weights, and whether a relay version fits it."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_asyncflow.config.model import EMBEDDING, HEAD
from mindspeed_asyncflow.errors import DataError, EngineError, WeightSyncError
from mindspeed_asyncflow.records import WeightManifest


@dataclass(frozen=True, slots=True)
class FolderWeights:
    """Names and shapes in a folder's safetensors files, and whether the output head is the input embedding."""

    shapes: dict[str, tuple[int, ...]]
    tied: bool
    vocab_size: int
    token_count: int  # ids that the tokenizer knows; the rest of the vocabulary is padding
    cache_parts: int  # key/value heads, into which a cache can be cut; 1: a latent cache

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding in the files; more than `vocab_size` where it is padded."""
        return self.shapes.get(EMBEDDING, (self.vocab_size,))[0]

    @property
    def has_experts(self) -> bool:
        return any(".experts." in name for name in self.shapes)

    def check(self, manifest: WeightManifest) -> None:
        """Raise `WeightSyncError` that names the first tensors that are missing, unknown or of another shape.

        A tied head may be present or absent on either side.
        """
        given = {p.name: p.shape for p in manifest.params}
        optional = {HEAD} if self.tied else set()
        missing = sorted(self.shapes.keys() - given.keys() - optional)
        unknown = sorted(given.keys() - self.shapes.keys() - optional)
        if missing or unknown:
            raise WeightSyncError(
                f"weight version {manifest.version} does not fit the model: "
                f"{len(missing)} tensors missing {missing[:3]}, {len(unknown)} unknown {unknown[:3]}"
            )
        for name, shape in given.items():
            if name in self.shapes and self.shapes[name] != shape:
                raise WeightSyncError(
                    f"weight version {manifest.version}: {name!r} has shape {shape}, the model has {self.shapes[name]}"
                )

    def check_ids(self, request_id: str, ids: np.ndarray) -> None:
        """Raise `EngineError` for token ids that the model has no embedding for."""
        if int(ids.min()) < 0 or int(ids.max()) >= self.vocab_size:
            raise EngineError(f"request {request_id}: prompt ids outside [0, {self.vocab_size})")


def read_folder(folder: str) -> FolderWeights:
    """Read config and safetensors headers (no weights) of `folder`. Raises `DataError`."""
    path = Path(folder)
    files = sorted(path.glob("*.safetensors"))
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not a Hugging Face model folder: config.json: {error}") from error
    if not files:
        raise DataError(f"{folder} has no *.safetensors file; save the model with safetensors")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))  # safetensors: header length, then a JSON header
            header = json.loads(stream.read(length))
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    vocab_size = int(config["vocab_size"])
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads", 1)
    return FolderWeights(
        shapes,
        tied=bool(config.get("tie_word_embeddings", False)),
        vocab_size=vocab_size,
        token_count=min(vocab_size, _token_count(path / "tokenizer.json", vocab_size)),
        cache_parts=1 if config.get("kv_lora_rank") else int(heads),
    )


def _token_count(file: Path, default: int) -> int:
    """One more than the largest id in a `tokenizers` file; `default` where there is none, or one of another layout."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = raw["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return 1 + max([*ids, *(added["id"] for added in raw.get("added_tokens", ()))])
    except (OSError, ValueError, KeyError, TypeError):
        return default
