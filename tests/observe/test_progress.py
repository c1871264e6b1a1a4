"""What a user sees, on a terminal of any width and in a file."""

import io
import re

import pytest

from mindspeed_asyncflow.observe.bottleneck import Sizes
from mindspeed_asyncflow.observe.log import close_logging, get_logger, setup_logging
from mindspeed_asyncflow.observe.progress import Progress

METRICS = {
    "reward/mean": 0.5,
    "perf/samples_per_s": 812.3,
    "perf/tokens_per_s": 9031.0,
    "staleness/worst_max": 1.0,
    "idle/trainer": 0.12,
    "idle/rollout": 0.3,
    "actor/pg_loss": -0.01,
    "actor/grad_norm": 0.4,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(total=60, **options):
    stream, clock = io.StringIO(), Clock()
    return Progress(total, stream, clock=clock, **options), stream, clock


def screen(text: str) -> list[str]:
    """What a terminal shows after `text` (cursor up, erase below, colours)."""
    lines: list[str] = [""]
    for piece in re.split(r"(\x1b\[\d*[A-Za-z]|\n)", text):
        up = re.fullmatch(r"\x1b\[(\d+)A", piece)
        if up:
            del lines[len(lines) - 1 - int(up[1]) :]
            lines.append("")
        elif piece == "\n":
            lines.append("")
        elif not piece.startswith("\x1b"):
            lines[-1] += piece
    return lines[:-1]


def test_a_file_gets_plain_lines_without_control_codes_at_most_every_five_seconds():
    progress, stream, clock = make(60, live=False)
    for step in range(60):
        clock.now += 1
        progress.step(step, METRICS)
        progress.tick()
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert 12 <= len(lines) <= 14
    assert lines[0].startswith("step 1/60") and lines[-1].startswith("step 60/60")
    for part in ("reward 0.500", "samples/s 812", "tokens/s 9,031", "lag 1", "trainer idle 12%", "rollout idle 30%",
                 "loss -0.0100", "grad 0.4"):  # fmt: skip
        assert part in lines[-1]


def test_a_short_run_prints_every_step():
    progress, stream, _ = make(5, live=False)
    for step in range(5):
        progress.step(step, METRICS)
    assert len(stream.getvalue().splitlines()) == 5


def test_a_long_step_says_every_fifteen_seconds_how_far_it_has_come():
    progress, stream, clock = make(2, live=False)
    progress.phase("training the first batch")
    for seconds in range(1, 41):
        clock.now += 1
        progress.inside(8 * (seconds // 10), 4 * (seconds // 10))
        progress.tick()
    progress.step(0, METRICS)
    for _ in range(16):
        clock.now += 1
        progress.tick()
    assert "in step 2" not in stream.getvalue()  # nothing is known of it yet
    progress.inside(16, 0)
    progress.tick()
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "first batch ... " in line] == [
        "[15 s] training the first batch ... 15 s, 8 answers scored, 4 trained",
        "[30 s] training the first batch ... 30 s, 24 answers scored, 12 trained",
    ]
    assert lines[-1] == "[56 s] in step 2 of 2 ... 16 s, 16 answers scored, 0 trained"


def test_start_up_phases_are_named_and_timed_in_a_file():
    progress, stream, clock = make(live=False)
    progress.phase("starting trainer")
    for _ in range(40):
        clock.now += 0.5
        progress.tick()
    progress.step(0, METRICS)
    text = stream.getvalue()
    assert "starting trainer ..." in text and "starting trainer ... 15 s" in text
    assert "starting trainer: done in 20 s" in text


@pytest.mark.parametrize("width", [24, 40, 80, 200])
@pytest.mark.parametrize("color", [False, True])
def test_the_live_block_never_wraps_and_leaves_one_block(width, color):
    progress, stream, clock = make(live=True, width=width, color=color)
    progress.phase("starting rollout replicas and everything else that takes time")
    for step in range(10):
        clock.now += 1
        progress.tick()
        progress.step(step, METRICS)
    progress.close()
    shown = screen(stream.getvalue())
    assert all(len(line) < width for line in shown)
    assert sum("step 10/60" in line for line in shown) == 1
    assert not any("step 9/60" in line for line in shown)
    assert ("\x1b[1m" in stream.getvalue()) is color


def test_notes_stay_above_the_live_block():
    progress, stream, _ = make(live=True, width=80, color=False)
    progress.step(0, METRICS)
    progress.note("warning: slow scorer")
    progress.step(1, METRICS)
    progress.close()
    progress.note("the end")
    shown = screen(stream.getvalue())
    assert shown[0] == "warning: slow scorer" and shown[-1] == "the end"
    assert any("step 2/60" in line for line in shown)


def test_time_left_ignores_start_up():
    progress, stream, clock = make(10, live=False)
    clock.now = 100.0  # start-up
    for step in range(3):
        clock.now += 2
        progress.step(step, METRICS)
    assert "14 s left" in stream.getvalue().splitlines()[-1]


def test_the_live_block_is_redrawn_at_most_ten_times_a_second():
    progress, stream, clock = make(live=True, width=80, color=False)
    progress.phase("starting trainer")
    for _ in range(1000):
        clock.now += 0.001
        progress.tick()
    assert 5 <= stream.getvalue().count("starting trainer") <= 12


@pytest.mark.parametrize("width", [60, 160])
def test_what_holds_the_run_back_is_said_whole_where_it_fits(width):
    progress, stream, _ = make(live=True, width=width, color=False, sizes=Sizes(nodes=2))
    for step in range(12):  # the first ones are forgotten
        progress.step(step, METRICS | {"idle/trainer": 0.9 if step < 2 else 0.31, "idle/rollout": 0.12})
    sentence = "rollout-bound: trainer waits 31 %; try workflow.max_lag 2 or move one node to rollout"
    assert (sentence in screen(stream.getvalue())) == (width > len(sentence))


def test_a_plain_line_says_which_side_holds_the_run_back():
    progress, stream, _ = make(2, live=False, sizes=Sizes())
    progress.step(0, METRICS)
    progress.step(1, {"reward/mean": 0.5})  # nothing was measured in this one
    assert [line.endswith("  trainer-bound") for line in stream.getvalue().splitlines()] == [True, True]


def test_a_not_finite_gradient_norm_is_shown_as_such():
    progress, stream, _ = make(1, live=False)
    progress.step(0, {"actor/grad_norm": float("nan"), "reward/mean": float("nan")})
    assert "grad n/a" in stream.getvalue() and "nan" not in stream.getvalue()


@pytest.mark.parametrize("live", [True, False])
def test_the_log_file_has_every_line_once_and_plain_and_the_console_shows_none_twice(tmp_path, live):
    progress, stream, clock = make(60, live=live, width=80)
    setup_logging("driver", tmp_path / "log.txt", write=progress.show)
    try:
        progress.phase("starting dock")
        clock.now += 2
        progress.note("run folder: here")
        get_logger("service").warning("one replica is late")
        for step in range(3):
            progress.step(step, METRICS)
        progress.evaluated({"eval/mean_at_k": 0.25, "eval/k": 1, "eval/unscored": 0, "eval/version": 3})
    finally:
        close_logging()
    text = (tmp_path / "log.txt").read_text()
    for line in ("starting dock ...", "starting dock: done in 2.0 s", "run folder: here", "one replica is late",
                 "step 1/60", "step 2/60", "step 3/60", "] held-out 0.250 (version 3)"):  # fmt: skip
        assert text.count(line) == 1, line
    assert "\x1b" not in text and "\r" not in text
    assert all(" driver[" in line for line in text.splitlines())
    assert stream.getvalue().count("one replica is late") == stream.getvalue().count("run folder: here") == 1
