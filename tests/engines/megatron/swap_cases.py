"""Functions that tests run inside trainer ranks: the train state leaves the device and comes back."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from rank_cases import engine, share


@contextlib.contextmanager
def on_host(state: dict[str, list[torch.Tensor]]) -> Iterator[None]:
    """Empty every storage of `state` inside the block. Gradients return as 0."""
    storages = {kind: [t.untyped_storage() for t in tensors] for kind, tensors in state.items()}
    copies = {kind: [s.clone() for s in found] for kind, found in storages.items() if kind != "gradients"}
    sizes = {kind: [s.nbytes() for s in found] for kind, found in storages.items()}
    for found in storages.values():
        for storage in found:
            storage.resize_(0)
    yield
    for kind, found in storages.items():
        for i, storage in enumerate(found):
            storage.resize_(sizes[kind][i])
            storage.copy_(copies[kind][i]) if kind in copies else storage.fill_(0)


def live_bytes() -> int:
    """Bytes of all storages that a tensor of this process refers to, parameters and their gradients included."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t.device.type == "cpu"}
    return sum(s.nbytes() for s in storages.values())


def contents(state: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """uint8, a copy of all bytes of each kind."""
    return {
        kind: torch.cat([torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage().clone()) for t in tensors])
        for kind, tensors in state.items()
    }


def out_and_back(rank: int, folder: str, sizes: dict, samples: list, dtype: str) -> dict[str, Any]:
    """Three steps, of which the second follows a swap; and the same steps without one."""

    def step(made: Any) -> tuple[float, float]:
        metrics = made.forward_backward(share(samples, made))
        return metrics["loss_sum"], made.optim_step(10.0).grad_norm

    def run(swap: bool) -> dict[str, Any]:
        before_engine = live_bytes()
        with engine(rank, folder, sizes, dtype) as made:
            found: dict[str, Any] = {"steps": [step(made)]}
            state = made.train_state()
            found["bytes"] = {kind: sum(t.untyped_storage().nbytes() for t in state[kind]) for kind in state}
            if swap:
                before = contents(state)
                copies = sum(t.numel() for t in before.values())
                with on_host(state):
                    shards = made.shards()
                    found["left"] = live_bytes() - before_engine - copies
                    found["empty"] = all(t.untyped_storage().nbytes() == 0 for t in shards.values())
                after = contents(state)
                found["identical"] = all(torch.equal(before[k], after[k]) for k in ("train weights", "optimizer"))
                found["no gradients"] = not after["gradients"].any()
                del before, after
            found["steps"] += [step(made), step(made)]
            found["parameters"] = sum(t.numel() for t in made.shards().values())
            found["weights"] = {name: t.float().numpy().copy() for name, t in made.export_weights()}
        return found

    at_first = live_bytes()
    return {"swapped": run(True), "plain": run(False), "kept": live_bytes() - at_first}
