"""Evaluation: one version, every prompt once, beside training or between its steps."""

import asyncio
import dataclasses
import json
import math
import time

import numpy as np
import pytest

from mindspeed_asyncflow.config.rules_evaluation import rules
from mindspeed_asyncflow.data.prompts import Prompt
from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.records import VersionSpan
from mindspeed_asyncflow.rewards.pool import Score
from mindspeed_asyncflow.workflow.evaluating import chosen, runs_beside, source_names
from mindspeed_asyncflow.workflow.verdict import Figures, Judged, judge, of_run
from tests.workflow.fakes import FakePool, FakeRollout, FakeTrain, prompts_of, run_loops
from tests.workflow.test_run import config

FIRST = 1000  # ids of evaluation prompts, so that engines can tell them from those of training


def heldout(count, **fields):
    return [
        Prompt(np.array([FIRST + i, 1], np.int32), str(FIRST + i), f"prompt {i}", json.dumps(fields))
        for i in range(count)
    ]


class Watched(FakeRollout):
    """Notes which evaluation answers it gave, with which version and seed, and how many batches of each kind ran."""

    def __init__(self, eval_s=0.0, dies_after=None, **more):
        super().__init__(**more)
        self.eval_s, self.dies_after = eval_s, dies_after
        self.asked: list[tuple[int, int, int, float]] = []  # prompt, seed, version, temperature
        self.sizes: list[int] = []  # of evaluation batches
        self.evaluating: list[tuple[float, float]] = []
        self.kill = None

    def generate(self, requests, timeout_s, stream=None):
        if requests[0].prompt_ids[0] < FIRST:
            yield from super().generate(requests, timeout_s)
            return
        began = time.perf_counter()
        self.sizes.append(len(requests))
        self.asked += [(int(r.prompt_ids[0]) - FIRST, r.seed, self.version, r.sampling.temperature) for r in requests]
        time.sleep(self.eval_s)
        if self.kill is not None:
            self.kill()
        yield from super().generate(requests, timeout_s)
        self.evaluating.append((began, time.perf_counter()))


class Graded(FakePool):
    """Scores by evaluation prompt: `values[i]`; None where there is no score."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def score(self, answers):
        return [
            Score(self.values[int(a.truth) - FIRST], "") if int(a.truth) >= FIRST else one
            for a, one in zip(answers, super().score(answers))
        ]


def evaluations(tmp_path):
    (file,) = tmp_path.glob("loops-*/evaluations.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("replicas", [1, 4])
def test_five_prompts_over_any_number_of_replicas_are_a_mean_over_five(tmp_path, replicas):
    """B82: scores 1, 0, 0, 0, 0. B81: four replicas cannot divide five."""
    engines = [Watched() for _ in range(replicas)]
    out = run_loops(
        config(steps=1, max_lag=0, replicas=replicas, groups=4),
        tmp_path,
        prompts_of(100, 4),
        rollouts=engines,
        pool=Graded([1.0, 0.0, 0.0, 0.0, 0.0]),
        heldout=heldout(5),
    )
    asked = sorted(p for e in engines for p, _, version, _ in e.asked if version == 0)
    assert asked == [0, 1, 2, 3, 4]
    before, after = evaluations(tmp_path)
    assert [before["mean_at_k"], before["prompts"], before["scores"]] == [0.2, 5, [[1.0], [0.0], [0.0], [0.0], [0.0]]]
    assert (before["version"], after["version"]) == (0, 1)
    assert out.recorder.verdicts[0].metrics()["eval/mean_at_k"] == 0.2


def test_seeds_are_unique_and_the_same_in_every_evaluation_and_for_any_number_of_replicas(tmp_path):
    """B83: k = 8 answers to one prompt and more, temperature 1; run with one replica and with three."""
    seeds = {}
    for replicas in (1, 3):
        engines = [Watched() for _ in range(replicas)]
        settings = {"answers": 8, "temperature": 1.0}
        run_loops(
            config(steps=1, max_lag=0, replicas=replicas, evaluation=settings),
            tmp_path / str(replicas),
            prompts_of(100, 4),
            rollouts=engines,
            pool=Graded([1.0, 0.0, 0.5]),
            heldout=heldout(3),
        )
        for version in (0, 1):
            asked = [(p, seed) for e in engines for p, seed, v, _ in e.asked if v == version]
            assert len({seed for _, seed in asked}) == len(asked) == 24
            seeds[replicas, version] = sorted(asked)
        assert {t for e in engines for *_, t in e.asked} == {1.0}
    assert len(set(map(str, seeds.values()))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("update", ["delayed", "rolling", "in_flight"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_evaluation_beside_training_is_of_one_version_and_its_share_and_stops_nobody_before_the_law(
    tmp_path, update, replicas
):
    """Versions 3 and 6 of eight are measured, each while training goes on; share x max_running is 2 answers at once."""
    engines = [Watched(eval_s=0.01, delay_s=0.002) for _ in range(replicas)]
    train = FakeTrain(delay_s=0.004)
    out = run_loops(
        config(
            steps=8,
            max_lag=2,
            replicas=replicas,
            workflow={"update": update},
            rollout={"max_running": 8},
            evaluation={"every": 3, "answers": 2, "temperature": 1.0, "share": 0.25},
        ),
        tmp_path,
        prompts_of(100, 4),
        rollouts=engines,
        train=train,
        pool=Graded([1.0, 0.0, 0.0, 1.0, None, 0.0]),
        heldout=heldout(6),
    )
    records = evaluations(tmp_path)
    assert [r["version"] for r in records if r["beside"]] in ([3, 6], [3])  # the second one may find the first running
    assert [r["version"] for r in records if not r["beside"]] == [0, 8]
    for record in records:
        assert (record["mean_at_k"], record["pass_at_k"], record["unscored"]) == (0.4, pytest.approx(1 / 3), 1 / 6)
        mine = [v for e in engines for _, _, v, _ in e.asked if v == record["version"]]
        assert len(mine) == 12
    beside = [size for e in engines for size, (*_,) in zip(e.sizes, e.evaluating)]
    assert min(beside) >= 1 and sum(size > 2 for size in beside) <= 2 * 2 * replicas  # start and end take all there is
    assert out.run.window.trained == 64 and max(out.recorder.lags) <= 2
    metrics = [json.loads(line) for line in next(tmp_path.glob("loops-*/metrics.jsonl")).read_text().splitlines()]
    ended = {m["eval/version"]: m["step"] for m in metrics if "eval/version" in m}
    assert ended[0.0] == 0 and ended.get(3.0, 8) >= 3
    assert not out.run.sync.holds.describe()


@pytest.mark.slow
def test_a_held_replica_leaves_to_the_others_what_it_would_stop_training_for(tmp_path):
    """Two replicas, one version of lag, and an evaluation that takes longer than three steps: training does not wait
    for its end."""
    engines = [Watched(eval_s=0.05), Watched(eval_s=0.05)]
    run_loops(
        config(steps=12, max_lag=1, replicas=2, rollout={"max_running": 4}, evaluation={"every": 4, "share": 0.25}),
        tmp_path,
        prompts_of(400, 4),
        rollouts=engines,
        pool=Graded([1.0] * 12),
        heldout=heldout(12),
    )
    first = next(r for r in evaluations(tmp_path) if r["beside"])
    assert first["version"] == 4 and first["seconds"] > 0.3
    of_version = [sum(v == 4 for _, _, v, _ in e.asked) for e in engines]
    assert sum(of_version) == 12 and min(of_version) < max(of_version)
    last = max(end for e in engines for begin, end in e.evaluating[: -1 if e.sizes[-1] > 1 else None])
    loaded = max(begin for e in engines for version, begin, _ in e.loads if version <= 11)
    assert loaded < last  # steps went on in the meantime


@pytest.mark.slow
def test_what_a_lost_replica_was_asked_is_asked_of_the_others(tmp_path):
    engines = [Watched(), Watched(eval_s=0.02)]

    def before(run):
        loop, replica = asyncio.get_running_loop(), run.sync.replicas[1]
        engines[1].kill = lambda: loop.call_soon_threadsafe(replica.kill)

    out = run_loops(
        config(steps=6, max_lag=1, replicas=2, evaluation={"every": 2}, rollout={"max_running": 8}),
        tmp_path,
        prompts_of(100, 4),
        rollouts=engines,
        train=FakeTrain(delay_s=0.01),
        pool=Graded([1.0, 0.0, 0.0, 0.0, 0.0]),
        before=before,
        heldout=heldout(5),
    )
    assert sorted(out.run.job.crew.rollouts) == [0] and out.run.window.trained == 48
    for record in evaluations(tmp_path):
        assert record["mean_at_k"] == 0.2 and record["prompts"] == 5


@pytest.mark.slow
def test_an_evaluation_that_finds_the_last_one_running_is_left_out_and_said(tmp_path, caplog):
    engines = [Watched(eval_s=0.15)]
    run_loops(
        config(steps=6, max_lag=5, evaluation={"every": 1}, workflow={"keep_versions": 6}),
        tmp_path,
        prompts_of(100, 4),
        rollouts=engines,
        pool=Graded([1.0, 1.0]),
        heldout=heldout(2),
    )
    versions = [r["version"] for r in evaluations(tmp_path)]
    assert versions[0] == 0 and versions[-1] == 6 and len(versions) < 7
    assert versions == sorted(set(versions))


def test_without_lag_the_trainer_waits_and_every_version_is_measured(tmp_path):
    engines = [Watched(), Watched()]
    run_loops(
        config(steps=4, max_lag=0, replicas=2, evaluation={"every": 2}),
        tmp_path,
        prompts_of(100, 4),
        rollouts=engines,
        pool=Graded([1.0, 0.0, 0.0]),
        heldout=heldout(3),
    )
    assert [(r["version"], r["beside"]) for r in evaluations(tmp_path)] == [(0, False), (2, False), (4, False)]
    assert [e.sizes for e in engines] == [[2] * 3, [1] * 3]  # the same shares each time


@pytest.mark.parametrize(
    ("workflow", "beside"),
    [({"max_lag": 0}, False), ({"max_lag": 1}, True), ({"max_lag": 1, "lend": True}, False)],
)
def test_evaluation_is_beside_training_where_neither_batches_nor_devices_are_shared(workflow, beside):
    assert runs_beside(config(workflow=workflow)) is beside


def test_figures_of_several_answers_each():
    """Majority: two of three say b, which scores 0; white space around an answer does not make it another one."""
    nan = math.nan
    answers = [
        [Judged("a", 1.0), Judged("b", 0.0), Judged(" b\n", 0.0)],
        [Judged("x", 0.5), Judged("y", 1.0), Judged("x", 0.5)],
        [Judged("?", nan), Judged("!", nan), Judged("?", nan)],
    ]
    figures = Figures.of(answers)
    assert figures.mean_at_k == pytest.approx(3 / 6) and figures.pass_at_k == pytest.approx(2 / 3)
    assert figures.maj_at_k == pytest.approx(0.25) and figures.unscored == pytest.approx(1 / 3)
    prompts = [{"source": s, "prompt": "p", "truth": "t"} for s in ("one", "two", "two")]
    verdict, record = judge(7, 1.0, 0.5, answers, prompts)
    assert record["sources"]["one"]["mean_at_k"] == pytest.approx(1 / 3)
    assert record["sources"]["two"]["maj_at_k"] == 0.5 and record["scores"][2] == [None] * 3
    assert record["source_of"] == ["one", "two", "two"] and record["samples"][1]["answers"] == ["x", "y", "x"]
    json.dumps(record, allow_nan=False)
    assert of_run([verdict], 7)["heldout_greedy"] is None and of_run([verdict], 7)["evaluation"]["version"] == 7
    greedy, _ = judge(7, 0.0, 0.5, answers, prompts)
    assert of_run([greedy], 7)["heldout_greedy"] == 0.5 and of_run([greedy], 8)["heldout_greedy"] is None


def test_prompts_are_taken_evenly_from_sources_that_may_have_fewer():
    prompts = heldout(2, source=1) + heldout(5, source=2)
    assert [number for number, _ in chosen(prompts, 6)] == [1, 2, 1, 2, 2, 2]
    assert [p.text for _, p in chosen(prompts, 3)] == ["prompt 0", "prompt 0", "prompt 1"]
    assert len(chosen(prompts, 100)) == 7 and chosen(prompts, 0) == []
    c = config(data={"task": "sort4", "validation": [{"task": "sort5"}, {"task": "sort5"}]})
    assert source_names(c) == ["sort4", "sort5 (1)", "sort5 (2)"]


def test_an_answer_of_another_version_ends_the_run(tmp_path):
    class Moved(Watched):
        def generate(self, requests, timeout_s, stream=None):
            for answer in super().generate(requests, timeout_s):
                moved = requests[0].prompt_ids[0] >= FIRST and self.version == 2
                spans = (VersionSpan(0, 0, 1), *answer.spans[1:]) if moved else answer.spans
                yield dataclasses.replace(answer, spans=spans)

    with pytest.raises(WeightSyncError, match=r"held at version 2 .* answered with .0."):
        run_loops(
            config(steps=6, evaluation={"every": 2}),
            tmp_path,
            prompts_of(100, 4),
            rollouts=[Moved()],
            pool=Graded([1.0]),
            heldout=heldout(1),
        )


def test_settings_that_would_measure_nothing_or_the_same_are_named():
    def found(**sections):
        return [(level, keys[0]) for level, keys, _ in rules(config(**sections))]

    assert found() == []
    assert found(evaluation={"answers": 4}) == [("warning", "evaluation.answers")]
    assert found(evaluation={"answers": 4, "temperature": 1.0, "every": 2}) == []
    assert found(evaluation={"every": 2, "prompts": 0}) == [("error", "evaluation.every")]
    assert found(evaluation={"every": 2}, data={"heldout": 0}) == [("error", "evaluation.every")]
    assert found(evaluation={"every": 2}, data={"heldout": 0, "validation": [{"task": "sort4"}]}) == []
