"""What k answers per prompt say about a policy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mean_at_k(scores: np.ndarray) -> float:
    """Mean score over prompts and answers, [prompts, k]; NaN scores are left out."""
    scores = np.asarray(scores, np.float64)
    return float(np.nanmean(scores)) if np.isfinite(scores).any() else float("nan")


def pass_at_k(scores: np.ndarray, k: int, threshold: float = 1.0) -> float:
    """Chance that at least one of k answers scores `threshold` or more, mean over prompts; scores [prompts, n], n >= k.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) of c right answers among n (Chen et al., arXiv 2107.03374). A NaN
    score is no right answer.
    """
    scores = np.asarray(scores, np.float64)
    n = scores.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} answers per prompt, there are {n}")
    right = (np.nan_to_num(scores, nan=-np.inf) >= threshold).sum(axis=1)
    missed = [float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1))) if n - c >= k else 0.0 for c in right]
    return float(1.0 - np.mean(missed))


def maj_at_k(scores: np.ndarray, answers: Sequence[Sequence[str]]) -> float:
    """Mean score of each prompt's most frequent answer; of equally frequent ones that which came first counts.

    scores, answers: [prompts, k]; answers are compared as they are. NaN: no score of the chosen answer, left out.
    """
    chosen = []
    for row, texts in zip(np.asarray(scores, np.float64), answers):
        counts = {text: list(texts).count(text) for text in texts}
        best = max(counts, key=lambda text: counts[text])
        chosen.append(row[list(texts).index(best)])
    return mean_at_k(np.array(chosen))
