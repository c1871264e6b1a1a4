"""Ranks for tests and the benchmark: forked from one process that has loaded the heavy libraries already."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_S = 120.0


class Ranks:
    """`run(function, **kwargs)` calls `function(world, **kwargs)` in `count` processes; `world` is a `World`.

    Functions and arguments must be importable and picklable. Results come back in rank order. A function that raises,
    or takes longer than `timeout_s`, ends all ranks and raises here.
    """

    def __init__(self, count: int, modules: tuple[str, ...] = ()) -> None:
        self.count = count
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        store = str(Path(self._folder.name) / "store")
        self._root = context.Process(target=_root, args=(count, modules, store, theirs))
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)  # a spawned process reads its own before this file is loaded
        try:
            self._root.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        theirs.close()
        self._answer("start", START_S)

    def run(self, function: Callable[..., Any], timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
        self._pipe.send((function, kwargs, timeout_s))
        return self._answer(function.__name__, timeout_s + 10.0)

    def _answer(self, what: str, timeout_s: float) -> list[Any]:
        try:
            if not self._pipe.poll(timeout_s):
                raise TimeoutError(f"{self.count} ranks did not finish {what} in {timeout_s} s")
            state, value = self._pipe.recv()
        except (TimeoutError, EOFError):
            self.close()
            raise
        if state == "failed":
            self.close()
            raise RuntimeError(f"{what}: {value}")
        return value

    def close(self) -> None:
        if self._root.is_alive() and self._root.pid:
            try:
                os.killpg(self._root.pid, signal.SIGKILL)
            except ProcessLookupError:  # it ended by itself, or had not become the leader of its group yet
                self._root.kill()
        self._root.join(10)
        self._folder.cleanup()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class World:
    """What a rank's function sees."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self._groups: dict[int, Any] = {}

    def group(self, size: int) -> Any:
        """The group of the first `size` ranks. All ranks must ask for the same sizes in the same order."""
        import torch.distributed as dist

        if size == self.count:
            return None
        if size not in self._groups:
            self._groups[size] = dist.new_group(range(size))
        return self._groups[size]


def _root(count: int, modules: tuple[str, ...], store: str, pipe: Any) -> None:
    import importlib
    import warnings

    os.setsid()
    warnings.simplefilter("ignore")
    warnings.showwarning = lambda *args, **kwargs: None  # some libraries switch the filter back on
    for name in ("torch", "torch.distributed", *modules):
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    children = []
    for rank in range(count):
        mine, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(rank, count, store, theirs), daemon=True)
        process.start()
        theirs.close()
        children.append((process, mine))
    pipe.send(_collect(children, START_S))
    while True:
        try:
            function, kwargs, timeout_s = pipe.recv()
        except EOFError:
            os.killpg(0, signal.SIGKILL)
        for _, child in children:
            child.send((function, kwargs))
        pipe.send(_collect(children, timeout_s))


def _collect(children: list[Any], timeout_s: float) -> tuple[str, Any]:
    until = time.monotonic() + timeout_s
    values: list[Any] = []
    failed: list[str] = []
    for rank, (process, child) in enumerate(children):
        try:
            if not child.poll(max(0.0, until - time.monotonic()) if not failed else 2.0):
                failed.append(f"rank {rank} did not answer in {timeout_s} s")
                continue
            state, value = child.recv()
        except EOFError:
            failed.append(f"rank {rank} ended with {process.exitcode}")
            continue
        if state == "ok":
            values.append(value)
        else:
            failed.append(f"rank {rank}:\n{value}")
    if not failed:
        return "ok", values
    first = [text for text in failed if "lost a peer" not in text] or failed  # others only saw it end
    return "failed", "\n".join(first[:2])


def _rank(rank: int, count: int, store: str, pipe: Any) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        timeout = timedelta(seconds=60)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=timeout
        )
        world = World(rank, count)
        pipe.send(("ok", None))
        while True:
            function, kwargs = pipe.recv()
            pipe.send(("ok", function(world, **kwargs)))
    except EOFError:
        pass
    except Exception:  # boundary: the parent process raises it
        pipe.send(("failed", traceback.format_exc()))
    sys.stdout.flush()
    os._exit(0)  # no teardown of groups that a failed case may have left half-made
