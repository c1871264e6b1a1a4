"""Which arguments the kernels of `vocabulary.py` get for torch tensors, wherever they run: torch only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Kernels:
    """The functions of `platforms/vocabulary_torch.py`, through kernels.

    `run(kernel, rows, *arguments)` runs "stats" or "gradient" with the arguments of the Triton function of that name,
    tensors and numbers, and gets the number of rows besides.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def stats(
        self, logits: torch.Tensor, targets: torch.Tensor, first: int, live: int, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = len(logits)
        top, total, weighted, picked = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4))
        if rows:
            logits, targets = _in_order(logits, targets)
            numbers = (rows, logits.stride(0), first, live, 1.0 / temperature)
            self._run("stats", rows, logits, targets, top, total, weighted, picked, *numbers)
        return top, total, weighted, picked

    def gradient(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        top: torch.Tensor,
        by_total: torch.Tensor,
        by_weighted: torch.Tensor | None,
        by_picked: torch.Tensor,
        first: int,
        live: int,
        temperature: float,
    ) -> torch.Tensor:
        rows, width = logits.shape
        out = torch.empty((rows, width), dtype=logits.dtype, device=logits.device)
        if rows:
            logits, targets = _in_order(logits, targets)
            slopes: list[Any] = [by_total, torch.zeros_like(top) if by_weighted is None else by_weighted, by_picked]
            slopes = [slope.contiguous() for slope in slopes]
            numbers = (rows, logits.stride(0), width, first, live, 1.0 / temperature)
            self._run("gradient", rows, logits, targets, top, *slopes, out, *numbers)
        return out


def _in_order(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits if logits.stride(1) == 1 else logits.contiguous(), targets.to(torch.int32).contiguous()
