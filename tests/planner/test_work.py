"""Sizes of models agree with the weights that they have; stages are cut as well as can be."""

from __future__ import annotations

import itertools

import pytest

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.work import Work, stage_split
from tests.planner.models import DEEPSEEK, MOE, QWEN_7B, work


@pytest.mark.parametrize("model", [QWEN_7B, MOE, DEEPSEEK, {**QWEN_7B, "tie_word_embeddings": True}])
def test_all_weights_are_counted_once(model):
    found = work(model)
    bias = sum(1 for e in found.layer_experts if e) * 8 if model is DEEPSEEK else 0  # router corrections, no matrix
    assert found.parameters + bias == found.shape.parameters


def test_a_token_uses_its_share_of_the_experts():
    found = work(MOE)
    per_layer = 3 * 256 * 128
    assert found.experts == 4 * 16 * per_layer
    assert found.active == pytest.approx(found.dense - 256 + 4 * 2 * per_layer)  # without the last norm


def test_attention_costs_two_operations_per_unmasked_pair_for_scores_and_for_values():
    found = work(QWEN_7B)
    assert found.square_operations == 28 * (2 + 2) * 28 * 128 / 2
    assert found.cached == 28 * 2 * 4 * 128


def test_tensor_ranks_share_key_value_heads_but_repeat_a_latent_cache():
    assert [work(QWEN_7B).cache_cut(tp) for tp in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert work(DEEPSEEK).cache_cut(4) == 1


@pytest.mark.parametrize("missing", [None, 0, "two"])
def test_a_mixture_without_its_active_experts_is_refused(missing):
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        Work.of({**MOE, "num_experts_per_tok": missing})


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_no_other_cut_has_a_cheaper_busiest_stage(stages):
    found = work({**QWEN_7B, "num_hidden_layers": 9})
    cost = [*found.layer_active[:-1], found.layer_active[-1] + found.vocabulary]

    def busiest(counts):
        ends = list(itertools.accumulate(counts))
        return max(sum(cost[end - count : end]) for count, end in zip(counts, ends))

    cuts = itertools.combinations(range(1, 9), stages - 1)
    best = min(busiest([b - a for a, b in itertools.pairwise([0, *cut, 9])]) for cut in cuts)
    split = stage_split(found, stages)
    assert sum(split) == 9 and len(split) == stages and min(split) >= 1
    assert busiest(split) == pytest.approx(best)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="do not fill 29"):
        stage_split(work(QWEN_7B), 29)
