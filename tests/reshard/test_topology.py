import pytest

from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.reshard.topology import Topology


def test_the_link_between_two_ranks_is_the_slowest_that_they_must_cross():
    topology = Topology.regular(8, per_node=2, nodes_per_superpod=2)
    assert [topology.link(0, r) for r in (0, 1, 2, 3, 4, 7)] == [
        "local",
        "node",
        "superpod",
        "superpod",
        "roce",
        "roce",
    ]


def test_a_node_in_two_superpods_is_refused():
    with pytest.raises(ConfigError, match="node 0 lies in superpods 0 and 1"):
        Topology((0, 0), (0, 1))
    with pytest.raises(ConfigError, match="2 ranks have a node, 1 a superpod"):
        Topology((0, 0), (0,))
