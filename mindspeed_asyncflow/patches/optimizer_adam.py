"""Target: megatron.core.optimizer.Adam, .USING_PYTORCH_OPTIMIZER and distrib_optimizer.Adam, .HAVE_APEX_OR_TE.

Reason: without Apex or Transformer Engine megatron falls back to torch's AdamW, which keeps one `step` per parameter;
the reshardable checkpoint formats of the distributed optimizer want one per group, as Apex and MindSpeed have it.
Link: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/optimizer/distrib_optimizer.py
Remove: when the fallback stores `step` in the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed_asyncflow import patches


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW on torch's fused CPU kernel with the state layout of Apex: `step` in the group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update: Callable[..., Any] = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            self._update(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                # the kernel takes the step already counted, one scalar tensor per parameter
                [torch.tensor(float(group["step"])) for _ in params],
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def install() -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if optimizer.Adam is FusedAdam:
        return
    for module, name in (
        (optimizer, "USING_PYTORCH_OPTIMIZER"),
        (distrib_optimizer, "Adam"),
        (distrib_optimizer, "HAVE_APEX_OR_TE"),
    ):
        patches.require(hasattr(module, name), f"{module.__name__}.{name}", "it is not there")
    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = True
