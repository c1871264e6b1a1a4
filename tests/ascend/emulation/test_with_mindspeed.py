"""The real MindSpeed on an emulated device trains as megatron does on the CPU. Where its source is present."""

import shutil

import main_job
import pytest
from emulated import needs_mindspeed, run_python
from ranks import run_ranks

pytestmark = [pytest.mark.slow, needs_mindspeed]

TP2 = {"tensor_parallel": 2, "sequence_parallel": True}
PP2, EP2 = {"pipeline_parallel": 2}, {"data_parallel": 2, "expert_parallel": 2}
FUSED = {"npu_rms_norm", "npu_swiglu", "npu_rotary_mul", "npu_fusion_attention"}

GROUPED, ASYNC = FUSED | {"npu_gmm"}, {"all_to_all_single (async)"}
OVERLAP = {"mindspeed": {"moe_overlap": "alltoall"}}
RING = FUSED | {"npu_fusion_attention_grad"}


# Every token chooses experts of the first half: a rank that has the others gets none.
ONE_SIDED = """
import sys, torch
from safetensors.torch import load_file, save_file
path = sys.argv[1] + "/model.safetensors"
weights = load_file(path)
for name, weight in weights.items():
    if name.endswith("e_score_correction_bias"):
        weight.copy_(torch.tensor([9.0, 9.0, -9.0, -9.0]))
save_file(weights, path, metadata={"format": "pt"})
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Small models by kind, made by a process of its own: nothing here imports torch."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from tiny_models import make_model; make_model(*sys.argv[2:4])"
    found = {kind: tmp_path_factory.mktemp(kind) for kind in ("qwen3", "qwen3_moe", "deepseek_v3")}
    for kind, folder in found.items():
        run_python(code, "tests/engines/megatron", kind, str(folder), emulated=False)
    found["one_sided"] = tmp_path_factory.mktemp("one_sided") / "model"
    shutil.copytree(found["deepseek_v3"], found["one_sided"])
    run_python(ONE_SIDED, str(found["one_sided"]), emulated=False)
    return {kind: str(folder) for kind, folder in found.items()}


def near(a, b, tolerance=1e-5, rounding=0.0):
    """Losses and norms relative to the largest, weights as they are but for `rounding`, a share of each."""
    for name in ("losses", "norms"):
        top = max(map(abs, a[name]))
        assert max(abs(x - y) for x, y in zip(a[name], b[name])) < tolerance * top, name
    assert a["weights"].keys() == b["weights"].keys()
    for name, weight in a["weights"].items():
        # where a gradient is almost 0, Adam's step has the size of the rate and a sign by chance
        assert all(abs(x - y) < 1e-4 + rounding * abs(x) for x, y in zip(weight, b["weights"][name])), name


CASES = {
    "tensor": ("qwen3", TP2, FUSED),
    "sharded": ("qwen3", {"data_parallel": 2, "distributed_optimizer": True}, FUSED),
    "virtual": ("qwen3", {**PP2, "virtual_pipeline": 2}, FUSED),
    "context": ("qwen3", {"context_parallel": 2}, FUSED),
    "ring": ("qwen3", {"context_parallel": 2, "mindspeed": {"context_parallel": "ring", "swap_attention": True}}, RING),
    "latent_ring": ("deepseek_v3", {**TP2, "context_parallel": 2, "mindspeed": {"context_parallel": "ring"}}, RING),
    "expert": ("qwen3_moe", EP2, FUSED - {"npu_swiglu"}),
    "grouped": ("qwen3_moe", {**EP2, "moe_grouped_gemm": True}, GROUPED),
    "overlap": ("qwen3_moe", {**EP2, **OVERLAP, "recompute": True}, GROUPED | ASYNC),
    "latent_overlap": ("deepseek_v3", {**TP2, **EP2, **OVERLAP}, GROUPED | ASYNC),
    "one_sided": ("one_sided", {**EP2, **OVERLAP}, GROUPED | ASYNC),
    "latent": ("deepseek_v3", TP2, FUSED),
    "swap": ("qwen3", {"mindspeed": {"swap_attention": True, "fused_rope": False}}, FUSED - {"npu_rotary_mul"}),
    "recompute": ("qwen3", {**TP2, "mindspeed": {"recompute": ["attention", "mlp"]}}, FUSED),
}


@pytest.mark.parametrize(("kind", "sizes", "operators"), CASES.values(), ids=CASES)
def test_engine_trains_as_on_the_cpu(models, tmp_path, kind, sizes, operators):
    job = {"model": models[kind], "sizes": sizes, "steps": 3}
    by_itself = {name: value for name, value in sizes.items() if name != "moe_grouped_gemm"}
    plain = run_ranks(tmp_path / "cpu", {**job, "sizes": by_itself}, emulated=False)
    emulated = run_ranks(tmp_path / "npu", job, emulated=True)
    near(plain, emulated)
    assert emulated["device"] == "npu:0" and operators <= emulated["operators"].keys()


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({}, "float32"),
        ({"data_parallel": 2, "distributed_optimizer": True}, "float32"),
        ({"data_parallel": 2, "distributed_optimizer": True}, "bfloat16"),
    ],
    ids=["plain", "sharded", "masters"],
)
@pytest.mark.parametrize("first", ["npu", "cpu"])
def test_a_checkpoint_of_one_platform_goes_on_on_the_other(models, tmp_path, sizes, dtype, first):
    job = {"model": models["qwen3"], "sizes": sizes, "dtype": dtype}
    saved = str(tmp_path / "checkpoint")
    run_ranks(tmp_path / "one", {**job, "steps": 2, "save": saved}, emulated=first == "npu")
    here = run_ranks(tmp_path / "two", {**job, "steps": 1, "load": saved}, emulated=first == "npu")
    there = run_ranks(tmp_path / "three", {**job, "steps": 1, "load": saved}, emulated=first != "npu")
    near(here, there, *((1e-5,) if dtype == "float32" else (2e-2, 2**-7)))  # one unit in the last place of bfloat16


def test_halves_of_masters_change_nothing_under_the_optimizer_of_mindspeed(models, tmp_path):
    job = {"model": models["qwen3"], "dtype": "bfloat16", "steps": 3}
    sizes = ({}, {"mindspeed": {"reuse_fp32_param": True}})
    whole, halved = (run_ranks(tmp_path / str(len(s)), {**job, "sizes": s}, emulated=True) for s in sizes)
    assert all(whole[name] == halved[name] for name in ("losses", "norms", "weights")) and whole["norms"][-1] > 0


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        ("trainer.tensor_parallel=2", "trainer.sequence_parallel=true"),
        ("trainer.pipeline_parallel=2", "model.source=builtin:tiny_qwen2_4l"),
        ("trainer.data_parallel=2", "trainer.expert_parallel=2"),
        ("trainer.data_parallel=2", "trainer.expert_parallel=2", "trainer.mindspeed.moe_overlap=alltoall"),
    ],
    ids=["one", "tensor", "pipeline", "expert", "overlap"],
)
def test_main_job_has_the_losses_of_the_cpu(tmp_path, sizes):
    """Real Ray, dock, relay and rollout; three steps, every step trained on what the one before has sampled."""
    if "trainer.expert_parallel=2" in sizes:
        # its model has learnt nothing: what tells answers apart is their length
        experts = main_job.make_expert_model(tmp_path / "experts")
        sizes = (*sizes, f"model.source={experts}", "reward.overlong_buffer=4")
    plain, emulated = (main_job.train(tmp_path / f"emulated_{e}", sizes, emulated=e) for e in (False, True))
    assert len(plain) == len(emulated) == 3 and plain[-1]["actor/grad_norm"] > 0
    for a, b in zip(plain, emulated):
        assert {name: b[name] - a[name] for name in a if abs(a[name] - b[name]) > 1e-5} == {}


def test_an_argument_that_mindspeed_does_not_have_is_refused(models, tmp_path):
    sizes = {"mindspeed": {"arguments": {"use_fast_attention": True}}}
    with pytest.raises(AssertionError, match="MindSpeed has no argument use_fast_attention"):
        run_ranks(tmp_path, {"model": models["qwen3"], "sizes": sizes, "steps": 1}, emulated=True)
