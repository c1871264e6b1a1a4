"""Spoiled bodies of the completion calls: refused or answered, never a fault of the server."""

import copy
import json
import random
from collections import Counter

import httpx
import pytest

from tests.web.replica_fakes import TOKEN, Replicas, served

BODIES = 1000
CHAT = {
    "model": "policy",
    "messages": [{"role": "system", "content": "ab"}, {"role": "user", "content": [{"type": "text", "text": "cd"}]}],
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "seed": 7,
    "stop": ["x", "yz"],
    "stop_token_ids": [9],
    "logprobs": True,
    "top_logprobs": 0,
    "max_tokens": 5,
    "stream": False,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "tools": [],
    "logit_bias": {},
    "user": "me",
    "timeout_s": 20.0,
}
TEXT = {name: value for name, value in CHAT.items() if name not in ("messages", "logprobs", "top_logprobs", "tools")}
TEXTS = [TEXT | {"prompt": prompt, "logprobs": 0} for prompt in ("ab", ["ab", "c"], [3, 4], [[3], [4, 5]])]
JUNK = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        -(2**70),
        10**400,
        1e308,
        -0.0,
        0.5,
        "",
        "a",
        "7",
        "\ud800",
        "\x00",
        "Ä",
    ),
    *("x" * 5000, [], [[]], [None], ["\udfff"], [1, "a"], [1.5], {}, {"a": {}}, {"role": "user"}, "../../etc/passwd"),
    *([0] * 5000, ["ab"] * 300, {"type": "text", "text": 3}, [{"role": "tool", "content": None}], "{{ 7*7 }}"),
]

NAMES = ["", "__class__", "chat_template", "n ", "prompt", "messages"]

pytestmark = pytest.mark.slow


def spoiled(draw):
    """One value or name of a body is another one."""
    body = json.loads(json.dumps(draw.choice([CHAT, *TEXTS])))
    for _ in range(draw.randint(1, 3)):
        place = body
        while True:
            steps = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not steps:
                break
            step = draw.choice(steps)
            if isinstance(place[step], dict | list) and draw.random() < 0.6:
                place = place[step]
                continue
            how = draw.random()
            if how < 0.1:
                del place[step]
            elif how < 0.2 and isinstance(place, dict):
                place[draw.choice(["", "__class__", "chat_template", "n ", "prompt", "messages"])] = copy.deepcopy(
                    draw.choice(JUNK)
                )
            else:
                place[step] = copy.deepcopy(draw.choice(JUNK))
            break
    return json.dumps(body).encode()


def broken(draw):
    """Not JSON any more, mostly."""
    body = bytearray(json.dumps(draw.choice([CHAT, *TEXTS])).encode())
    for _ in range(draw.randint(1, 4)):
        body[draw.randrange(len(body))] = draw.randrange(256)
    how = draw.random()
    return bytes(body[: draw.randrange(len(body))]) if how < 0.4 else bytes(body) if how < 0.9 else b"[" * 20000


def test_whatever_is_sent_is_refused_or_answered():
    draw, met, faults = random.Random(0), Counter(), []
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    verbs = Replicas()
    with served(verbs) as address, httpx.Client(base_url=address, headers=headers, timeout=30) as client:
        for _ in range(BODIES):
            body = spoiled(draw) if draw.random() < 0.75 else broken(draw)
            path = draw.choice(["/v1/chat/completions", "/v1/completions"])
            answer = client.post(path, content=body)
            met[answer.status_code] += 1
            told = answer.json() if "json" in answer.headers["content-type"] else {}
            if answer.status_code >= 500 or (answer.status_code >= 400 and not told["error"]["message"]):
                faults.append((path, body[:300], answer.text[:300]))
        assert client.post("/v1/completions", json={"prompt": "ab"}).json()["choices"][0]["text"] == "an_answer"
    assert not faults and met[400] > BODIES / 2 and met[200] > BODIES / 50, (met, faults[:3])
    assert verbs.running == 0
