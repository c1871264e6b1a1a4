"""What is read from the files of a run is what its writers wrote."""

import itertools
import math

import pytest

from mindspeed_asyncflow.observe import trace
from mindspeed_asyncflow.observe.ledger import Ledger
from mindspeed_asyncflow.observe.report import answers, curves, lanes
from mindspeed_asyncflow.observe.report.histograms import binned, read_lags, read_lengths
from mindspeed_asyncflow.observe.writers import SamplesWriter, SampleText
from tests.report.runs import STEPS


def test_the_cut_last_line_of_a_killed_run_is_left_out(folder):
    with open(folder.metrics, "a") as file:
        file.write('{"step": 13, "ti')
    found = curves.read_curves(folder.metrics, [])
    assert found.steps == list(range(STEPS)) and len(found.values["reward/mean"]) == STEPS


def test_a_value_that_is_not_finite_or_not_there_leaves_a_gap_in_its_place(folder):
    with open(folder.metrics, "a") as file:
        file.write('{"step": 11, "time": 9e9, "eval/mean_at_k": 0.5}\n')  # a second line of the last step
    found = curves.read_curves(folder.metrics, [])
    assert found.values["actor/grad_norm"][4:7] == [0.5, None, 0.5]
    assert found.values["eval/mean_at_k"] == [None] * 11 + [0.5]
    assert found.times[11] < 9e9  # when the step was done, not when it was evaluated


def test_long_curves_are_thinned_to_their_ends_and_it_is_said(folder, monkeypatch):
    monkeypatch.setattr(curves, "MOST_STEPS", 4)
    missing: list[str] = []
    found = curves.read_curves(folder.metrics, missing)
    assert found.steps == [0, 3, 6, 9, 11] and "every 3th of 12" in missing[0]


@pytest.mark.parametrize(
    "text", ["a", "", "two\nlines", "answer: x\n--- step 1 | version 2 | lag 3 | reward 4", "\n\n", "\r a"]
)
def test_answers_come_back_as_they_were_written(folder, text):
    SamplesWriter(folder).write(99, SampleText(7, text, text, -0.25, text, 92, (3, 4)))
    SamplesWriter(folder).write(99, SampleText(8, "p", "a", math.nan, "t", 91))
    first, second = answers.read_answers(folder.samples, [], [])[-2:]
    assert first == answers.Answer(99, 7, 92, -0.25, text, text, text)
    assert second == answers.Answer(99, 8, 91, None, "p", "a", "t")


def test_too_many_answers_are_thinned_evenly_and_it_is_said(folder, monkeypatch):
    monkeypatch.setattr(answers, "MOST_CHARACTERS", 150)
    missing: list[str] = []
    found = answers.read_answers(folder.samples, [], missing)
    steps = [answer.step for answer in found]
    assert len(set(b - a for a, b in itertools.pairwise(steps))) == 1 and len(steps) < STEPS
    assert f"those of {len(steps)} of {STEPS} steps" in missing[0]


def test_lengths_are_counted_whole_and_at_both_ends(folder):
    counts = read_lengths(folder.events, [])
    assert sum(counts["whole run"].values()) == STEPS * 8
    assert counts["first quarter"] == {0: 1, 1: 2, 2: 3, **dict.fromkeys(range(3, 8), 3), 8: 2, 9: 1}
    assert min(counts["last quarter"]) == 9


def test_a_torn_file_of_rows_is_named_and_the_others_count(folder):
    torn = folder.events / "step_000003_replica_0.npz"
    torn.write_bytes(torn.read_bytes()[:100])
    missing: list[str] = []
    assert sum(read_lengths(folder.events, missing)["whole run"].values()) == (STEPS - 1) * 8
    assert torn.name in missing[0]


def test_lags_come_from_the_ledger_without_what_a_resume_undid(folder):
    ledger = Ledger(folder.ledger)
    rules = type("Rules", (), {"oldest_allowed": None})
    for step, oldest in ((0, 0), (1, 0), (1, 1)):
        ledger.note(
            "trained", step=step, plan=[[[0]]], groups={0: (0, 0)}, versions={0: (oldest, oldest)}, rewards={0: 1.0},
            rules=rules,
        )  # fmt: skip
        if oldest == 0 and step == 1:
            ledger.note("resumed", ledger=1)
    ledger.close()
    assert read_lags(folder.ledger, {}, [])["whole run"] == {0: 2}
    folder.ledger.write_text("no ledger")
    missing: list[str] = []
    assert read_lags(folder.ledger, {"lag_histogram": {"0": 3, "1": 0}}, missing) == {"whole run": {0: 3}}
    assert "ledger.sqlite" in missing[0]


def test_bins_grow_by_powers_of_two_and_lose_nobody():
    bins = binned({"whole run": {0: 1, 1023: 2, 1024: 3, 5000: 4}})
    assert bins["width"] == 16 and sum(count for _, count in bins["parts"]["whole run"]) == 10


def test_lanes_begin_with_the_steps_in_the_middle(folder):
    found = lanes.read_lanes(folder.trace, curves.Curves([0, 1, 2, 3, 4], [1, 2, 3, 4, 5], {}), [])
    assert found.rows == ["rollout0", "trainer0"] and len(found.bars) == 2 * STEPS
    assert found.window == (2_000_000, 5_000_000)
    assert found.bars[1] == (1, found.names.index("trainer/step"), 500_000, 500_000, 0, found.details.index("step=0"))


def test_lanes_stand_in_the_order_of_their_numbers(folder):
    for number in (10, 2):
        tracer = trace.Tracer(folder.trace, f"rollout{number}")
        with tracer.span("x", lane=f"rollout{number}"):
            pass
        tracer.close()
    found = lanes.read_lanes(folder.trace, curves.Curves([], [], {}), [])
    assert found.rows == ["rollout0", "rollout2", "rollout10", "trainer0"]


def test_lanes_without_steps_begin_with_everything(folder):
    found = lanes.read_lanes(folder.trace, curves.Curves([], [], {}), [])
    assert found.window == (0, STEPS * 1_000_000)


def test_a_long_trace_is_thinned_to_its_longest_spans_and_says_so(folder, monkeypatch):
    monkeypatch.setattr(lanes, "MOST_BARS", 3)
    missing: list[str] = []
    path = next(folder.trace.glob("rollout0-*"))
    path.write_text(
        path.read_text() + '[["X","rollout0","long",0,9000000,{}],["X","rollout0","longer",0,9900000,{}]]\n'
    )
    found = lanes.read_lanes(folder.trace, curves.Curves([], [], {}), missing)
    assert found.names == ["longer", "long"] and "only the 3 longest of 26" in missing[0]
