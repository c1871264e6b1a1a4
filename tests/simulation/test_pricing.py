"""What sharing devices costs: the in-place plan, priced by the model of its time."""

import pytest

from mindspeed_asyncflow.cli.plan import model_work
from mindspeed_asyncflow.config.load import load_config
from mindspeed_asyncflow.planner.candidates import changed
from mindspeed_asyncflow.simulation.pricing import gather_s, priced, reshard_s


@pytest.fixture(scope="module")
def colocated():
    config = load_config("configs/simulate/qwen2.5-7b.yaml")
    return changed(config, "workflow", schedule="colocated", max_lag=0), model_work(config)


def test_the_plan_costs_at_least_the_bytes_that_a_device_lacks_and_not_much_more(colocated):
    """TP 4 to TP 1: each rank lacks three quarters of the model; copies of its own quarter and messages come on top."""
    config, work = colocated
    assert gather_s(config, work) <= reshard_s(config, work) <= 2 * gather_s(config, work)


def test_equal_layouts_move_nothing_between_devices(colocated):
    config, work = colocated
    same = changed(config, "rollout", tensor_parallel=config.trainer.tensor_parallel)
    assert reshard_s(same, work) < 0.1 * reshard_s(config, work)


def test_only_shared_devices_pay_for_it(colocated):
    config, work = colocated
    apart = changed(config, "workflow", schedule="separated")
    assert priced(apart, work)[1].give_s == 0
    assert priced(config, work)[1].give_s > reshard_s(config, work)
