"""`NpuPlatform` and the operators on an emulated device, without MindSpeed; and what the emulation refuses."""

import pytest
from emulated import run_python

pytestmark = pytest.mark.slow

PLATFORM = """
import os
os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "4,5"
from mindspeed_asyncflow.platforms.base import current
from mindspeed_asyncflow.platforms.npu import device_count
assert current().name == "npu" and device_count() == 2
import torch, torch_npu
platform = current("npu")
assert platform.device(5) == torch.device("npu", 0)
assert torch_npu.npu.events[0] == ("set_device", 1), "B90: physical 5 is the second of the visible ones"
from mindspeed_asyncflow.platforms.memory import DeviceMemory, HostPool, TRAIN_WEIGHTS
memory = DeviceMemory(platform)
block = memory.tensor(TRAIN_WEIGHTS, (1000,), torch.float32).fill_(3.0)
assert block.device.type == "npu" and memory.total() == 4000 and memory.census() == 4000
assert platform.memory_bytes()[0] >= 4000 and platform.free_bytes() > 0
from mindspeed_asyncflow.reshard.swap import HostSwap
swap = HostSwap(memory, HostPool(platform))
swap.out({TRAIN_WEIGHTS: [block]})
assert block.untyped_storage().nbytes() == 0 and memory.total() == 0
swap.back()
assert block.device.type == "npu" and float(block.sum()) == 3000.0
assert all(buffer.is_pinned() for buffer in swap._pool.buffers()), "host copies are in pinned memory"
kinds = [event[0] for event in torch_npu.npu.events]
assert "stream" in kinds and "stream.synchronize" in kinds
from mindspeed_asyncflow.errors import PlatformError
try:
    platform.prepare_trainer(1)
except PlatformError as error:
    assert "scripts/install_mindspeed.sh" in str(error)
else:
    raise AssertionError("there is no MindSpeed")
print("done")
"""

OPERATORS = """
import numpy as np, torch, torch_npu
from mindspeed_asyncflow.config.mindspeed import MindSpeedConfig
from mindspeed_asyncflow.platforms import kernels, mindspeed
from mindspeed_asyncflow.platforms.packing import pack_layout
torch.manual_seed(0)
for cu in ([0, 3, 5, 9], [0, 4, 8], list(range(1030))):
    layout, total = pack_layout(np.array(cu)), cu[-1]
    given = [torch.randn(total, 1, 16), torch.rand(16), *(torch.randn(total, n, 8) for n in (4, 2, 2))]
    angles = torch.rand(total, 1, 4)
    found = []
    for where in ("cpu", "npu"):
        x, weight, q, k, v = inputs = [t.to(where).detach().requires_grad_() for t in given]
        cos, sin = angles.cos().to(where), angles.sin().to(where)
        placed = pack_layout(np.array(cu), where)
        outs = (kernels.rms_norm(x, weight, 1e-6), kernels.swiglu(x), kernels.rotary(q, cos, sin),
                kernels.attention_packed(q, k, v, placed, 0.3))
        sum((out * torch.arange(out.numel(), device=where).view(out.shape).sin()).sum() for out in outs).backward()
        assert all(out.device.type == where for out in outs)
        found.append([t.detach().cpu() for t in (*outs, *(i.grad for i in inputs))])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
assert torch_npu.calls["npu_fusion_attention"] == 1 + 1 + 2, "more than 1024 samples are two calls"
before = dict(torch_npu.calls)
off = MindSpeedConfig(fused_rmsnorm=False, fused_swiglu=False)
kernels.use_torch_for(name for name, fused in mindspeed.operators(off).items() if not fused)
x = torch.randn(4, 16, device="npu")
kernels.swiglu(kernels.rms_norm(x, torch.ones(16, device="npu"), 1e-6))
assert dict(torch_npu.calls) == before, "switched off: computed with torch"
print("done")
"""

BLOCKS = """
import numpy as np, torch, torch_npu
from mindspeed_asyncflow.platforms import kernels
from mindspeed_asyncflow.platforms.attention_block import block_backward, block_forward
from mindspeed_asyncflow.platforms.packing import pack_layout
torch.manual_seed(0)
kernels.NPU_MAX_SAMPLES = 3  # of one call
for cu in ([0, 3, 5, 9], [0, 4, 8], [0, 1, 4, 6, 7, 12]):
    total = cu[-1]
    q, k, v, grad, out = [torch.randn(total, n, d) for n, d in ((4, 8), (2, 8), (2, 12), (4, 12), (4, 12))]
    found = []
    for where in ("cpu", "npu"):
        placed = pack_layout(np.array(cu), where)
        on = [t.to(where) for t in (q, k, v)]
        part, log = block_forward(*on, placed, 0.3)
        # what other blocks add: the statistics of all of them are larger than this block's own
        of_all = log + 0.5 + torch.arange(log.numel(), device=where).view(log.shape).cos() / 4
        grads = block_backward(grad.to(where), *on, out.to(where), of_all, placed, 0.3)
        found.append([t.cpu() for t in (part, log, *grads)])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
assert torch_npu.calls["npu_fusion_attention"] == torch_npu.calls["npu_fusion_attention_grad"] == 1 + 1 + 2
print("done")
"""

GROUPS = """
import torch, torch_npu
from torch_npu.compiled import npu_gmm, npu_gmm_backward
torch.manual_seed(0)
ends = torch.tensor([3, 3, 7], device="npu")
x = torch.randn(7, 4, device="npu", requires_grad=True)
for weight in (torch.randn(3, 4, 5, device="npu"), torch.randn(3, 5, 4, device="npu").mT):
    weight = weight.detach().requires_grad_()
    (out,) = npu_gmm([x], [weight], [], ends, 0, 0)
    by_row = weight[torch.tensor([0, 0, 0, 2, 2, 2, 2], device="npu")]
    torch.testing.assert_close(out, torch.einsum("nk,nkm->nm", x, by_row))
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (x, weight), grad)
    (of_x,), (of_weight,), none = npu_gmm_backward([grad], [x], [weight], ends, 0)
    torch.testing.assert_close((of_x, of_weight), wanted)
def refused(words, *arguments):
    try:
        npu_gmm(*arguments)
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")
refused("groups end at", [x], [weight], [], ends + 1, 0, 0)
refused("got one on cpu", [x], [weight], [], ends.cpu(), 0, 0)
refused("last two dimensions transposed", [x], [weight.permute(1, 0, 2).contiguous().permute(1, 0, 2)], [], ends, 0, 0)
import torch.utils.cpp_extension
try:
    torch.utils.cpp_extension.load(name="algorithm", sources=[])
except RuntimeError as error:
    assert "algorithm is not emulated" in str(error)
print("done")
"""

REFUSALS = """
import torch, torch_npu
def refused(action, words):
    try:
        action()
    except (RuntimeError, TypeError, AttributeError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")
on = torch.randn(6, 2, 8, device="npu")
host = torch.randn(6, 2, 8)
mask = torch.ones(2048, 2048, dtype=torch.bool, device="npu").triu(1)
def attend(**changes):
    wanted = dict(head_num=2, input_layout="TND", atten_mask=mask, sparse_mode=3, actual_seq_qlen=[2, 6],
                  actual_seq_kvlen=[2, 6])
    return torch_npu.npu_fusion_attention(on, on, on, **{**wanted, **changes})
attend()
refused(lambda: attend(atten_mask=None), "compressed mask")
refused(lambda: attend(atten_mask=mask.logical_not()), "above the diagonal")
refused(lambda: attend(actual_seq_qlen=(2, 6)), "a list")
refused(lambda: attend(actual_seq_qlen=[2, 5]), "ends")
refused(lambda: attend(head_num=4), "4 heads")
refused(lambda: attend(input_layout="BSND", actual_seq_qlen=None), "belong to TND")
refused(lambda: torch_npu.npu_rms_norm(on, torch.ones(7, device="npu"), 1e-6), "gamma")
refused(lambda: torch_npu.npu_swiglu(host), "expected npu tensors")
refused(lambda: torch_npu.npu_matmul_everything, "not emulated")
refused(lambda: on + host, "both npu:0 and cpu")
refused(lambda: on.numpy(), "Tensor.cpu() first")
refused(lambda: torch.npu.set_device(3), "invalid device ordinal")
refused(lambda: torch.npu.set_rng_state(torch.get_rng_state()), "wrong size")
assert (on + 1).device.type == "npu" and on.cpu().device.type == "cpu" and torch.zeros_like(on).is_npu
assert torch.nn.Linear(8, 8).npu()(on).device.type == "npu"
import torch.distributed as dist
dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(on)
refused(lambda: dist.all_reduce(host), "no backend for a tensor on cpu")
refused(lambda: dist.all_reduce(on.transpose(0, 1)), "contiguous")
print("done")
"""


@pytest.mark.parametrize(
    "code",
    [PLATFORM, OPERATORS, BLOCKS, GROUPS, REFUSALS],
    ids=["platform", "operators", "blocks", "groups", "refusals"],
)
def test_on_the_emulated_device(code, monkeypatch):
    """B90 and the rules of the operators: the code of our platform, and what a device would not take."""
    monkeypatch.delenv("ASYNCFLOW_MINDSPEED_SRC", raising=False)
    assert run_python(code, emulated=True, devices=2).strip().endswith("done")
