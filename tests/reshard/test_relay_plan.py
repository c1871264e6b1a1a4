"""Who writes what into the relay: every element once, from a rank that holds it, evenly over replicas."""

import numpy as np
import pytest

from mindspeed_asyncflow.config.model import FullTensor, describe
from mindspeed_asyncflow.config.parallel import TrainParallel
from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.reshard.boxes import Box, matrix_shape
from mindspeed_asyncflow.reshard.layout import Layout, LocalParam, Segment
from mindspeed_asyncflow.reshard.relay_plan import write_plan
from mindspeed_asyncflow.reshard.train_layout import train_layout
from tests.reshard.models import DEEPSEEK, QWEN2_FEW_KV, QWEN3_MOE

DENSE = QWEN2_FEW_KV | dict(num_hidden_layers=5, vocab_size=101, tie_word_embeddings=True)
MOE = QWEN3_MOE | dict(num_hidden_layers=2)
CASES = [
    (DENSE, TrainParallel()),
    (DENSE, TrainParallel(tensor=4, data=2)),
    (DENSE, TrainParallel(tensor=2, pipeline=2, data=3, pipeline_layers=(2, 3))),
    (DENSE, TrainParallel(context=2, data=2)),
    (MOE, TrainParallel(tensor=2, data=4, expert=2)),
    (MOE, TrainParallel(tensor=2, pipeline=2, data=2, expert=4, expert_tensor=1)),
]


def filled(layout):
    """(full tensors with distinct numbers, local parameters of every rank as the layout says)."""
    numbers = iter(range(10**9))
    full = {}
    for name, tensor in layout.tensors.items():
        rows, cols = matrix_shape(tensor.shape)
        full[name] = np.array([next(numbers) for _ in range(rows * cols)]).reshape(rows, cols)
    ranks = []
    for params in layout.ranks:
        local = {p.name: np.full(matrix_shape(p.shape), -1) for p in params}
        for p in params:
            for s in p.segments:
                at, box = s.local, s.box
                local[p.name][at.r0 : at.r1, at.c0 : at.c1] = full[s.name][box.r0 : box.r1, box.c0 : box.c1]
        ranks.append(local)
    return full, ranks


@pytest.mark.parametrize(("model", "parallel"), CASES, ids=lambda c: str(c) if isinstance(c, TrainParallel) else "")
def test_every_element_is_written_once_and_by_a_rank_that_holds_it(model, parallel):
    layout = train_layout(describe(model), parallel)
    plan = write_plan(layout)
    full, ranks = filled(layout)
    written = {name: np.full(tensor.shape, -1) for name, tensor in full.items()}
    boxes = {name: [] for name in full}
    for rank, writes in enumerate(plan.ranks):
        for write in writes:
            box, at = write.segment.box, write.segment.local
            place = written[write.segment.name][box.r0 : box.r1, box.c0 : box.c1]
            assert (place == -1).all(), "written twice"
            place[:] = ranks[rank][write.param][at.r0 : at.r1, at.c0 : at.c1]
            boxes[write.segment.name].append(box)
    assert all((written[name] == full[name]).all() for name in full)
    assert {name: tuple(sorted(b)) for name, b in boxes.items()} == plan.shards


@pytest.mark.parametrize(("model", "parallel"), CASES[1:], ids=lambda c: str(c) if isinstance(c, TrainParallel) else "")
def test_ranks_of_one_stage_write_about_equally_much(model, parallel):
    """A rank may have at most an eighth of the mean load more than its stage: nothing larger is left uncut."""
    plan = write_plan(train_layout(describe(model), parallel))
    mean = sum(plan.elements(r) for r in range(parallel.world_size)) / parallel.world_size
    for first in range(0, parallel.world_size, parallel.stage_ranks):
        stage = [plan.elements(r) for r in range(first, first + parallel.stage_ranks)]
        assert max(stage) <= sum(stage) / len(stage) + mean / 8 + 1


def test_a_replica_of_ranks_without_own_boxes_is_not_left_idle():
    plan = write_plan(train_layout(describe(DENSE), TrainParallel(data=4)))
    assert min(plan.elements(rank) for rank in range(4)) > 0


def test_boxes_that_overlap_are_written_once():
    params = tuple(
        (LocalParam("p", (6, 2), (Segment("w", Box(r0, r0 + 6, 0, 2)),)),) for r0 in (0, 2)
    )  # rows 0-6 on rank 0, rows 2-8 on rank 1
    plan = write_plan(Layout({"w": FullTensor("w", (8, 2), 0)}, params))
    rows = [r for box in plan.shards["w"] for r in range(box.r0, box.r1)]
    assert rows == list(range(8))


def test_a_weight_that_no_rank_holds_is_named():
    layout = Layout({"w": FullTensor("w", (8, 2), 0)}, ((LocalParam("p", (6, 2), (Segment("w", Box(0, 6, 0, 2)),)),),))
    with pytest.raises(WeightSyncError, match="rows 6 to 8 of 'w' lie on no rank"):
        write_plan(layout)


def test_a_routers_correction_bias_stays_in_float32():
    """Rounded to bfloat16 it could send tokens to other experts than in training."""
    layout = train_layout(describe(DEEPSEEK), TrainParallel(data=2, expert=2))
    table = write_plan(layout).table(layout, "bfloat16")
    assert {p.name.rsplit(".", 1)[-1]: p.dtype for p in table.params} == {
        "weight": "bfloat16",
        "e_score_correction_bias": "float32",
    }
