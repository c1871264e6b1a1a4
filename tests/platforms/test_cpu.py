"""The CPU platform: what it refuses, and what the shims change in a trainer process."""

import subprocess
import sys
import types

import pytest

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms import cpu_shims
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.platforms.cpu_shims import is_accelerator


def test_late_preparation_is_refused(monkeypatch):
    monkeypatch.setattr(cpu_shims, "_applied", False)  # whatever ran before in this process
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(PlatformError, match=r"before megatron\.core"):
        CpuPlatform().prepare_trainer(1)


@pytest.mark.parametrize("field", ["deallocate_pipeline_outputs", "gradient_accumulation_fusion"])
def test_settings_that_give_wrong_numbers_are_refused(field):
    config = types.SimpleNamespace(**{field: True})
    with pytest.raises(PlatformError, match=field):
        CpuPlatform().check_transformer_config(config)


@pytest.mark.parametrize(("overlap", "batched"), [(False, False), (True, True)])
def test_virtual_pipeline_needs_single_overlapped_transfers(overlap, batched):
    config = types.SimpleNamespace(
        virtual_pipeline_model_parallel_size=2, overlap_p2p_comm=overlap, batch_p2p_comm=batched
    )
    with pytest.raises(PlatformError, match="virtual pipeline"):
        CpuPlatform().check_transformer_config(config)


def test_own_settings_are_accepted():
    CpuPlatform().check_transformer_config(types.SimpleNamespace(**CpuPlatform().transformer_overrides()))


@pytest.mark.parametrize(
    ("device", "answer"), [("cuda", True), ("npu:3", True), (0, True), ("cpu", False), (None, False), (True, False)]
)
def test_which_device_arguments_mean_an_accelerator(device, answer):
    assert is_accelerator(device) is answer


def test_memory_is_a_real_figure():
    now, peak = CpuPlatform().memory_bytes()
    assert 10_000_000 < now <= peak * 1.01


IN_A_TRAINER = """
import sys, torch
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
platform = CpuPlatform()
platform.prepare_trainer(1)
platform.prepare_trainer(1)
assert torch.zeros(2, device="cuda").device.type == "cpu"
assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
assert torch.zeros(1).cuda().to("cuda:0").device.type == "cpu"
assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
assert torch.zeros(1).type("torch.cuda.LongTensor").dtype == torch.int64
assert not torch.cuda.is_available()
a, b = torch.cuda.Event(), torch.cuda.Event()
a.record(); b.record()
assert 0 <= a.elapsed_time(b) < 1000
torch.cuda.manual_seed(3); x = torch.rand(1)
torch.manual_seed(3); assert torch.equal(x, torch.rand(1))
with torch.device("meta"):  # the factories must still be known by identity
    assert torch.arange(3).device.type == "meta"
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "gloo"
y = torch.ones(2); dist.all_reduce(y, group=dist.new_group([0], backend="hccl"))
assert "megatron" not in sys.modules
print("fine")
"""


@pytest.mark.slow
def test_shims_change_where_code_runs():
    command = [sys.executable, "-W", "ignore", "-c", IN_A_TRAINER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.stdout.strip() == "fine", done.stderr
