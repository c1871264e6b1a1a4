"""The process group of one pair of layouts: made once, with buffers no larger than its messages need.

Trainers have a dozen groups for their own collectives. Weights travel in one of their own, so that neither waits behind
the other, and because on an NPU a group's buffers are device memory that lasts as long as the group does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.base import Platform
from mindspeed_asyncflow.platforms.communicators import BUFFER_ENV, MIB

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayoutGroup:
    """A group of the first ranks of the world, and what it costs each of their devices."""

    handle: Any  # of torch.distributed
    buffer_bytes: int  # of device memory, beside the allocator: no book counts them


def layout_group(platform: Platform, ranks: int, message_bytes: int, timeout_s: float, what: str) -> LayoutGroup:
    """A group of ranks 0 to `ranks` - 1 whose members send and receive at most `message_bytes` at a time.

    All ranks of the world must call it, in the same order as any other `new_group`; `what` names it in messages.
    Raises `PlatformError` where its buffers find no room on the device, before the group is made.
    """
    options, buffer_bytes = platform.group_options(message_bytes)
    if buffer_bytes:
        platform.free_unused()  # the allocator's own, which a group cannot use
        room = platform.unclaimed_bytes()
        if room is not None and buffer_bytes > room:
            raise PlatformError(
                f"the group of {what} takes {buffer_bytes // MIB} MiB of device memory for its buffers, and "
                f"{room // MIB} MiB are free; every group of a rank takes twice its buffer: set {BUFFER_ENV} (MiB, for "
                "all groups) lower"
            )
    handle = dist.new_group(
        range(ranks), backend=platform.backend, pg_options=options, timeout=timedelta(seconds=timeout_s)
    )
    log.info("group of %s: %d ranks, %d MiB of buffers on each device", what, ranks, buffer_bytes // MIB)
    return LayoutGroup(handle, buffer_bytes)
