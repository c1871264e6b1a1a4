"""What differs between the vLLM releases that the adapter drives. One row per call shape, newest last.

Read from the sources of 0.18.0, 0.23.0, 0.27.1 and 0.32.0; vllm-ascend releases follow the vLLM of the same number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_asyncflow.errors import EngineError


@dataclass(frozen=True, slots=True)
class CallShape:
    """How one range of releases wants a weight update."""

    first: tuple[int, int]
    transfer_engine: bool  # False: vllm-ascend has no transfer engines yet, our worker extension loads by itself
    start_args: tuple[Any, ...] = ()  # of start_weight_update
    cpu_reloads_experts: bool = True  # False: a reload on CPU writes expert weights into the packed buffer unpacked


SHAPES = (
    CallShape((0, 18), transfer_engine=False),
    CallShape((0, 23), transfer_engine=True, start_args=(True,)),  # is_checkpoint_format; the worker owns the reload
    CallShape((0, 27), transfer_engine=True),  # the transfer engine owns the reload
    CallShape((0, 32), transfer_engine=True, cpu_reloads_experts=False),
)


def parse(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "0.27.1+cpu" or "0.23.0rc1"."""
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise EngineError(f"cannot read the vLLM version {version!r}") from None


def shape_for(version: str, *, cpu: bool, experts: bool) -> CallShape:
    """The row for `version`. Raises `EngineError` where weights could not be replaced in place.

    `experts`: the model has expert layers.
    """
    fitting = [s for s in SHAPES if s.first <= parse(version)]
    if not fitting:
        first = ".".join(map(str, SHAPES[0].first))
        raise EngineError(
            f"vLLM {version} cannot replace weights in place; use {first} or newer, or rollout.engine: reference"
        )
    shape = fitting[-1]
    if cpu and experts and not shape.cpu_reloads_experts:
        raise EngineError(
            f"vLLM {version} on CPU corrupts expert weights at every update; use 0.27.1, or rollout.engine: reference"
        )
    return shape


def update_weights(rpc: Callable[..., list[Any]], shape: CallShape, manifest: str) -> list[str]:
    """One complete weight update; returns the fingerprint that each worker loaded.

    `rpc(method, args=...)` reaches every worker, blocks, raises, and returns one result per worker.
    `manifest`: text form of the relay version.
    """
    rpc("relay_begin")
    if shape.transfer_engine:
        rpc("start_weight_update", args=shape.start_args)
        rpc("update_weights", args=({"manifest": manifest},))
        rpc("finish_weight_update")
    else:
        rpc("relay_load", args=(manifest,))
    return rpc("relay_end")


def core_request(struct: Any, **values: Any) -> Any:
    """Build the engine-core request `struct`; required fields that we do not use are None."""
    required = len(struct.__struct_fields__) - len(struct.__struct_defaults__)
    filled = dict.fromkeys(struct.__struct_fields__[:required])
    return struct(**{**filled, **values})
