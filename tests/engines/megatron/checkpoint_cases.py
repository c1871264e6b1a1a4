"""Functions about checkpoints that tests run inside trainer ranks (see rank_group.py)."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_cases import engine, share

SCHEDULE = {"lr_warmup_steps": 3, "lr_decay": "cosine", "steps": 10}


def steps(made: Any, samples: list, count: int) -> list[tuple[float, float, float]]:
    """(loss over all replicas, learning rate, gradient norm) of each step."""
    found = []
    for _ in range(count):
        sums = made.forward_backward(share(samples, made))
        total = torch.tensor([sums["loss_sum"]], dtype=torch.float64)
        dist.all_reduce(total)  # every rank of a replica has its sum
        report = made.optim_step(10.0)
        found.append((float(total) * made.data_parallel_size / dist.get_world_size(), report.lr, report.grad_norm))
    return found


def weights(made: Any) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in made.export_weights()}


def save(
    rank: int,
    folder: str,
    sizes: dict,
    samples: list,
    out: str,
    before: int = 3,
    after: int = 3,
    dtype: str = "float32",
) -> dict[str, Any]:
    """`before` steps, a checkpoint that is written during `after` more, and what those gave."""
    with engine(rank, folder, {**SCHEDULE, **sizes}, dtype) as made:
        steps(made, samples, before)
        at = weights(made)
        made.begin_save(out)
        straight = steps(made, samples, after)
        return {"files": made.finish_save(), "at": at, "steps": straight, "weights": weights(made)}


def load(
    rank: int, folder: str, sizes: dict, samples: list, out: str, after: int = 3, dtype: str = "float32"
) -> dict[str, Any]:
    """What `after` steps from the checkpoint give, and the smallest sum of any moment that it brought."""
    from mindspeed_asyncflow.engines.megatron.optim_state import shares

    with engine(rank, folder, {**SCHEDULE, **sizes}, dtype) as made:
        made.load_checkpoint(out)
        found = list(shares(made.step.optimizer, made._checkpointer._weights))
        moments = {kind: sum(float(s.state[kind].abs().sum()) for s in found) for kind in found[0].state}
        at = weights(made)
        return {"moments": moments, "at": at, "steps": steps(made, samples, after), "weights": weights(made)}


def save_untrained(rank: int, folder: str, sizes: dict, out: str) -> list:
    with engine(rank, folder, sizes) as made:
        made.begin_save(out)
        return made.finish_save()


def pause_over_copy(rank: int, folder: str, samples: list, out: str, times: int) -> dict[str, Any]:
    """Seconds of the pause of each of `times` saves, and of a plain copy of the same bytes after it; bytes that the
    first pause copies."""
    with engine(rank, folder, {}) as made:
        steps(made, samples, 1)
        pauses, copies, moved = [], [], []
        for number in range(times):
            began = time.perf_counter()
            with _counted() if number == 0 else contextlib.nullcontext() as counted:
                made.begin_save(os.path.join(out, str(number)))
            pauses.append(time.perf_counter() - began)
            moved = counted or moved
            files = made.finish_save()
            tensors = [held.tensor for held in made._checkpointer._state()]
            hosts = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
            for host, tensor in zip(hosts, tensors):  # touched once, as the pool's buffers are
                host.copy_(tensor)
            began = time.perf_counter()
            for host, tensor in zip(hosts, tensors):
                host.copy_(tensor)
            copies.append(time.perf_counter() - began)
        copied = sum(t.numel() * t.element_size() for t in tensors)
        return {
            "pauses": pauses, "copies": copies, "bytes": copied, "written": files[0].bytes, "moved": sum(moved),
        }  # fmt: skip


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Bytes of every tensor copy that this thread makes."""
    real, me, found = torch.Tensor.copy_, threading.get_ident(), []

    def copy_(target: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        if threading.get_ident() == me:
            found.append(target.nbytes)
        return real(target, *args, **how)

    torch.Tensor.copy_ = copy_  # type: ignore[method-assign]
    try:
        yield found
    finally:
        torch.Tensor.copy_ = real  # type: ignore[method-assign]


def refused(rank: int, folder: str, sizes: dict, out: str, dtype: str = "float32") -> str:
    """What loading the checkpoint says; "" if it loads."""
    from mindspeed_asyncflow.errors import CheckpointError

    with engine(rank, folder, sizes, dtype) as made:
        try:
            made.load_checkpoint(out)
        except CheckpointError as error:
            return str(error)
    return ""


def failing_disk(rank: int, folder: str, samples: list, out: str) -> dict[str, Any]:
    """A save that the disk refuses, then one that it takes; files of the second."""
    import resource
    import signal

    from mindspeed_asyncflow.errors import CheckpointError

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does by itself where it is the main program
    with engine(rank, folder, {}) as made:
        steps(made, samples, 1)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
        said = ""
        try:
            made.begin_save(os.path.join(out, "first"))
            made.finish_save()
        except CheckpointError as error:
            said = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        made.begin_save(os.path.join(out, "second"))
        return {"said": said, "files": made.finish_save()}
