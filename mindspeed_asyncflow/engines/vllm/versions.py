"""What differs between the vLLM releases that the adapter drives. One row per call shape, newest last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_asyncflow.errors import EngineError


@dataclass(frozen=True, slots=True)
class CallShape:
    """How one range of releases wants its weight-update verbs called on the worker."""

    first: tuple[int, int]
    start_args: tuple[Any, ...]  # of start_weight_update
    engine_owns_reload: bool  # the transfer engine runs the layerwise reload, not the worker


SHAPES = (
    CallShape((0, 23), (True,), False),  # is_checkpoint_format=True
    CallShape((0, 27), (), True),
)


def parse(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "0.27.1+cpu" or "0.23.0rc1"."""
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise EngineError(f"cannot read the vLLM version {version!r}") from None


def shape_for(version: str) -> CallShape:
    """Raises `EngineError` for a release without the weight-transfer life cycle."""
    fitting = [s for s in SHAPES if s.first <= parse(version)]
    if not fitting:
        raise EngineError(
            f"vLLM {version} cannot replace weights in place (no weight-transfer life cycle); use 0.23 or newer, "
            "or rollout.engine: reference"
        )
    return fitting[-1]


def update_weights(rpc: Callable[..., Any], shape: CallShape, info: dict[str, Any]) -> None:
    """The whole life cycle: open a session, load one complete version, post-process and close.

    `rpc(method, args=...)` reaches every worker, blocks and raises.
    """
    rpc("start_weight_update", args=shape.start_args)
    rpc("update_weights", args=(info,))
    rpc("finish_weight_update")


def core_request(struct: Any, **values: Any) -> Any:
    """Build the engine-core request `struct`; fields that a release has and we do not use are None."""
    required = len(struct.__struct_fields__) - len(struct.__struct_defaults__)
    filled = dict.fromkeys(struct.__struct_fields__[:required])
    return struct(**{**filled, **values})
