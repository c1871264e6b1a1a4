"""The analytic model: textbook numbers, and the direction of every size."""

from __future__ import annotations

import pytest

from mindspeed_asyncflow.planner.analytic import analytic_costs, calibrated, stage_share
from mindspeed_asyncflow.planner.costs import Costs
from tests.planner.models import DEEPSEEK, MOE, PLAIN, QWEN_7B, configuration, work

IDEAL = ["cluster.compute_efficiency=1", "cluster.memory_efficiency=1", "cluster.link_efficiency=1"]


def costs(*overrides: str, model=QWEN_7B, **more):
    return analytic_costs(configuration(*overrides), work(model), **more)


def test_training_takes_six_operations_per_weight_and_token():
    found = costs(*IDEAL)
    assert found.train_token_s == pytest.approx(6 * work(QWEN_7B).active / 376e12)
    assert costs(*IDEAL, "trainer.recompute=true").train_token_s == pytest.approx(found.train_token_s * 4 / 3)


def test_decoding_reads_all_weights_and_the_cache_of_every_token():
    found = costs(*IDEAL)
    assert found.decode_weights_s == pytest.approx(work(QWEN_7B).dense * 2 / 1600e9)
    assert found.decode_context_s == pytest.approx(28 * 2 * 4 * 128 * 2 / 1600e9)
    assert found.prefill_token_s == pytest.approx(found.train_token_s / 3)


def test_tensor_parallelism_divides_work_and_costs_communication():
    one, four = costs(), costs("trainer.tensor_parallel=4", "rollout.tensor_parallel=4")
    assert four.decode_weights_s == pytest.approx(one.decode_weights_s / 4)
    assert four.train_square_s == pytest.approx(one.train_square_s / 4)
    assert one.train_token_s / 4 < four.train_token_s < one.train_token_s
    assert one.prefill_token_s / 4 < four.prefill_token_s < one.prefill_token_s


def test_communication_across_nodes_is_slower():
    inside = costs("trainer.tensor_parallel=4")
    across = costs("trainer.tensor_parallel=4", "cluster.devices_per_node=2")
    assert across.train_token_s > 1.5 * inside.train_token_s


def test_messages_of_a_ring_do_not_shrink_with_more_ranks():
    def moves(ranks, way):
        sizes = (f"trainer.context_parallel={ranks}", f"trainer.mindspeed.context_parallel={way}")
        return costs(*sizes, *IDEAL).train_token_s - costs(*IDEAL).train_token_s / ranks

    assert moves(1, "ring") == pytest.approx(0, abs=1e-12)
    assert moves(4, "ulysses") < 0.8 * moves(2, "ulysses")
    assert moves(4, "ring") > moves(2, "ring") > 0


def test_pipelines_share_layers_and_the_head_makes_the_last_stage_longer():
    even = configuration("trainer.pipeline_parallel=4")
    assert stage_share(even, work(QWEN_7B)) > 0.25
    cut = configuration("trainer.pipeline_parallel=4", "trainer.pipeline_layers=[7,8,8,5]")
    assert 0.25 < stage_share(cut, work(QWEN_7B)) < stage_share(even, work(QWEN_7B))
    virtual = configuration("trainer.pipeline_parallel=2", "trainer.virtual_pipeline=2")
    assert analytic_costs(virtual, work(QWEN_7B)).bubble == 0.5
    assert analytic_costs(even, work(QWEN_7B)).bubble == 3


@pytest.mark.parametrize("model", [MOE, DEEPSEEK])
def test_experts_cost_only_what_a_token_uses(model):
    found = costs(*IDEAL, model=model)
    assert found.train_token_s == pytest.approx(6 * work(model).active / 376e12)
    assert 0 < found.expert_share < 1 and found.decode_experts_s > 0
    parallel = ["trainer.data_parallel=4", "trainer.expert_parallel=4"]
    assert costs(*IDEAL, *parallel, model=model).train_token_s > found.train_token_s  # all-to-all


def test_versions_go_over_every_link_that_is_there():
    version = work(QWEN_7B).parameters * 2
    near = costs(*IDEAL, "trainer.data_parallel=8")
    assert near.publish_s == pytest.approx(version / (8 * 32e9))
    assert near.load_s == pytest.approx(version / 32e9)
    assert near.fetch_s == 0
    far = costs(*IDEAL, "trainer.data_parallel=16", "rollout.replicas=64")
    assert far.fetch_s == pytest.approx(4 * version / (16 * 25e9))  # one node sends to four
    turns = costs(*IDEAL, "trainer.data_parallel=16", "workflow.schedule=colocated", reshard_s=1.0)
    assert turns.give_s == pytest.approx(turns.take_s + 1.0) and turns.fetch_s == 0


def test_data_parallel_ranks_pay_for_their_gradients_and_share_the_update():
    one = costs("trainer.distributed_optimizer=false")
    many = costs("trainer.data_parallel=8", "trainer.distributed_optimizer=false")
    shared = costs("trainer.data_parallel=8", "trainer.distributed_optimizer=true")
    assert many.optimizer_s > one.optimizer_s
    assert shared.optimizer_s < many.optimizer_s


def test_calibration_factors_scale_sides():
    plain, scaled = costs(), costs("simulation.rollout_scale=2", "simulation.train_scale=3")
    assert scaled.decode_weights_s == pytest.approx(2 * plain.decode_weights_s)
    assert scaled.train_token_s == pytest.approx(3 * plain.train_token_s)


def test_measured_costs_are_carried_by_the_ratio_of_analytic_ones():
    there = costs("trainer.pipeline_parallel=1")
    here = costs("trainer.pipeline_parallel=2", "rollout.tensor_parallel=2")
    measured = Costs(**PLAIN.to_dict() | {"train_call_s": 0.5, "load_s": 7.0})
    carried = calibrated(here, measured, there)
    assert calibrated(there, measured, there) == measured
    assert carried.load_s == pytest.approx(7.0 / 2)
    assert carried.train_token_s == pytest.approx(measured.train_token_s * here.train_token_s / there.train_token_s)
    assert carried.train_call_s == 0.5  # the analytic model knows no such time
    assert carried.bubble == 1.0
