"""Plans are carried out here on numbered elements, by nothing but the moves that they list."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel
from mindspeed_asyncflow.errors import ConfigError, WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape
from mindspeed_asyncflow.reshard.layout import Layout
from mindspeed_asyncflow.reshard.plan import Plan, make_plan
from mindspeed_asyncflow.reshard.rollout_layout import rollout_layout
from mindspeed_asyncflow.reshard.topology import Topology
from mindspeed_asyncflow.reshard.train_layout import train_layout
from tests.reshard.models import DEEPSEEK, DEEPSEEK_R1, FAMILIES, QWEN2, QWEN2_TIED, QWEN3_MOE

NOTHING = -1


def numbered(layout):
    """Every full tensor with a number of its own in every element."""
    full, start = {}, 0
    for name, tensor in layout.tensors.items():
        rows, cols = matrix_shape(tensor.shape)
        full[name] = np.arange(start, start + rows * cols).reshape(rows, cols)
        start += rows * cols
    return full


def wanted(layout, rank, full):
    """{tensor: matrix with the elements of `rank`, NOTHING elsewhere}."""
    found = {}
    for param in layout.ranks[rank]:
        for segment in param.segments:
            canvas = found.setdefault(segment.name, np.full_like(full[segment.name], NOTHING))
            at = np.s_[segment.box.r0 : segment.box.r1, segment.box.c0 : segment.box.c1]
            canvas[at] = full[segment.name][at]
    return found


def carry_out(plan, source, target, target_first):
    """Execute all moves; returns what every target rank ends with. Fails where a sender does not hold what it sends."""
    full = numbered(target)
    world = plan.topology.world_size
    have = [wanted(source, r, full) if r < source.world_size else {} for r in range(world)]
    got = [{name: np.full_like(full[name], NOTHING) for name in full} for _ in range(world)]
    order = [b * 8 + s for b, s in zip(plan.bucket.tolist(), plan.step.tolist())]
    assert order == sorted(order)
    for i in range(len(plan.tensor)):
        name, box = plan.names[plan.tensor[i]], Box(*plan.boxes[i].tolist())
        at = np.s_[box.r0 : box.r1, box.c0 : box.c1]
        sender, receiver = int(plan.source[i]), int(plan.target[i])
        held = have[sender].get(name)
        data = held[at] if held is not None and (held[at] != NOTHING).all() else got[sender][name][at]
        assert (data != NOTHING).all(), f"rank {sender} sends {name} {box} without having it"
        assert (got[receiver][name][at] == NOTHING).all(), f"rank {receiver} gets {name} {box} twice"
        got[receiver][name][at] = data
    for rank in range(target.world_size):
        expected = wanted(target, rank, full)
        for name, canvas in got[target_first + rank].items():
            assert np.array_equal(canvas, expected.get(name, np.full_like(canvas, NOTHING))), (rank, name)


def least_by_elements(source, target, target_first, topology):
    """The lower bound, counted element by element."""
    full = numbered(target)
    have = {r: wanted(source, r, full) for r in range(source.world_size)}
    need = {target_first + r: wanted(target, r, full) for r in range(target.world_size)}
    superpods = nodes = ranks = 0

    def holders(name, members):
        masks = [have[r][name] != NOTHING for r in members if r in have and name in have[r]]
        return np.any(masks, axis=0) if masks else np.zeros(full[name].shape, bool)

    def needers(name, members):
        masks = [need[r][name] != NOTHING for r in members if r in need and name in need[r]]
        return np.any(masks, axis=0) if masks else np.zeros(full[name].shape, bool)

    world = range(topology.world_size)
    for name in full:
        for superpod in set(topology.superpod_of):
            members = [r for r in world if topology.superpod_of[r] == superpod]
            superpods += (needers(name, members) & ~holders(name, members)).sum()
        for node in set(topology.node_of):
            members = [r for r in world if topology.node_of[r] == node]
            nodes += (needers(name, members) & ~holders(name, members)).sum()
        for rank in world:
            ranks += (needers(name, [rank]) & ~holders(name, [rank])).sum()
    return superpods, nodes, ranks


CASES = [
    ("qwen2", TrainParallel(tensor=4, pipeline=2), RolloutParallel(tensor=2, replicas=4)),
    ("qwen2", TrainParallel(tensor=2, data=2), RolloutParallel(tensor=4)),
    ("qwen2_tied", TrainParallel(tensor=2, pipeline=2, vocab_multiple=128), RolloutParallel(tensor=4)),
    ("qwen2_few_kv", TrainParallel(tensor=4), RolloutParallel(tensor=4)),
    ("qwen3", TrainParallel(tensor=2, pipeline=3, pipeline_layers=(1, 1, 2)), RolloutParallel(replicas=6)),
    ("qwen3_moe", TrainParallel(data=8, expert=8), RolloutParallel(tensor=2, data=2, expert=True, replicas=2)),
    ("qwen3_moe", TrainParallel(tensor=2, data=2, expert=2), RolloutParallel(tensor=2, data=4, expert=True)),
    ("deepseek", TrainParallel(tensor=2, pipeline=2, data=2, expert=2), RolloutParallel(tensor=2, data=2, expert=True)),
    ("deepseek", TrainParallel(tensor=2, pipeline=2, virtual=2), RolloutParallel(tensor=4)),
]


@pytest.mark.parametrize("apart", [False, True], ids=["colocated", "apart"])
@pytest.mark.parametrize(("family", "train", "rollout"), CASES, ids=str)
def test_every_rank_ends_with_exactly_what_its_layout_wants(family, train, rollout, apart):
    model = describe(FAMILIES[family])
    source, target = train_layout(model, train), rollout_layout(model, rollout)
    first = source.world_size if apart else 0
    world = max(source.world_size, first + target.world_size)
    topology = Topology.regular(world, 2, 2)
    plan = make_plan(source, target, itemsize=2, bucket_bytes=8192, topology=topology, target_first=first)
    carry_out(plan, source, target, first)
    superpods, nodes, ranks = least_by_elements(source, target, first, topology)
    assert plan.least_crossings == (2 * superpods, 2 * nodes, 2 * ranks)
    assert plan.over_lower_bound() == 1.0
    assert plan.peak_bucket_bytes().max() <= 8192
    received = plan.received_bytes() + plan.copied_bytes()
    assert received.tolist()[first : first + target.world_size] == [
        target.rank_bytes(r, 2) for r in range(target.world_size)
    ]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_pairs_bucket_sizes_and_topologies_are_exact(data):
    model = describe(FAMILIES[data.draw(st.sampled_from(["qwen2_few_kv", "qwen3_moe", "deepseek"]))])
    moe = model.experts is not None
    tensor, pipeline, replicas = (data.draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    expert = data.draw(st.sampled_from([1, 2, 4])) if moe else 1
    train = TrainParallel(
        tensor=tensor,
        pipeline=pipeline,
        data=expert,
        expert=expert,
        expert_tensor=data.draw(st.sampled_from([1, None])),
    )
    rollout = RolloutParallel(
        tensor=data.draw(st.sampled_from([1, 2, 4])),
        data=data.draw(st.sampled_from([1, 2])),
        expert=moe and data.draw(st.booleans()),
        replicas=replicas,
    )
    source, target = train_layout(model, train), rollout_layout(model, rollout)
    if data.draw(st.booleans(), label="back"):
        source, target = target, source
        target = Layout(target.tensors, target.ranks)
    first = data.draw(st.sampled_from([0, source.world_size]))
    world = max(source.world_size, first + target.world_size)
    topology = Topology.regular(world, data.draw(st.integers(1, 4)), data.draw(st.sampled_from([None, 1, 2])))
    bucket = data.draw(st.sampled_from([640, 4096, 1 << 20]))
    across = data.draw(st.booleans())
    plan = make_plan(
        source, target, itemsize=4, bucket_bytes=bucket, topology=topology, target_first=first, across_stages=across
    )
    carry_out(plan, source, target, first)
    assert plan.over_lower_bound() == 1.0
    assert plan.peak_bucket_bytes().max(initial=0) <= bucket


def test_the_part_of_each_rank_fits_that_of_its_peers():
    """Sends and receives between two ranks of one step are the same list, in the same order."""
    model = describe(QWEN2)
    source = train_layout(model, TrainParallel(tensor=4, pipeline=2))
    target = rollout_layout(model, RolloutParallel(tensor=2, replicas=4))
    plan = make_plan(source, target, itemsize=2, bucket_bytes=8192, topology=Topology.regular(8, 2))
    parts = {rank: plan.for_rank(rank) for rank in range(8)}
    moves = {}
    for rank, buckets in parts.items():
        for bucket in buckets:
            for number, step in enumerate(bucket.steps):
                for move in step.sends:
                    moves.setdefault((rank, move.peer), []).append((move.name, move.box))
                assert number < 3
    for rank, buckets in parts.items():
        for peer in range(8):
            received = [(m.name, m.box) for b in buckets for s in b.steps for m in s.receives if m.peer == peer]
            assert received == moves.get((peer, rank), [])


def test_replicas_of_a_source_share_the_sending():
    """Four data-parallel trainers, eight replicas apart: no trainer sends more than a bucket above the mean."""
    model = describe(QWEN2)
    source = train_layout(model, TrainParallel(tensor=2, data=4))
    target = rollout_layout(model, RolloutParallel(tensor=2, replicas=8))
    plan = make_plan(source, target, itemsize=2, bucket_bytes=8192, target_first=8)
    sent = plan.sent_bytes()[:8]
    assert sent.max() <= 1.05 * sent.mean()


def test_experts_go_from_the_rank_that_has_them_to_those_that_serve_them():
    """No rank receives an expert that it does not serve: a plain gather would give every rank all of them."""
    model = describe(QWEN3_MOE)
    source = train_layout(model, TrainParallel(data=8, expert=8))
    target = rollout_layout(model, RolloutParallel(tensor=1, data=4, expert=True, replicas=2))
    plan = make_plan(source, target, itemsize=2, bucket_bytes=1 << 20)
    for rank in range(8):
        served = {s.name for p in target.ranks[rank] for s in p.segments}
        received = {plan.names[t] for t, r in zip(plan.tensor, plan.target) if r == rank}
        assert {n for n in received if ".experts." in n} == {n for n in served if ".experts." in n}


def test_layers_go_in_order_and_across_stages_shares_the_buckets():
    model = describe(QWEN2)
    source = train_layout(model, TrainParallel(pipeline=4))
    target = rollout_layout(model, RolloutParallel(replicas=4))
    orders = {name: t.order for name, t in target.tensors.items()}
    plan = make_plan(source, target, itemsize=2, bucket_bytes=32768)
    in_order = [orders[plan.names[t]] for t in plan.tensor[np.argsort(plan.bucket, kind="stable")]]
    buckets = plan.bucket.tolist()
    assert all(a <= b for a, b, x, y in zip(in_order, in_order[1:], buckets, buckets[1:]) if x != y)
    across = make_plan(source, target, itemsize=2, bucket_bytes=32768, across_stages=True)
    assert across.buckets < plan.buckets


def test_what_nobody_holds_is_named():
    model = describe(QWEN2)
    whole = train_layout(model, TrainParallel(tensor=2))
    target = rollout_layout(model, RolloutParallel())
    with pytest.raises(WeightSyncError, match=r"rows 60 to 120.*wanted by rank 0.*no rank"):
        make_plan(Layout(whole.tensors, whole.ranks[:1]), target, itemsize=2, bucket_bytes=1 << 20)


@pytest.mark.parametrize(
    ("moves", "least", "worst"),
    [
        ([(0, 1)], (0, 0, 1), 1.0),
        ([(0, 1), (0, 1)], (0, 0, 1), 2.0),  # twice inside a node
        ([(0, 2), (0, 3)], (0, 1, 2), 2.0),  # twice into a node, where one rank could pass it on
        ([(0, 4), (1, 5), (4, 6)], (1, 2, 3), 2.0),  # twice over RoCE; no more than needed in all
        ([(0, 1), (0, 2), (2, 3), (0, 3)], (0, 1, 3), 2.0),
        ([(0, 1), (0, 1), (0, 2), (2, 3)], (0, 1, 3), 4 / 3),
        ([(0, 1)], (0, 0, 0), np.inf),  # to one that has it
        ([(0, 0)], (0, 0, 0), 1.0),  # a copy is no move
    ],
)
def test_what_moves_too_often_shows_over_the_lower_bound(moves, least, worst):
    """One box of 6 bytes, by hand; ranks in pairs on nodes, nodes in pairs in superpods."""
    one = np.zeros(len(moves), np.int32)
    source, target = np.array(moves, np.int32).T
    plan = Plan(
        names=("w",),
        tensor=one,
        boxes=np.array([(0, 1, 0, 3)] * len(moves), np.int32),
        source=source,
        target=target,
        step=one.astype(np.int8),
        bucket=one,
        itemsize=2,
        bucket_bytes=1 << 20,
        topology=Topology.regular(8, 2, 2),
        least_crossings=tuple(6 * count for count in least),
    )
    assert plan.over_lower_bound() == pytest.approx(worst)


def test_a_bucket_smaller_than_an_element_and_a_foreign_topology_are_refused():
    model = describe(QWEN2_TIED)
    source = train_layout(model, TrainParallel(tensor=2))
    target = rollout_layout(model, RolloutParallel(replicas=2))
    with pytest.raises(ConfigError, match=r"bucket_bytes=1 .*at least"):
        make_plan(source, target, itemsize=2, bucket_bytes=1)
    for name in ("itemsize", "bucket_bytes", "target_first"):
        with pytest.raises(ConfigError, match=f"{name}=-1 must be at least"):
            make_plan(source, target, **({"itemsize": 2, "bucket_bytes": 1 << 20} | {name: -1}))
    with pytest.raises(ConfigError, match="topology has 3 ranks"):
        make_plan(source, target, itemsize=2, bucket_bytes=1 << 20, topology=Topology.regular(3, 1))


@pytest.mark.slow
def test_671_billion_parameters_over_384_ranks_are_planned_and_every_byte_is_accounted_for():
    model = describe(DEEPSEEK_R1)
    layers = (6, *[5] * 11)
    train = TrainParallel(tensor=8, pipeline=12, data=4, expert=32, expert_tensor=1, pipeline_layers=layers)
    source = train_layout(model, train)
    target = rollout_layout(model, RolloutParallel(tensor=4, data=16, expert=True, replicas=6))
    topology = Topology.regular(384, 16, 12)
    plan = make_plan(source, target, itemsize=2, bucket_bytes=1 << 30, topology=topology, across_stages=True)
    total = plan.received_bytes() + plan.copied_bytes()
    assert total.tolist() == [target.rank_bytes(rank, 2) for rank in range(384)]
    assert plan.over_lower_bound() == 1.0
    assert plan.peak_bucket_bytes().max() <= 1 << 30
    assert sum(plan.link_bytes().values()) == total.sum()


def test_expert_parallel_over_a_dense_layer_leaves_it_whole():
    model = describe(DEEPSEEK)
    target = rollout_layout(model, RolloutParallel(tensor=1, data=4, expert=True))
    for params in target.ranks:
        gates = [p for p in params if p.name == "model.layers.0.mlp.gate_proj.weight"]
        assert [p.shape for p in gates] == [(64, 32)]
