"""The report says what happened, from whatever lies in the folder."""

import re
import shutil
from html.parser import HTMLParser

import pytest

from mindspeed_asyncflow.observe import trace
from mindspeed_asyncflow.observe.report import read_history, write_report
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.summary import write_summary
from mindspeed_asyncflow.observe.writers import EvaluationsWriter, MetricsWriter, SamplesWriter, SampleText

SUMMARY = {
    "reward_first": 0.2,
    "reward_last": 0.9,
    "heldout_greedy": 0.97,
    "steps": 12,
    "wall_s": 12.5,
    "max_lag": 1,
    "samples_issued": 96,
    "samples_trained": 96,
    "samples_dropped": 0,
    "samples_open": 0,
    "rollout_train_logprob_gap_max": 1e-6,
    "lag_histogram": {"0": 8, "1": 88},
}
CONFIG = "model:\n  source: <odd> & name\n"


class Closed(HTMLParser):
    """Every tag that is opened is closed, in order."""

    void = {"meta", "br"}

    def __init__(self):
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def folder(tmp_path):
    run = RunFolder.create(tmp_path, "t", CONFIG)
    writer, tracer = MetricsWriter(run, tensorboard=False), trace.Tracer(run.trace, "trainer0")
    for step in range(12):
        with tracer.span("train/forward_backward", lane="trainer0", step=step):
            pass
        values = {"reward/mean": step / 12, "idle/trainer": 0.1, "staleness/worst_max": 1, "actor/grad_norm": 0.5}
        writer.write(step, values | ({"actor/grad_norm": float("nan")} if step == 5 else {}))
        SamplesWriter(run).write(step, SampleText(step, "p", f"answer of step {step} </pre>", 1.0, "t", 0))
    writer.write(12, {"eval/mean_at_k": 0.97})
    writer.close()
    tracer.close()
    write_summary(run, SUMMARY)
    return run


def test_a_whole_run_gives_one_page_that_loads_nothing(folder):
    html = write_report(folder.path).read_text(encoding="utf-8")
    parser = Closed()
    parser.feed(html)
    assert parser.open == []
    assert not re.search(r"(src|href|@import|url\()", html)
    assert "prefers-color-scheme" in html and html.count("<svg") >= 5
    assert "Reward went from 0.2 to 0.9" in html and "Who worked when" in html
    assert "answer of step 0" in html and "answer of step 11" in html
    assert "Gradient norm before clipping." in html  # definitions stand in the table
    assert "Not in this report" not in html


def test_every_evaluation_is_in_the_reward_curve_at_the_version_that_it_measured(folder):
    writer = EvaluationsWriter(folder)
    for version, mean in ((0, 0.3), (6, None), (12, 0.97)):  # no answer of the second one had a score
        writer.write({"version": version, "temperature": 0.0, "k": 1, "mean_at_k": mean})
    with open(folder.evaluations, "a") as file:
        file.write('{"version": 13, "mea')  # the process was killed here
    html = write_report(folder.path).read_text(encoding="utf-8")
    assert re.findall(r"held-out, greedy, step (\d+): ([\d.]+)<", html) == [("0", "0.3"), ("12", "0.97")]


def test_text_of_users_cannot_become_markup(folder):
    html = write_report(folder.path).read_text(encoding="utf-8")
    assert "&lt;odd&gt; &amp; name" in html and "step 0 </pre>" not in html


@pytest.mark.parametrize("part", ["summary", "metrics", "trace", "samples", "config"])
def test_a_missing_piece_is_named_and_the_rest_is_shown(folder, part):
    path = getattr(folder, part)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    html = write_report(folder.path).read_text(encoding="utf-8")
    missing = html.split("Not in this report")[1].split("</section>")[0]
    assert path.name in missing
    assert missing.count("<li>") == 1


def test_an_empty_folder_still_gives_a_page(tmp_path):
    assert "This run has no summary" in write_report(tmp_path).read_text()


def test_a_failed_run_shows_its_root_error_first(folder):
    write_summary(folder, SUMMARY | {"error": "EngineError: gradient <nan>"})
    html = write_report(folder.path).read_text(encoding="utf-8")
    assert html.index("EngineError: gradient &lt;nan&gt;") < html.index("<svg")


def test_the_cut_last_line_of_a_killed_run_is_left_out(folder):
    with open(folder.metrics, "a") as file:
        file.write('{"step": 13, "ti')
    history, times = read_history(folder.metrics)
    assert max(times) == 12 and len(history["reward/mean"]) == 12


def test_a_long_trace_is_thinned_to_its_longest_spans_and_says_so(folder, monkeypatch):
    monkeypatch.setattr("mindspeed_asyncflow.observe.report._GANTT_BARS", 3)
    folder.metrics.unlink()  # no step times: the window is the whole short trace
    html = write_report(folder.path).read_text(encoding="utf-8")
    assert re.search(r"only the 3 longest of \d+ spans", html)
    assert html.split("Who worked when")[1].count("<rect") <= 3
