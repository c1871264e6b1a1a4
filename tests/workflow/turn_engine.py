"""A rollout engine without a model whose turns have a known length, and an environment that a test can hold back."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np

from mindspeed_asyncflow.engines.step_backend import Finished
from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.environments.pool import Reply
from mindspeed_asyncflow.environments.rendering import Rendered
from mindspeed_asyncflow.workflow.conversing import Conversation
from tests.workflow.partial_engine import BASE, CountingBackend

EOS = 2  # also an id that padding may have
WRITTEN = 900  # ids from here on are the environment's


class TurnBackend(CountingBackend):
    """Prompts are [length, ...]: a turn is `length` tokens, version * BASE + 10 + place in the answer, the last EOS."""

    def step(self) -> list[Finished]:
        done = []
        if self.permits == 0:
            return super().step()
        for name, row in list(self.rows.items()):
            ended = len(row.tokens) + 1 >= int(row.request.prompt_ids[0])
            row.tokens.append(EOS if ended else self.version * BASE + 10 + row.length)
            if ended or row.length >= row.request.sampling.max_tokens:
                done.append(self._end(name, "stop" if ended else "length"))
        if self.permits is not None:
            self.permits -= 1
        return done


def turn_engine() -> SteppedEngine:
    return SteppedEngine("turns", TurnBackend, start_timeout_s=5.0, command_timeout_s=5.0)


class Words:
    """Replies as ids: `first` + 0, 1, ... for every character."""

    def __init__(self, first: int = WRITTEN) -> None:
        self.first = first

    def render(self, prompt, seen, turns):
        return Rendered(np.arange(len(turns[-1].text), dtype=np.int32) + self.first, "drift" in turns[-1].text)


class Partner:
    """Replies what `says(turns)` gives; a reply to a truth in `held` waits for `release`."""

    def __init__(self, says=lambda turns: "ok", held=()) -> None:
        self.says, self.held, self.asked, self.closed = says, set(held), [], False
        self._waiting: list[tuple[Future[Reply], Reply]] = []
        self.waits = threading.Event()

    def ask(self, turns, truth, fields):
        self.asked.append((truth, list(turns), fields))
        said = self.says(turns)
        reply = said if isinstance(said, Reply) else Reply(said)
        future: Future[Reply] = Future()
        if truth in self.held:
            self._waiting.append((future, reply))
            self.waits.set()
        else:
            future.set_result(reply)
        return future

    def release(self) -> None:
        self.held.clear()
        for future, reply in self._waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(reply)

    def close(self) -> None:
        self.closed = True


def conversation(partner, max_turns: int = 3, in_rounds: bool = False, first: int = WRITTEN) -> Conversation:
    def clean(ids: np.ndarray) -> str:
        return " ".join(str(i) for i in ids.tolist() if i != EOS)

    return Conversation(partner, Words(first), lambda ids: str(ids.tolist()), clean, max_turns, in_rounds)
