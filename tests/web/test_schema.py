"""Calls made from the OpenAPI schema by schemathesis, right ones and wrong ones: answers are as the schema says."""

import json

import pytest
from hypothesis import HealthCheck, given, seed, settings

from mindspeed_asyncflow.web.app import make_app
from mindspeed_asyncflow.web.security import Tenants
from mindspeed_asyncflow.web.server import Listening, offered
from tests.web.fakes import OWNER, FakeVerbs

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis needs Python 3.11: scripts/bootstrap.sh dev")

pytestmark = pytest.mark.slow
TOKEN = "the-token-of-the-owner"
EXAMPLES = 12  # of each operation and kind


@pytest.fixture(scope="module")
def fake():
    return FakeVerbs(patience_s=0.0)


@pytest.fixture(scope="module")
def url(fake):
    with offered(fake, Tenants({OWNER: TOKEN}), Listening(port=0)) as address:
        yield address


def operations():
    schema = schema_of(make_app(FakeVerbs(), Tenants(None)))
    return [result.ok() for result in schemathesis.openapi.from_dict(schema).get_all_operations()]


def schema_of(door):
    from starlette.testclient import TestClient

    return TestClient(door, base_url="http://localhost").get("/openapi.json").json()


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.label)
def test_answers_are_as_the_schema_says(operation, mode, url, fake, monkeypatch):
    mode = schemathesis.GenerationMode[mode]
    statuses = set()
    monkeypatch.setattr(fake, "ended", operation.label == "GET /api/metrics")  # else it goes on for `timeout_s`

    @seed(0)
    @settings(max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def called(case):
        before = fake.state()
        response = case.call(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)
        statuses.add(response.status_code)
        assert response.status_code < 500, response.content
        told = operation.definition.raw["responses"]
        assert str(response.status_code) in told, f"{response.status_code} is not in the schema"
        if response.status_code >= 400:
            assert fake.state() == before
            assert set(json.loads(response.content)["error"]) >= {"code", "message"}

    called()
    assert statuses
