"""Answers that are interrupted and go on elsewhere. Runs on the reference engine and on vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.records import Completion, GenRequest
from tests.engines.bench import Bench, Policy, ask, make_engine, prompt

LENGTH = 60


@pytest.fixture
def other(policies: dict[str, dict[str, Policy]]) -> Iterator:
    """A second engine, of the reference kind, with the same weights."""
    engine = make_engine("reference", policies["dense"]["a"].folder, RolloutConfig(max_running=64, timeout_s=60.0))
    yield engine
    engine.close()


def continued(request: GenRequest, part: Completion) -> GenRequest:
    return replace(request, resume_ids=part.token_ids, resume_logprobs=part.logprobs, resume_spans=part.spans)


def cut_short(bench: Bench, requests: list[GenRequest], tokens: int) -> list[Completion]:
    """What each answer has when it is aborted `tokens` steps after its admission."""
    bench.hold()
    stream = bench.engine.generate(requests, 60.0)
    bench.advance(tokens)
    bench.engine.abort([r.request_id for r in requests])
    parts = {part.request_id: part for part in stream}
    bench.release()
    return [parts[r.request_id] for r in requests]


def test_greedy_answers_interrupted_anywhere_and_moved_between_engines_are_the_uninterrupted_ones(
    bench: Bench, other
) -> None:
    """Tokens are equal and log-probs within 1e-4, whatever the number of interruptions and the engine in between."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 50, n).astype(np.int32) for n in (3, 17, 41)]
    requests = [ask(f"r{i}", ids, LENGTH, temperature=0.0) for i, ids in enumerate(prompts)]
    whole = bench.answer(*requests)
    for places in ([1, 2, 33], [20, 40], sorted(rng.choice(np.arange(1, LENGTH), 5, replace=False).tolist())):
        now, have = requests, 0
        for turn, place in enumerate(places):
            if turn % 2:  # the other engine gets a smaller budget instead of an abort
                short = [replace(r, sampling=replace(r.sampling, max_tokens=place)) for r in now]
                found = {part.request_id: part for part in other.generate(short, 60.0)}
                parts = [found[r.request_id] for r in now]
            else:
                parts = cut_short(bench, now, place - have)
            assert [len(part.token_ids) for part in parts] == [place] * len(parts)
            now, have = [continued(r, part) for r, part in zip(requests, parts)], place
        for done, expected in zip(bench.answer(*now), whole):
            assert done.token_ids.tolist() == expected.token_ids.tolist()
            assert np.abs(done.logprobs - expected.logprobs).max() < 1e-4
            assert done.finish_reason == expected.finish_reason == "length"


def test_a_continuation_draws_no_random_number_again_and_is_repeatable(bench: Bench, kind: str) -> None:
    """B83: at a flat distribution the tokens show the random numbers themselves."""
    bench.serve_flat()
    request = ask("r", prompt(1, 2, 3), LENGTH, seed=77)
    (whole,) = bench.answer(request)
    rests = []
    for place in (5, 20, 20):
        (part,) = cut_short(bench, [request], place)
        assert part.token_ids.tolist() == whole.token_ids[:place].tolist()
        (done,) = bench.answer(continued(request, part))
        rests.append(done.token_ids[place:].tolist())
    first, second, again = rests
    assert second == again
    begin = whole.token_ids.tolist()
    for rest in (first, second):
        assert rest[:10] != begin[:10]
    assert first[:10] != second[:10]
    if kind == "reference":  # its random numbers depend on the place in the answer only
        assert begin == begin[:5] + first == begin[:20] + second


def test_a_continuation_on_an_engine_of_another_version_keeps_the_spans_of_its_beginning(bench: Bench, other) -> None:
    """B31: spans tile the answer, also when a replica that serves an older version goes on."""
    bench.serve("a")
    newer = bench.engine.version
    request = ask("r", prompt(4, 5), 30, temperature=0.0)
    (part,) = cut_short(bench, [request], 7)
    (middle,) = other.generate(
        [replace(continued(request, part), sampling=replace(request.sampling, max_tokens=19))], 60.0
    )
    (done,) = bench.answer(continued(request, middle))
    assert [(s.version, s.start, s.end) for s in done.spans] == [(newer, 0, 7), (0, 7, 19), (newer, 19, 30)]
    assert (done.version_min, done.version_max) == (0, newer)


def test_an_answer_that_is_stopped_before_it_began_keeps_what_it_had(bench: Bench) -> None:
    request = ask("r", prompt(4, 5), 30, temperature=0.0)
    (part,) = cut_short(bench, [request], 7)
    (again,) = cut_short(bench, [continued(request, part)], 0)
    assert again.finish_reason == "abort" and again.token_ids.tolist() == part.token_ids.tolist()
    assert again.spans == part.spans and again.fingerprint == ""
