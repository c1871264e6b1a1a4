"""Messages over the device's backend. `batch_isend_irecv`: one handle for the whole batch, as torch_npu gives, that can
be asked whether it is done; gloo's own handles cannot. All-to-alls that nobody waits for at once are counted."""

from __future__ import annotations

import threading
from typing import Any

from .operators import calls


class Handle:
    """Waiting for it waits for the host, because the emulated stream is the host."""

    def __init__(self, works: list[Any]) -> None:
        self._done, self._error = threading.Event(), None
        threading.Thread(target=self._finish, args=(works,), daemon=True).start()

    def _finish(self, works: list[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def wait(self, timeout: Any = None) -> bool:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None


def install() -> None:
    import torch.distributed as dist

    batch, exchange = dist.batch_isend_irecv, dist.all_to_all_single

    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        if not operations or dist.get_backend(operations[0].group) != "hccl":
            return batch(operations)
        ways = [(o.op.__name__, o.peer) for o in operations]
        if len(set(ways)) < len(ways):
            raise RuntimeError(f"the task list has two messages one way to one rank: {ways}")
        return [Handle(batch(operations))]

    def all_to_all_single(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        calls["all_to_all_single (async)"] += async_op
        return exchange(*args, async_op=async_op, **kwargs)

    dist.all_to_all_single = dist.distributed_c10d.all_to_all_single = all_to_all_single
    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batch_isend_irecv
