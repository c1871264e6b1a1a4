import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.records import TrainSample
from mindspeed_asyncflow.workflow.batcher import RowInfos, pack, plan


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
    assert batch.ref_logprobs.tolist() == [0, -2, -3]


def test_a_rank_without_rows_gets_one_position_of_weight_zero():
    batch = pack([])
    assert batch.num_valid_tokens == 0
    assert batch.rows.tolist() == [-1]


def infos(tokens, order=None):
    """Rows 100, 101, ... of groups of four; they arrive in `order`."""
    place = np.arange(len(tokens)) if order is None else np.asarray(order)
    return RowInfos(100 + place, place // 4, place % 4, np.asarray(tokens)[place])


def test_plan_does_not_depend_on_arrival_order():
    tokens = [9, 3, 7, 5, 8, 2, 6, 4]
    shuffled = infos(tokens, np.random.default_rng(0).permutation(len(tokens)))
    assert plan(infos(tokens), 2, 16) == plan(shuffled, 2, 16)


@pytest.mark.parametrize("data_parallel", [1, 2, 3])
def test_plan_holds_every_row_once_within_the_token_limit(data_parallel):
    tokens = np.random.default_rng(1).integers(1, 30, 64).tolist()
    rows = infos(tokens)
    replicas = plan(rows, data_parallel, 64, count_multiple=2)
    flat = [r for replica in replicas for batch in replica for r in batch]
    size = dict(zip(rows.rows.tolist(), tokens))
    assert sorted(flat) == list(size)
    assert all(sum(size[r] for r in batch) <= 64 for replica in replicas for batch in replica)
    assert len({len(replica) for replica in replicas}) == 1 and len(replicas[0]) % 2 == 0


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 64), min_size=1, max_size=60),
    data_parallel=st.integers(1, 6),
    multiple=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_any_plan_keeps_the_limit_has_every_row_once_and_spreads_tokens(tokens, data_parallel, multiple, random):
    limit, rows = 64, infos(tokens)
    replicas = plan(rows, data_parallel, limit, multiple)
    size = dict(zip(rows.rows.tolist(), tokens))
    assert sorted(r for replica in replicas for batch in replica for r in batch) == list(size)
    assert len({len(replica) for replica in replicas}) == 1 and len(replicas[0]) % multiple == 0
    filled = [[sum(size[r] for r in batch) for batch in replica] for replica in replicas]
    assert max(map(max, filled)) <= limit
    loads = [sum(each) for each in filled]
    assert max(loads) <= sum(tokens) / data_parallel + (1 - 1 / data_parallel) * max(tokens) + 1e-9
    assert max(loads) - min(loads) <= max(tokens)
    for replica in filled:
        assert max(replica) - min(replica) <= max(tokens), "micro-batches of a replica are filled alike"
    needed = -(-max(loads) // limit)
    assert len(replicas[0]) < 2 * needed + multiple
    order = random.sample(range(len(tokens)), len(tokens))
    assert plan(infos(tokens, order), data_parallel, limit, multiple) == replicas


def test_long_tailed_answers_load_replicas_evenly_where_dealing_in_turn_does_not():
    rng = np.random.default_rng(0)
    balanced, in_turn, batches = [], [], []
    for _ in range(10):
        tokens = np.minimum(rng.lognormal(6, 1.2, 256).astype(int) + 50, 8192)
        rows = infos(tokens.tolist())
        size = dict(zip(rows.rows.tolist(), tokens.tolist()))
        replicas = plan(rows, 16, 8192)
        loads = [sum(size[r] for batch in replica for r in batch) for replica in replicas]
        mean = tokens.sum() / 16
        balanced.append(max(loads) / mean)
        in_turn.append(max(tokens[i::16].sum() for i in range(16)) / mean)
        batches.append(len(replicas[0]) - -(-max(loads) // 8192))
    assert max(balanced) < 1.01 < 1.4 < min(in_turn)
    assert max(batches) <= 1, "hardly more micro-batches than tokens need"


def test_a_sample_larger_than_a_micro_batch_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"trainer\.micro_batch_tokens"):
        plan(infos([5, 50]), 1, 20)
