"""The parts that a user's engine is made of: a model that answers whole batches, and a trainer with whole weights."""

import uuid
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.config.load import parse_config
from mindspeed_asyncflow.config.schema import RolloutConfig, TrainerConfig
from mindspeed_asyncflow.engines.batched import BatchEngine
from mindspeed_asyncflow.engines.setup import RolloutSetup, TrainSetup
from mindspeed_asyncflow.engines.whole import WholeModel, whole_layout
from mindspeed_asyncflow.errors import CheckpointError, ConfigError, EngineError, WeightSyncError
from mindspeed_asyncflow.platforms.base import current
from mindspeed_asyncflow.records import VersionSpan
from mindspeed_asyncflow.reshard.hf_folder import export_hf
from mindspeed_asyncflow.reshard.relay_plan import write_plan
from tests.engines.bench import MAX_LEN, ask, prompt
from tests.reshard.whole_writer import WholeWriter

STOP = 9


class Counting:
    """Answers 1, 2, 3, ... by place, `STOP` in the fourth; logs what it is asked."""

    def __init__(self):
        self.batches, self.loaded, self.result = [], {}, None

    def answer(self, asks):
        self.batches.append([(a.ids.tolist(), a.place, a.max_tokens, a.seed) for a in asks])
        if self.result is not None:
            return [self.result for _ in asks]
        answers = [[*range(a.place + 1, 4), STOP][: a.max_tokens] for a in asks]
        return [(ids, [-0.5] * len(ids)) for ids in answers]

    def score(self, sequences):
        return [np.full(len(answer), -0.5, np.float32) for _, answer in sequences]

    def load(self, tensors):
        self.loaded = {name: tensor.clone() for name, tensor in tensors}


@pytest.fixture
def model(policies):
    """(the engine, the model in it, weights as the relay takes them)"""
    policy, counting = policies["dense"]["a"], Counting()
    rollout = RolloutConfig(max_running=3, timeout_s=20)
    setup = RolloutSetup(policy.folder, rollout, "float32", MAX_LEN, 0, (STOP,), current("cpu"))
    engine = BatchEngine("counting", setup, lambda: counting)
    yield SimpleNamespace(engine=engine, counting=counting, weights=policy.tensors())
    engine.close()


@pytest.fixture
def relay():
    writer = WholeWriter(f"/dev/shm/asyncflow-test-{uuid.uuid4().hex}")
    yield writer
    writer.close()


def answers(engine, *requests):
    found = {c.request_id: c for c in engine.generate(requests, 20)}
    return [found[r.request_id] for r in requests]


def test_answers_end_at_a_stop_token_or_their_length(model):
    long, short = answers(model.engine, ask("a", prompt(5, 6), 10, seed=1), ask("b", prompt(7), 2, seed=2))
    assert long.token_ids.tolist() == [1, 2, 3, STOP] and long.finish_reason == "stop"
    assert short.token_ids.tolist() == [1, 2] and short.finish_reason == "length"
    assert model.counting.batches == [[([5, 6], 0, 10, 1), ([7], 0, 2, 2)]]


def test_no_batch_is_larger_than_max_running(model):
    answers(model.engine, *(ask(str(i), prompt(1), 2) for i in range(7)))
    assert [len(batch) for batch in model.counting.batches] == [3, 3, 1]


def test_an_answer_goes_on_where_it_was_left_and_keeps_its_versions(model, relay):
    model.engine.update(relay.publish(3, model.weights))
    whole = ask("a", prompt(5), 10)
    begun = {"resume_ids": np.array([1, 2], np.int32), "resume_logprobs": np.array([-1, -2], np.float32)}
    spans = (VersionSpan(2, 0, 2),)
    (answer,) = answers(
        model.engine, type(whole)("a", whole.prompt_ids, whole.sampling, 0, **begun, resume_spans=spans)
    )
    assert model.counting.batches[0][0][:3] == ([5, 1, 2], 2, 8)
    assert answer.token_ids.tolist() == [1, 2, 3, STOP] and answer.logprobs.tolist() == [-1, -2, -0.5, -0.5]
    assert [(s.version, s.start, s.end) for s in answer.spans] == [(2, 0, 2), (3, 2, 4)]


def test_an_update_loads_every_weight_and_is_what_answers_say(model, relay):
    manifest = relay.publish(1, model.weights)
    assert model.engine.update(manifest).fingerprint == manifest.fingerprint
    assert all(torch.equal(model.counting.loaded[name], tensor) for name, tensor in model.weights)
    (answer,) = answers(model.engine, ask("a", prompt(5), 4))
    assert (answer.version_min, answer.fingerprint) == (1, manifest.fingerprint)


def test_weights_of_another_model_are_refused_before_anything_changes(model, relay):
    with pytest.raises(WeightSyncError, match="does not fit"):
        model.engine.update(relay.publish(1, model.weights[1:]))
    assert model.engine.state == "RUNNING" and model.counting.loaded == {}


def test_paused_requests_wait_and_an_abort_ends_them_with_nothing(model):
    model.engine.pause()
    stream = model.engine.generate([ask("a", prompt(5), 4)], 20)
    model.engine.abort()
    assert [(c.finish_reason, len(c.token_ids)) for c in stream] == [("abort", 0)]
    model.engine.resume()
    assert answers(model.engine, ask("b", prompt(5), 4))[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (([1, 2], [-1.0, -1.0]), "2 tokens with 2 log-probabilities"),  # neither stopped nor long enough
        (([1, 2, STOP], [-1.0]), "3 tokens with 1 log-probabilities"),
        (([1, STOP, 2, 3], [-1.0] * 4), "goes on behind a token that ends it"),
        (([1, 2, 3, 4, 5], [-1.0] * 5), "5 tokens"),
    ],
)
def test_an_answer_that_is_none_breaks_the_engine_with_its_reason(model, result, named):
    model.counting.result = result
    with pytest.raises(EngineError, match=named):
        answers(model.engine, ask("a", prompt(5), 4))


def test_a_batch_engine_is_refused_where_it_would_have_to_sleep():
    for settings, key in ((["workflow.lend=true"], "lend"), (["workflow.schedule=colocated"], "schedule")):
        with pytest.raises(ConfigError, match=f"workflow.{key}: my:Own answers whole batches and cannot sleep"):
            BatchEngine.check(parse_config("", ["rollout.engine=my:Own", *settings]))


class Line(WholeModel):
    """A trainer without loss: each step moves the weights by their own values."""

    def __init__(self, rank=0, world=1, size=3, seed=0):
        torch.manual_seed(seed)
        self.parts = {"a.weight": torch.randn(size, 2), "a.bias": torch.randn(size), "b.weight": torch.randn(4, size)}
        self.parts = {name: torch.nn.Parameter(tensor) for name, tensor in self.parts.items()}
        self.optimizer = torch.optim.AdamW(self.parts.values(), lr=0.1)
        setup = TrainSetup("none", TrainerConfig(), "float32", 1.0, None, rank, world, "", 0, 0, 5.0, current("cpu"))
        super().__init__(setup, self.parts, self.optimizer)

    def step(self):
        for part in self.parts.values():
            part.grad = part.detach().sin()
        self.optimizer.step()
        self.applied += 1

    def values(self):
        return {name: part.detach().clone() for name, part in self.parts.items()}


def save(folder, *ranks):
    for rank in ranks:
        rank.begin_save(str(folder))
    return [file for rank in ranks for file in rank.finish_save()]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 2), (3, 1)])
def test_training_goes_on_from_a_checkpoint_of_any_number_of_ranks(tmp_path, before, after):
    ranks = [Line(r, before) for r in range(before)]
    for rank in ranks:
        rank.step()
        rank.step()
    files = save(tmp_path, *ranks)
    assert sorted(f.name for f in files) == [f"rank{r:05d}.safetensors" for r in range(before)]
    again = [Line(r, after, seed=7) for r in range(after)]
    for rank in again:
        rank.load_checkpoint(str(tmp_path))
        assert rank.applied == 2
        rank.step()
    ranks[0].step()
    for rank in again:
        assert all(torch.equal(rank.values()[name], value) for name, value in ranks[0].values().items())


def test_a_checkpoint_is_of_the_moment_of_its_begin_and_becomes_a_model_folder(tmp_path):
    one = Line()
    one.begin_save(str(tmp_path / "state"))
    then = one.values()
    one.step()
    one.finish_save()
    export_hf(tmp_path / "state", tmp_path / "hf")
    from safetensors.torch import load_file

    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == then.keys() and all(torch.equal(found[name], then[name]) for name in then)


def test_a_checkpoint_of_another_model_is_refused_by_the_tensor(tmp_path):
    save(tmp_path, Line(size=5))
    with pytest.raises(CheckpointError, match=r"a.weight is \(5, 2\) there and \(3, 2\)"):
        Line().load_checkpoint(str(tmp_path))


def test_ranks_with_whole_weights_share_the_writing_of_a_version():
    layout = whole_layout({"a": torch.zeros(64, 8), "b": torch.zeros(64)}, 4)
    layout.check_coverage()
    plan = write_plan(layout)
    assert sum(plan.elements(rank) for rank in range(4)) == 64 * 8 + 64
    assert min(plan.elements(rank) for rank in range(4)) > 100
