"""Device memory of HCCL's communicators, which no allocator of torch counts. Pure.

A process group becomes a communicator at its first collective, and then has two buffers, one to send and one to
receive, until it is destroyed. Their size is a setting of the group, or else of the environment, in MiB.
"""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_asyncflow.errors import PlatformError

BUFFER_ENV = "HCCL_BUFFSIZE"
DEFAULT_BUFFER_MB = 200
MIB = 1 << 20
# Groups of a trainer rank that carry collectives: at most nine of megatron's in the cases that were counted, with
# tensor, pipeline, data and expert parallel ranks, and one for weights in place.
TRAINER_COMMUNICATORS = 10


def buffer_limit_mb(environ: Mapping[str, str]) -> int:
    """MiB of one buffer of a group without a setting of its own. Raises `PlatformError` for what is no such number."""
    text = environ.get(BUFFER_ENV, str(DEFAULT_BUFFER_MB))
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise PlatformError(f"{BUFFER_ENV}={text!r}: it is a whole number of MiB, at least 1")
    return int(text)


def buffer_mb_for(message_bytes: int) -> int:
    """MiB of a buffer that takes `message_bytes` in one piece."""
    return max(1, -(-message_bytes // MIB))


def communicator_bytes(buffer_mb: int, communicators: int = 1) -> int:
    """Device bytes of so many communicators with buffers of this size."""
    return communicators * 2 * buffer_mb * MIB
