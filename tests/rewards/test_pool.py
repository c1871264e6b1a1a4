import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mindspeed_asyncflow.config.schema import DataConfig, RewardConfig
from mindspeed_asyncflow.errors import RewardError
from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.pool import Score, ScorerPool
from mindspeed_asyncflow.rewards.process import ScorerProcess

ROOT = Path(__file__).parents[2]
HOSTILE = DataConfig(task="python:tests.rewards.hostile_tasks:Hostile")


def score(pool, *texts):
    return pool.score([Answer(text, "", True) for text in texts])


def make_pool(workers=2, timeout_s=0.5, on_timeout="drop", data=HOSTILE):
    return ScorerPool(data, RewardConfig(workers=workers, timeout_s=timeout_s, on_timeout=on_timeout))


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with_pool = make_pool()
    yield with_pool
    with_pool.close()


def pids(pool):
    return [process.process.pid for process in pool._processes]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_256_scores_come_back_in_order_and_take_few_messages(monkeypatch):
    with_sort = make_pool(workers=1, data=DataConfig())
    messages = []
    give = ScorerProcess.give
    monkeypatch.setattr(ScorerProcess, "give", lambda process, *args: (messages.append(args), give(process, *args)))
    try:
        texts = [f"{i:04d}" for i in range(256)]
        truths = [text if i % 3 else "x" for i, text in enumerate(texts)]
        scores = with_sort.score([Answer(*each) for each in zip(texts, truths, [i % 2 == 0 for i in range(256)])])
        assert [s.value for s in scores] == [float(i % 3 != 0 and i % 2 == 0) for i in range(256)]
        assert len(messages) <= 4
    finally:
        with_sort.close()


@pytest.mark.parametrize("hang", ["sleep", "regex"])
def test_endless_answers_are_ended_named_and_waited_for_side_by_side(pool, hang, monkeypatch):
    """B36"""
    waits = []
    replace = pool._replace
    monkeypatch.setattr(
        pool, "_replace", lambda process: (waits.append((process.since, time.monotonic())), replace(process))
    )
    for _ in range(2):
        waits.clear()
        texts = ["fine"] * 16
        texts[3] = texts[5] = hang
        scores = score(pool, *texts)
        assert [i for i, s in enumerate(scores) if s.value is None] == [3, 5]
        assert "0.5 s" in scores[3].error and "reward.timeout_s" in scores[3].error
        (_, first_end), (second_start, _) = waits
        assert second_start < first_end
    assert pool.counts["timed_out"] == 4 and pool.counts["scored"] == 28
    assert len([pid for pid in pids(pool) if alive(pid)]) == 2


def test_a_slow_answer_does_not_hold_up_those_behind_it(pool):
    began = time.perf_counter()
    scores = score(pool, *["slow"] * 4, *["fine"] * 12)  # the four are one message to one process: 1.0 s alone
    assert time.perf_counter() - began < 0.9
    assert [s.value for s in scores] == [1.0] * 16


@pytest.mark.parametrize("text, error", [("raise", "ZeroDivisionError: one third of nothing"), ("word", "ValueError")])
def test_a_failing_scorer_is_counted_and_named_never_a_silent_zero(pool, text, error):
    """B35"""
    scores = score(pool, "fine", text, "fine")
    assert scores[0] == scores[2] == Score(1.0)
    assert scores[1].value is None and scores[1].error.startswith(error)
    assert pool.counts["failed"] == 1


def test_with_on_timeout_zero_a_failure_is_a_zero_that_still_carries_its_error(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with_zero = make_pool(workers=1, on_timeout="zero")
    try:
        assert score(with_zero, "raise")[0].value == 0.0
        assert "ZeroDivisionError" in score(with_zero, "raise")[0].error
    finally:
        with_zero.close()


def test_an_abstention_is_neither_a_score_nor_an_error(pool):
    assert score(pool, "none") == [Score(None)]
    assert pool.counts["abstained"] == 1


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_a_number_that_is_not_finite_is_a_named_failure(pool, text):
    """B05"""
    assert score(pool, text) == [Score(None, f"scorer returned {text}, not a finite number")]


def test_scorers_that_use_alarm_signals_work_from_any_thread(pool):
    """B35"""
    results = [score(pool, "alarm")[0].value]
    thread = threading.Thread(target=lambda: results.append(score(pool, "alarm")[0].value))
    thread.start()
    thread.join(10)

    async def in_executor():
        return await asyncio.get_running_loop().run_in_executor(None, score, pool, "alarm")

    results.append(asyncio.run(in_executor())[0].value)
    assert results == [1.0, 1.0, 1.0]


def test_a_dying_scorer_loses_its_answer_only_and_is_replaced(pool):
    scores = score(pool, "fine", "exit", "fine", "fine")
    assert [s.value for s in scores] == [1.0, None, 1.0, 1.0]
    assert "died" in scores[1].error and pool.counts["died"] == 1
    assert score(pool, "fine") == [Score(1.0)]


def test_a_scorer_that_died_while_idle_is_replaced(pool):
    for pid in pids(pool):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
    assert [s.value for s in score(pool, *["fine"] * 8)] == [1.0] * 8
    assert len(pool._processes) == 2


def test_scorer_processes_are_light(pool):
    assert score(pool, "heavy") == [Score(0.0)]


def test_a_task_that_cannot_start_is_an_error_at_once(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(RewardError, match="exit code 3"):
        make_pool(data=DataConfig(task="python:tests.rewards.hostile_tasks:Unstartable"))
    with pytest.raises(RewardError, match=r"cannot start: .*unknown"):
        make_pool(data=DataConfig(task="sort99"))


def test_close_leaves_no_process_even_while_one_is_hung(pool):
    before = pids(pool)
    thread = threading.Thread(target=score, args=(pool, "sleep"))
    thread.start()
    time.sleep(0.1)
    pool.close()
    thread.join(10)
    assert not any(alive(pid) for pid in before)
    with pytest.raises(RewardError, match="closed"):
        score(pool, "fine")


PARENT = """
import sys, threading
from mindspeed_asyncflow.config.schema import DataConfig, RewardConfig
from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.pool import ScorerPool
hostile = DataConfig(task="python:tests.rewards.hostile_tasks:Hostile")
pool = ScorerPool(hostile, RewardConfig(workers=2, timeout_s=600.0))
print(*[p.process.pid for p in pool._processes], flush=True)
pool.score([Answer("regex", "", True)])
"""


def test_scorers_die_with_their_parent_even_in_compiled_code():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    children = [int(word) for word in parent.stdout.readline().split()]
    time.sleep(0.2)
    assert len(children) == 2 and all(alive(pid) for pid in children)
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in children)
