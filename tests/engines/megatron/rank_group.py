"""Trainer ranks for tests: a few processes that join a gloo world per job and run named functions together."""

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

from mindspeed_asyncflow.platforms.ports import hold_port


def _serve(rank: int, world: int, meet: Any, pipe: Any) -> None:
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    import warnings

    warnings.simplefilter("ignore")
    from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap

    platform = bootstrap("cpu")
    from mindspeed_asyncflow.engines.megatron.world import leave_world
    from mindspeed_asyncflow.engines.training import join_world

    pipe.send(("ready", None))
    while (job := pipe.recv()) is not None:
        function, kwargs = job
        held = hold_port() if rank == 0 else None
        for _ in range(world if held else 0):
            meet.put(held.port)
        port = meet.get(timeout=60)
        # A world for each job: the threads of a left-over group wake up a hundred times per second for ever.
        join_world(platform, rank=rank, world_size=world, address="127.0.0.1", port=port, timeout_s=60, held_port=held)
        try:
            pipe.send(("ok", function(rank=rank, **kwargs)))
        except Exception:  # the parent process raises it
            pipe.send(("failed", traceback.format_exc()))
        leave_world(joined_here=True)
        gc.collect()
    os._exit(0)  # no teardown of groups that a failed case may have left half-made


class RankGroup:
    """`run(function, **kwargs)` calls `function(rank=r, **kwargs)` in all ranks and returns their results in order."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("spawn")
        meet = context.Queue()
        self.world, self._pipes, self._processes = world, [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, meet, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self._collect("start", 120)

    def run(self, function: Callable[..., Any], timeout_s: float = 120, **kwargs: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, kwargs))
        return self._collect(function.__name__, timeout_s)

    def _collect(self, what: str, timeout_s: float) -> list[Any]:
        until, results = time.monotonic() + timeout_s, []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, until - time.monotonic())):
                self.close()
                raise TimeoutError(f"rank {rank} of {self.world} did not finish {what} in {timeout_s} s")
            state, value = pipe.recv()
            if state == "failed":
                self.close()
                raise RuntimeError(f"rank {rank} of {self.world}, {what}:\n{value}")
            results.append(value)
        return results

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)


class RankGroups:
    """One group per world size, started when first asked for and again after a failure."""

    def __init__(self) -> None:
        self._groups: dict[int, RankGroup] = {}

    def of(self, world: int) -> RankGroup:
        if world not in self._groups or not self._groups[world].alive:
            self._groups[world] = RankGroup(world)
        return self._groups[world]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()
