"""float32 masters of bf16 parameters as what the parameter does not hold of them: 2 bytes each, not 4.

    master, 32 bits  =  high half: the parameter, or the number before it   ++   low half, kept beside the parameter

A parameter is its master rounded to the nearest, ties to even. Where the low half is a half or more that was upwards:
the high half is the parameter's bits less one, else the bits as they are. That is wrong for ties that were rounded
downwards (about one number in 131072) and for nan; of these the high half is kept too, with their places, in host
memory. So parameters are the ones that megatron rounds, and masters come back bit for bit, however a device rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

ELEMENTS_AT_ONCE = 1 << 25  # masters put together at a time (128 MiB), unless one parameter has more


class Halves:
    """The masters of a bf16 parameter, or of a contiguous range of one, of N elements."""

    def __init__(self, param: torch.Tensor, master: torch.Tensor) -> None:
        """`param`: bf16, contiguous, `master` (float32) rounded. Both are read; `param` is kept, not copied."""
        self._param = param.detach().view(-1)
        self.low = torch.empty_like(self._param, dtype=torch.int16)
        self._places = torch.empty(0, dtype=torch.int64, device="cpu")  # ascending, where the rule above is wrong
        self._high = torch.empty(0, dtype=torch.int16, device="cpu")  # the high halves there
        self.write(master)

    def read(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """float32 [last - first], the masters of a range, in memory of their own."""
        low = self.low[first:last]
        pairs = low.new_empty(len(low), 2)  # of halves, as they lie in a float32
        pairs[:, 0] = low
        pairs[:, 1] = self._ruled(first, len(low))
        begin, end = self._between(first, first + len(low))
        if begin < end:
            places, high = (self._places[begin:end] - first, self._high[begin:end])
            pairs[places.to(pairs.device), 1] = high.to(pairs.device)
        return pairs.view(torch.float32).view(-1)

    def write(self, master: torch.Tensor, first: int = 0) -> None:
        """Keep `master` (float32 [n], from element `first` on) beside the parameter as it is."""
        pairs = master.detach().contiguous().view(-1, 1).view(torch.int16)
        self.low[first : first + len(pairs)] = pairs[:, 0]
        wrong = (self._ruled(first, len(pairs)) != pairs[:, 1]).nonzero().view(-1)
        begin, end = self._between(first, first + len(pairs))
        self._places = torch.cat([self._places[:begin], wrong.cpu() + first, self._places[end:]])
        self._high = torch.cat([self._high[:begin], pairs[wrong, 1].cpu(), self._high[end:]])

    def round(self, master: torch.Tensor) -> None:
        """Make the parameter of `master` (float32, as many elements), and keep that."""
        self._param.copy_(master.detach().view(-1))
        self.write(master)

    def _ruled(self, first: int, count: int) -> torch.Tensor:
        """int16 [count], the high halves as the rule has them."""
        where = slice(first, first + count)
        return self._param[where].view(torch.int16) - (self.low[where] < 0).to(torch.int16)

    def _between(self, first: int, last: int) -> tuple[int, int]:
        """Which of `_places` are in [first, last)."""
        begin, end = torch.searchsorted(self._places, torch.tensor([first, last], device="cpu")).tolist()
        return begin, end


class HalvedOptimizer:
    """In the place of the torch optimizer inside one of megatron's: masters are whole for their own step only.

    Between two steps a master has its shape, and nan for all its elements; `halves` has its value.
    """

    def __init__(self, optimizer: Any, params: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`params`: pairs of a bf16 parameter and its master, on which `optimizer` steps."""
        self._optimizer = optimizer
        self.halves: Mapping[torch.Tensor, Halves] = {main: Halves(param, main) for param, main in params}
        for main in self.halves:
            _empty(main)

    @property
    def param_groups(self) -> Any:
        return self._optimizer.param_groups

    @property
    def state(self) -> Any:
        return self._optimizer.state

    @torch.no_grad()
    def step(self) -> None:
        """A step of the optimizer, and the parameters after it.

        The optimizer takes it in several calls, each with a part of one group's parameters and the group's other
        entries as they were before the first, since a call counts a step.
        """
        groups = self._optimizer.param_groups
        try:
            for group in groups:
                self._optimizer.param_groups = [group]
                before = dict(group)
                for params in _portions(before["params"]):
                    group.clear()
                    group.update(before, params=params)
                    self._step_on(params)
                group["params"] = before["params"]
        finally:
            self._optimizer.param_groups = groups

    def _step_on(self, params: list[torch.Tensor]) -> None:
        halved = [(main, self.halves[main]) for main in params if main in self.halves]
        for main, halves in halved:
            main.data = halves.read().view(main.shape)
        self._optimizer.step()
        for main, halves in halved:
            halves.round(main)
            _empty(main)


def keep_halves(optimizer: Any) -> None:
    """From now on megatron's `optimizer` of a bf16 model keeps halves of masters. Its steps stay the same."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer:
            continue
        if hasattr(part, "shard_float16_groups"):  # the distributed optimizer: ranges of parameters
            groups = part.shard_float16_groups, part.shard_fp32_from_float16_groups
        else:
            groups = part.float16_groups, part.fp32_from_float16_groups
        pairs = [pair for params, mains in zip(*groups) for pair in zip(params, mains)]
        part.optimizer = HalvedOptimizer(part.optimizer, pairs)
        part._copy_main_params_to_model_params = _rounded_already


def _rounded_already() -> None:
    """What megatron calls after a step: `HalvedOptimizer.step` has made the parameters."""


def _empty(main: torch.Tensor) -> None:
    main.data = main.new_full((1,), float("nan")).expand(main.shape)


def _portions(params: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """At least one, and each as many whole parameters as may be put together at a time."""
    some: list[torch.Tensor] = []
    for param in params:
        if some and sum(p.numel() for p in some) + param.numel() > ELEMENTS_AT_ONCE:
            yield some
            some = []
        some.append(param)
    yield some
