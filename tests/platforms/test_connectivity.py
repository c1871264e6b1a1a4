"""Which devices talk to each other, against groups that megatron-core itself makes."""

import numpy as np
import pytest
from megatron.core.parallel_state import RankGenerator

from mindspeed_asyncflow.config import parse_config
from mindspeed_asyncflow.platforms.connectivity import hccl_groups

ORDER = "tp-cp-ep-dp-pp"


def config_of(*overrides):
    return parse_config("", [f"trainer.{o}" if "." not in o else o for o in overrides])


@pytest.mark.parametrize(
    "tp, cp, dp, pp, ep, per_node", [(2, 1, 4, 2, 1, 8), (2, 2, 2, 2, 1, 4), (1, 1, 8, 2, 4, 8), (4, 1, 4, 1, 2, 8)]
)
def test_groups_are_those_of_megatron(tp, cp, dp, pp, ep, per_node):
    sizes = [f"tensor_parallel={tp}", f"context_parallel={cp}", f"data_parallel={dp}", f"pipeline_parallel={pp}"]
    found = {g.kind: g for g in hccl_groups(config_of(*sizes, f"expert_parallel={ep}"), per_node)}
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    experts = RankGenerator(tp=tp, ep=ep, dp=dp * cp // ep, pp=pp, cp=1, order=ORDER)
    expected = {
        "tensor": dense.get_ranks("tp"), "context": dense.get_ranks("cp"), "data": dense.get_ranks("dp-cp"),
        "pipeline": dense.get_ranks("pp"), "expert": experts.get_ranks("ep"),
    }  # fmt: skip
    for kind, groups in expected.items():
        if len(groups[0]) == 1:
            assert f"trainer {kind}" not in found
            continue
        nodes = max(len(set(np.array(ranks) // per_node)) for ranks in groups)
        group = found[f"trainer {kind}"]
        assert (group.count, group.size, group.nodes) == (len(groups), len(groups[0]), nodes)


def test_a_replica_inside_a_node_talks_over_hccs_only():
    config = config_of("rollout.tensor_parallel=4", "rollout.replicas=3")
    (group,) = hccl_groups(config, 8)
    assert str(group) == "rollout tensor: 3 x 4 devices inside a node, HCCS"


def test_a_sender_of_weights_and_its_replica_are_a_group_that_may_cross_nodes():
    config = config_of("rollout.tensor_parallel=4", "rollout.replicas=3", "rollout.ascend.transfer=hccl")
    (group,) = [g for g in hccl_groups(config, 8) if g.kind == "weights to a replica"]
    assert (group.count, group.size, group.nodes) == (3, 5, 2)


def test_the_critic_follows_the_trainer_on_the_nodes():
    config = config_of("tensor_parallel=4", "algorithm.advantage=gae")
    found = {g.kind: g.nodes for g in hccl_groups(config, 3)}
    assert found == {"trainer tensor": 2, "critic tensor": 2}
    assert {g.kind: g.nodes for g in hccl_groups(config, 6)} == {"trainer tensor": 1, "critic tensor": 2}


def test_one_device_of_each_kind_has_no_group():
    assert hccl_groups(config_of("tensor_parallel=1"), 8) == []
