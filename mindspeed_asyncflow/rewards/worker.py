"""What runs inside a scorer process. Imports nothing heavy: it must be up in a fraction of a second.

Protocol, one JSON text per line on one socket. To the process: a list of answers, the fields of `Answer` each. Back:
first ["ready"] or ["failed", reason], then for each answer, as soon as it is scored, [value, error, parts]: a number
and ""; null and "" where all scorers abstain; null and what went wrong. [] says that the process lives: the deadline of
the next answer starts anew.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from mindspeed_asyncflow.errors import DataError, RewardError
from mindspeed_asyncflow.rewards.base import Answer
from mindspeed_asyncflow.rewards.child import end_with_parent, send
from mindspeed_asyncflow.rewards.registry import Spec, build


def main(descriptor: int, parent: int, spec: dict[str, Any]) -> None:
    """Serve the socket `descriptor` until the other side closes it."""
    end_with_parent(parent)
    with socket.socket(fileno=descriptor) as channel:
        try:
            scorers = build(Spec(**spec))
        except (DataError, RewardError) as error:
            send(channel, ["failed", str(error)])
            return
        send(channel, ["ready"])
        for line in channel.makefile("r", encoding="utf-8", newline="\n"):
            answers = [Answer(*fields) for fields in json.loads(line)]
            asked: dict[str, list[float | Exception | None]] = {}
            if scorers.in_batches:
                asked = scorers.ask_batches(answers)
                send(channel, [])
            for i, answer in enumerate(answers):
                result = scorers.result(answer, {name: said[i] for name, said in asked.items()})
                send(channel, [result.value, result.error, result.parts])
