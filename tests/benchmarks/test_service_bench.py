"""The benchmark of the service: what its last line says, and what it counts as an effect of a spoiled request."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import service as bench
import service_parts as parts
from service_run import Driven, reward

from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.web.client import Client
from mindspeed_asyncflow.web.security import Tenants
from mindspeed_asyncflow.web.server import Listening, offered
from tests.web.fakes import FakeVerbs

TOKENS = {"owner": "the-token-of-the-owner", "intruder": "the-token-of-an-intruder"}
PROMISED = {
    *("verbs_run_ok", "bad_requests_tried", "server_errors", "experience_gb_per_s_over_dock", "overhead_us_per_call"),
}


@pytest.mark.parametrize(
    ("rewards", "whole", "effects", "ok"),
    [([0.1, 0.5], True, [], True), ([0.5, 0.1], True, [], False), ([0.1, 0.5], False, [], False),
     ([0.1, 0.5], True, ["x"], False)],
)  # fmt: skip
def test_a_run_is_ok_only_if_it_is_whole_and_learnt_and_nothing_came_through(rewards, whole, effects, ok):
    spoiled = SimpleNamespace(effects=effects, tried=10, errors=0)
    found = bench.figures(Driven(steps=4, rewards=rewards), whole, spoiled, (0.5, 2.0), 700.0)
    assert found.keys() >= PROMISED
    assert found["verbs_run_ok"] is ok and found["experience_gb_per_s_over_dock"] == 0.25


def test_spoiled_requests_over_sockets_are_counted_by_their_answers():
    fake = FakeVerbs(patience_s=0.0)
    with offered(fake, Tenants(TOKENS), Listening(port=0)) as url:
        spoiled = parts.Spoiled(url, *TOKENS.values(), 150)
        spoiled.send()
    assert spoiled.tried == sum(spoiled.statuses.values()) > 140
    assert spoiled.errors == 0 and spoiled.effects == [] and spoiled.statuses[400] > 70


def test_both_transfers_move_the_same_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "TOKENS", 100)
    fake = FakeVerbs(patience_s=5.0)
    fake.owner = "owner"
    with offered(fake, Tenants(TOKENS), Listening(port=0)) as url, Client(url, TOKENS["intruder"]) as guest:
        assert parts.over_http(guest, 2) > 0
    with DockServer(GRPO_COLUMNS, grpo_tasks(False, service=True), arena_mb=8, secret="a secret") as dock:
        told = {"addresses": [dock.address], "secret": b"a secret".hex()}
        (tmp_path / "dock.json").write_text(json.dumps(told))
        assert parts.direct(tmp_path, 2) > 0


def test_a_taken_request_and_a_fault_are_seen(monkeypatch):
    answers = iter([200, 500, 404, 400])
    monkeypatch.setattr(parts.Spoiled, "_sent", lambda self, request: next(answers))
    spoiled = parts.Spoiled("http://h:1", *TOKENS.values(), 40)
    spoiled._requests = [r for r in spoiled._requests if r.hopeless][:4]
    spoiled.send()
    assert len(spoiled.effects) == 1 and spoiled.errors == 1


def test_the_reward_is_the_share_of_places_and_a_point_for_all():
    assert reward("0237", "0237") == 2.0 and reward("0273", "0237") == 0.5 and reward("", "0237") == 0.0
