"""A critic without a model, and docks of runs that train one."""

from __future__ import annotations

import contextlib

import numpy as np

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.records import OptimReport


class FakeCritic:
    """Values every state at its version + the position in the sample / 10; remembers what it was asked."""

    def __init__(self) -> None:
        self.version, self.asked, self.trained = 0, [], []
        self.denominators: list[float] = []
        self.bad_from: int | None = None  # steps from this one on have bad gradients

    def values(self, micro_batches):
        self.asked += [b.rows[b.rows >= 0].tolist() for b in micro_batches]
        return [((self.version + b.positions / 10) * b.loss_mask).astype(np.float32) for b in micro_batches]

    def forward_backward(self, micro_batches):
        self.trained += micro_batches
        return {"critic/tokens_count": sum(b.num_valid_tokens for b in micro_batches)}

    def optim_step(self, denominator):
        self.denominators.append(denominator)
        bad = self.bad_from is not None and self.version >= self.bad_from
        self.version += 1
        return OptimReport(not bad, float("nan") if bad else 0.5, 0.01, "value_head.weight" if bad else "")

    def close(self):
        pass


@contextlib.contextmanager
def serving(kl=False):
    """A client of a dock whose rows go through the critic; `kl`: with log-probabilities of a reference."""
    tasks = grpo_tasks(kl, kl_in_reward=kl, token_level=True, critic=True)
    with (
        DockServer(GRPO_COLUMNS, tasks, arena_mb=2, lease_s=30.0, secret="s") as server,
        DockClient(server.address, "s", wait_s=5.0) as client,
    ):
        yield client
