"""Answers as columns, for rows that are put together with their answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.dock.columns import FINISH_CODES
from mindspeed_asyncflow.records import Completion


def answer_columns(answers: Sequence[Completion]) -> dict[str, Any]:
    """Values of all columns that `rollout` writes, and of `response_mask` where answers have one (all, or none)."""
    values: dict[str, Any] = {
        "response_ids": [a.token_ids for a in answers],
        "rollout_logprobs": [a.logprobs for a in answers],
        "response_spans": [
            np.array([(s.version, s.start, s.end) for s in a.spans], np.int32).reshape(-1, 3) for a in answers
        ],
        "finish": np.array([FINISH_CODES[a.finish_reason] for a in answers], np.uint8),
    }
    masks = [a.mask for a in answers if a.mask is not None]
    return values | ({"response_mask": masks} if masks else {})
