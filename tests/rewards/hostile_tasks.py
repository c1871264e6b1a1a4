"""Tasks that misbehave on purpose; loaded by scorer processes under their module name."""

from __future__ import annotations

import os
import re
import signal
import sys
import time


class Hostile:
    """Does what the answer says."""

    name = "hostile"

    def problems(self, size, seed):
        return []

    def score(self, text, truth, finished):
        if text == "sleep":
            time.sleep(600)
        if text == "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")  # exponential, inside C, holds the interpreter lock
        if text == "slow":
            time.sleep(0.25)
        if text == "raise":
            raise ZeroDivisionError("one third of nothing")
        if text == "exit":
            os._exit(7)
        if text == "alarm":
            return self._with_alarm()
        if text == "heavy":
            return float("torch" in sys.modules or "transformers" in sys.modules)
        return {"none": None, "nan": float("nan"), "inf": float("inf"), "word": "good"}.get(text, 1.0)

    def _with_alarm(self):
        """As math scorers guard themselves: `signal` works in the main thread of a process only."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(5)
        signal.alarm(0)
        return 1.0


class Unstartable(Hostile):
    def __init__(self):
        os._exit(3)
