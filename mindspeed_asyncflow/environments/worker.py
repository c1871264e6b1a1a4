"""What runs inside an environment process. Imports the environment and nothing heavy.

Protocol, one JSON text per line on one socket. To the process: a list of [turns, truth, fields], turns as [role, text].
Back: first ["ready"] or ["failed", reason], then for each, as soon as it is known, [reply, error, {}]: a text and "";
null and "" where the conversation is over; null and what went wrong.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from mindspeed_asyncflow.environments.base import Environment, Turn, build_environment
from mindspeed_asyncflow.errors import DataError, RewardError
from mindspeed_asyncflow.rewards.child import end_with_parent, send


def main(descriptor: int, parent: int, spec: dict[str, Any]) -> None:
    """Serve the socket `descriptor` until the other side closes it."""
    end_with_parent(parent)
    with socket.socket(fileno=descriptor) as channel:
        try:
            environment = build_environment(spec["name"], spec["options"])
        except (DataError, RewardError) as error:
            send(channel, ["failed", str(error)])
            return
        send(channel, ["ready"])
        for line in channel.makefile("r", encoding="utf-8", newline="\n"):
            for turns, truth, fields in json.loads(line):
                send(channel, reply_one(environment, [Turn(*turn) for turn in turns], truth, fields))


def reply_one(environment: Environment, turns: list[Turn], truth: str, fields: dict[str, Any]) -> list[Any]:
    """[reply, error, {}]. Whatever the environment does wrong becomes a named error."""
    try:
        text = environment.reply(turns, truth, fields)
    except Exception as error:  # boundary: environments are user code, their failures end one conversation
        return [None, f"{type(error).__name__}: {error}", {}]
    if text is None or isinstance(text, str):
        return [text, "", {}]
    return [None, f"it replied with a {type(text).__name__}, not with a str or None", {}]
