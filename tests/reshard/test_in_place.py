"""Turns between training and generation on the same devices: what is served, what comes back, what lies where."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_asyncflow.config.parallel import RolloutParallel, TrainParallel
from mindspeed_asyncflow.errors import ConfigError, WeightSyncError
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.memory import DeviceMemory, HostPool
from mindspeed_asyncflow.reshard.in_place import InPlace
from tests.reshard import in_place_ranks
from tests.reshard.matrix import Case, rollout_side, train_side
from tests.reshard.matrix_ranks import same_bits
from tests.reshard.ranks import Ranks, World
from tests.reshard.stand_ins import StandInRollout

TRAIN_KINDS = ("train weights", "gradients", "optimizer")
CASES = [
    Case("qwen2", TrainParallel(tensor=4), RolloutParallel(tensor=2, replicas=2)),  # fewer tensor ranks
    Case("seven", TrainParallel(tensor=2, pipeline=2, pipeline_layers=(5, 2)), RolloutParallel(tensor=4)),  # more
    Case("qwen3_moe", TrainParallel(tensor=2, data=2, expert=2), RolloutParallel(tensor=2, data=2, expert=True)),
    Case("deepseek", TrainParallel(data=4, expert=4), RolloutParallel(tensor=2, replicas=2, expert=True)),
]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4, in_place_ranks.MODULES) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("train", [torch.float32, torch.bfloat16], ids=str)
def test_identities_of_memory_and_bits(ranks, case, train):
    """Three times: the generation shard is the slice of the full tensors (B69: also the second and third time), weights
    and optimizer come back bit for bit, gradients as zeros, host buffers are used again. No byte of train state while
    generating, no byte of generation weights while training, by the books and by the garbage collector."""
    for found in ranks.run(in_place_ranks.cycle, case=case, train=train, serve=torch.bfloat16, times=3):
        assert len(found) == 3
        for turn, (there, back, generating, training) in enumerate(found):
            shard = there.usage_before["train weights"]
            assert there.version == turn
            assert [there.usage_after[kind] for kind in (*TRAIN_KINDS, "bucket")] == [0, 0, 0, 0]
            assert generating == there.usage_after["generation weights"] > 0
            assert there.identity_bytes == shard + generating + in_place_ranks.BUCKET_BYTES
            assert there.peak_bytes <= there.identity_bytes
            assert there.peak_bytes >= shard + generating
            assert [back.usage_after[kind] for kind in ("generation weights", "kv cache", "bucket")] == [0, 0, 0]
            assert {k: back.usage_after[k] for k in TRAIN_KINDS} == {k: there.usage_before[k] for k in TRAIN_KINDS}
            assert training == sum(there.usage_before[kind] for kind in TRAIN_KINDS)
            assert there.swapped_bytes == back.swapped_bytes == shard + there.usage_before["optimizer"]
            spent = there.swap_exposed_s + there.fill_s + there.load_s
            assert 0.9 * there.seconds <= spent <= there.seconds + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("when", in_place_ranks.MOMENTS)
def test_a_failure_on_one_rank_brings_all_back_to_training_and_the_next_turn_serves(ranks, when):
    """At once, before any engine answers with the new weights (a resume that fails is the one exception), and without
    a byte of generation weights or staging."""
    for rank, seen in enumerate(ranks.run(in_place_ranks.fail, case=CASES[1], spoil=2, when=when)):
        assert seen["said"].startswith("rank 2 failed"), seen
        assert f"{when} broke" in seen["said"] or rank != 2
        assert seen["seconds"] < 5
        assert seen["uncounted"] == 0
        assert seen["on the device"] == dict.fromkeys(TRAIN_KINDS, True)
        if when == "state":  # nothing has begun
            assert seen["state"] == "RUNNING"
        else:
            assert (seen["state"], seen["generation weights"], seen["bucket"]) == ("SLEEPING", 0, 0)
        assert seen["served before"] == (when == "resume" and rank != 2)
        assert seen["served"] == 2


@pytest.mark.slow
def test_a_rank_that_dies_before_it_serves_leaves_the_others_in_training(tmp_path):
    with Ranks(4, in_place_ranks.MODULES) as ranks, pytest.raises(RuntimeError, match="rank 2 ended"):
        ranks.run(in_place_ranks.die, case=CASES[1], spoil=2, folder=str(tmp_path))
    for rank in (0, 1, 3):
        assert (tmp_path / str(rank)).read_text().startswith("SLEEPING, served 0, bits True, 0 bytes left: rank")


@pytest.mark.slow
def test_an_engine_that_serves_already_is_filled_and_a_second_turn_in_a_row_is_refused(ranks):
    for state, version, said in ranks.run(in_place_ranks.from_serving, case=CASES[0]):
        assert (state, version) == ("RUNNING", 5)
        assert "version 6: the train state is on the host already; call to_training first" in said


@pytest.mark.slow
def test_an_older_version_is_refused_on_all_ranks_before_anything_moves(ranks):
    for rank, (said, same, host_buffers, state) in enumerate(ranks.run(in_place_ranks.refused, case=CASES[0])):
        assert said.startswith("rank 1 failed beginning the turn to version 2")
        assert "version 3 was served and versions only rise" in said or rank != 1
        assert (same, host_buffers, state) == (True, 0, "SLEEPING")


def in_place(case: Case, rollout: object) -> InPlace:
    memory = DeviceMemory(CpuPlatform())
    train = SimpleNamespace(layout=train_side(case.model, case.train))
    layout = rollout_side(case.model, case.rollout)
    assert layout is not None
    return InPlace(train, rollout, layout, rank=0, memory=memory, pool=HostPool(CpuPlatform()), bucket_bytes=1 << 16)  # type: ignore[arg-type]


def wanting(case: Case) -> StandInRollout:
    layout = rollout_side(case.model, case.rollout)
    assert layout is not None
    return StandInRollout(DeviceMemory(CpuPlatform()), layout, 0, torch.bfloat16)


@pytest.fixture
def alone():
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_engine_that_wants_other_weights_than_its_layout_is_refused_by_name(alone):
    case = Case("qwen3", TrainParallel(), RolloutParallel())
    wanted = wanting(case).weights_wanted()
    assert in_place(case, wanting(case)).plan.itemsize == 2
    for change, said in (
        (wanted[:-1], r"has no weight 'lm_head.weight'"),
        ([*wanted, ("model.other", "bfloat16", (1,))], r"wants 'model.other' \(1,\)"),
        ([("lm_head.weight", "bfloat16", (64, 32)) if n == "lm_head.weight" else (n, d, s) for n, d, s in wanted],
         r"'lm_head.weight' has shape \(64, 32\) in its engine, \(128, 32\) in the layout"),
    ):  # fmt: skip
        engine = wanting(case)
        engine.weights_wanted = lambda change=change: change  # type: ignore[method-assign,misc]
        with pytest.raises(WeightSyncError, match=said):
            in_place(case, engine)


def test_both_sides_must_have_the_same_ranks():
    case = Case("qwen3", TrainParallel(tensor=2), RolloutParallel())
    with pytest.raises(ConfigError, match=r"trainer \(TP2\) and rollout \(TP1 DP1\) .* 2 and 1 ranks"):
        in_place(case, wanting(case))


def test_every_step_of_the_way_back_is_tried_and_the_first_error_is_raised(alone):
    """The engine cannot take the failure and the weights do not come back at first: the optimizer does."""
    device = in_place_ranks.Device(
        World(0, 1), Case("qwen3", TrainParallel(), RolloutParallel()), *[torch.bfloat16] * 2
    )
    before = device.state()

    def broken(why: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            raise OSError(why)

        return call

    real = device.both._weight_swap.undo
    device.rollout.loaded = broken("no fingerprint")  # type: ignore[method-assign]
    device.rollout.load_failed = broken("engine gone")  # type: ignore[method-assign]
    device.both._weight_swap.undo = broken("host gone")  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="taking over the weights: no fingerprint") as raised:
        device.both.to_generation(1)
    assert [note.rsplit(": ", 1)[1] for note in raised.value.__notes__] == [
        "engine gone", "sleep is refused while the engine is UPDATING", "host gone",
    ]  # fmt: skip
    assert all(map(same_bits, device.trainer.optimizer, before[1:]))
    assert device.both.generating
    real()
    assert same_bits(device.trainer.weights, before[0])
