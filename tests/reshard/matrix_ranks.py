"""What one rank does to verify pairs of layouts: fill, compare bit for bit, and back again."""

import time
from typing import Any

import torch

from mindspeed_asyncflow.reshard.boxes import Box, subtract
from mindspeed_asyncflow.reshard.layout import Layout
from mindspeed_asyncflow.reshard.plan import Plan, make_plan
from mindspeed_asyncflow.reshard.transfer import TransferReport, run
from tests.reshard.matrix import Case, rollout_side, train_side
from tests.reshard.ranks import World
from tests.reshard.slices import rollout_shards

MODULES = (
    "tests.reshard.matrix_ranks",
    "tests.reshard.shards",
)  # for `Ranks`: loaded once, before the ranks are forked
BUCKET_BYTES = 4096  # smaller than many of the tensors
CPU = torch.device("cpu")


def empty_like_layout(layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Local tensors full of NaN: what the transfer leaves out is seen."""
    return {p.name: torch.full(p.shape, float("nan"), dtype=dtype) for p in layout.ranks[rank]}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_cases(world: World, cases: list[Case], dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """Verify the cases one after the other; what this rank saw of each. Raises at the first wrong bit."""
    return [_check(world, case, dtype) for case in cases]


def _check(world: World, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    from tests.reshard import shards  # loads megatron and mbridge, which the parent process does not need

    group = world.group(case.ranks)
    if world.rank >= case.ranks:
        return {}
    began = time.monotonic()
    source, target = train_side(case.model, case.train), rollout_side(case.model, case.rollout)
    assert source is not None and target is not None, case
    first = case.train.world_size if case.apart else 0
    trains, serves = world.rank < source.world_size, 0 <= world.rank - first < target.world_size
    held = shards.trainer_shards(case, world.rank, source.ranks[world.rank]) if trains else {}
    if trains:
        missing = shards.expected_names(case, world.rank) - held.keys()
        assert not missing, f"{case}: rank {world.rank} lacks {missing}"
    filled = empty_like_layout(target, world.rank - first, dtype) if serves else {}

    plan = make_plan(source, target, itemsize=dtype.itemsize, bucket_bytes=BUCKET_BYTES, target_first=first)
    report = run(
        plan, world.rank, held, filled, source_layout=source, target_layout=target, dtype=dtype, device=CPU,
        group=group, target_first=first, timeout_s=30,
    )  # fmt: skip
    if serves:
        expected = {n: t.to(dtype) for n, t in rollout_shards(case, world.rank - first).items()}
        _compare(case, world.rank, filled, expected)
    _check_bytes(case, world.rank, plan, report)

    if first == 0:  # and back: rollout ranks are the trainer's
        _back(world, case, target, source, filled, held, dtype)
    needed = needed_elements(source, target, world.rank, first) * dtype.itemsize
    plain = {"sent": report.sent_bytes, "received": report.received_bytes, "needed": needed}
    return plain | {"seconds": time.monotonic() - began}


def needed_elements(source: Layout, target: Layout, rank: int, first: int) -> int:
    """Elements that `rank` wants and does not hold, counted from the layouts alone."""
    left = 0
    held = source.ranks[rank] if rank < source.world_size else ()
    wanted = target.ranks[rank - first] if 0 <= rank - first < target.world_size else ()
    boxes: dict[str, list[Box]] = {}
    for segment in (s for p in held for s in p.segments):
        boxes.setdefault(segment.name, []).append(segment.box)
    for segment in (s for p in wanted for s in p.segments):
        parts = [segment.box]
        for box in boxes.get(segment.name, ()):
            parts = [rest for part in parts for rest in subtract(part, box)]
        left += sum(part.size for part in parts)
    return left


def _back(
    world: World, case: Case, source: Layout, target: Layout, held: Any, original: Any, dtype: torch.dtype
) -> None:
    """A -> B -> A returns to A, rounded once to what B holds; padding rows are not touched."""
    plan = make_plan(source, target, itemsize=4, bucket_bytes=BUCKET_BYTES)
    trains = world.rank < target.world_size
    filled = {name: torch.zeros_like(t) for name, t in original.items()} if trains else {}
    run(
        plan, world.rank, held, filled, source_layout=source, target_layout=target, dtype=torch.float32, device=CPU,
        group=world.group(case.ranks), timeout_s=30,
    )  # fmt: skip
    _compare(case, world.rank, filled, {name: t.to(dtype).float() for name, t in original.items()})


def _compare(case: Case, rank: int, filled: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert filled.keys() == expected.keys(), f"{case}: rank {rank}: {filled.keys() ^ expected.keys()}"
    wrong = [name for name in filled if not same_bits(filled[name], expected[name])]
    assert not wrong, f"{case}: rank {rank}: {len(wrong)} of {len(filled)} tensors differ, first {wrong[0]}"


def _check_bytes(case: Case, rank: int, plan: Plan, report: TransferReport) -> None:
    assert report.received_bytes == plan.received_bytes()[rank], case
    assert report.sent_bytes == plan.sent_bytes()[rank], case
    assert report.copied_bytes == plan.copied_bytes()[rank], case
    assert report.staging_bytes <= plan.bucket_bytes, case
