"""Engines without a model: a trainer rank with weights, gradients and optimizer, and a rollout rank with buffers."""

from types import SimpleNamespace
from typing import Any

import torch

from mindspeed_asyncflow.errors import EngineError
from mindspeed_asyncflow.platforms.memory import GENERATION_WEIGHTS, GRADIENTS, OPTIMIZER, TRAIN_WEIGHTS, DeviceMemory
from mindspeed_asyncflow.reshard.layout import Layout


class StandInTrainer:
    """Weights are views of one flat buffer, as megatron's; gradients are float32; the optimizer has a float32 copy of
    the weights and two moments. All of it lies in `memory`."""

    def __init__(
        self, memory: DeviceMemory, layout: Layout, shards: dict[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        self.layout, self._shards = layout, {}
        count = sum(t.numel() for t in shards.values())
        self.weights = memory.tensor(TRAIN_WEIGHTS, (count,), dtype)
        self.gradients = memory.tensor(GRADIENTS, (count,), torch.float32)
        self.optimizer = [memory.tensor(OPTIMIZER, (count,), torch.float32) for _ in range(3)]
        start = 0
        for name, shard in shards.items():
            view = self.weights[start : start + shard.numel()].view(shard.shape)
            view.copy_(shard)
            self._shards[name] = view
            start += shard.numel()
        generator = torch.Generator().manual_seed(count)
        for tensor in (self.gradients, *self.optimizer):
            tensor.copy_(torch.rand(count, generator=generator))

    def shards(self) -> dict[str, torch.Tensor]:
        return self._shards

    def train_state(self) -> dict[str, list[torch.Tensor]]:
        return {TRAIN_WEIGHTS: [self.weights], GRADIENTS: [self.gradients], OPTIMIZER: self.optimizer}


class StandInRollout:
    """The in-place part of a rollout engine's protocol. Routers are float32, as in DeepSeek's models."""

    def __init__(self, memory: DeviceMemory, layout: Layout, rank: int, dtype: torch.dtype) -> None:
        self._memory, self._dtype = memory, dtype
        self._params = layout.ranks[rank]
        self.buffers: dict[str, torch.Tensor] = {}
        self.state, self._after, self.version = "SLEEPING", "PAUSED", -1
        self.served = 0  # how often it began to answer with filled weights

    def weights_wanted(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(p.name, str(self._type(p.name)).removeprefix("torch."), tuple(p.shape)) for p in self._params]

    def _type(self, name: str) -> torch.dtype:
        return torch.float32 if ".mlp.gate." in name else self._dtype

    def generation_buffers(self) -> dict[str, torch.Tensor]:
        if not self.buffers:
            for param in self._params:
                self.buffers[param.name] = self._memory.tensor(GENERATION_WEIGHTS, param.shape, self._type(param.name))
        self._after = "RUNNING" if self.state == "RUNNING" else "PAUSED"
        self.state = "UPDATING"
        return self.buffers

    def loaded(self, version: int, fingerprint: str = "") -> Any:
        self.state, self.version = self._after, version
        self.served += self.state == "RUNNING"
        return SimpleNamespace(version=version, fingerprint=f"{version:016x}")

    def load_failed(self, why: str) -> None:
        self.state = "DIRTY"

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        self.state = "PAUSED"

    def resume(self) -> None:
        if self.state != "PAUSED":
            raise EngineError(f"resume is refused while the engine is {self.state}")
        self.state = "RUNNING"
        self.served += 1

    def abort(self) -> None:
        """It has no requests."""

    def sleep(self, level: int = 1) -> None:
        if self.state not in ("PAUSED", "DIRTY"):
            raise EngineError(f"sleep is refused while the engine is {self.state}")
        for buffer in self.buffers.values():
            self._memory.release(buffer)
        self.buffers.clear()
        self.state = "SLEEPING"
