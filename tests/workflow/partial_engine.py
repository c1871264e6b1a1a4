"""A rollout engine without a model whose answers say which version sampled which token, and replicas made of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from mindspeed_asyncflow.dock.client import Claim, DockClient
from mindspeed_asyncflow.engines.base import EngineCaps
from mindspeed_asyncflow.engines.lifecycle import PAUSE_MODES
from mindspeed_asyncflow.engines.step_backend import Finished
from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.records import GenRequest, SamplingSpec, WeightManifest
from mindspeed_asyncflow.workflow.workers import RolloutReport, RolloutWorker, RowBatch

QUIET = Tracer("", "test", enabled=False)
BASE = 1000  # a token is version * BASE + a number that the seed and its place in the answer give
WAIT_S = 10.0


def draw(seed: int, place: int) -> int:
    return (seed ^ (place * 0x9E3779B97F4A7C15)) % 997


def natural_length(seed: int) -> int:
    """Tokens after which the answer of this seed ends by itself."""
    return 1 + seed % 17


@dataclass
class _Row:
    request: GenRequest
    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens) + (0 if self.request.resume_ids is None else len(self.request.resume_ids))


class CountingBackend:
    """See `StepBackend`. `permits`: steps that answers may still take; None: any number."""

    caps = EngineCaps("counting", PAUSE_MODES, (1, 2), ("relay",), False)
    token_count = 1 << 62

    def __init__(self) -> None:
        self.rows: dict[str, _Row] = {}
        self.requests: list[GenRequest] = []
        self.version, self.permits, self.broken = 0, None, False

    def check(self, request: GenRequest) -> None: ...

    def admit(self, requests: Sequence[GenRequest]) -> None:
        self.requests += requests
        self.rows |= {r.request_id: _Row(r) for r in requests}

    def step(self) -> list[Finished]:
        if self.permits == 0:
            time.sleep(0.0002)
            return []
        done = []
        for name, row in list(self.rows.items()):
            seed = row.request.seed
            row.tokens.append(self.version * BASE + draw(seed, row.length))
            if row.length >= natural_length(seed):
                done.append(self._end(name, "stop"))
            elif row.length >= row.request.sampling.max_tokens:
                done.append(self._end(name, "length"))
        if self.permits is not None:
            self.permits -= 1
        return done

    def _end(self, name: str, reason: str) -> Finished:
        row = self.rows.pop(name)
        return Finished(name, row.tokens, [-t / 7 for t in row.tokens], reason)

    def progress(self) -> dict[str, int]:
        return {name: len(row.tokens) for name, row in self.rows.items()}

    def sampled(self, since: Mapping[str, int]) -> list[Finished]:
        tokens = {name: self.rows[name].tokens[n:] for name, n in since.items() if name in self.rows}
        return [Finished(name, new, [-t / 7 for t in new], "running") for name, new in tokens.items()]

    def abort(self, request_ids: Sequence[str]) -> list[Finished]:
        return [self._end(name, "abort") for name in request_ids if name in self.rows]

    def check_manifest(self, manifest: WeightManifest) -> None: ...

    def load(self, manifest: WeightManifest) -> str:
        if self.broken:
            raise RuntimeError("the memory is gone")
        self.version = manifest.version
        return manifest.fingerprint

    def clear_caches(self) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


def manifest(version: int) -> WeightManifest:
    return WeightManifest(version, "", 0, (), (), f"of {version}")


class Replica:
    """A worker over such an engine; its answers grow as the test allows."""

    def __init__(self, dock: DockClient, name: str, longest: int, **how) -> None:
        self.backend = CountingBackend()
        self.engine = SteppedEngine(name, lambda: self.backend, start_timeout_s=WAIT_S, command_timeout_s=WAIT_S)
        how = {"seed": 0, "commit_groups": 1, "timeout_s": WAIT_S, "tracer": QUIET} | how
        self.worker = RolloutWorker(self.engine, dock, SamplingSpec(longest), name=name, **how)
        self._thread = ThreadPoolExecutor(2)

    def begin(self, claim: Claim) -> Future[RolloutReport]:
        """Its `generate` runs, and the engine has all rows; no token is sampled yet."""
        self.backend.permits = 0
        known = len(self.backend.requests) + len(claim)
        batch = RowBatch(claim.rows, claim.group_ids, claim.members)
        running = self._thread.submit(self.worker.generate, claim.claim_id, batch)
        self.until(lambda: len(self.backend.requests) == known or running.done())
        return running

    def advance(self, steps: int) -> None:
        """Every running answer grows by `steps` tokens, or to its end."""
        self.backend.permits = steps
        self.until(lambda: not self.backend.permits or not self.backend.rows)
        self.backend.permits = 0
        self.engine.abort(())  # ends nothing, but returns after the last of these steps

    def release(self) -> None:
        self.backend.permits = None

    @staticmethod
    def until(condition) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "the engine did not get there"
            time.sleep(0.0002)

    def close(self) -> None:
        self.release()
        self.engine.close()
        self._thread.shutdown()


def expected_tokens(seed: int, versions: np.ndarray) -> list[int]:
    return [int(v) * BASE + draw(seed, place) for place, v in enumerate(versions)]
