"""A model folder says which weights fit it."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mindspeed_asyncflow.engines.hf_model import HostModel
from mindspeed_asyncflow.engines.weights import read_folder
from mindspeed_asyncflow.errors import DataError, EngineError, WeightSyncError
from mindspeed_asyncflow.platforms.memory import DeviceMemory
from mindspeed_asyncflow.records import ParamMeta, WeightManifest
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape
from mindspeed_asyncflow.reshard.relay import RelayWriter, assemble
from mindspeed_asyncflow.reshard.relay_table import make_table
from tests.engines.bench import make_model


def folder(path: Path, tied: bool) -> str:
    (path / "config.json").write_text(json.dumps({"vocab_size": 5, "tie_word_embeddings": tied}))
    save_file({"embed": torch.zeros(5, 2), "scale": torch.zeros(())}, path / "model-1.safetensors")
    head = {} if tied else {"lm_head.weight": torch.zeros(5, 2)}
    save_file(
        {"layers.0.experts.0.up": torch.zeros(3, 2), **head}, path / "model-2.safetensors", metadata={"format": "pt"}
    )
    return str(path)


def manifest(**shapes: tuple[int, ...]) -> WeightManifest:
    params = tuple(ParamMeta(name.replace("__", "."), "float32", shape, ()) for name, shape in shapes.items())
    return WeightManifest(3, "", 0, params, (), "")


FULL = {"embed": (5, 2), "scale": (), "layers__0__experts__0__up": (3, 2)}


def test_all_shards_are_read_and_a_tied_head_is_optional(tmp_path: Path) -> None:
    weights = read_folder(folder(tmp_path, tied=True))
    assert weights.shapes == {"embed": (5, 2), "scale": (), "layers.0.experts.0.up": (3, 2)}
    assert weights.has_experts
    weights.check(manifest(**FULL))
    weights.check(manifest(**FULL, lm_head__weight=(5, 2)))


def test_an_untied_head_is_required(tmp_path: Path) -> None:
    weights = read_folder(folder(tmp_path, tied=False))
    with pytest.raises(WeightSyncError, match=r"1 tensors missing \['lm_head.weight'\]"):
        weights.check(manifest(**FULL))


def test_ids_outside_the_embedding_are_refused(tmp_path: Path) -> None:
    weights = read_folder(folder(tmp_path, tied=True))
    weights.check_ids("r", np.array([0, 4]))
    for bad in ([-1], [5]):
        with pytest.raises(EngineError, match=r"request r: prompt ids outside \[0, 5\)"):
            weights.check_ids("r", np.array(bad))


def test_folders_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json"):
        read_folder(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    with pytest.raises(DataError, match="save the model with safetensors"):
        read_folder(str(tmp_path))


def test_an_engines_model_takes_a_version_whose_tensors_are_cut_both_ways(tmp_path: Path) -> None:
    """Two trainer ranks: projections back into the residual stream cut along columns, all others along rows."""
    relay = f"/dev/shm/asyncflow-test-{uuid.uuid4().hex}"
    model = HostModel(make_model(tmp_path, "dense", 1), "float32", DeviceMemory())
    shapes = model.weights.shapes
    parts: dict[int, list[tuple[str, Box]]] = {0: [], 1: []}
    for name, shape in shapes.items():
        rows, cols = matrix_shape(shape)
        for rank in (0, 1):
            r0, r1, c0, c1 = rank * (rows // 2), rows if rank else rows // 2, 0, cols
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                r0, r1, c0, c1 = 0, rows, rank * (cols // 2), cols if rank else cols // 2
            parts[rank].append((name, Box(r0, r1, c0, c1)))
    table = make_table(shapes, "float32", parts)
    new = {name: torch.randn(shape) for name, shape in shapes.items()}
    with RelayWriter(relay, table, 0, (0, 1)) as zero, RelayWriter(relay, table, 1, (0, 1)) as one:
        written = [
            writer.publish(
                1,
                [
                    (name, box, new[name].reshape(matrix_shape(shapes[name]))[box.r0 : box.r1, box.c0 : box.c1])
                    for name, box in parts[writer.rank]
                ],
            )
            for writer in (zero, one)
        ]
        manifest = assemble(1, table, relay, written)
        model.weights.check(manifest)
        assert model.load(manifest) == manifest.fingerprint
    held = dict(model._model.named_parameters())
    assert all(torch.equal(held[name], tensor) for name, tensor in new.items())
