"""Parts of answers for clients make up the answers as they are, on both engines, beside answers that are trained."""

from __future__ import annotations

import numpy as np

from mindspeed_asyncflow.workflow.completing import AnswerPart, Completing
from tests.engines.bench import Bench, ask, prompt

LENGTH = 24


def joined(parts: list[AnswerPart], name: str) -> tuple[list[int], np.ndarray, list[str]]:
    """Tokens, log-probabilities and reasons of one answer."""
    mine = [part for part in parts if part.request_id == name]
    logprobs = np.concatenate([part.logprobs for part in mine])
    return [int(t) for part in mine for t in part.token_ids], logprobs, [part.reason for part in mine if part.reason]


def until_ended(clients: Completing, parts: list[AnswerPart], *names: str) -> list[AnswerPart]:
    while {part.request_id for part in parts if part.reason} < set(names):
        parts += clients.news(5.0)
    return parts


def test_parts_make_up_the_answers_that_the_engine_gives_for_the_same_seed(bench: Bench) -> None:
    requests = [ask(f"w{i}", prompt(1, 2, 3 + i), LENGTH, seed=40 + i) for i in range(4)]
    requests.append(ask("w4", prompt(9, 8), LENGTH, seed=3, temperature=0.7, top_p=0.8))
    requests.append(ask("w5", prompt(7, 7, 7), LENGTH, temperature=0.0))
    whole = bench.answer(*requests)
    clients = Completing(bench.engine, "test")
    clients.ask(requests, 60.0)
    trained = bench.engine.generate([ask("t", prompt(5, 5), LENGTH)], 60.0)
    parts = until_ended(clients, [], *(r.request_id for r in requests))
    for answer in whole:
        tokens, logprobs, reasons = joined(parts, answer.request_id)
        assert tokens == answer.token_ids.tolist() and reasons == [answer.finish_reason]
        assert np.allclose(logprobs, answer.logprobs, atol=1e-4)
    assert [a.request_id for a in trained] == ["t"]
    assert clients.news(5.0) == []  # nothing runs, so that nobody waits


def test_an_answer_goes_on_with_new_weights_and_each_part_is_of_one_version(bench: Bench) -> None:
    clients = Completing(bench.engine, "test")
    before = bench.engine.version
    bench.hold()
    clients.ask([ask("v", prompt(1, 2), LENGTH, seed=1)], 60.0)
    bench.advance(7)
    bench.serve("b")
    bench.release()
    parts = until_ended(clients, [], "v")
    tokens, _, reasons = joined(parts, "v")
    count = {version: sum(len(p.token_ids) for p in parts if p.version == version) for version in (before, before + 1)}
    assert count == {before: 7, before + 1: len(tokens) - 7} and reasons in (["length"], ["stop"])


def test_what_nobody_wants_any_more_ends_with_what_it_has(bench: Bench) -> None:
    clients = Completing(bench.engine, "test")
    bench.hold()
    clients.ask([ask("d", prompt(1, 2), LENGTH, seed=1), ask("e", prompt(1, 3), 4, seed=2)], 60.0)
    bench.advance(2)
    clients.drop(["d"])
    bench.release()
    parts = until_ended(clients, [], "d", "e")
    tokens, _, reasons = joined(parts, "d")
    assert len(tokens) == 2 and reasons == ["abort"] and joined(parts, "e")[2][0] in ("length", "stop")
