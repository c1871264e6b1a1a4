"""What every rollout engine promises about weights, versions and states. Runs on the reference engine and on vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.config.schema import RolloutConfig
from mindspeed_asyncflow.errors import DeadlineExceeded, EngineError, WeightSyncError
from mindspeed_asyncflow.records import Completion
from mindspeed_asyncflow.reshard import relay
from tests.engines.bench import TOLERANCE, Bench, House, ask, make_engine, prompt
from tests.reshard.whole_writer import WholeWriter

LONG = prompt(*range(40))  # longer than one cache block, so that a prefix cache holds it
PAIR = (LONG, prompt(3, 1, 4, 1, 5, 9, 2, 6))


def assert_serves(bench: Bench, name: str) -> None:
    (score,) = bench.engine.score([PAIR])
    assert np.abs(score - bench.policies[name].logprobs(*PAIR)).max() < TOLERANCE


def assert_each_token_is_of_its_version(bench: Bench, done: Completion, ids: np.ndarray, names: dict[int, str]) -> None:
    """Spans tile the answer, and inside each span the log-probs are those of that version's policy."""
    end = 0
    for span in done.spans:
        assert span.start == end
        end = span.end
        expected = bench.policies[names[span.version]].logprobs(ids, done.token_ids)[span.start : span.end]
        assert np.abs(done.logprobs[span.start : span.end] - expected).max() < TOLERANCE
    assert end == len(done.token_ids) == len(done.logprobs)


def assert_identity_updates_change_nothing(bench: Bench) -> None:
    """Bit-equal scores after each of three updates with the weights that are served already."""
    (before,) = bench.engine.score([PAIR])
    assert np.abs(before - bench.policies["a"].logprobs(*PAIR)).max() < TOLERANCE
    fingerprints = set()
    for _ in range(3):
        report = bench.serve("a")
        fingerprints.add(report.fingerprint)
        assert report.version == bench.engine.version
        (after,) = bench.engine.score([PAIR])
        assert after.tolist() == before.tolist()
    assert len(fingerprints) == 1


def assert_other_weights_and_back(bench: Bench) -> None:
    """Policy "b" differs visibly, is matched, and "a" comes back bit for bit."""
    (before,) = bench.engine.score([PAIR])
    bench.serve("b")
    assert_serves(bench, "b")
    (between,) = bench.engine.score([PAIR])
    assert np.abs(between - before).max() > 0.1
    bench.serve("a")
    (after,) = bench.engine.score([PAIR])
    assert after.tolist() == before.tolist()


def test_the_same_weights_three_times_change_nothing(bench: Bench) -> None:
    """Contract test 3, B67."""
    assert_identity_updates_change_nothing(bench)


def test_other_weights_and_back(bench: Bench) -> None:
    """Contract test 4."""
    assert_other_weights_and_back(bench)


def test_a_cached_prefix_does_not_survive_an_update(bench: Bench) -> None:
    """B67 (contract test 7): same prompt before and after, idle and with a request running, three updates."""
    bench.hold()
    background = bench.engine.generate([ask("background", LONG, 40, seed=9)], 60.0)
    names = {bench.engine.version: "a"}
    for round_, name in enumerate(["b", "a", "b"]):
        fill = bench.engine.generate([ask(f"fill{round_}", LONG, 2, seed=round_)], 60.0)
        bench.advance(3)
        assert len(list(fill)) == 1
        names[bench.serve(name).version] = name
        again = bench.engine.generate([ask(f"again{round_}", LONG, 8, seed=round_)], 60.0)
        bench.advance(8)
        (done,) = again
        assert np.abs(done.logprobs - bench.policies[name].logprobs(LONG, done.token_ids)).max() < TOLERANCE
    bench.release()
    (done,) = background
    assert [s.end for s in done.spans] == [3, 14, 25, 40]
    assert_each_token_is_of_its_version(bench, done, LONG, names)


def test_running_answers_continue_with_new_weights_and_know_the_cut(bench: Bench) -> None:
    """B44, B46, contract test 5: updates while requests run; four versions in one answer, no token lost or doubled."""
    names = {bench.engine.version: "a"}
    first = bench.engine.version
    bench.hold()
    stream = bench.engine.generate([ask(f"r{i}", LONG[: 5 * i + 1], 30 + i, seed=i) for i in range(6)], 60.0)
    for name, count in (("b", 7), ("a", 1), ("b", 12)):
        bench.advance(count)
        names[bench.serve(name).version] = name
    bench.release()
    answers = list(stream)
    assert len(answers) == 6
    for done in answers:
        index = int(done.request_id[1:])
        assert_each_token_is_of_its_version(bench, done, LONG[: 5 * index + 1], names)
        assert [s.version for s in done.spans] == list(names)
        assert [s.end for s in done.spans] == [7, 8, 20, 30 + index]
        assert (done.version_min, done.version_max) == (first, first + 3)


def test_without_clearing_the_cache_the_check_above_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract test 5, negative control: stale keys and values are visible to the comparison."""
    names = {bench.engine.version: "a"}
    bench.hold()
    stream = bench.engine.generate([ask("r", LONG, 20, seed=1)], 60.0)
    bench.advance(5)
    monkeypatch.setattr(bench.engine._backend, "clear_caches", lambda: None)
    names[bench.serve("b").version] = "b"
    monkeypatch.undo()
    bench.release()
    (done,) = stream
    assert len(done.spans) == 2
    with pytest.raises(AssertionError):
        assert_each_token_is_of_its_version(bench, done, LONG, names)


def test_an_aborted_answer_continues_under_new_weights(bench: Bench) -> None:
    """Partial answers keep their tokens, log-probs and versions across abort, update and resume (contract test 6)."""
    names = {bench.engine.version: "a"}
    request = ask("r", LONG, 30, seed=4)
    bench.hold()
    stream = bench.engine.generate([request], 60.0)
    bench.advance(11)
    bench.engine.pause("abort")
    (part,) = stream
    assert (part.finish_reason, len(part.token_ids)) == ("abort", 11)
    names[bench.serve("b").version] = "b"
    assert bench.engine.state == "PAUSED"  # it was paused before
    bench.engine.resume()
    bench.release()
    (done,) = bench.answer(
        replace(request, resume_ids=part.token_ids, resume_logprobs=part.logprobs, resume_spans=part.spans)
    )
    assert [(s.version, s.end) for s in done.spans] == list(zip(names, (11, 30), strict=True))
    assert done.token_ids[:11].tolist() == part.token_ids.tolist()
    assert_each_token_is_of_its_version(bench, done, LONG, names)


def test_a_frozen_engine_samples_nothing_and_queues_what_arrives(bench: Bench) -> None:
    """Contract test 9: queued requests survive a pause and an update."""
    bench.hold()
    stream = bench.engine.generate([ask("running", prompt(1), 30)], 60.0)
    bench.advance(4)
    bench.engine.pause("keep")
    bench.release()
    late = bench.engine.generate([ask("late", prompt(2), 5)], 60.0)
    with pytest.raises(EngineError, match="1 frozen requests"):
        bench.engine.score([PAIR])
    bench.serve("b")
    assert (bench.engine.state, bench.engine._backend.progress()) == ("PAUSED", {"running": 4})
    bench.engine.resume()
    (queued,) = late
    assert [s.version for s in queued.spans] == [bench.engine.version]
    (done,) = stream
    assert [s.end for s in done.spans] == [4, 30]


def test_pause_wait_completes_what_runs_and_holds_the_rest(bench: Bench) -> None:
    stream = bench.engine.generate([ask("running", prompt(1), 20)], 60.0)
    bench.engine.pause("wait")
    assert (bench.engine.state, bench.engine._backend.progress()) == ("PAUSED", {})
    (done,) = stream
    assert len(done.token_ids) == 20
    bench.engine.resume()


def test_refused_moves_raise_and_change_nothing(bench: Bench) -> None:
    """Contract test 8."""
    engine = bench.engine
    for verb in (engine.resume, engine.sleep, engine.wake):
        with pytest.raises(EngineError, match="is refused while the engine is RUNNING"):
            verb()
    with pytest.raises(EngineError, match="mode 'nap' is unknown"):
        engine.pause("nap")
    engine.pause()
    for verb in (engine.pause, engine.wake):
        with pytest.raises(EngineError, match="PAUSED"):
            verb()
    with pytest.raises(EngineError, match="level 7 is unknown"):
        engine.sleep(7)
    engine.sleep(1)
    manifest = bench.publish("b")
    for verb in (engine.resume, engine.pause, lambda: engine.update(manifest), lambda: engine.score([PAIR])):
        with pytest.raises(EngineError, match="SLEEPING"):
            verb()
    engine.wake()
    engine.resume()
    assert_serves(bench, "a")


def test_versions_only_rise(bench: Bench) -> None:
    old = bench.publish("b")
    bench.serve("a")
    with pytest.raises(WeightSyncError, match=f"update to version {old.version} refused"):
        bench.engine.update(old)
    assert bench.engine.state == "RUNNING"
    assert_serves(bench, "a")


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("after", [2, 10_000], ids=["between two shards of a layer", "after the last tensor"])
def test_a_failure_while_loading_leaves_dirty_until_a_complete_update(
    bench: Bench, after: int, paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract test 8: requests come back as aborted, nothing is generated, the next update heals completely."""
    engine = bench.engine
    bench.hold()
    stream = engine.generate([ask("running", LONG, 50)], 60.0)
    bench.advance(2)
    bench.release()
    if paused:
        engine.pause()
    good = relay.RelayReader.__iter__

    def broken(self: relay.RelayReader) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(good(self)):
            if index == after:
                raise OSError("the relay went away")
            yield item
        if after >= len(self.manifest.params):
            raise OSError("the relay went away")

    monkeypatch.setattr(relay.RelayReader, "__iter__", broken)
    before = engine.version
    with pytest.raises(WeightSyncError, match=r"failed \(.*the relay went away.*\); the engine is DIRTY"):
        bench.serve("b")
    monkeypatch.undo()
    assert (engine.state, engine.version) == ("DIRTY", before)
    (done,) = stream
    assert done.finish_reason == "abort" and [s.version for s in done.spans] == [before]
    calls: list[Any] = [engine.resume, engine.pause, engine.sleep, lambda: engine.score([PAIR])]
    for verb in [*calls, lambda: engine.generate([ask("x", prompt(1), 1)], 60.0)]:
        with pytest.raises(EngineError, match="DIRTY"):
            verb()
    bench.serve("b")
    assert engine.state == ("PAUSED" if paused else "RUNNING")
    if paused:
        engine.resume()
    assert_serves(bench, "b")


def test_bytes_that_are_not_those_published_are_never_served(bench: Bench) -> None:
    manifest = replace(bench.publish("b"), fingerprint="0" * 16)
    with pytest.raises(WeightSyncError, match="fingerprint 0000000000000000"):
        bench.engine.update(manifest)
    assert bench.engine.state == "DIRTY"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[1:], "1 tensors missing"),
        (lambda p: (*p, replace(p[0], name="model.extra")), r"1 unknown \['model.extra'\]"),
        (lambda p: (replace(p[0], shape=(1, *p[0].shape)), *p[1:]), "the model has"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_before_anything_changes(
    bench: Bench, change: Any, message: str
) -> None:
    """Contract test 11."""
    manifest = bench.publish("b")
    with pytest.raises(WeightSyncError, match=message):
        bench.engine.update(replace(manifest, params=change(manifest.params)))
    assert bench.engine.state == "RUNNING"
    assert_serves(bench, "a")


def test_served_weights_are_copies(bench: Bench) -> None:
    """The relay recycles its slots; an engine that still looked into one would change its policy silently."""
    bench.serve("a")
    for _ in range(4):
        bench.publish("b")
    assert_serves(bench, "a")


def test_a_tied_head_may_travel_or_stay_away(bench: Bench) -> None:
    """Contract test 11: trainers differ in whether they export the output head of a tied model."""
    tensors = dict(bench.policies["b"].tensors())
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    path = f"{bench.publish('b').path}-tied"
    with WholeWriter(path) as writer:
        bench.engine.update(writer.publish(bench.engine.version + 1000, tensors.items()))
    bench.restart_versions_at(bench.engine.version)
    assert_serves(bench, "b")


def test_replicas_that_took_one_manifest_serve_one_version_and_one_may_fail_alone(house: House) -> None:
    """Contract test 9."""
    first = house.bench("reference", "dense")
    second = make_engine("reference", first.policies["a"].folder, RolloutConfig())
    try:
        manifest = first.publish("b")
        reports = [engine.update(manifest) for engine in (first.engine, second)]
        assert len({(r.version, r.fingerprint) for r in reports}) == 1
        following = first.publish("a")
        first.engine.update(following)
        with pytest.raises(WeightSyncError):
            second.update(replace(following, fingerprint="0"))
        assert (first.engine.state, second.state) == ("RUNNING", "DIRTY")
        request = ask("r", prompt(1, 2), 20, seed=3)
        second.update(first.publish("a"))
        (again,) = second.generate([request], 60.0)
        assert again.token_ids.tolist() == first.answer(request)[0].token_ids.tolist()
    finally:
        second.close()


def test_a_closed_or_broken_engine_says_so_to_every_caller(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = house.bench("reference", "dense").policies["a"].folder
    engine = make_engine("reference", folder, RolloutConfig(timeout_s=5.0))
    engine.pause()
    stream = engine.generate([ask("r", prompt(1), 5)], 60.0)
    monkeypatch.setattr(engine._backend, "step", lambda: 1 / 0)
    engine.resume()
    with pytest.raises(EngineError, match="division by zero"):
        list(stream)
    with pytest.raises(EngineError, match="it broke: ZeroDivisionError"):
        engine.update(house.bench("reference", "dense").publish("a"))
    engine.close()
    engine.close()
    closed = make_engine("reference", folder, RolloutConfig())
    closed.pause()
    stream = closed.generate([ask("r", prompt(1), 5)], 60.0)
    closed.close()
    assert [c.finish_reason for c in stream] == ["abort"]
    with pytest.raises(EngineError, match="closed"):
        closed.resume()


def test_pause_wait_gives_up_at_its_deadline_and_goes_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = house.bench("reference", "dense")
    bench.hold()
    stream = bench.engine.generate([ask("r", prompt(1), 5)], 60.0)
    monkeypatch.setattr(bench.engine, "_timeout_s", 1.0)
    with pytest.raises(DeadlineExceeded, match="pause until running answers are complete"):
        bench.engine.pause("wait")
    late = bench.engine.generate([ask("late", prompt(1), 2)], 60.0)
    bench.release()
    assert (bench.engine.state, len(list(stream)), len(list(late))) == ("RUNNING", 1, 1)


def test_experts_take_updates_like_dense_layers(kind: str, house: House) -> None:
    """Contract tests 3 and 4 for expert layers, whose weights engines repack."""
    bench = house.bench(kind, "experts")
    assert_identity_updates_change_nothing(bench)
    assert_other_weights_and_back(bench)
