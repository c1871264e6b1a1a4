"""The trainer: megatron-core's model, schedules, optimizer and checkpoints behind `TrainEngine`.

`MegatronTrainEngine` is loaded on first access: that prepares the platform (on a CPU: the torch.cuda shims, on an NPU:
MindSpeed) and only then imports megatron. It changes torch for the whole process: access it in trainer processes only.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MegatronTrainEngine"]


def __getattr__(name: str) -> Any:
    if name != "MegatronTrainEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap

    bootstrap()
    from mindspeed_asyncflow.engines.megatron.engine import MegatronTrainEngine

    return MegatronTrainEngine
