"""The books of running answers."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from mindspeed_asyncflow.engines.step_backend import Finished
from mindspeed_asyncflow.engines.tickets import Books, Ticket, check_sampled
from mindspeed_asyncflow.errors import EngineError
from mindspeed_asyncflow.records import GenRequest, VersionSpan
from tests.engines.bench import ask, prompt


def test_partial_answers_are_joined_with_what_they_resumed() -> None:
    """B31: ids, log-probs and versions all have five entries, [4,4,4,5,5]."""
    resumed = GenRequest(
        "r",
        prompt(1),
        ask("r", prompt(1), 5).sampling,
        0,
        prompt(7, 8, 9),
        np.float32([-1, -2, -3]),
        (VersionSpan(4, 0, 3),),
    )
    books, ticket = Books(), Ticket([resumed])
    books.open(ticket)
    books.deliver([Finished("r", [3, 2], [-4.0, -5.0], "length")], 5, "5a5a")
    (done,) = ticket.collect(lambda: 1.0)
    assert done.token_ids.tolist() == [7, 8, 9, 3, 2]
    assert done.logprobs.tolist() == [-1, -2, -3, -4, -5]
    assert done.spans == (VersionSpan(4, 0, 3), VersionSpan(5, 3, 5))
    assert (done.version_min, done.version_max, done.fingerprint) == (4, 5, "5a5a")


def test_answers_reach_the_call_that_asked_and_free_their_ids() -> None:
    books = Books()
    first, second = Ticket([ask("a", prompt(1), 2), ask("b", prompt(1), 2)]), Ticket([ask("c", prompt(1), 2)])
    books.open(first)
    books.open(second)
    with pytest.raises(EngineError, match=r"\['c'\] are running"):
        books.open(Ticket([ask("c", prompt(1), 2)]))
    books.deliver([Finished("c", [1], [0.0], "stop"), Finished("b", [], [], "abort")], 0, "")
    assert [c.request_id for c in second.collect(lambda: 0.0)] == ["c"]
    with pytest.raises(queue.Empty):
        list(first.collect(lambda: 0.0))
    assert first.open == {"a"}
    books.open(Ticket([ask("b", prompt(1), 2), ask("c", prompt(1), 2)]))


def test_a_failure_reaches_every_open_call() -> None:
    books = Books()
    tickets = [Ticket([ask(name, prompt(1), 2)]) for name in "ab"]
    for ticket in tickets:
        books.open(ticket)
    books.fail_all(OSError("gone"))
    for ticket in tickets:
        with pytest.raises(EngineError, match="gone"):
            list(ticket.collect(lambda: 1.0))


@pytest.mark.parametrize(
    ("ids", "logprobs", "said"),
    [
        ([3, 10], [-1.0, -2.0], "token 1 of the answer is id 10 with log-probability -2, where the tokenizer has 10"),
        ([-1, 3], [-1.0, -1.0], "token 0 of the answer is id -1"),
        ([3, 4], [-1.0, -np.inf], "token 1 of the answer is id 4 with log-probability -inf"),
        ([3, 4], [np.nan, -1.0], "token 0 of the answer is id 3 with log-probability nan"),
    ],
)
def test_tokens_that_no_policy_gives_are_refused(ids: list[int], logprobs: list[float], said: str) -> None:
    """Known issue 9, B71: a padding row of the vocabulary won, and everything after it is worthless."""
    check_sampled(Finished("r", [0, 9], [0.0, -30.0], "stop"), 10)
    check_sampled(Finished("r", (), (), "abort"), 10)
    with pytest.raises(EngineError, match=said):
        check_sampled(Finished("r", ids, logprobs, "stop"), 10)
