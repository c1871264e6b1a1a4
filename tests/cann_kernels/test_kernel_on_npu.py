"""The kernels on a real NPU, against float64; skipped where there is none."""

import pytest
import torch

from cann_kernels import exactly
from mindspeed_asyncflow.platforms import kernels
from mindspeed_asyncflow.platforms.base import current

VOCABULARY = 151_936
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def device() -> torch.device:
    platform = current()
    if platform.name != "npu":
        pytest.skip("there is no NPU here: torch_npu sees no device")
    return platform.device()


@pytest.mark.parametrize("width", [31, 4097, VOCABULARY])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_on_the_device_agree_with_float64(device, dtype, width):
    slopes = torch.linspace(-1, 1, 200).view(2, 100)  # more rows than vector cores
    generator = torch.Generator().manual_seed(width)
    for scale in (1.0, 8.0, 30.0):
        logits = (torch.randn(100, width, generator=generator) * scale).to(dtype)
        targets = torch.randint(0, width, (100,), generator=generator)
        wanted = exactly.in_float64(logits, targets, 0.7)
        wanted_gradient = exactly.gradients_in_float64(logits, targets, 0.7, slopes)
        for shards in (1, 3):
            parts = [part.to(device) for part in exactly.cut(logits, shards)]
            before = kernels.path_calls()
            found = exactly.over_shards(parts, targets.to(device), 0.7, width)
            gradient = exactly.gradients(parts, targets.to(device), 0.7, width, slopes.to(device))
            ran = {path: count - before.get(path, 0) for path, count in kernels.path_calls().items()}
            assert ran["vocabulary_stats/triton"] == 2 * shards and ran["vocabulary_gradient/triton"] == shards
            exactly.assert_values((found[0].cpu(), found[1].cpu()), wanted, atol=3e-5)
            exactly.assert_gradient(gradient.cpu(), wanted_gradient)
