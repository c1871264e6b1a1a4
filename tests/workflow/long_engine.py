"""A rollout engine without a model that samples one token per step: what interrupts an answer does so exactly.

The real `SteppedEngine` around a backend that knows how long each answer will be. Prompts are [length, key]: the answer
to them is `length` tokens, key + 10, key + 11, ..., and the log-probability of a token is minus the version that
sampled it.
"""

from __future__ import annotations

import time

import numpy as np

from mindspeed_asyncflow.engines.base import EngineCaps
from mindspeed_asyncflow.engines.step_backend import Finished
from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.reshard.relay import RelayReader
from mindspeed_asyncflow.workflow.book import Issue


def long_engine(step_s: float = 0.0) -> SteppedEngine:
    return SteppedEngine("long", lambda: LengthBackend(step_s), start_timeout_s=5.0, command_timeout_s=5.0)


def prompts_of_lengths(lengths, batch: int):
    """A data stream as the loops see it; prompt i asks for `lengths(i)` tokens."""
    number = iter(range(10**9))

    def next_batch():
        found = [next(number) for _ in range(batch)]
        return [Issue(0, i, np.array([lengths(i), i], np.int32), str(i)) for i in found]

    return next_batch


class LengthBackend:
    caps = EngineCaps("long", ("abort", "wait", "keep"), (), ("relay",), False)
    token_count = 1 << 31

    def __init__(self, step_s: float) -> None:
        self.step_s, self.version, self.running = step_s, 0, {}

    def check(self, request) -> None:
        pass

    def admit(self, requests) -> None:
        for request in requests:
            done = 0 if request.resume_ids is None else len(request.resume_ids)
            self.running[request.request_id] = (request, done, [], [])

    def step(self):
        time.sleep(self.step_s)
        finished = []
        for name, (request, done, ids, logprobs) in list(self.running.items()):
            ids.append(int(request.prompt_ids[1]) + 10 + done + len(ids))
            logprobs.append(-float(self.version))
            length, most = int(request.prompt_ids[0]), request.sampling.max_tokens
            if done + len(ids) >= min(length, most):
                del self.running[name]
                finished.append(Finished(name, ids, logprobs, "stop" if done + len(ids) >= length else "length"))
        return finished

    def progress(self):
        return {name: len(ids) for name, (_, _, ids, _) in self.running.items()}

    def sampled(self, since):
        rows = [(name, *self.running[name][2:], n) for name, n in since.items() if name in self.running]
        return [Finished(name, ids[n:], logprobs[n:], "running") for name, ids, logprobs, n in rows]

    def abort(self, request_ids):
        gone = [(name, self.running.pop(name)) for name in request_ids if name in self.running]
        return [Finished(name, ids, logprobs, "abort") for name, (_, _, ids, logprobs) in gone]

    def check_manifest(self, manifest) -> None:
        pass

    def load(self, manifest) -> str:
        reader = RelayReader(manifest)
        for _ in reader:
            pass
        reader.check()
        self.version = manifest.version
        return manifest.fingerprint

    def clear_caches(self) -> None:
        pass

    def score(self, sequences):
        return [np.full(len(answer), -float(self.version), np.float32) for _, answer in sequences]

    def close(self) -> None:
        pass
