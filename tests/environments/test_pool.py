"""Environment processes: deadlines end the work, failures are named, and nothing is left behind."""

import time

import psutil
import pytest

from mindspeed_asyncflow.config.schema import TurnsConfig
from mindspeed_asyncflow.environments.base import MODEL, Turn
from mindspeed_asyncflow.environments.pool import EnvironmentPool, Reply
from mindspeed_asyncflow.errors import RewardError

NAUGHTY = "python:tests.environments.samples:Naughty"


def ask(pool, text):
    return pool.ask([Turn(MODEL, text)], "t", {"prompt": "p"})


def processes():
    """Those of environments; other tests may have left children of their own."""
    return {p.pid for p in psutil.Process().children() if "environments.worker" in " ".join(p.cmdline())}


@pytest.mark.slow
def test_failures_are_data_and_the_next_reply_comes_all_the_same():
    pool = EnvironmentPool(TurnsConfig(environment=NAUGHTY, timeout_s=0.5, workers=2))
    try:
        before = processes()
        asked = [ask(pool, text) for text in ("a", "raise", "number", "die", "hang", "b")]
        a, raised, number, died, hung, b = (future.result(20) for future in asked)
        assert (a, b) == (Reply("a t p"), Reply("b t p"))
        assert "ValueError: no" in raised.error and "with a int" in number.error
        assert "died" in died.error and "0.5 s (turns.timeout_s)" in hung.error
        assert pool.counts == {"replied": 2, "over": 0, "failed": 2, "timed_out": 1, "died": 1}
        assert len(before & processes()) <= 1, "the hanging process was not ended"
    finally:
        pool.close()
    assert not processes()
    with pytest.raises(RewardError, match="closed"):
        ask(pool, "a").result(0)


@pytest.mark.slow
def test_replies_are_waited_for_side_by_side():
    pool = EnvironmentPool(TurnsConfig(environment=NAUGHTY, timeout_s=5.0, workers=2))
    try:
        began = time.monotonic()
        for future in [ask(pool, "sleep") for _ in range(8)]:
            assert future.result(20).text == "sleep t p"
        assert time.monotonic() - began < 0.75  # 0.8 s one after the other
    finally:
        pool.close()


@pytest.mark.slow
def test_an_environment_that_cannot_be_used_is_told_when_the_pool_starts():
    with pytest.raises(RewardError, match=r"environment process cannot start: turns\.options"):
        EnvironmentPool(TurnsConfig(environment="calculator", options={"colour": 1}))
