"""Memory by kind, against counts made by hand."""

from __future__ import annotations

import pytest

from mindspeed_asyncflow.planner import memory
from mindspeed_asyncflow.planner.memory import MIB, rollout_bytes, trainer_bytes
from tests.planner.models import DEEPSEEK, MOE, QWEN_7B, configuration, work

QWEN = work(QWEN_7B)
WIDENED = 2 * 4 * 2**25  # logits and their gradient that are float32 at a time


def of_trainer(*overrides: str, model=QWEN):
    return trainer_bytes(configuration(*overrides), model)


def test_mixed_precision_adam_takes_eighteen_bytes_per_weight():
    kinds = of_trainer()
    states = kinds[memory.WEIGHTS] + kinds[memory.GRADIENTS] + kinds[memory.OPTIMIZER]
    assert states == pytest.approx(18 * QWEN.parameters, rel=1e-6)


def test_float32_training_keeps_no_masters():
    kinds = of_trainer("model.dtype=float32")
    states = kinds[memory.WEIGHTS] + kinds[memory.GRADIENTS] + kinds[memory.OPTIMIZER]
    assert states == pytest.approx(16 * QWEN.parameters, rel=1e-6)


def test_a_distributed_optimizer_divides_only_the_optimizer():
    whole, shared = of_trainer(), of_trainer("trainer.data_parallel=4", "trainer.distributed_optimizer=true")
    assert shared[memory.OPTIMIZER] == pytest.approx(whole[memory.OPTIMIZER] / 4)
    assert shared[memory.GRADIENTS] == whole[memory.GRADIENTS]


def test_the_fullest_pipeline_rank_counts():
    kinds = of_trainer("trainer.pipeline_parallel=4", "trainer.pipeline_layers=[7,8,8,5]")
    first = 7 * QWEN.layer_dense[0] + QWEN.vocabulary
    assert kinds[memory.WEIGHTS] == pytest.approx(2 * first)


def test_expert_parallelism_divides_experts_only():
    moe = work(MOE)
    alone, shared = (of_trainer(f"trainer.expert_parallel={n}", model=moe)[memory.WEIGHTS] for n in (1, 4))
    assert alone - shared == pytest.approx(2 * moe.experts * 3 / 4)


def test_optimizer_state_of_an_expert_is_cut_over_the_ranks_that_hold_it_only():
    moe = work(MOE)
    sizes = ["trainer.data_parallel=8", "trainer.expert_parallel=4", "trainer.distributed_optimizer=true"]
    dense = moe.dense + moe.vocabulary - moe.shape.hidden  # the last norm is left out
    assert of_trainer(*sizes, model=moe)[memory.OPTIMIZER] == pytest.approx(12 * (dense / 8 + moe.experts / 4 / 2))


def test_recomputation_keeps_one_row_per_layer_and_one_whole_layer():
    saved, again = (of_trainer(f"trainer.recompute={r}")[memory.ACTIVATIONS] for r in ("false", "true"))
    logits = 4096 * 2 * 2 * 152064 + WIDENED
    assert again == pytest.approx(4096 * 2 * (28 * 3584 + QWEN.layer_activations) + logits)
    assert saved == pytest.approx(4096 * 2 * 28 * QWEN.layer_activations + logits)


def test_sequence_parallelism_divides_all_activations():
    tensor = "trainer.tensor_parallel=4"
    plain, cut = (of_trainer(tensor, f"trainer.sequence_parallel={s}")[memory.ACTIVATIONS] for s in ("false", "true"))
    assert cut - WIDENED == pytest.approx((of_trainer()[memory.ACTIVATIONS] - WIDENED) / 4)
    assert plain - cut == pytest.approx(4096 * 28 * 2 * 3 * 3584 * 3 / 4)


def test_earlier_stages_hold_more_micro_batches():
    first, last = (memory._activations(configuration("trainer.pipeline_parallel=4"), QWEN, r, 7) for r in (0, 3))
    logits = 4096 * 2 * 2 * 152064 + WIDENED
    assert first == pytest.approx(4 * (last - logits))


def test_buckets_stay_between_their_limits():
    assert memory.bucket_bytes(1 << 40) == 512 * MIB
    assert memory.bucket_bytes(64 * MIB) == 16 * MIB
    assert memory.bucket_bytes(MIB) == MIB


def test_a_replica_cuts_its_cache_by_heads():
    kinds = rollout_bytes(configuration("rollout.tensor_parallel=2", "rollout.kv_cache_mb=1000"), QWEN)
    assert kinds[memory.CACHE] == 500 * MIB
    assert kinds[memory.WEIGHTS] == QWEN.parameters
    eight = rollout_bytes(configuration("rollout.tensor_parallel=8", "rollout.kv_cache_mb=1000"), QWEN)
    assert eight[memory.CACHE] == 250 * MIB  # 8 ranks hold 4 heads twice
    assert memory.cache_bytes_per_token(configuration(), QWEN) == 28 * 2 * 4 * 128 * 2


def test_every_tensor_rank_holds_a_latent_cache_whole():
    kinds = rollout_bytes(configuration("rollout.tensor_parallel=4", "rollout.kv_cache_mb=1000"), work(DEEPSEEK))
    assert kinds[memory.CACHE] == 1000 * MIB
