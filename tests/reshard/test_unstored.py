"""Versions that are not stored: the manifest is that of a relay, and what a replica was filled with is compared."""

import os
import secrets

import pytest
import torch

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box
from mindspeed_asyncflow.reshard.relay import RelayWriter, assemble
from mindspeed_asyncflow.reshard.relay_table import make_table
from mindspeed_asyncflow.reshard.unstored import UnstoredWriter, verify

SHAPES = {"rows": (6, 4), "columns": (4, 6), "norm": (5,)}
WRITERS = {
    0: [("rows", Box(0, 3, 0, 4)), ("columns", Box(0, 4, 0, 2)), ("norm", Box(0, 5, 0, 1))],
    1: [("rows", Box(3, 6, 0, 4)), ("columns", Box(0, 4, 2, 6))],
}


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def boxes(full, rank):
    for name, box in WRITERS[rank]:
        matrix = full[name].reshape(SHAPES[name][0], -1)
        yield name, box, matrix[box.r0 : box.r1, box.c0 : box.c1]


def manifest_of(full, dtype):
    table = make_table(SHAPES, dtype, WRITERS)
    return assemble(3, table, "", [UnstoredWriter(table).publish(3, boxes(full, rank)) for rank in WRITERS])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_has_the_manifest_that_a_relay_gives_it(dtype):
    table = make_table(SHAPES, dtype, WRITERS)
    path = f"/dev/shm/asyncflow-{os.getpid()}-test{secrets.token_hex(4)}"
    with RelayWriter(path, table, 0, (0, 1)) as first, RelayWriter(path, table, 1, (0, 1)) as second:
        stored = assemble(3, table, "", [w.publish(3, boxes(weights(), w.rank)) for w in (first, second)])
    assert manifest_of(weights(), dtype) == stored


def test_what_was_filled_is_proven_also_in_a_type_of_its_own():
    full = weights()
    verify(manifest_of(full, "float32"), full, "rollout0")
    verify(manifest_of(full, "bfloat16"), weights(torch.bfloat16), "rollout0")


def test_one_wrong_element_is_found_and_its_shard_named():
    for name, (r0, r1, c0, c1) in [part for parts in WRITERS.values() for part in parts]:
        full = weights()
        manifest = manifest_of(full, "float32")
        full[name].reshape(SHAPES[name][0], -1)[r1 - 1, c1 - 1] += 1e-3
        with pytest.raises(WeightSyncError, match=rf"version 3: '{name}' box \({r0}, {r1}, {c0}, {c1}\) of rollout0"):
            verify(manifest, full, "rollout0")


@pytest.mark.parametrize("change", [{"norm": None}, {"other": torch.zeros(2)}])
def test_a_weight_that_only_one_side_has_is_named(change):
    full = {name: tensor for name, tensor in (weights() | change).items() if tensor is not None}
    with pytest.raises(WeightSyncError, match=f"only one of trainer and rollout0 has '{next(iter(change))}'"):
        verify(manifest_of(weights(), "float32"), full, "rollout0")
