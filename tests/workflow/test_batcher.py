import numpy as np
import pytest

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.records import TrainSample
from mindspeed_asyncflow.workflow.batcher import RowInfo, pack, plan


def sample(prompt, response, *, row=0, advantage=1.0, mask=None, reference=None):
    return TrainSample(
        row=row,
        group_id=0,
        member=0,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        rollout_logprobs=-np.arange(1, len(response) + 1, dtype=np.float32),
        advantage=advantage,
        version_min=0,
        version_max=0,
        ref_logprobs=None if reference is None else np.array(reference, np.float32),
        loss_mask=None if mask is None else np.array(mask, np.uint8),
    )


def test_positions_restart_and_boundaries_follow_lengths():
    """B78: samples of 3, 2 and 4 positions."""
    batch = pack([sample([7, 8], [9, 1]), sample([5], [6, 1]), sample([2, 3], [4, 5, 1])])
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 9]


def test_targets_never_cross_a_sample_boundary():
    """B78: the token after the last position of a sample is its own last token."""
    batch = pack([sample([7, 8], [9, 1]), sample([5], [6, 1])])
    assert batch.input_ids.tolist() == [7, 8, 9, 5, 6]
    assert batch.targets.tolist() == [8, 9, 1, 6, 1]
    assert batch.loss_mask.tolist() == [0, 1, 1, 1, 1]


def test_mask_counts_exactly_the_tokens_that_the_engine_reported():
    """B27: three answers of 3, 3 and 6 tokens, with and without an EOS (id 1)."""
    batch = pack([sample([4], [5, 6, 1]), sample([4], [5, 6, 7]), sample([4], [5, 6, 7, 8, 9, 5])])
    per_sample = [batch.loss_mask[batch.sample_index == i].sum() for i in range(3)]
    assert per_sample == [3, 3, 6]


def test_eos_that_equals_the_pad_id_is_trained():
    """B28: pad = eos = 2; an EOS-valued id in the middle of an answer stays too."""
    batch = pack([sample([4], [5, 6, 2]), sample([4], [5, 2, 6, 2])])
    trained = batch.targets[batch.loss_mask > 0]
    assert trained.tolist() == [5, 6, 2, 5, 2, 6, 2]


def test_ids_are_those_that_were_sampled():
    """B32: [a, b] stays two ids with two log-probabilities although the text "ab" is one token elsewhere."""
    batch = pack([sample([0], [1, 2])])
    assert batch.targets[batch.loss_mask > 0].tolist() == [1, 2]
    assert batch.rollout_logprobs[batch.loss_mask > 0].tolist() == [-1.0, -2.0]


def test_masked_response_tokens_carry_no_advantage_but_stay_in_context():
    batch = pack([sample([4], [5, 6, 7], mask=[0, 1, 1], reference=[-1, -2, -3])])
    assert batch.input_ids.tolist() == [4, 5, 6]
    assert batch.loss_mask.tolist() == [0, 1, 1]
    assert batch.advantages.tolist() == [0, 1, 1]
    assert batch.ref_logprobs.tolist() == [-1, -2, -3]


def test_a_rank_without_rows_gets_one_position_of_weight_zero():
    batch = pack([])
    assert batch.num_valid_tokens == 0
    assert batch.rows.tolist() == [-1]


def infos(tokens):
    return [RowInfo(row=100 + i, group_id=i // 4, member=i % 4, tokens=n) for i, n in enumerate(tokens)]


def test_plan_does_not_depend_on_arrival_order():
    rows = infos([9, 3, 7, 5, 8, 2, 6, 4])
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    assert plan(rows, 2, 16) == plan(shuffled, 2, 16)


@pytest.mark.parametrize("data_parallel", [1, 2, 3])
def test_plan_holds_every_row_once_within_the_token_limit(data_parallel):
    tokens = np.random.default_rng(1).integers(1, 30, 64).tolist()
    rows = infos(tokens)
    replicas = plan(rows, data_parallel, 64, count_multiple=2)
    flat = [r for replica in replicas for batch in replica for r in batch]
    assert sorted(flat) == [r.row for r in rows]
    size = {r.row: r.tokens for r in rows}
    assert all(sum(size[r] for r in batch) <= 64 for replica in replicas for batch in replica)
    assert len({len(replica) for replica in replicas}) == 1 and len(replicas[0]) % 2 == 0


def test_replicas_get_even_token_loads():
    tokens = [100] * 4 + [1] * 60
    rows = infos(tokens)
    size = {r.row: r.tokens for r in rows}
    loads = [sum(size[r] for batch in replica for r in batch) for replica in plan(rows, 4, 400)]
    assert max(loads) - min(loads) <= 1


def test_a_sample_larger_than_a_micro_batch_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"trainer\.micro_batch_tokens"):
        plan(infos([5, 50]), 1, 20)
