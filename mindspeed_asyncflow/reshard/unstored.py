"""A version that is not stored anywhere: in place the trainer's weights go straight into the generation weights.

Trainer ranks still sum the boxes that they would have written into a relay, in the relay's types, so that a version has
the same manifest and fingerprint as there; `verify` sums the same boxes of what a replica was filled with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape
from mindspeed_asyncflow.reshard.fingerprint import bytes_of, checksum
from mindspeed_asyncflow.reshard.relay_table import RelayTable


class UnstoredWriter:
    """In the place of a `RelayWriter`; there is nothing to read."""

    path = ""

    def __init__(self, table: RelayTable) -> None:
        self.table = table

    def publish(self, version: int, tensors: Iterable[tuple[str, Box, torch.Tensor]]) -> dict[int, int]:
        """crc32 by shard number of this rank's boxes, as a relay would store them."""
        crc: dict[int, int] = {}
        for name, box, tensor in tensors:
            shard = self.table.number[name, Box(*box)]
            crc[shard] = _sum(tensor, self.table.param_of[shard].dtype)
        return crc

    def close(self) -> None:
        pass


def verify(manifest: WeightManifest, weights: Mapping[str, torch.Tensor], whose: str) -> None:
    """Raise `WeightSyncError` unless `weights`, whole tensors by Hugging Face name, are what was published; it names
    the first tensor or shard that is not."""
    other = weights.keys() ^ {param.name for param in manifest.params}
    if other:
        raise WeightSyncError(f"weight version {manifest.version}: only one of trainer and {whose} has {min(other)!r}")
    sums = iter(manifest.checksums)
    for param in manifest.params:
        matrix = weights[param.name].detach().reshape(matrix_shape(param.shape))
        for shard in param.shards:
            r0, r1, c0, c1 = shard.box
            if _sum(matrix[r0:r1, c0:c1], param.dtype) != next(sums):
                raise WeightSyncError(
                    f"weight version {manifest.version}: {param.name!r} box {shard.box} of {whose} does not have the "
                    "bytes that the trainer published"
                )


def _sum(box: torch.Tensor, dtype: str) -> int:
    stored = box.detach().to("cpu", getattr(torch, dtype)).contiguous()  # may be a copy, which must live on
    return checksum(bytes_of(stored))
