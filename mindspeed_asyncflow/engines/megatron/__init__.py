"""The trainer: megatron-core's model, schedules, optimizer and checkpoints behind `TrainEngine` and `CriticEngine`.

`MegatronTrainEngine` and `MegatronCritic` are loaded on first access: that prepares the platform (on a CPU: the
torch.cuda shims, on an NPU: MindSpeed) and only then imports megatron. It changes torch for the whole process: access
them in trainer processes only.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MegatronCritic", "MegatronTrainEngine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap

    bootstrap()
    from mindspeed_asyncflow.engines.megatron.critic import MegatronCritic
    from mindspeed_asyncflow.engines.megatron.engine import MegatronTrainEngine

    return {"MegatronCritic": MegatronCritic, "MegatronTrainEngine": MegatronTrainEngine}[name]
