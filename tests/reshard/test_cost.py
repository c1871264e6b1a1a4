import pytest

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel
from mindspeed_asyncflow.reshard.cost import LinkSpeeds, modelled_seconds
from mindspeed_asyncflow.reshard.plan import make_plan
from mindspeed_asyncflow.reshard.rollout_layout import rollout_layout
from mindspeed_asyncflow.reshard.topology import Topology
from mindspeed_asyncflow.reshard.train_layout import train_layout
from tests.reshard.models import QWEN2

FREE = 1e30


def plan(train, rollout, topology, apart=False):
    model = describe(QWEN2)
    source, target = train_layout(model, train), rollout_layout(model, rollout)
    first = source.world_size if apart else 0
    return make_plan(source, target, itemsize=2, bucket_bytes=1 << 20, topology=topology, target_first=first)


def test_one_sender_to_one_receiver_takes_bytes_over_speed_and_one_latency_a_bucket():
    moved = plan(TrainParallel(), RolloutParallel(), Topology.regular(2, 1), apart=True)
    total = int(moved.received_bytes()[1])
    speeds = LinkSpeeds(node=FREE, superpod=1e6, roce=FREE, copy=FREE, latency_s=0.5)
    assert moved.buckets == 1
    assert modelled_seconds(moved, speeds) == pytest.approx(total / 1e6 + 0.5)


def test_each_kind_of_link_has_its_own_speed():
    node = plan(TrainParallel(), RolloutParallel(), Topology.regular(2, 2), apart=True)
    roce = plan(TrainParallel(), RolloutParallel(), Topology.regular(2, 1, 1), apart=True)
    speeds = LinkSpeeds(node=4e6, superpod=FREE, roce=1e6, copy=FREE)
    assert modelled_seconds(roce, speeds) == pytest.approx(4 * modelled_seconds(node, speeds))


def test_copies_inside_a_rank_cost_memory_speed_and_no_latency():
    here = plan(TrainParallel(), RolloutParallel(), Topology.regular(1, 1))
    speeds = LinkSpeeds(node=FREE, superpod=FREE, roce=FREE, copy=1e6, latency_s=9.0)
    assert modelled_seconds(here, speeds) == pytest.approx(here.copied_bytes()[0] / 1e6)
