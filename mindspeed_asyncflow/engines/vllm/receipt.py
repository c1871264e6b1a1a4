"""Proof that the weights which a sender gave to a native transfer are those that the model was given.

vllm-ascend's engines move tensors and say nothing about them. So the sender lets one more tensor follow, the receipt:
version, fingerprint and a sum over the bytes of every tensor; the receiver sums what reaches the model and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from mindspeed_asyncflow.errors import WeightSyncError

RECEIPT = "asyncflow.receipt"  # name under which it travels; no weight has it
RECEIPT_DTYPE = "int64"
VOID = -1  # its version where the sender takes back what it has sent


def receipt_shape(tensors: int) -> list[int]:
    return [2 + tensors]


def byte_sum(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [] on the tensor's device: sum over its bytes, taken in pairs where they are."""
    pairs = torch.uint8 if tensor.element_size() == 1 else torch.int16
    return tensor.detach().contiguous().view(-1).view(pairs).sum(dtype=torch.int64)


def _signed(fingerprint: str) -> int:
    return int.from_bytes(bytes.fromhex(fingerprint), "big", signed=True)


def with_receipt(
    tensors: Iterable[tuple[str, torch.Tensor]],
    version: int,
    fingerprint: str,
    valid: Callable[[], bool] = lambda: True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs as given, and the receipt behind them; nothing waits for the device.

    `valid` is asked when all pairs have been taken: False makes a receipt that no receiver accepts, so that it ends in
    step with the sender.
    """
    sums: list[torch.Tensor] = []
    for name, tensor in tensors:
        sums.append(byte_sum(tensor))
        yield name, tensor
    head = torch.tensor([version if valid() else VOID, _signed(fingerprint)], device=sums[0].device if sums else None)
    yield RECEIPT, torch.cat([head, torch.stack(sums)]) if sums else head


class CheckedLoad:
    """Stands in for a model's `load_weights` during one native update: passes weights on and keeps the receipt."""

    def __init__(self, load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any]) -> None:
        self._load = load
        self._sums: dict[str, torch.Tensor] = {}
        self._receipt: torch.Tensor | None = None

    def __call__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        passed = []
        for name, tensor in weights:
            if name == RECEIPT:
                self._receipt = tensor.clone()
                continue
            if name in self._sums:
                raise WeightSyncError(f"weight {name!r} came twice in one native transfer")
            self._sums[name] = byte_sum(tensor)
            passed.append((name, tensor))
        return self._load(passed)

    def verify(self, version: int, fingerprint: str, names: Sequence[str]) -> None:
        """Raise `WeightSyncError` unless exactly the tensors `names` of this version reached the model, unchanged."""
        what = f"native transfer of weight version {version}"
        if self._receipt is None:
            raise WeightSyncError(f"{what}: {len(self._sums)} tensors and no receipt reached the model")
        got_version, got_fingerprint, *sums = self._receipt.tolist()
        if (got_version, got_fingerprint) != (version, _signed(fingerprint)):
            gave = "took it back" if got_version == VOID else f"gave version {got_version}"
            raise WeightSyncError(f"{what} with fingerprint {fingerprint}: the sender {gave}")
        missing = [name for name in names if name not in self._sums]
        if missing or len(sums) != len(names) or len(self._sums) != len(names):
            raise WeightSyncError(
                f"{what}: {len(self._sums)} of {len(names)} tensors reached the model, {len(sums)} were sent; "
                f"missing {missing[:3]}"
            )
        wrong = [name for name, total in zip(names, sums, strict=True) if int(self._sums[name]) != total]
        if wrong:
            raise WeightSyncError(f"{what}: {len(wrong)} tensors have other bytes than were sent, first {wrong[0]!r}")
