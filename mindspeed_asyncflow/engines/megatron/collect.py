"""Small facts that ranks tell each other: flags, sizes and named numbers."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def broadcast_numbers(numbers: dict[str, float], source: int, group: Any, device: torch.device) -> dict[str, float]:
    """`numbers` of global rank `source` on all ranks of `group`, as JSON bytes."""
    text = json.dumps(numbers).encode() if dist.get_rank() == source else b""
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=source, group=group)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if text:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(data, src=source, group=group)
    return json.loads(bytes(data.cpu().tolist()))


def extreme(value: int, op: Any, device: torch.device, group: Any = None) -> int:
    """The largest or smallest of one integer over `group` (None: all ranks)."""
    tensor = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=op, group=group)
    return int(tensor)
