"""The page says what happened, from whatever lies in the folder, before any script runs."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from mindspeed_asyncflow.cli import main
from mindspeed_asyncflow.observe.report import write_report
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.summary import write_summary
from tests.report.runs import SUMMARY, make_run


class Closed(HTMLParser):
    """Every tag that is opened is closed, in order."""

    void = {"meta", "br", "input"}

    def __init__(self):
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def written(*runs) -> str:
    return write_report(runs[0].path, [run.path for run in runs[1:]]).read_text(encoding="utf-8")


def data_of(html: str) -> dict:
    return json.loads(html.split('id="data">')[1].split("</script>")[0])


def test_a_whole_run_gives_one_page_that_loads_nothing(folder):
    html = written(folder)
    parser = Closed()
    parser.feed(html)
    assert parser.open == []
    assert not re.search(r"""(src|href)\s*=\s*["']|@import|url\(|fetch\(|XMLHttpRequest|import\(""", html)
    assert "default-src 'none'" in html
    assert "Reward went from 0.2 to 0.9" in html
    assert "Not in this report" not in html


def test_text_of_users_cannot_become_markup_or_end_the_data(folder):
    html = written(folder)
    assert "</pre><b>x" not in html and "waited 3 s &lt;long&gt;" in html
    assert data_of(html)["runs"][0]["answers"][0][5] == "answer of step 0 </pre><b>x"


def test_the_same_warning_of_one_process_is_shown_once_with_its_count(folder):
    table = written(folder).split('id="warnings"')[1].split("</section>")[0]
    assert table.count("waited") == 1 and "<td class='n'>2</td>" in table
    assert "all is well" not in table


@pytest.mark.parametrize("part", ["summary", "metrics", "trace", "samples", "config", "events"])
def test_a_missing_piece_is_named_and_the_rest_is_shown(folder, part):
    path = getattr(folder, part)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    missing = written(folder).split("Not in this report")[1].split("</section>")[0]
    assert path.name in missing
    assert missing.count("<li>") == 1


def test_an_empty_folder_still_gives_a_page(tmp_path):
    assert "This run has no summary" in write_report(tmp_path).read_text()


def test_a_run_that_goes_on_says_what_holds_it_back(folder):
    folder.summary.unlink()
    lines = [json.loads(line) | {"idle/trainer": 0.4, "idle/rollout": 0.02} for line in folder.metrics.open()]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "What holds it back: rollout-bound: trainer waits 40 %" in written(folder)
    folder.config.write_text("x: 1")
    assert "What holds it back" not in written(folder)


def test_a_failed_run_shows_its_root_error_first(folder):
    write_summary(folder, SUMMARY | {"error": "EngineError: gradient <nan>"})
    html = written(folder)
    assert html.index("EngineError: gradient &lt;nan&gt;") < html.index('id="curves"')


def test_a_text_that_is_no_unicode_is_kept_as_its_escape(folder):
    with open(folder.evaluations, "a") as file:
        sample = {"source": "s", "prompt": "\ud800", "truth": "", "answers": ["a"], "scores": [1.0]}
        record = {"version": 99, "temperature": 0.0, "k": 1, "mean_at_k": 1.0, "samples": [sample]}
        file.write(json.dumps(record) + "\n")
    assert data_of(written(folder))["runs"][0]["answers"][-1][4] == "\ud800"


def test_runs_that_differ_in_their_seed_only_are_one_experiment(tmp_path):
    runs = [make_run(tmp_path, f"r{i}", settings) for i, settings in enumerate((
        ("run.seed=1",), ("run.seed=2",), ("run.seed=1", "trainer.lr=3e-6")
    ))]  # fmt: skip
    data = data_of(written(*runs))
    assert [run["experiment"] for run in data["runs"]] == [0, 0, 1]
    differ = {row["key"]: row["values"] for row in data["settings"] if len(set(row["values"])) > 1}
    assert set(differ) == {"run.seed", "trainer.lr"} and differ["run.seed"] == ["1", "2", "1"]


def test_a_run_of_defaults_has_only_settings_that_are_the_default(tmp_path):
    data = data_of(written(make_run(tmp_path, "grpo")))
    assert [row for row in data["settings"] if row["values"] != [row["default"]]] == []


def test_the_command_compares_runs_in_a_file_of_its_own(tmp_path, capsys):
    runs = [make_run(tmp_path, "a"), make_run(tmp_path, "b")]
    out = tmp_path / "both.html"
    assert main(["report", str(runs[0].path), "--compare", str(runs[1].path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert [run["name"] for run in data_of(out.read_text())["runs"]] == [run.path.name for run in runs]
    assert not runs[0].report.exists()


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    runs = [RunFolder(tmp_path / place / "run") for place in ("here", "there")]
    for run in runs:
        run.path.mkdir(parents=True)
    assert [run["name"] for run in data_of(written(*runs))["runs"]] == ["here/run", "there/run"]


def test_the_command_names_what_is_no_run_and_what_cannot_be_written(folder, tmp_path, capsys):
    assert main(["report", str(folder.path), "--compare", str(tmp_path / "none")]) == 2
    assert f"there is no {tmp_path / 'none'}: name a run folder" in capsys.readouterr().err
    assert main(["report", str(folder.path), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert "--out" in capsys.readouterr().err
