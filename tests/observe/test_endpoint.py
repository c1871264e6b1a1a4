"""What Prometheus reads: every metric of the table with its definition, on this machine only."""

import socket
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mindspeed_asyncflow.observe.table import METRICS
from mindspeed_asyncflow.observe.trackers import Trackers
from mindspeed_asyncflow.observe.trackers.endpoint import Endpoint, exposed_name


@pytest.fixture
def endpoint():
    made = Endpoint(0, 'run "one"', 60)
    yield made
    made.close(time.monotonic() + 30)


def scrape(endpoint):
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def test_every_metric_has_its_definition_as_help_and_no_value_before_it_has_one(endpoint):
    families = scrape(endpoint)
    for metric in METRICS:
        family = families[exposed_name(metric.name)]
        assert metric.definition in family.documentation and metric.unit in family.documentation
        assert family.samples == []
    assert len({exposed_name(m.name) for m in METRICS}) == len(METRICS)


def test_values_are_those_of_the_newest_step(endpoint):
    endpoint.write(0, 1000.0, {"reward/mean": 0.25, "eval/mean_at_k": 0.5, "scorer/length": 1.0})
    endpoint.write(1, 1002.5, {"reward/mean": 0.75, "actor/grad_norm": float("nan")})
    families = scrape(endpoint)

    def value(name):
        (sample,) = families[name].samples
        assert sample.labels["run"] == 'run "one"'
        return sample.value

    assert value("asyncflow_reward_mean") == 0.75
    assert value("asyncflow_eval_mean_at_k") == 0.5  # not measured in every step
    assert value("asyncflow_actor_grad_norm") != value("asyncflow_actor_grad_norm")  # NaN is told as such
    assert value("asyncflow_steps_done") == 2 and value("asyncflow_steps_wanted") == 60
    assert value("asyncflow_last_step_seconds") == 1002.5
    assert families["asyncflow_scorer"].samples[0].labels == {"run": 'run "one"', "name": "length"}


def test_only_this_machine_is_served(endpoint):
    assert endpoint._server.server_address[0] == "127.0.0.1"


def test_a_port_in_use_costs_the_endpoint_only():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        trackers = Trackers({"prometheus": lambda: Endpoint(taken.getsockname()[1], "r", 1)})
        assert trackers.names == ()


def test_after_the_end_nobody_listens():
    endpoint = Endpoint(0, "r", 1)
    endpoint.close(time.monotonic() + 30)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10)
