"""What differs between the releases that the adapter drives: one table for vLLM, one for vllm-ascend, newest row last.

Read from the sources of vLLM 0.18.0, 0.23.0, 0.24.0, 0.25.1, 0.26.0, 0.27.1 and 0.32.0, and of vllm-ascend's branches
0.18.0, 0.22.1rc, 0.23.0, 0.24.0rc, 0.25.1rc, 0.26.0rc and main. A vllm-ascend release runs the vLLM of the same number
(main: 0.27.1), so both tables are looked up by vLLM's version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mindspeed_asyncflow.errors import EngineError

RELAY_ENGINE = "asyncflow_relay"  # our own transfer engine, under this name in vLLM's registry
UPDATE_VERBS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
SLEEP_VERBS = ("sleep", "wake_up")


@dataclass(frozen=True, slots=True)
class CallShape:
    """How one range of releases wants a weight update."""

    first: tuple[int, int]
    transfer_engine: bool  # False: no transfer engines of others yet, our worker extension loads by itself
    start_args: tuple[Any, ...] = ()  # of start_weight_update; with an argument the worker owns the reload
    cpu_reloads_experts: bool = True  # False: a reload on CPU writes expert weights into the packed buffer unpacked

    @property
    def verbs(self) -> tuple[str, ...]:
        """Methods of the worker that the adapter calls."""
        return SLEEP_VERBS + (UPDATE_VERBS if self.transfer_engine else ())


@dataclass(frozen=True, slots=True)
class AscendShape(CallShape):
    """And what else differs in vllm-ascend."""

    native: tuple[str, ...] = ()  # its own transfer engines
    ipc_reloads: bool = True  # False: under npu_ipc nobody prepares the model for a reload
    ipc_packed: bool = True  # False: what a packed npu_ipc buffer holds never reaches the model
    ipc_sender: str = "static"  # static: trainer_send_weights of the engine; factory: a trainer engine with a client
    wake_turns_experts: bool = False  # wake_up leaves expert weights in the layout of the checkpoint, not of the kernel
    rl_config: bool = False  # knows the option of that name


VLLM = (
    CallShape((0, 18), transfer_engine=False),
    CallShape((0, 23), transfer_engine=True, start_args=(True,)),  # is_checkpoint_format
    CallShape((0, 25), transfer_engine=True),  # the transfer engine owns the reload
    CallShape((0, 32), transfer_engine=True, cpu_reloads_experts=False),
)
ASCEND = (
    AscendShape((0, 18), transfer_engine=False, wake_turns_experts=True),
    AscendShape((0, 23), transfer_engine=True, start_args=(True,), native=("hccl", "npu_ipc"), wake_turns_experts=True),
    AscendShape(
        (0, 27),
        transfer_engine=True,
        native=("hccl", "npu_ipc"),
        ipc_reloads=False,
        ipc_packed=False,
        ipc_sender="factory",
        rl_config=True,
    ),
)
Row = TypeVar("Row", bound=CallShape)


def parse(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as "0.27.1+cpu" or "0.23.0rc1"."""
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise EngineError(f"cannot read the vLLM version {version!r}") from None


def shape_for(version: str, *, experts: bool) -> CallShape:
    """vLLM's row for `version` on CPU. Raises `EngineError` where weights could not be replaced in place.

    `experts`: the model has expert layers.
    """
    shape = _row(VLLM, version)
    if experts and not shape.cpu_reloads_experts:
        raise EngineError(
            f"vLLM {version} on CPU corrupts expert weights at every update; use 0.27.1, or rollout.engine: reference"
        )
    return shape


def ascend_shape_for(version: str) -> AscendShape:
    """vllm-ascend's row for the vLLM `version` that it runs. Raises `EngineError` for one that is too old."""
    return _row(ASCEND, version)


def _row(table: Sequence[Row], version: str) -> Row:
    fitting = [s for s in table if s.first <= parse(version)]
    if not fitting:
        first = ".".join(map(str, table[0].first))
        raise EngineError(
            f"vLLM {version} cannot replace weights in place; use {first} or newer, or rollout.engine: reference"
        )
    return fitting[-1]


def check_verbs(rpc: Callable[..., list[Any]], shape: CallShape, version: str) -> None:
    """Raise `EngineError` where the workers of vLLM `version` lack a verb of their row in the table."""
    missing = sorted({verb for verbs in rpc("missing_verbs", args=(shape.verbs,)) for verb in verbs})
    if missing:
        raise EngineError(
            f"the worker of vLLM {version} has no {', '.join(missing)}: this release is not what its number says, or "
            "vllm-ascend and vLLM are not of one release"
        )


def update_weights(rpc: Callable[..., list[Any]], shape: CallShape, manifest: str) -> list[str]:
    """One complete weight update from the relay; returns the fingerprint that each worker loaded.

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
