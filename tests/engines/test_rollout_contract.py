"""What every rollout engine promises about its answers. Runs on the reference engine and on vLLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.engines.base import Stream
from mindspeed_asyncflow.errors import DeadlineExceeded, EngineError
from mindspeed_asyncflow.records import Completion, GenRequest
from tests.engines.bench import MAX_LEN, TOLERANCE, VOCAB, Bench, House, Policy, ask, prompt

LONG = prompt(*range(40))  # longer than one cache block


@pytest.mark.parametrize("count", [1, 16])
def test_logprobs_equal_a_fresh_forward_of_the_same_weights(bench: Bench, count: int) -> None:
    """Contract test 1: prompts of different lengths, alone and in a batch."""
    rng = np.random.default_rng(count)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 50)).astype(np.int32) for _ in range(count)]
    requests = [ask(f"r{i}", ids, 3 + i, seed=i) for i, ids in enumerate(prompts)]
    for request, done in zip(requests, bench.answer(*requests), strict=True):
        assert len(done.token_ids) == len(done.logprobs) == request.sampling.max_tokens
        expected = bench.policies["a"].logprobs(request.prompt_ids, done.token_ids)
        assert np.abs(done.logprobs - expected).max() < TOLERANCE


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_those_of_the_scaled_distribution(bench: Bench, temperature: float) -> None:
    """B22: scaling happens once, on the logits (contract test 2)."""
    (done,) = bench.answer(ask("t", prompt(1, 2, 3), 25, seed=3, temperature=temperature))
    expected = bench.policies["a"].logprobs(prompt(1, 2, 3), done.token_ids, temperature)
    assert np.abs(done.logprobs - expected).max() < 1e-4


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, -1), (1.0, 4)])
def test_truncated_sampling_reports_the_renormalised_value(bench: Bench, top_p: float, top_k: int) -> None:
    """Contract test 2: plain value minus the log of the kept mass; nothing outside the kept set is drawn."""
    (done,) = bench.answer(ask("t", prompt(5, 6), 25, seed=1, top_p=top_p, top_k=top_k))
    probs = bench.policies["a"].logits(prompt(5, 6), done.token_ids).softmax(-1)  # [L, V]
    ordered, order = probs.sort(-1, descending=True)
    if top_k > 0:
        kept = torch.arange(VOCAB).expand_as(ordered) < top_k
    else:
        kept = ordered.cumsum(-1) - ordered < top_p
    mass = (ordered * kept).sum(-1)
    chosen = order == torch.from_numpy(done.token_ids).long()[:, None]
    assert bool((chosen & kept).any(-1).all())
    expected = ((ordered * chosen).sum(-1) / mass).log().numpy()
    assert np.abs(done.logprobs - expected).max() < TOLERANCE


def test_temperature_zero_takes_the_likeliest_token_and_reports_its_raw_value(bench: Bench) -> None:
    """Contract test 2."""
    (done,) = bench.answer(ask("g", prompt(9), 30, temperature=0.0))
    best = bench.policies["a"].logits(prompt(9), done.token_ids).log_softmax(-1).max(-1)
    assert done.token_ids.tolist() == best.indices.tolist()
    assert np.abs(done.logprobs - best.values.numpy()).max() < TOLERANCE


def test_scores_of_sampled_answers_equal_their_sampling_logprobs(bench: Bench) -> None:
    """B32: the ids that come back are the ids that were sampled. Different lengths in one batch."""
    requests = [ask(f"r{i}", LONG[: 1 + 6 * i], 120 - 35 * i, seed=i) for i in range(4)]
    answers = bench.answer(*requests)
    for _ in range(2):  # the second time the prompts are cached
        scores = bench.engine.score([(r.prompt_ids, c.token_ids) for r, c in zip(requests, answers, strict=True)])
        for done, score in zip(answers, scores, strict=True):
            assert score.dtype == np.float32
            assert np.abs(score - done.logprobs).max() < TOLERANCE


def test_a_sequence_as_long_as_the_model_is_scored_and_a_longer_one_refused(bench: Bench) -> None:
    full = np.random.default_rng(0).integers(0, VOCAB, MAX_LEN).astype(np.int32)
    (score,) = bench.engine.score([(full[:5], full[5:])])
    assert np.abs(score - bench.policies["a"].logprobs(full[:5], full[5:])).max() < TOLERANCE
    with pytest.raises(EngineError, match="201 tokens exceeds the model length 200"):
        bench.engine.score([(full[:6], full[5:])])


def test_scoring_disturbs_no_running_answer(bench: Bench) -> None:
    """Running answers go on while scores are computed, and they stay a function of their seed."""
    requests = [ask(f"r{i}", prompt(i, 2), 50, seed=i) for i in range(4)]
    alone = bench.answer(*requests)
    stream = bench.engine.generate(requests, 60.0)
    pair = (LONG, prompt(1, 2, 3))
    for _ in range(3):
        (score,) = bench.engine.score([pair])
        assert np.abs(score - bench.policies["a"].logprobs(*pair)).max() < TOLERANCE
    together = {c.request_id: c for c in stream}
    assert [together[c.request_id].token_ids.tolist() for c in alone] == [c.token_ids.tolist() for c in alone]


def test_answers_end_by_length_or_at_a_stop_id_that_is_part_of_them(bench: Bench) -> None:
    """B27: the engine's length decides, not a search for an id."""
    (free,) = bench.answer(ask("free", prompt(7, 8), 6, seed=11))
    assert (free.finish_reason, len(free.token_ids)) == ("length", 6)
    stop = int(free.token_ids[3])
    first = free.token_ids.tolist().index(stop)
    (stopped,) = bench.answer(ask("stop", prompt(7, 8), 6, seed=11, stop_token_ids=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert np.abs(stopped.logprobs - free.logprobs[: first + 1]).max() < TOLERANCE


def test_the_eos_id_ends_an_answer_only_where_it_is_a_stop_id(bench: Bench) -> None:
    """B28: EOS and PAD share id 0 here; a sampled 0 is a token like any other."""
    requests = [ask(f"r{i}", prompt(3), 30, seed=i) for i in range(40)]
    with_zero = [c for c in bench.answer(*requests) if 0 in c.token_ids[:-1]]
    assert with_zero, "no answer sampled id 0: the test needs another seed"
    assert all(len(c.token_ids) == 30 for c in with_zero)
    again = ask("again", prompt(3), 30, seed=int(with_zero[0].request_id[1:]), stop_token_ids=(0,))
    (ended,) = bench.answer(again)
    assert (ended.finish_reason, ended.token_ids[-1]) == ("stop", 0)
    assert 0 not in ended.token_ids[:-1]


def test_sampled_ids_stay_inside_the_vocabulary_with_finite_logprobs(bench: Bench) -> None:
    """Contract test 12: also at a temperature that makes a padded vocabulary visible."""
    requests = [ask(f"r{i}", prompt(i % VOCAB), 20, seed=i, temperature=2.0) for i in range(64)]
    for done in bench.answer(*requests):
        assert done.token_ids.dtype == np.int32 and done.logprobs.dtype == np.float32
        assert done.token_ids.min() >= 0 and done.token_ids.max() < VOCAB
        assert np.isfinite(done.logprobs).all()


def test_seeds_make_answers_different_and_repeatable_in_any_company(bench: Bench) -> None:
    """B83: eight samples of one prompt on two replicas; the same seeds again in another batch give the same answers."""
    requests = [ask(f"r{i}", prompt(1, 2), 12, seed=700 + i) for i in range(8)]
    first = bench.answer(*requests[:4]) + bench.answer(*requests[4:])  # replica 0, replica 1
    assert len({tuple(c.token_ids.tolist()) for c in first}) == 8
    greedy = ask("greedy", LONG, 20, temperature=0.0)
    again = bench.answer(greedy, *requests[::-1], ask("other", LONG[:3], 30, seed=5))[1:-1][::-1]
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]


def test_more_requests_than_places_are_all_answered(bench: Bench) -> None:
    requests = [ask(f"r{i}", prompt(i % VOCAB, 3), 4, seed=i) for i in range(150)]  # 64 places
    assert [len(c.token_ids) for c in bench.answer(*requests)] == [4] * 150


def test_aborted_answers_come_back_and_can_be_continued(bench: Bench) -> None:
    """Contract test 6: no token lost or doubled, joined log-probs as of one answer."""
    ids = prompt(4, 5, 6)
    bench.hold()
    stream = bench.engine.generate([ask(f"r{i}", ids, 40, seed=i) for i in range(3)], 60.0)
    bench.advance(15)
    bench.engine.abort(["r1", "r2", "unknown"])
    partial = {c.request_id: c for c in [next(stream), next(stream)]}
    assert {(i, c.finish_reason, len(c.token_ids)) for i, c in partial.items()} == {
        ("r1", "abort", 15),
        ("r2", "abort", 15),
    }
    done = partial["r1"]
    spec = ask("x", ids, 40).sampling
    resumed = GenRequest("r1", ids, spec, 1, done.token_ids, done.logprobs, done.spans)  # its id is free again
    bench.release()
    (joined,) = bench.answer(resumed)
    assert joined.token_ids[:15].tolist() == done.token_ids.tolist()
    assert np.abs(joined.logprobs - bench.policies["a"].logprobs(ids, joined.token_ids)).max() < TOLERANCE
    assert [(s.start, s.end) for s in joined.spans] == [(0, 40)]
    (untouched,) = list(stream)
    assert (untouched.request_id, untouched.finish_reason, len(untouched.token_ids)) == ("r0", "length", 40)


def test_a_stream_gets_beginnings_of_the_answers_and_whoever_continues_one_ends_it_alike(bench: Bench) -> None:
    """Also across new weights, whose cut is in the parts. The engine goes on meanwhile."""
    parts: list[Completion] = []
    bench.hold()
    requests = [ask(f"r{i}", prompt(4, i), 12, seed=i) for i in range(3)]
    answers = bench.engine.generate(requests, 60.0, Stream(0.0, parts.extend))
    bench.advance(5)
    old = bench.engine.version
    bench.serve("b")
    bench.release()
    whole = {c.request_id: c for c in answers}
    assert {p.finish_reason for p in parts} == {"running"}
    for name, answer in whole.items():
        own = [p for p in parts if p.request_id == name]
        assert [len(p.token_ids) for p in own] == list(range(1, 12))
        for part in own:
            count = len(part.token_ids)
            assert part.token_ids.tolist() == answer.token_ids[:count].tolist()
            assert part.logprobs.tolist() == answer.logprobs[:count].tolist()
            cut = [(old, 0, min(count, 5))] + ([(old + 1, 5, count)] if count > 5 else [])
            assert [(s.version, s.start, s.end) for s in part.spans] == cut
    first = next(p for p in parts if p.request_id == "r0" and len(p.token_ids) == 9)
    spec = requests[0].sampling
    resumed = GenRequest("r0", prompt(4, 0), spec, 0, first.token_ids, first.logprobs, first.spans)
    (joined,) = bench.answer(resumed)
    assert len(joined.token_ids) == 12 and joined.token_ids[:9].tolist() == first.token_ids.tolist()
    assert joined.spans[0] == first.spans[0] and joined.spans[-1].end == 12


def test_a_deadline_names_who_is_late_and_frees_the_engine(bench: Bench) -> None:
    bench.engine.pause()
    with pytest.raises(DeadlineExceeded, match=r"2 of 2 answers are not complete after 0.05 s \(engine PAUSED\)"):
        list(bench.engine.generate([ask("a", prompt(1), 5), ask("b", prompt(1), 5)], 0.05))
    bench.engine.resume()
    assert len(bench.answer(ask("a", prompt(1), 5))) == 1  # its id is free again


def test_dropping_the_iterator_aborts_what_is_left(bench: Bench) -> None:
    stream = bench.engine.generate([ask("short", prompt(1), 1), ask("long", prompt(1), 190)], 60.0)
    assert next(stream).request_id == "short"
    stream.close()
    (again,) = bench.answer(ask("long", prompt(1), 2))
    assert len(again.token_ids) == 2


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask("x", prompt(), 3), "the prompt is empty"),
        (ask("x", prompt(VOCAB), 3), r"outside \[0, 57\)"),
        (ask("x", prompt(1), MAX_LEN), "exceeds the model length 200"),
        (ask("x", prompt(1), 0), "leaves none"),
        (
            GenRequest("x", prompt(1), ask("x", prompt(1), 9).sampling, 0, prompt(1, 2), np.zeros(2, np.float32)),
            r"do not tile \[0, 2\)",
        ),
    ],
)
def test_requests_that_cannot_run_are_refused_at_once(bench: Bench, request_: GenRequest, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        bench.engine.generate([request_], 60.0)


def test_request_ids_must_be_unique(bench: Bench) -> None:
    with pytest.raises(EngineError, match="given twice"):
        bench.engine.generate([ask("x", prompt(1), 3), ask("x", prompt(1), 3)], 60.0)
    bench.engine.pause()
    stream = bench.engine.generate([ask("x", prompt(1), 3)], 60.0)
    with pytest.raises(EngineError, match=r"\['x'\] are running"):
        bench.engine.generate([ask("x", prompt(1), 3)], 60.0)
    bench.engine.resume()
    assert len(list(stream)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [5.0, 0.003])
def test_temperatures_that_vllm_refuses_or_changes_are_refused(house: House, temperature: float) -> None:
    with pytest.raises(EngineError, match="temperature"):
        house.bench("vllm", "dense").engine.generate([ask("x", prompt(1), 3, temperature=temperature)], 60.0)


@pytest.mark.slow
def test_vllm_and_the_reference_agree_on_greedy_tokens(house: House, policies: dict[str, dict[str, Policy]]) -> None:
    """Contract test 14: equal wherever the best token leads by more than the numerical tolerance."""
    requests = [ask(f"r{i}", prompt(i, 2 * i), 60, temperature=0.0) for i in range(20)]
    ours, theirs = (house.bench(kind, "dense").answer(*requests) for kind in ("reference", "vllm"))
    for request, left, right in zip(requests, ours, theirs, strict=True):
        top = policies["dense"]["a"].logits(request.prompt_ids, left.token_ids).topk(2).values
        unsure = (top[:, 0] - top[:, 1] < TOLERANCE).nonzero()
        sure = int(unsure[0]) if len(unsure) else 60
        assert left.token_ids[:sure].tolist() == right.token_ids[:sure].tolist()
