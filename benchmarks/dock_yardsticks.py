"""What the machine can do with the same columns: memcpy, shared memory, one hop through a socket or ZeroMQ.

No rows, no metadata, no store: ceilings, in GB/s. `dock_yardsticks.py sink` is the receiving process.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from dock_load import MB, Plan
from dock_measure import now
from dock_process import Child, serve

LIMIT_S = 120.0
ALIGN = 64
MEMCPY_BYTES = 256 * MB  # most that one memcpy copies


def best(measure: Callable[[], float], repeats: int) -> float:
    """Least disturbed of the repeats, after one that is not counted."""
    measure()
    return min(measure() for _ in range(repeats))


class Memcpy:
    """One thread between warm buffers, asked just before and just after a cell."""

    def __init__(self) -> None:
        self._source = self._target = np.empty(0, np.uint8)

    def __call__(self, nbytes: int) -> float:
        nbytes = min(nbytes, MEMCPY_BYTES)
        if len(self._source) != nbytes:
            self._source, self._target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        return nbytes / best(self._once, 5) / 1e9

    def _once(self) -> float:
        began = now()
        np.copyto(self._target, self._source)
        return now() - began


def memcpy_fresh(nbytes: int) -> float:
    """Into memory that nobody has touched: every page is a fault."""
    source = np.ones(nbytes, np.uint8)

    def once() -> float:
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
            began = now()
            fresh[:] = source.data
            return now() - began

    return nbytes / best(once, 3) / 1e9


def measure(plan: Plan, repeats: int) -> dict[str, float]:
    """All yardsticks of one cell; that of ZeroMQ only where it is installed."""
    with ExitStack() as stack:
        sink = stack.enter_context(Child("the yardstick's sink", [sys.executable, __file__, "sink"]))
        found = _shared_memory(plan, sink, repeats) | {"socket_tcp": _socket(plan, sink, repeats)}
        if "zmq" in sink.ask("libraries", LIMIT_S):
            found["zmq_tcp"] = _zmq(plan, sink, repeats)
    return found


def _shared_memory(plan: Plan, sink: Child, repeats: int) -> dict[str, float]:
    """Write in this process, then look at it, or copy it, in the other one; the memory is warm."""
    batches = [plan.batch(i).buffers() for i in range(plan.puts)]
    places, size = [], 0
    for buffers in batches:
        for buffer in buffers:
            places.append((size, buffer.nbytes))
            size += -(-buffer.nbytes // ALIGN) * ALIGN
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="dock-yardstick-") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        sink.ask("map", LIMIT_S, path=file.name)

    def write() -> float:
        began = now()
        for (at, length), buffer in zip(places, (b for buffers in batches for b in buffers)):
            memory[at : at + length] = buffer
        return now() - began

    written = best(write, repeats)
    view = best(lambda: sink.ask("look", LIMIT_S, places=places, copy=False), repeats)
    copy = best(lambda: sink.ask("look", LIMIT_S, places=places, copy=True), repeats)
    return {"shm_view": plan.nbytes / (written + view) / 1e9, "shm_copy": plan.nbytes / (written + copy) / 1e9}


def _socket(plan: Plan, sink: Child, repeats: int) -> float:
    """One connection over the loopback, into a recycled buffer."""
    sizes = [sum(b.nbytes for b in plan.batch(i).buffers()) for i in range(plan.puts)]
    with socket.create_connection(("127.0.0.1", sink.ask("listen", LIMIT_S))) as connection:

        def hop() -> float:
            sink.tell("receive", sizes=sizes)
            began = now()
            for i in range(plan.puts):
                for buffer in plan.batch(i).buffers():
                    connection.sendall(buffer.data)
            return sink.answer(LIMIT_S, "receive") - began

        return plan.nbytes / best(hop, repeats) / 1e9


def _zmq(plan: Plan, sink: Child, repeats: int) -> float:
    """One hop, PUSH to PULL over TCP, a frame for each column, no copy at the sender."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.set_hwm(0)
        push.linger = 0
        sink.ask("pull", LIMIT_S, address=f"tcp://127.0.0.1:{push.bind_to_random_port('tcp://127.0.0.1')}")

        def hop() -> float:
            sink.tell("take", messages=plan.puts)
            began = now()
            for i in range(plan.puts):
                push.send_multipart([b.data for b in plan.batch(i).buffers()], copy=False)
            return sink.answer(LIMIT_S, "take") - began

        return plan.nbytes / best(hop, repeats) / 1e9


class Sink:
    """The receiving process. Times are ends, on the clock that both processes share, or seconds."""

    connection: socket.socket | None = None

    def libraries(self) -> list[str]:
        try:
            import zmq  # noqa: F401
        except ImportError:
            return []
        return ["zmq"]

    def map(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        self.own = np.ones_like(self.memory)

    def look(self, places: list[tuple[int, int]], copy: bool) -> float:
        began = now()
        for at, length in places:
            if copy:
                self.own[at : at + length] = self.memory[at : at + length]
            else:
                self.memory[at : at + length][:1].sum()
        return now() - began

    def listen(self) -> int:
        self.listener = socket.create_server(("127.0.0.1", 0))
        return self.listener.getsockname()[1]

    def receive(self, sizes: list[int]) -> float:
        if self.connection is None:
            self.connection, _ = self.listener.accept()
            self.buffer = memoryview(bytearray(max(sizes)))
        for size in sizes:
            filled = 0
            while filled < size:
                count = self.connection.recv_into(self.buffer[filled:size])
                if not count:
                    raise ConnectionError(f"the sender went away after {filled} of {size} bytes")
                filled += count
        return now()

    def pull(self, address: str) -> None:
        import zmq

        self.frames: Any = zmq.Context.instance().socket(zmq.PULL)
        self.frames.set_hwm(0)
        self.frames.linger = 0
        self.frames.connect(address)

    def take(self, messages: int) -> float:
        for _ in range(messages):
            for frame in self.frames.recv_multipart(copy=False):
                frame.buffer[:1]
        return now()


if __name__ == "__main__":
    sink = Sink()
    serve({name: getattr(sink, name) for name in ("libraries", "map", "look", "listen", "receive", "pull", "take")})
