"""Parts of the benchmark of the service: the server's address, spoiled requests, transfers over HTTP and without."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from mindspeed_asyncflow import Client
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.records import PromptRow
from mindspeed_asyncflow.service.verbs import Prompt
from tests.web.malformed import Request, requests

TOKENS, GROUPS = 1 << 16, 8  # of an answer; of a transfer
AT_ONCE = 4
PATIENCE_S = 20.0


def environment(threads: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("OMP_")} | threads


def address(log: Path, server: subprocess.Popen, limit_s: float) -> str:
    """Where it listens, from what it has printed."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until and server.poll() is None:
        if found := re.search(r"listening on (\S+)", log.read_text(encoding="utf-8")):
            return found[1]
        time.sleep(0.2)
    raise RuntimeError(f"the server is not there; {log} ends with:\n{log.read_text(encoding='utf-8')[-2000:]}")


def end(server: subprocess.Popen) -> None:
    for number, patience_s in ((signal.SIGINT, 30.0), (signal.SIGKILL, 5.0)):
        if server.poll() is not None:
            return
        server.send_signal(number)
        try:
            server.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue


def overhead_us(client: Client, count: int) -> float:
    """Median of `status` of a server that has no run yet: the call itself and nothing else."""
    took = []
    for _ in range(count + 20):
        began = time.perf_counter()
        client.status()
        took.append(time.perf_counter() - began)
    return statistics.median(took[20:]) * 1e6


class Spoiled:
    """The requests of tests/web/malformed.py over sockets. Those that cannot be right come with the owner's token,
    the others with that of somebody who owns nothing."""

    def __init__(self, url: str, owner: str, intruder: str, count: int) -> None:
        host, port = url.partition("//")[2].split(":")
        self._place, self._tokens = (host, int(port)), (owner, intruder)
        self._requests = [r for r in requests(0, count + count // 10) if not _waits(r)][:count]
        self.tried = self.errors = 0
        self.effects: list[Request] = []  # taken though nothing right is left
        self.statuses: Counter[int] = Counter()

    def send(self) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for request, status in zip(self._requests, pool.map(self._sent, self._requests)):
                self.tried += 1
                self.statuses[status] += 1
                self.errors += status >= 500
                if request.hopeless and 200 <= status < 300:
                    self.effects.append(request)

    def _sent(self, request: Request) -> int:
        token = self._tokens[0 if request.hopeless else 1]
        headers = {"host": "localhost", "authorization": f"Bearer {token}", "connection": "close"} | request.headers
        headers.setdefault("content-length", str(len(request.body)))
        head = f"{request.method} {request.path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        with socket.create_connection(self._place, timeout=PATIENCE_S) as sock:
            try:
                sock.sendall(head.encode("latin-1") + b"\r\n" + request.body)
                answer = sock.recv(64)
            except ConnectionError:  # refused before all of it was there
                return 0
        return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def _waits(request: Request) -> bool:
    """A right call that would wait for its default, a minute."""
    return not request.hopeless and b"timeout_s" not in request.body and request.path.endswith("get_experience_data")


def over_http(guest: Client, rounds: int) -> float:
    """GB/s of answers into a partition of the guest's and out of it again."""
    rates = []
    for _ in range(rounds):
        guest.put_prompts_data([Prompt("1234>", "1234")] * GROUPS)
        claim = guest.get_experience_data("rollout", ["prompt_ids"], groups=GROUPS)
        columns = _answers(len(claim.rows))
        began = time.perf_counter()
        guest.put_experience_data(claim.claim, claim.rows, columns)
        batch = guest.get_experience_data("reward", ["response_ids", "rollout_logprobs"], groups=GROUPS)
        seconds = time.perf_counter() - began
        rates.append(_moved(columns) / seconds / 1e9)
        _same(batch.columns, columns)
        ones = np.ones(len(batch.rows), np.float32)
        guest.put_experience_data(batch.claim, batch.rows, {"score": ones, "reward": ones, "advantage": ones})
        trained = guest.get_experience_data("train", ["reward"], groups=GROUPS)
        guest.put_experience_data(trained.claim, trained.rows, {})  # frees them
    return statistics.median(rates)


def direct(run: Path, rounds: int) -> float:
    """The same by a client of the dock itself, from the same machine."""
    told = json.loads((run / "dock.json").read_text(encoding="utf-8"))
    rates, partition, size = [], "benchmark", 8
    with DockClient(told["addresses"], bytes.fromhex(told["secret"]), wait_s=30.0, home=0) as dock:
        for turn in range(rounds):
            prompt = np.arange(5, dtype=np.int32)
            groups = [[PromptRow(turn * GROUPS + g, m, size, prompt, "") for m in range(size)] for g in range(GROUPS)]
            dock.put_groups(partition, groups)
            claim = dock.claim("rollout", GROUPS, partition=partition, worker="b", unit="groups", at_least=GROUPS)
            columns = _answers(len(claim.rows))
            began = time.perf_counter()
            dock.write(claim.rows, columns, claim_id=claim.claim_id, done=True)
            batch = dock.claim("reward", GROUPS, partition=partition, worker="b", unit="groups", at_least=GROUPS)
            values = dock.read(batch.rows, ["response_ids", "rollout_logprobs"], copy=True)
            seconds = time.perf_counter() - began
            rates.append(_moved(columns) / seconds / 1e9)
            _same(values, columns)
            dock.free(batch.rows)
        dock.close_partition(partition)
    return statistics.median(rates)


def _answers(rows: int) -> dict:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 20, TOKENS, np.int32) for _ in range(rows)]
    return {
        "response_ids": ids,
        "rollout_logprobs": [row.astype(np.float32) / -20 for row in ids],
        "finish": np.zeros(rows, np.uint8),
    }


def _moved(columns: dict) -> int:
    """Bytes there and back."""
    return 2 * sum(row.nbytes for name in ("response_ids", "rollout_logprobs") for row in columns[name])


def _same(got: dict, sent: dict) -> None:
    for name in ("response_ids", "rollout_logprobs"):
        if not all(np.array_equal(a, b) for a, b in zip(got[name], sent[name])):
            raise RuntimeError(f"{name} came back otherwise than it was sent")
