"""From accumulated gradient sums to one optimizer step: reduce, divide, check, clip, update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.engines.megatron.collect import extreme
from mindspeed_asyncflow.engines.megatron.export import ExportEntry, global_name, gradient, held_weights
from mindspeed_asyncflow.engines.megatron.halves import keep_halves
from mindspeed_asyncflow.engines.training import learning_rate
from mindspeed_asyncflow.errors import EngineError
from mindspeed_asyncflow.records import OptimReport

NOTHING_BAD = 1 << 62


def wrap_data_parallel(config: Any, trainer: TrainerConfig, chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """megatron's DDP around each model chunk. Gradients are summed over data and context parallel ranks, in fp32."""
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=trainer.distributed_optimizer, grad_reduce_in_fp32=True, overlap_grad_reduce=False
    )
    return [DistributedDataParallel(config, ddp, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]


def make_optimizer(trainer: TrainerConfig, dtype: torch.dtype, models: Sequence[Any]) -> Any:
    """megatron's AdamW over all chunks; weight decay spares biases and norms."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=trainer.lr,
        weight_decay=trainer.weight_decay,
        adam_beta1=trainer.betas[0],
        adam_beta2=trainer.betas[1],
        adam_eps=1e-8,
        clip_grad=trainer.grad_clip,
        use_distributed_optimizer=trainer.distributed_optimizer,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    optimizer = get_megatron_optimizer(config, list(models))
    if trainer.mindspeed.reuse_fp32_param and config.bf16:
        keep_halves(optimizer)
    return optimizer


class GradientStep:
    """Owns the optimizer, the count of applied steps and the rule that no step is taken on a bad gradient."""

    def __init__(self, trainer: TrainerConfig, models: Sequence[Any], optimizer: Any) -> None:
        self.trainer, self.models, self.optimizer = trainer, list(models), optimizer
        self.applied = 0  # steps; the learning rate is a function of it

    def buffers(self) -> list[torch.Tensor]:
        """The flat fp32 gradient buffers of this rank."""
        return [b.grad_data for m in self.models for b in (*m.buffers, *m.expert_parallel_buffers)]

    def clear(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def apply(self, denominator: float, bridge: Any, plan: Sequence[ExportEntry]) -> OptimReport:
        """Take one step with the accumulated sums divided by `denominator`, then clear them. Collective.

        Nothing is applied, on any rank, when a gradient anywhere is not finite, or when `denominator` is 0 (a batch
        without a trained token). Such a step does not advance the learning rate.
        """
        if not (math.isfinite(denominator) and denominator >= 0):
            raise EngineError(f"optimizer step with denominator {denominator}: expected a token or sample count")
        rate = learning_rate(self.applied, self.trainer)
        # data-parallel sum, norm weights under sequence parallelism, tied embeddings of the first and last stage
        finalize_model_grads(self.models, None)
        if denominator == 0:
            self.clear()
            return OptimReport(applied=False, grad_norm=0.0, lr=rate)
        for buffer in self.buffers():
            buffer.div_(denominator)
        bad = self._bad_tensor(bridge, plan)
        if bad:
            self.clear()
            return OptimReport(applied=False, grad_norm=math.nan, lr=rate, bad_tensor=bad)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
        with torch.no_grad():
            _, norm, _ = self.optimizer.step()
        self.clear()
        self.applied += 1
        return OptimReport(applied=True, grad_norm=float(norm), lr=rate)

    def _bad_tensor(self, bridge: Any, plan: Sequence[ExportEntry]) -> str:
        """Hugging Face name of the first tensor, in layer order, with a non-finite gradient on any rank; "" if none."""
        mpu, device = bridge.mpu, self.buffers()[0].device
        finite = all(_is_finite(buffer) for buffer in self.buffers())
        if dist.get_world_size() == 1 and finite:
            return ""
        if extreme(int(finite), dist.ReduceOp.MIN, device):
            return ""
        mine = NOTHING_BAD
        # the bf16 wrapper puts its own level above the model
        held = [held_weights(getattr(model.module, "module", model.module)) for model in self.models]
        for i, entry in enumerate(plan):
            if mine < NOTHING_BAD or entry.stage != mpu.pp_rank or not entry.trained:
                continue
            if not torch.isfinite(gradient(held[entry.chunk][entry.local_name])).all():
                mine = i * mpu.ep_size + mpu.ep_rank
        first = extreme(mine, dist.ReduceOp.MIN, device)
        if first == NOTHING_BAD:
            return "(a gradient buffer)"
        entry = plan[first // mpu.ep_size]
        return bridge._weight_name_mapping_mcore_to_hf(global_name(bridge, entry.name, first % mpu.ep_size))[0]


def _is_finite(buffer: torch.Tensor) -> bool:
    # one pass: nan and inf survive a sum. A sum of finite numbers may overflow, so a bad sum is looked at again
    return bool(torch.isfinite(buffer.sum())) or bool(torch.isfinite(buffer).all())
