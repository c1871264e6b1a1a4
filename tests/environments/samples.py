"""Environments of the tests."""

import os
import time


class Counter:
    """Counts the turns, up to `until`."""

    def __init__(self, until: int = 9) -> None:
        self.until = until

    def reply(self, turns, truth, fields):
        return str(len(turns)) if len(turns) < self.until else None


class Naughty:
    """Does what the last turn says."""

    def reply(self, turns, truth, fields):
        text = turns[-1].text
        if text == "hang":
            sum(range(10**12))  # in compiled code: no Python signal handler runs
        if text == "die":
            os._exit(3)
        if text == "raise":
            raise ValueError("no")
        if text == "number":
            return 7
        if text == "sleep":
            time.sleep(0.1)
        return f"{text} {truth} {fields['prompt']}"


class Deaf:
    pass


class Curt:
    def reply(self, turns):
        return None
