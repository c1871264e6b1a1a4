"""A relay with one writer of whole tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.boxes import whole
from mindspeed_asyncflow.reshard.relay import RelayWriter, assemble
from mindspeed_asyncflow.reshard.relay_table import make_table

if TYPE_CHECKING:
    import torch


class WholeWriter:
    """A relay with one writer of whole tensors; the first version that it publishes fixes names, shapes and types.

    `dtype` (torch name, e.g. "bfloat16"): what every tensor is cast to; None keeps each tensor's own type.
    """

    def __init__(self, path: str, keep: int = 3, dtype: str | None = None) -> None:
        self.path, self._keep, self._dtype = path, keep, dtype
        self._writer: RelayWriter | None = None
        self._closed = False

    @property
    def versions(self) -> tuple[int, ...]:
        return self._writer.versions if self._writer else ()

    def publish(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightManifest:
        """(name, full tensor) pairs. The first call holds all tensors at once, later ones one at a time."""
        if self._closed:
            raise WeightSyncError(f"relay {self.path} is closed")
        if self._writer is None:
            weights = list(weights)
            shapes = {name: tuple(tensor.shape) for name, tensor in weights}
            if len(shapes) < len(weights):
                raise WeightSyncError(f"version {version} holds a tensor twice")
            own = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in weights}
            self._writer = RelayWriter(self.path, make_table(shapes, self._dtype or own), keep=self._keep)
        parts = self._writer.publish(version, ((name, whole(t.shape), t) for name, t in weights))
        return assemble(version, self._writer.table, self.path, [parts])

    def close(self) -> None:
        self._closed = True
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> WholeWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
