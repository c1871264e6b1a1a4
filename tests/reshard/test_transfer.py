"""Running plans: what is packed, what goes directly, how much is staged, and how ranks fail together."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mindspeed_asyncflow.reshard.messages as messages_module
import mindspeed_asyncflow.reshard.transfer as transfer_module
from mindspeed_asyncflow.config.model import FullTensor
from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box
from mindspeed_asyncflow.reshard.dtypes import agree_on_dtypes
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment
from mindspeed_asyncflow.reshard.places import BoxView, Places, one_run
from mindspeed_asyncflow.reshard.plan import make_plan
from mindspeed_asyncflow.reshard.transfer import run
from tests.reshard.ranks import Ranks, World

ROWS, COLS = 12, 8
CPU = torch.device("cpu")


def full(number: int = 0) -> torch.Tensor:
    return torch.arange(ROWS * COLS, dtype=torch.float32).view(ROWS, COLS) + 1000 * number


def layout(*ranks: list[tuple[str, Box]], count: int = 1) -> Layout:
    """Tensors t0, t1, ... of [ROWS, COLS]; each rank holds one parameter for each box."""
    tensors = {f"t{i}": FullTensor(f"t{i}", (ROWS, COLS), i) for i in range(count)}
    params = [tuple(LocalParam(n, (b.rows, b.cols), (Segment(n, b),)) for n, b in boxes) for boxes in ranks]
    return Layout(tensors, tuple(params))


def rows(start: int, stop: int) -> Box:
    return Box(start, stop, 0, COLS)


def cols(start: int, stop: int) -> Box:
    return Box(0, ROWS, start, stop)


def tensors_of(params: Any, dtype: torch.dtype, filled: bool) -> dict[str, torch.Tensor]:
    found = {}
    for param in params:
        (segment,) = param.segments
        box = segment.box
        value = full(int(param.name[1:]))[box.r0 : box.r1, box.c0 : box.c1].contiguous()
        found[param.name] = (value if filled else torch.full_like(value, float("nan"))).to(dtype)
    return found


# ---- what one rank does, without peers -------------------------------------------------------------------------------


def test_a_box_is_read_from_several_segments_and_from_the_right_rows():
    fused = LocalParam(
        "fused",
        (6, COLS),
        (Segment("t0", rows(0, 2), row=0), Segment("t1", rows(0, 2), row=2), Segment("t0", rows(2, 4), row=4)),
    )
    stored = torch.cat([full(0)[0:2], full(1)[0:2], full(0)[2:4]])
    places = Places([fused], {"fused": stored}, "rank 0")
    pieces = places.read("t0", Box(1, 4, 2, 5))
    assert pieces is not None
    assert sum(p.box.size for p in pieces) == 9
    for box, view in pieces:
        assert torch.equal(view, full(0)[box.r0 : box.r1, box.c0 : box.c1])
    assert places.read("t0", rows(3, 5)) is None
    assert places.read("t2", rows(0, 1)) is None


def test_a_weight_that_lies_twice_is_written_twice():
    params = [LocalParam(n, (ROWS, COLS), (Segment("t0", rows(0, ROWS)),)) for n in ("embedding", "head")]
    places = Places(params, {"embedding": full(), "head": full()}, "rank 0")
    assert len(places.write("t0", rows(3, 5))) == 2
    assert len(places.read("t0", rows(3, 5)) or ()) == 1
    with pytest.raises(WeightSyncError, match="no parameter has a place for all of 't0'"):
        places.write("t0", rows(10, 13))


def test_tensors_must_be_what_the_layout_says():
    params = layout([("t0", rows(0, 4))]).ranks[0]
    with pytest.raises(WeightSyncError, match=r"rank 5, source: 't0' has shape \(4, 7\), its layout says \(4, 8\)"):
        Places(params, {"t0": torch.zeros(4, 7)}, "rank 5, source")
    with pytest.raises(WeightSyncError, match="missing, first 't0'"):
        Places(params, {}, "rank 5, source")


def test_pieces_that_follow_each_other_in_memory_are_one_run():
    stored = full()
    first, second = BoxView(rows(0, 2), stored[0:2]), BoxView(rows(2, 5), stored[2:5])
    found = one_run([first, second], torch.float32)
    assert found is not None
    assert torch.equal(found.view(torch.float32), stored[0:5].flatten())
    assert found.data_ptr() == stored.data_ptr()
    assert one_run([second, first], torch.float32) is None
    assert one_run([first, second], torch.bfloat16) is None
    assert one_run([BoxView(Box(0, 2, 0, 4), stored[0:2, 0:4])], torch.float32) is None
    assert one_run([first, BoxView(rows(2, 5), stored.clone()[2:5])], torch.float32) is None


# ---- ranks together --------------------------------------------------------------------------------------------------


def move(
    world: World,
    source: Layout,
    target: Layout,
    *,
    bucket_bytes: int = 1 << 20,
    dtype: torch.dtype = torch.float32,
    other: dict[str, torch.dtype] | None = None,
    first: int = 0,
    wait_s: float = 20.0,
    spoil: int = -1,
    when: str = "",
) -> dict[str, Any]:
    """Rank `spoil` fails at `when`. Returns what the caller wants to know, with the error as text."""
    size = max(source.world_size, first + target.world_size)
    group = world.group(size)
    rank = world.rank
    if rank >= size:
        return {}
    other = other or {}
    largest = max(t.itemsize for t in (dtype, *other.values()))
    plan = make_plan(source, target, itemsize=largest, bucket_bytes=bucket_bytes, target_first=first)
    held = tensors_of(source.ranks[rank], torch.float32, True) if rank < source.world_size else {}
    place = rank - first
    filled = tensors_of(target.ranks[place], dtype, False) if 0 <= place < target.world_size else {}
    filled = {name: tensor.to(other.get(name, dtype)) for name, tensor in filled.items()}
    packed = 0

    def pack(messages: Any) -> None:
        nonlocal packed
        packed += 1
        if packed == 2 and when == "packing":
            raise ValueError("packing broke")
        if packed == 2 and when == "death":
            os._exit(3)
        if packed == 2 and when == "silence":
            time.sleep(wait_s + 1.5)
        messages_module.pack(messages)

    transfer_module.pack = pack if rank == spoil else messages_module.pack
    if rank == spoil and when == "shape":
        held = {name: tensor[:-1] for name, tensor in held.items()}
    began, error, report = time.monotonic(), "", None
    try:
        report = run(
            plan, rank, held, filled, source_layout=source, target_layout=target, dtype=dtype, device=CPU, group=group,
            target_first=first, timeout_s=wait_s, other_dtypes=other,
        )  # fmt: skip
    except (WeightSyncError, DeadlineExceeded) as raised:
        error = f"{type(raised).__name__}: {raised}"
    expected = tensors_of(target.ranks[place], torch.float32, True) if filled else {}
    right = all(torch.equal(filled[name], expected[name].to(other.get(name, dtype))) for name in expected)
    return {
        "right": right, "error": error, "report": report, "seconds": time.monotonic() - began,
        "buckets": plan.buckets,
    }  # fmt: skip


ONE = layout([("t0", rows(0, ROWS))])
ROW_HALVES = layout([("t0", rows(0, 6))], [("t0", rows(6, ROWS))])
COLUMN_HALVES = layout([("t0", cols(0, 4))], [("t0", cols(4, 8))])
TWO_EACH = layout(
    [("t0", rows(0, ROWS)), ("t1", rows(0, ROWS))], [("t2", rows(0, ROWS)), ("t3", rows(0, ROWS))], count=4
)
ALL_FOUR = layout(*[[(f"t{i}", rows(0, ROWS)) for i in range(4)]] * 2, count=4)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3, ("tests.reshard.test_transfer",)) as ranks:
        yield ranks


@pytest.mark.slow
def test_a_message_that_is_one_run_on_a_side_is_not_staged_there(ranks):
    one, halves = ranks.run(move, source=ONE, target=ROW_HALVES)[:2]
    assert one["right"] and halves["right"]
    assert one["report"].staging_bytes == halves["report"].staging_bytes == 0
    assert halves["report"].direct_bytes == halves["report"].received_bytes == 6 * COLS * 4
    one, columns = ranks.run(move, source=ONE, target=COLUMN_HALVES)[:2]
    assert one["right"] and columns["right"]
    assert one["report"].staging_bytes == ROWS * 4 * 4  # gathered out of rows
    assert columns["report"].staging_bytes == 0
    assert one["report"].copied_bytes == ROWS * 4 * 4


@pytest.mark.slow
def test_all_boxes_for_one_peer_are_one_message_of_the_targets_type(ranks):
    found = ranks.run(move, source=TWO_EACH, target=ALL_FOUR, dtype=torch.bfloat16)[:2]
    for seen in found:
        assert seen["right"], seen
        assert seen["report"].messages == 2  # one out, one in
        assert seen["report"].sent_bytes == seen["report"].received_bytes == 2 * ROWS * COLS * 2
        assert seen["report"].staging_bytes == 4 * ROWS * COLS * 2  # two tensors out (cast), two in (not one run)


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [64, 200, ROWS * COLS * 4])
def test_staging_stays_within_a_bucket(ranks, bucket_bytes):
    for seen in ranks.run(move, source=TWO_EACH, target=ALL_FOUR, bucket_bytes=bucket_bytes)[:2]:
        assert seen["right"], seen
        assert seen["report"].staging_bytes <= bucket_bytes
        assert seen["buckets"] >= 4 * ROWS * COLS * 4 // bucket_bytes


THIRDS = layout([("t0", rows(0, ROWS)), ("t1", rows(0, ROWS)), ("t2", rows(0, ROWS))], [], [], count=3)
ODD = layout(
    [], [(f"t{i}", Box(0, 3, 1, 6)) for i in range(3)], [(f"t{i}", Box(1, 4, 0, 3)) for i in range(3)], count=3
)


@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [48, 1 << 20])
@pytest.mark.parametrize("other", [{"t1": torch.float32}, {"t0": torch.float32, "t2": torch.float64}], ids=str)
def test_tensors_of_several_types_travel_in_their_own(ranks, bucket_bytes, other):
    """Odd numbers of elements, so that nothing is aligned by chance."""
    small = torch.bfloat16
    found = ranks.run(move, source=THIRDS, target=ODD, dtype=small, other=other, bucket_bytes=bucket_bytes)
    sizes = [other.get(name, small).itemsize for name in ("t0", "t1", "t2")]
    assert all(seen["right"] for seen in found), found
    assert found[0]["report"].sent_bytes == sum(sizes) * (15 + 9)
    assert [seen["report"].received_bytes for seen in found[1:]] == [sum(sizes) * 15, sum(sizes) * 9]
    assert all(seen["report"].staging_bytes <= bucket_bytes for seen in found)


def want(world: World, types: list[dict[str, torch.dtype]]) -> Any:
    try:
        return agree_on_dtypes(types[world.rank], ["a", "b", "c", "d"], rank=world.rank, device=CPU, timeout_s=20)
    except WeightSyncError as error:
        return str(error)


@pytest.mark.slow
def test_all_ranks_learn_the_type_of_every_tensor(ranks):
    small, large = torch.bfloat16, torch.float32
    found = ranks.run(want, types=[{"a": small}, {"a": small, "b": small, "c": large}, {}])
    assert found == [(small, {"c": large})] * 3
    for said in ranks.run(want, types=[{"a": small}, {"a": large}, {}]):
        assert said == "ranks want 'a' in different types, float32 and bfloat16"
    for said in ranks.run(want, types=[{"a": small}, {"b": torch.int8}, {}]):
        assert "type that cannot be sent" in said


@pytest.mark.slow
def test_rollout_ranks_may_follow_the_trainers(ranks):
    trainer, first, second = ranks.run(move, source=ONE, target=COLUMN_HALVES, first=1)
    assert first["right"] and second["right"]
    assert trainer["report"].copied_bytes == 0
    assert trainer["report"].sent_bytes == ROWS * COLS * 4


def inside_a_later_group(world: World) -> bool:
    """Ranks 1 and 2 of the world are ranks 0 and 1 of the plan."""
    group = dist.new_group([1, 2])
    rank = world.rank - 1
    if rank < 0:
        return True
    plan = make_plan(TWO_EACH, ALL_FOUR, itemsize=4, bucket_bytes=200)
    filled = tensors_of(ALL_FOUR.ranks[rank], torch.float32, False)
    run(
        plan, rank, tensors_of(TWO_EACH.ranks[rank], torch.float32, True), filled, source_layout=TWO_EACH,
        target_layout=ALL_FOUR, dtype=torch.float32, device=CPU, group=group, timeout_s=20,
    )  # fmt: skip
    expected = tensors_of(ALL_FOUR.ranks[rank], torch.float32, True)
    return all(torch.equal(filled[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_ranks_of_a_plan_are_those_of_its_group(ranks):
    assert ranks.run(inside_a_later_group) == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("when", ["packing", "shape"])
def test_a_rank_that_fails_stops_all_at_once_and_the_group_works_on(ranks, when):
    small = {"source": TWO_EACH, "target": ALL_FOUR, "bucket_bytes": 200}
    failed, other = ranks.run(move, **small, spoil=0, when=when)[:2]
    assert failed["seconds"] < 5 and other["seconds"] < 5
    assert ("packing broke" if when == "packing" else "its layout says") in failed["error"]
    assert other["error"].startswith("WeightSyncError: rank 0 failed")
    assert all(seen["right"] for seen in ranks.run(move, **small)[:2])


@pytest.mark.slow
def test_a_silent_peer_ends_the_wait_at_its_deadline_and_is_named():
    with Ranks(2, ("tests.reshard.test_transfer",)) as ranks:
        silent, waiting = ranks.run(
            move, source=TWO_EACH, target=ALL_FOUR, bucket_bytes=200, wait_s=1.0, spoil=0, when="silence"
        )
    assert waiting["error"].startswith("DeadlineExceeded: rank 1 waited 1 s for bucket 1, step 0: ")
    assert waiting["error"].endswith("from rank 0") or waiting["error"].endswith("to rank 0")
    assert waiting["seconds"] < 2.4
    assert silent["error"].startswith("WeightSyncError: rank 0 lost a peer, bucket 1")


@pytest.mark.slow
def test_a_peer_that_dies_ends_the_others_long_before_their_deadline():
    with Ranks(2, ("tests.reshard.test_transfer",)) as ranks, pytest.raises(RuntimeError) as raised:
        ranks.run(move, source=TWO_EACH, target=ALL_FOUR, bucket_bytes=200, wait_s=50.0, spoil=0, when="death")
    assert "rank 0 ended" in str(raised.value)
    assert "rank 1 did not answer" not in str(raised.value)  # within two seconds it had
