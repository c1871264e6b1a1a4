from collections import Counter

import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.topology import Node
from mindspeed_asyncflow.service.assignment import assign, rank_topology


def config(**sections):
    return Config.model_validate(sections)


def cluster(*devices, superpods=None):
    pods = superpods or [""] * len(devices)
    return [Node(f"n{i}", f"10.0.0.{i + 1}", count, pod) for i, (count, pod) in enumerate(zip(devices, pods))]


def used(home):
    return Counter(node for name, node in home.items() if not name.startswith("dock"))


def test_on_one_node_ray_chooses():
    assert assign(config(trainer={"data_parallel": 2}), cluster(8)) == {}


def test_a_tensor_parallel_group_never_crosses_nodes_and_pipeline_stages_do():
    settings = config(trainer={"tensor_parallel": 4, "pipeline_parallel": 3}, rollout={"replicas": 4})
    home = assign(settings, cluster(6, 6, 4))
    for group in range(3):
        assert len({home[f"trainer{group * 4 + i}"] for i in range(4)}) == 1
    assert len({home[f"trainer{i}"] for i in range(12)}) == 3
    assert used(home) == {"n0": 6, "n1": 6, "n2": 4}  # replicas fill what is left


def test_replicas_keep_away_from_the_trainer_as_long_as_there_is_room():
    settings = config(trainer={"data_parallel": 4}, rollout={"replicas": 2, "tensor_parallel": 2})
    home = assign(settings, cluster(4, 4, 4))
    assert {home[f"trainer{i}"] for i in range(4)} == {"n0"}
    assert {home[f"rollout{i}"] for i in range(2)} == {"n2"}


def test_large_replicas_are_placed_before_small_ranks_break_up_the_nodes():
    settings = config(trainer={"data_parallel": 5}, rollout={"replicas": 1, "tensor_parallel": 4})
    home = assign(settings, cluster(4, 5))
    assert home["rollout0"] == "n1" and used(home) == {"n0": 4, "n1": 2}


def test_a_replica_that_no_node_can_hold_is_refused_with_what_is_free():
    settings = config(trainer={"data_parallel": 2}, rollout={"replicas": 1, "tensor_parallel": 4})
    with pytest.raises(PlatformError, match=r"rollout0 wants 4 devices of one node, free are 10\.0\.0\.1: 3 of 3"):
        assign(settings, cluster(3, 3))


def test_replicas_that_may_come_later_need_no_place_yet():
    settings = config(rollout={"replicas": 4, "min_replicas": 1})
    home = assign(settings, cluster(1, 1))
    assert "rollout0" in home and "rollout1" not in home


def test_a_tensor_parallel_group_larger_than_any_node_fills_nodes_in_order():
    home = assign(config(trainer={"tensor_parallel": 4}), cluster(2, 2, 1))
    assert [home[f"trainer{i}"] for i in range(4)] == ["n0", "n0", "n1", "n1"]


def test_ranks_whose_devices_hold_a_replica_in_turn_share_a_node():
    shared = {"workflow": {"schedule": "colocated"}, "rollout": {"replicas": 2, "tensor_parallel": 4, "engine": "vllm"}}
    home = assign(config(trainer={"tensor_parallel": 2, "data_parallel": 4}, **shared), cluster(6, 6))
    assert [{home[f"trainer{i}"] for i in range(first, first + 4)} for first in (0, 4)] == [{"n0"}, {"n1"}]


def test_every_node_has_a_dock_pair_before_one_has_two():
    home = assign(config(dock={"pairs": 4}), cluster(1, 1, 1))
    assert [home[f"dock{i}"] for i in range(4)] == ["n0", "n1", "n2", "n0"]


def test_ranks_of_one_superpod_meet_over_hccs_and_of_two_over_roce():
    nodes = cluster(2, 2, 2, superpods=["a", "a", "b"])
    topology = rank_topology(nodes, ["n0", "n0", "n1", "n2"])
    assert [topology.link(0, other) for other in range(4)] == ["local", "node", "superpod", "roce"]
