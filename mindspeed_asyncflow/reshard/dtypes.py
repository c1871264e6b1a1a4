"""Of which type each full tensor is on the rollout side: every rank knows its own tensors, all must know all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.transfer import contiguous, wait

NAMES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_ABSENT = -1


def agree_on_dtypes(
    own: Mapping[str, torch.dtype],
    tensors: Iterable[str],
    *,
    rank: int,
    device: torch.device,
    group: Any = None,
    timeout_s: float = 120.0,
) -> tuple[torch.dtype, dict[str, torch.dtype]]:
    """(the type of most tensors, those of another type) over all ranks of `group`, the same on each. Collective.

    `own`: what this rank wants; `tensors`: all names in an order that is the same everywhere. Raises `WeightSyncError`
    on all ranks for a tensor that two ranks want in different types, or a type that is none of `NAMES`.
    """
    types = [getattr(torch, name) for name in NAMES]
    strange = {name: dtype for name, dtype in own.items() if dtype not in types}
    names = list(tensors)
    codes = [types.index(own[name]) if name in own and name not in strange else _ABSENT for name in names]
    # the largest code, and the largest of the negated ones, i.e. the smallest; a last number tells of strange types
    lowest = [-code if code != _ABSENT else -len(types) for code in codes]
    seen = torch.tensor([*codes, *lowest, int(bool(strange))], dtype=torch.int32, device=device)
    work = dist.all_reduce(contiguous(seen, "types"), op=dist.ReduceOp.MAX, group=group, async_op=True)
    wait(work, f"rank {rank}", "all ranks of the group to say which types they want", timeout_s, group)
    *numbers, odd = seen.tolist()
    if odd:
        what = f"this rank: {next(iter(strange.items()))}" if strange else "another rank"
        raise WeightSyncError(f"a generation weight has a type that cannot be sent ({what}); known: {', '.join(NAMES)}")
    found: dict[str, torch.dtype] = {}
    for name, high, low in zip(names, numbers[: len(names)], numbers[len(names) :]):
        if high == _ABSENT:
            continue
        if high != -low:
            raise WeightSyncError(f"ranks want {name!r} in different types, {NAMES[-low]} and {NAMES[high]}")
        found[name] = types[high]
    if not found:
        raise WeightSyncError("no rank wants any weight")
    common = Counter(found.values()).most_common(1)[0][0]
    return common, {name: dtype for name, dtype in found.items() if dtype != common}
