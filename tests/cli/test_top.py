"""What the folder of a run tells about it, while it goes on and after it, however it ended."""

import io
import json
import sys

import numpy as np
import pytest

from mindspeed_asyncflow.cli import main
from mindspeed_asyncflow.cli.top import _driver_lives, histogram, plain, see, sparkline, table
from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.config.load import dump_resolved
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.observe import attached
from mindspeed_asyncflow.observe.attached import look, recent_lags, tail, time_left
from mindspeed_asyncflow.observe.ledger import Ledger
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.records import PromptRow


@pytest.fixture
def folder(tmp_path):
    config = parse_config('{"trainer": {"steps": 40}, "rollout": {"replicas": 3}, "run": {"platform": "npu"}}')
    return RunFolder.create(tmp_path, "t", dump_resolved(config))


def write(folder, steps, begin=1000.0, pace=2.0, **more):
    with open(folder.metrics, "a") as file:
        for step in steps:
            record = {
                **{"step": step, "time": begin + pace * step, "reward/mean": step / 100, "actor/loss": -0.5},
                **{"actor/kl_loss": 0.25, "actor/entropy": 1.5, "perf/tokens_per_s": 800.0},
                **{"idle/trainer": 0.31, "idle/rollout": 0.02, "queue/train": 17.0, **more},
            }
            file.write(json.dumps(record) + "\n")


def seen(folder, lives=True, now=1100.0):
    view = look(folder, lambda: lives, now)
    return view, {label: value for _, rows in view.sections for label, value in rows}


def test_a_running_run_shows_its_newest_step_and_means_of_the_last_ones(folder):
    write(folder, range(20))
    view, rows = seen(folder, now=1039.0)
    assert (view.state, view.alive, view.steps, view.wanted) == ("running", True, 20, 40)
    assert rows["reward"] == "0.190  (10-step mean 0.145)"
    assert rows["loss"] == "-0.5000" and rows["KL to reference"] == "0.2500" and rows["entropy"] == "1.500"
    assert rows["tokens/s"].startswith("800") and rows["tokens/s per device"] == "200.0"  # 1 trainer, 3 replicas
    assert rows["trainer idle"].startswith("31%") and rows["answers for the trainer"] == "17"
    assert view.ran_s == 39.0 and view.left_s == 2.0 * 20 - 1.0
    assert view.bottleneck == "rollout-bound: trainer waits 31 %; try rollout.replicas 4"


def test_before_the_first_step_there_is_only_a_state(folder):
    view, rows = seen(folder)
    assert (view.state, view.steps, rows, view.left_s, view.bottleneck) == ("starting", 0, {}, None, "")
    assert plain(view).splitlines() == [f"{folder.path.name}: starting, step 0/40"]


@pytest.mark.parametrize(
    ("summary", "lives", "state", "words"),
    [
        ({"error": "", "wall_s": 77.0}, False, "ended", ""),
        ({"error": "", "note": "data ends after 3 steps"}, False, "ended", "data ends"),
        ({"error": "WorkerLost: rollout0 died"}, False, "failed", "rollout0 died"),
        ({"error": "Interrupted: stopped by a signal"}, False, "stopped", "signal"),
        ({"error": "Interrupted: stopped by its client"}, False, "stopped", "by its client"),
        (None, False, "lost", "--run-folder"),
        (None, None, "running", "this node"),
        ({"error": ""}, True, "ended", ""),
    ],
)
def test_the_state_is_that_of_summary_and_driver(folder, summary, lives, state, words):
    write(folder, range(3))
    if summary is not None:
        folder.summary.write_text(json.dumps(summary))
    view, _ = seen(folder, lives)
    assert view.state == state and words in view.words
    assert view.alive == (view.left_s is not None)
    if summary and "wall_s" in summary:
        assert view.ran_s == 77.0


def test_a_line_that_is_being_written_or_cut_in_front_is_left_out(folder, monkeypatch):
    write(folder, range(30))
    with open(folder.metrics, "a") as file:
        file.write('{"step": 30, "time": 1')
    assert [record["step"] for record in tail(folder.metrics)] == list(range(30))
    monkeypatch.setattr(attached, "TAIL_BYTES", 1000)
    steps = [record["step"] for record in tail(folder.metrics)]
    assert steps and steps == list(range(steps[0], 30)) and steps[0] > 20


def test_values_that_were_not_finite_or_not_measured_are_no_numbers(folder):
    write(folder, range(2), **{"actor/grad_norm": None})
    _, rows = seen(folder)
    assert rows["gradient norm"] == "n/a" and "answers/s" not in rows


def test_the_newest_evaluation_is_shown(folder):
    write(folder, range(2))
    lines = [{"version": v, "mean_at_k": m} for v, m in ((0, 0.25), (10, 0.75))]
    folder.evaluations.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seen(folder)[1]["held-out"] == "0.750  (version 10)"


def test_a_pause_does_not_count_for_the_time_that_is_left():
    times = [0.0, 1.0, 2.0, 500.0, 501.0, 502.0]
    assert time_left(times, 6, 16, 502.5) == pytest.approx(9.5)
    assert time_left(times, 16, 16, 502.5) is None and time_left([1.0], 1, 16, 2.0) is None
    assert time_left(times, 6, 16, 1e6) == 0.0


def train(ledger, step, oldest):
    rules = type("Rules", (), {"oldest_allowed": None})
    one = {"plan": [[[0]]], "groups": {0: (0, 0)}, "versions": {0: (oldest, oldest)}, "rewards": {0: 1.0}}
    ledger.note("trained", step=step, rules=rules, **one)


def test_lags_are_those_of_the_last_steps_that_were_not_undone(folder):
    ledger = Ledger(folder.ledger)
    for step, oldest in ((3, 0), (9, 9), (9, 8), (9, 8), (10, 2)):
        train(ledger, step, oldest)
    ledger.note("resumed", ledger=4)
    ledger.close()
    assert recent_lags(folder.ledger, 5) == {0: 1, 1: 2}
    folder.ledger.write_text("no database, and long enough to be none " * 9)
    assert recent_lags(folder.ledger, 5) == {}
    assert recent_lags(folder.path / "none", 5) == {}


def test_a_driver_is_known_by_the_folder_that_it_holds(folder):
    assert not folder.held_here
    with folder.locked():
        assert folder.held_here and _driver_lives(folder) is True
        with open(folder.config) as other:  # looking takes no lock from anybody
            assert other.read()
    assert not folder.held_here and _driver_lives(folder) is None  # it may be about to begin
    write(folder, range(1))
    assert _driver_lives(folder) is False
    folder.processes.write_text('{"driver": {"pid": 1, "host": "203.0.113.9"}}')
    assert _driver_lives(folder) is None
    folder.processes.write_text('{"driver": {"pid": 1, "host": "127.0.0.1"}}')
    assert _driver_lives(folder) is True
    folder.processes.write_text('{"driver": {"pid": 4194305, "host": "127.0.0.1"}}')  # above every process id
    assert _driver_lives(folder) is False


def test_both_forms_say_the_same(folder):
    from rich.console import Console

    write(folder, range(20))
    ledger = Ledger(folder.ledger)
    train(ledger, 19, 18)
    ledger.close()
    view, rows = seen(folder)
    text = plain(view)
    assert "\x1b" not in text
    console = Console(width=150, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    console.print(table(view))
    drawn = console.export_text()
    for part in (*rows, *rows.values(), "step 20/40", "100%", view.bottleneck):
        assert part in text and part in drawn
    assert "▁" in drawn
    narrow = Console(width=40, file=open("/dev/null", "w"), record=True)  # noqa: SIM115
    narrow.print(table(view))
    assert max(map(len, narrow.export_text().splitlines())) <= 40


def test_what_waits_is_asked_of_a_dock_that_is_up(folder, capsys):
    write(folder, range(3))
    assert "answers for the trainer 17\n" in plain(see(folder))
    secret = b"0123456789abcdef"
    server = DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=1, secret=secret).start()
    folder.dock.write_text(json.dumps({"addresses": [server.address], "secret": secret.hex()}))
    with DockClient([server.address], secret) as client:
        client.put_groups("train", [[PromptRow(5, m, 2, np.arange(3, dtype=np.int32), "truth") for m in range(2)]])
    text = plain(see(folder))
    assert "prompts for rollout     2  (now)\n" in text and "answers for the trainer 0  (now)\n" in text
    server.close()
    assert "answers for the trainer 17\n" in plain(see(folder))


def test_bars_are_to_scale():
    assert histogram({2: 10, 0: 30}, width=6) == [(0, "██████", 0.75), (2, "██", 0.25)]
    assert histogram({}) == []
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([3.0, 3.0]) == "▁▁"


def test_the_command_prints_once_without_a_terminal_and_refuses_what_is_no_run(folder, capsys):
    write(folder, range(3))
    assert main(["top", str(folder.path)]) == 0
    printed = capsys.readouterr().out
    assert "lost, step 3/40" in printed and "\x1b" not in printed
    assert main(["top", str(folder.path / "samples")]) == 2
    assert "no run folder" in capsys.readouterr().err
    assert main(["top", str(folder.path), "--every", "0"]) == 2
    assert "--every" in capsys.readouterr().err


def test_on_a_terminal_the_view_follows_the_run_until_it_ends(folder, monkeypatch):
    from rich.console import Console

    write(folder, range(3))
    screen = io.StringIO()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("rich.get_console", lambda: Console(file=screen, force_terminal=True, width=120))
    monkeypatch.setattr("rich.live.get_console", lambda: Console(file=screen, force_terminal=True, width=120))

    def goes_on(seconds):
        assert seconds == 2.5
        write(folder, range(3, 5))
        folder.summary.write_text('{"error": ""}')

    monkeypatch.setattr("mindspeed_asyncflow.cli.top.time.sleep", goes_on)
    with folder.locked():
        assert main(["top", str(folder.path), "--every", "2.5"]) == 0
    assert "running, step 3/40" in screen.getvalue() and "ended, step 5/40" in screen.getvalue()
