"""Soft punishment of answers that come close to the length limit (DAPO, arXiv 2503.14476, equation 13)."""

from __future__ import annotations

import numpy as np


def overlong_penalty(lengths: np.ndarray, limit: int, buffer: int, factor: float, beyond: str) -> np.ndarray:
    """[N], at most 0: 0 up to limit - buffer tokens, then linear to -factor at `limit`.

    `lengths` [N] are those of answers alone. `beyond` the limit: "capped" stays at -factor, "falling" goes on linearly.
    """
    into = (np.asarray(lengths, np.float64) - (limit - buffer)) / buffer
    return -factor * np.clip(into, 0.0, 1.0 if beyond == "capped" else None)
