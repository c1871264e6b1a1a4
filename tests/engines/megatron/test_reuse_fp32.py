"""Masters of bf16 parameters kept as halves: the same run, bit for bit, in 2 bytes less for each of them."""

import checkpoint_cases
import numpy as np
import place_cases
import pytest
import reuse_cases
import torch
from reuse_cases import HALVES, bits
from tiny_models import make_samples

from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap

bootstrap("cpu")  # changes torch, so it comes before megatron is imported
from mindspeed_asyncflow.engines.megatron.halves import Halves  # noqa: E402

DP2 = {"data_parallel": 2}
SHARDED = {**DP2, "distributed_optimizer": True}
EXPERTS = {**SHARDED, "expert_parallel": 2, "moe_grouped_gemm": True}


def any_bits(count, seed=0):
    """float32 [count] of any bits, then one between each two bf16 numbers: nan, infinities and all ties are there."""
    rng = np.random.default_rng(seed)
    some = torch.from_numpy(rng.integers(-(2**31), 2**31, count).astype(np.int32))
    ties = (torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16) | 0x8000
    return torch.cat([some, ties, ties - 1, ties + 1]).view(torch.float32)


def halved(master):
    param = torch.empty(master.shape, dtype=torch.bfloat16)
    halves = Halves(param, torch.zeros_like(master))
    halves.round(master)
    return param, halves


def test_any_master_comes_back_bit_for_bit_beside_the_parameter_that_torch_rounds():
    master = any_bits(200_000)
    param, halves = halved(master)
    assert np.array_equal(bits(param), bits(master.to(torch.bfloat16)))
    assert np.array_equal(bits(halves.read()), bits(master))


def test_a_parameter_that_was_not_rounded_from_its_master_stays_as_it_is():
    """Another platform's rounding, say, in a checkpoint of it."""
    master = any_bits(1000)
    param = torch.zeros(master.shape, dtype=torch.bfloat16)
    halves = Halves(param, master)
    assert not param.any() and np.array_equal(bits(halves.read()), bits(master))


@pytest.mark.parametrize(("first", "count"), [(0, 7), (3, 500), (1999, 1), (0, 2000), (5, 0)])
def test_a_range_of_masters_is_kept_without_the_others(first, count):
    master, other = any_bits(0)[:2000], any_bits(2000, seed=1)[:2000]
    _, halves = halved(master)
    halves.write(other[first : first + count], first)
    wanted = bits(master)
    wanted[first : first + count] = bits(other)[first : first + count]
    assert np.array_equal(bits(halves.read()), wanted)
    assert np.array_equal(bits(halves.read(first, first + count)), wanted[first : first + count])


def test_masters_of_a_model_seldom_need_more_than_a_low_half():
    master = torch.randn(1_000_000, generator=torch.Generator().manual_seed(2)) * 0.02
    _, halves = halved(master)
    assert halves.low.nbytes == 2 * len(master) and len(halves._places) < len(master) / 20_000


def same(plain, halved):
    assert plain["steps"] == halved["steps"]
    assert plain["numbers"].keys() == halved["numbers"].keys()
    kinds = {kind for kind, _, _ in plain["numbers"]}
    assert kinds == {"weight", "master", "exp_avg", "exp_avg_sq"}
    for name, numbers in plain["numbers"].items():
        assert np.array_equal(numbers, halved["numbers"][name]), name
    assert plain["halved"] == 0 < halved["halved"]


def saved_bytes(plain, halved, masters):
    assert {kind: plain["bytes"][kind] - halved["bytes"][kind] for kind in plain["bytes"]} == {
        "train weights": 0,
        "gradients": 0,
        "optimizer": 2 * masters,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "at_once"),
    [("qwen2", {"tensor_parallel": 2, "sequence_parallel": True}, 1), ("qwen3_moe", EXPERTS, 9000)],
    ids=["plain", "sharded"],
)
def test_steps_are_those_without_it_bit_for_bit(groups, folders, kind, sizes, at_once):
    given = {"folder": folders[kind], "samples": make_samples(), "count": 3, "at_once": at_once}
    plain = groups.of(2).run(reuse_cases.train, sizes=sizes, swap=False, **given)
    halved = groups.of(2).run(reuse_cases.train, sizes=sizes | HALVES, swap=True, **given)
    for one, other in zip(plain, halved):
        same(one, other)
        assert other["identical"], "the state that left the device came back"
        assert other["masters"] > 10_000
        saved_bytes(one, other, other["masters"])


@pytest.mark.slow
def test_a_critic_with_a_float32_head_takes_the_same_steps(groups, folders):
    samples = make_samples()
    for s in samples:
        values, returns = np.random.default_rng(len(s["ids"])).normal(size=(2, len(s["ids"]))) * s["mask"]
        s |= {"values": values, "returns": returns}
    given = {"folder": folders["qwen3"], "samples": samples, "ways": [(4,), (1, 3)], "count": 3}
    plain, halved = (groups.of(2).run(reuse_cases.train_critic, sizes=DP2 | how, **given) for how in ({}, HALVES))
    for one, other in zip(plain, halved):
        same(one, other)
        saved_bytes(one, other, other["masters"])
    head = {name for r in plain for kind, name, _ in r["numbers"] if kind == "exp_avg"}
    head -= {name for r in halved for kind, name, _ in r["numbers"] if kind == "master"}
    assert head == {"value_head.weight", "value_head.bias"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sizes"), [("qwen2", DP2), ("qwen3_moe", EXPERTS)], ids=["plain", "sharded"])
def test_a_checkpoint_is_the_same_file_with_it_and_without_it_and_goes_on(groups, folders, tmp_path, kind, sizes):
    run = groups.of(2).run
    given = {"folder": folders[kind], "samples": make_samples(), "dtype": "bfloat16", "after": 1}
    out = [str(tmp_path / name) for name in ("plain", "halved")]
    plain = run(checkpoint_cases.save, sizes=sizes, out=out[0], before=2, **given)
    halved = run(checkpoint_cases.save, sizes=sizes | HALVES, out=out[1], before=2, **given)
    assert [r["files"] for r in plain] == [r["files"] for r in halved], "sizes and sums of all that either loads"
    for before, after in zip(plain, run(checkpoint_cases.load, sizes=sizes | HALVES, out=out[0], **given)):
        assert before["steps"] == after["steps"]
        assert all(np.array_equal(before["weights"][n], after["weights"][n]) for n in before["weights"])


@pytest.mark.slow
def test_training_beside_a_rollout_engine_on_the_same_devices_is_the_same(groups, folders):
    given = {"folder": folders["qwen3"], "samples": make_samples(), "dtype": "bfloat16"}
    for r in groups.of(2).run(place_cases.turns, sizes=SHARDED | HALVES, **given):
        assert r["steps"] == r["plain"]
        for turn in r["turns"]:
            assert turn["report"].fingerprint == turn["exported"]
            assert all(turn["generating"][kind] == 0 for kind in place_cases.TRAIN)
            assert turn["uncounted"] < 32768, "no tensor of weight escaped the books"
        assert r["buffers made"] == r["storages"], "host buffers of the first turn are used again"
