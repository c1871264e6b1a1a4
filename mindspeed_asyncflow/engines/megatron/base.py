"""`MegatronEngine`: what a rank of a policy and a rank of a critic have in common.

    micro-batches -> feed (pad, cut over CP) -> megatron's schedule -> model -> numbers per token -> loss -> gradients
    gradients -> optim (reduce, divide once, check, clip, step) -> weights -> checkpoint

A loss is always a *sum* over tokens. Gradients stay sums until `optim_step` divides them, so a result does not depend
on how samples were cut into micro-batches, calls, data-parallel or context-parallel ranks.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from mindspeed_asyncflow.config.parallel import check_parallel
from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.engines.checkpoint import Checkpointer
from mindspeed_asyncflow.engines.megatron import collect, world
from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap
from mindspeed_asyncflow.engines.megatron.bridges import make_bridge
from mindspeed_asyncflow.engines.megatron.export import plan_export
from mindspeed_asyncflow.engines.megatron.feed import RankBatch, make_rank_batches
from mindspeed_asyncflow.engines.megatron.optim import GradientStep, make_optimizer, wrap_data_parallel
from mindspeed_asyncflow.engines.megatron.optim_state import MegatronState
from mindspeed_asyncflow.engines.megatron.shards import named_weights, trainer_layout
from mindspeed_asyncflow.engines.megatron.state import Leftovers, state_by_kind
from mindspeed_asyncflow.engines.training import join_world, merge_metrics
from mindspeed_asyncflow.observe.checkpoints import SavedFile
from mindspeed_asyncflow.platforms import modules
from mindspeed_asyncflow.platforms.ports import HeldPort
from mindspeed_asyncflow.records import MicroBatch, OptimReport

LossFn = Callable[[torch.Tensor, torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class MegatronEngine(abc.ABC):
    """One rank. All ranks construct it together; every method is collective.

    The last stage of its model gives float32 [K, N], K numbers for each trained position; `_token_loss` makes a loss
    of them. `held_port` (rank 0) is the port given to all ranks, held.
    """

    VALUES = False  # whether the model has a value head in place of the vocabulary's

    def __init__(
        self,
        model_folder: str,
        trainer: TrainerConfig,
        *,
        dtype: str,
        loss_fn: LossFn,
        rank: int,
        world_size: int,
        master_address: str = "127.0.0.1",
        master_port: int,
        seed: int,
        timeout_s: float,
        temperature: float = 1.0,
        platform: str = "auto",
        held_port: HeldPort | None = None,
    ) -> None:
        with open(os.path.join(model_folder, "config.json")) as f:
            self.model: dict[str, Any] = json.load(f)
        check_parallel(self.model, trainer)
        self.model_folder, self.trainer, self.loss_fn = model_folder, trainer, loss_fn
        self.platform = bootstrap(platform, trainer.threads)
        self.platform.apply_features(trainer.mindspeed)
        self.device = self.platform.device()
        self._joined = join_world(
            self.platform,
            rank=rank,
            world_size=world_size,
            address=master_address,
            port=master_port,
            timeout_s=timeout_s,
            held_port=held_port,
        )
        world.cut_world(trainer, seed, timeout_s)
        torch_dtype = getattr(torch, dtype)
        self.bridge = make_bridge(
            model_folder, trainer, self.platform, torch_dtype, temperature=temperature, values=self.VALUES
        )
        self.config = self.bridge.config
        self.platform.check_transformer_config(self.config)
        with contextlib.redirect_stdout(io.StringIO()):  # mbridge prints the parameter count
            wrapped = self.bridge.get_model(bf16=torch_dtype == torch.bfloat16)
        self.bridge.load_weights(wrapped, model_folder)
        self.chunks = [getattr(m, "module", m) for m in wrapped]  # the models below the bf16 wrapper
        modules.swap_attention(self.chunks, trainer.mindspeed.swap_attention)
        self._loaded()
        self.models = wrap_data_parallel(self.config, trainer, wrapped)
        self.step = GradientStep(trainer, self.models, make_optimizer(trainer, torch_dtype, self.models))
        self.layout = trainer_layout(self.model, trainer)
        weights = named_weights(self.bridge, self.chunks)
        trained = MegatronState(self.step)
        self._checkpointer = Checkpointer(
            self.platform, self.layout, rank, weights, trained, model_folder=model_folder, timeout_s=timeout_s
        )
        self.plan = plan_export(self.bridge, self.chunks)
        self.data_parallel_rank = parallel_state.get_data_parallel_rank()
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        self.inv_freq = self.chunks[0].rotary_pos_emb.inv_freq.to(self.device)
        self._cp_group = parallel_state.get_context_parallel_group()
        self._leftovers = Leftovers(self.chunks)
        self.step.clear()

    def _loaded(self) -> None:
        """The weights of the model folder are in place, and neither gradients nor optimizer exist yet."""
        return None  # most models are complete as they were loaded

    @abc.abstractmethod
    def _token_loss(self, found: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss sum, metric parts) of [K, T] numbers, 0 where nothing is trained."""

    # -- gradients ----------------------------------------------------------------------------------------------------

    def forward_backward(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        outputs = self._run(micro_batches, self._loss, forward_only=False)
        return self._from_last_stage(merge_metrics(outputs))

    def optim_step(self, denominator: float) -> OptimReport:
        return self.step.apply(denominator, self.bridge, self.plan)

    def _first_of_tokens(self, micro_batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """float32 [T] of each micro-batch on every rank: the first number of each position, 0 if not trained."""
        with torch.no_grad():
            outputs = self._run(micro_batches, self._spread_only, forward_only=True)
        sizes = [len(b.input_ids) for b in micro_batches]
        if not sizes:
            return []
        flat = torch.cat(outputs[: len(sizes)]) if outputs else torch.empty(sum(sizes), device=self.device)
        if self.trainer.pipeline_parallel > 1:
            dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(), self.bridge.mpu.pp_group)
        return [part.numpy().copy() for part in flat.cpu().split(sizes)]

    def _run(self, micro_batches: Sequence[MicroBatch], loss: Callable[..., Any], forward_only: bool) -> list[Any]:
        """Run megatron's schedule; what `loss` returned for each micro-batch, on the last stage (else empty)."""
        trainer, count = self.trainer, len(micro_batches)
        if trainer.expert_parallel > 1:  # experts are shared over replicas: all of them run equally many batches
            count = collect.extreme(count, dist.ReduceOp.MAX, self.device)
        if trainer.virtual_pipeline:
            count = -(-count // trainer.pipeline_parallel) * trainer.pipeline_parallel
        if count == 0:
            return []
        batches = make_rank_batches(
            micro_batches,
            count=count,
            multiple=trainer.context_parallel * (trainer.tensor_parallel if trainer.sequence_parallel else 1),
            same_length=trainer.pipeline_parallel > 1,
            cp_rank=self._cp_group.rank(),
            cp_size=self._cp_group.size(),
            ring=trainer.mindspeed.context_parallel == "ring",
            prune=not trainer.sequence_parallel,
            inv_freq=self.inv_freq,
        )
        several = len(self.models) > 1
        outputs = get_forward_backward_func()(
            forward_step_func=functools.partial(self._forward_step, loss),
            data_iterator=[iter(batches) for _ in self.models] if several else iter(batches),
            model=self.models if several else self.models[0],
            num_microbatches=count,
            seq_length=batches[0].tokens,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        self._leftovers.drop()
        return outputs

    def _forward_step(self, loss: Callable[..., Any], batches: Iterator[RankBatch], model: Any) -> tuple[Any, Any]:
        batch = next(batches)
        output = model(
            input_ids=batch.input_ids,
            position_ids=None,
            attention_mask=None,
            labels=batch.selection,
            packed_seq_params=batch.packed,
        )
        return output, functools.partial(loss, batch)

    def _loss(self, batch: RankBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        nothing = torch.zeros((), dtype=torch.int, device=self.device)  # the engine divides, not the schedule
        if batch.source is None:
            return output.sum() * 0.0, nothing, {}
        loss, metrics = self._token_loss(self._spread(batch, output), batch.source)
        return loss, nothing, metrics

    def _spread_only(self, batch: RankBatch, output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
        return self._spread(batch, output)[0] if batch.source is not None else output.new_zeros(0)

    def _spread(self, batch: RankBatch, found: torch.Tensor) -> torch.Tensor:
        """[K, N] at this rank's trained positions -> [K, T] over all positions of the micro-batch, 0 elsewhere."""
        assert batch.source is not None
        if self._cp_group.size() > 1:
            share = batch.tokens // self._cp_group.size()
            mine = found.new_zeros(len(found), share).index_copy(1, batch.selection.index, found)
            found = _GatherSlices.apply(mine, self._cp_group).index_select(1, batch.trained)
        return found.new_zeros(len(found), len(batch.source.input_ids)).index_copy(1, batch.origin, found)

    def _from_last_stage(self, metrics: dict[str, float]) -> dict[str, float]:
        if self.trainer.pipeline_parallel == 1:
            return metrics
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        return collect.broadcast_numbers(metrics, last, self.bridge.mpu.pp_group, self.device)

    # -- state --------------------------------------------------------------------------------------------------------

    def train_state(self) -> dict[str, list[torch.Tensor]]:
        return state_by_kind(self.chunks, self.step)

    def begin_save(self, folder: str) -> None:
        self._checkpointer.begin(folder)

    def finish_save(self) -> list[SavedFile]:
        return self._checkpointer.finish()

    def load_checkpoint(self, folder: str) -> None:
        self._checkpointer.load(folder)

    def close(self) -> None:
        self._checkpointer.close()
        world.leave_world(self._joined)


class _GatherSlices(torch.autograd.Function):
    """[..., T/cp] of each rank -> [..., T] on all ranks. Every rank computes the same loss from the result, and only
    its own slice depends on its weights: the gradient is that slice, and data-parallel reduction adds up the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.rank, ctx.share = group.rank(), x.shape[-1]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0][..., ctx.rank * ctx.share : (ctx.rank + 1) * ctx.share], None
