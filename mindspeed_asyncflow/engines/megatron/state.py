"""What a trainer rank keeps on its device between steps, by kind; and what it shall not keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from mindspeed_asyncflow.engines.megatron.optim import GradientStep


def state_by_kind(chunks: Sequence[torch.nn.Module], step: GradientStep) -> dict[str, list[torch.Tensor]]:
    """Every device tensor that training needs between two steps, one tensor per storage.

    "train weights": parameters and buffers of the model, or the flat buffer that they are views of; "gradients": the
    flat fp32 buffers; "optimizer": fp32 master weights where the model has another type, and the moments, which exist
    from the first step on. Bytes of a kind: the sum over its tensors of `untyped_storage().nbytes()`. For P parameters
    on this rank, o bytes each: o * P, 4 * P and (8 + 4 if o < 4) * P, the last divided by the size of the data-parallel
    group where the distributed optimizer shards it (up to its padding). Where halves of masters are kept (halves.py),
    masters are 2 * P.
    """
    seen: set[int] = set()
    return {
        "train weights": _new_storages(_model_tensors(chunks), seen),
        "gradients": _new_storages(step.buffers(), seen),
        "optimizer": _new_storages(_optimizer_tensors(step.optimizer), seen),
    }


def _new_storages(tensors: Iterable[torch.Tensor], seen: set[int]) -> list[torch.Tensor]:
    """Those tensors whose storage is not in `seen`, which grows by them."""
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found.append(tensor.detach())
    return found


def _model_tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()
        yield chunk.rotary_pos_emb.inv_freq  # type: ignore[union-attr, misc]


def _optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """What megatron's optimizer, or each one of its chain (dense and expert parameters), steps on and remembers."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer:  # this rank has no parameter of the part
            continue
        halves = getattr(part.optimizer, "halves", {})
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                yield halves[param].low if param in halves else param.data
                yield from (value for value in part.optimizer.state.get(param, {}).values() if torch.is_tensor(value))


class Leftovers:
    """Activations that megatron still refers to when a schedule has ended.

    These are the gathered tokens of sequence parallelism, the input of each pipeline stage, and the routing of each MoE
    layer: tokens x experts numbers, whose autograd graph besides keeps the model alive when the engine is gone.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Before the first forward: what dispatchers hold now they hold for good."""
        self._chunks = chunks
        found = [getattr(module, "token_dispatcher", None) for chunk in chunks for module in chunk.modules()]
        self._dispatchers = [(d, frozenset(_tensor_names(d))) for d in found if d is not None]

    def drop(self) -> None:
        parallel_state.get_global_memory_buffer().buffer.clear()
        for chunk in self._chunks:
            chunk.set_input_tensor(None)  # type: ignore[operator]
        for dispatcher, constant in self._dispatchers:
            for name in _tensor_names(dispatcher):
                if name not in constant:
                    setattr(dispatcher, name, None)


def _tensor_names(owner: Any) -> list[str]:
    return [name for name, value in vars(owner).items() if torch.is_tensor(value)]
