"""Target: FileSystemWriterAsync.write_preloaded_data_multiproc and the module's _get_write_results_queue, in
megatron.core.dist_checkpointing.strategies.filesystem_async.

Reason: each save forks writer processes and starts a manager process that outlives a killed trainer. A trainer rank has
threads (collectives, Ray) that do not survive a fork, and no process of a run may survive the run. The replacements
write the same buckets with the same upstream function in this process.
Link: https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/megatron/core/dist_checkpointing/strategies/filesystem_async.py
Remove: when upstream can write without child processes.
"""

from __future__ import annotations

import inspect
import queue
from typing import Any

from mindspeed_asyncflow import patches


class _NoCounter:
    """Stands for the queue on which writer processes report their end."""

    def get(self) -> None: ...
    def task_done(self) -> None: ...


def write_here(transform_list: Any, use_msc: bool, rank: int, write_buckets: Any, global_results_queue: Any) -> None:
    """Write all buckets of this rank, and hand {bucket: results}, or the first exception, to the queue."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    results: Any = {}
    for i, bucket in enumerate(write_buckets):
        done: queue.Queue = queue.Queue()
        FileSystemWriterAsync.write_preloaded_data(transform_list, i, bucket, done, _NoCounter(), True, use_msc=use_msc)
        _, outcome = done.get_nowait()
        if isinstance(outcome, Exception):
            results = outcome
            break
        results[i] = outcome
    global_results_queue.put(results)


def install() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async as upstream

    writer = upstream.FileSystemWriterAsync
    target = writer.write_preloaded_data_multiproc
    if target is write_here:
        return
    parameters = list(inspect.signature(target).parameters)
    patches.require(
        parameters == list(inspect.signature(write_here).parameters) and hasattr(upstream, "_get_write_results_queue"),
        f"{upstream.__name__}.FileSystemWriterAsync.write_preloaded_data_multiproc",
        f"parameters {parameters}",
    )
    results: queue.Queue = queue.Queue()
    upstream._get_write_results_queue = lambda: results
    writer.write_preloaded_data_multiproc = staticmethod(write_here)
