"""All patches of a trainer on the real megatron-core, in a process of its own."""

import subprocess
import sys

import pytest

IN_A_TRAINER = """
import sys
from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap
from mindspeed_asyncflow import patches
bootstrap("cpu")
import megatron.core.optimizer as optimizer
from megatron.core.transformer.moe import moe_utils, token_dispatcher
def state():
    return [optimizer.Adam, optimizer.distrib_optimizer.Adam, moe_utils.te_general_gemm,
            token_dispatcher.maybe_move_tensor_to_cpu, sys.modules["mbridge"]]
from megatron.core.transformer import multi_latent_attention
assert not multi_latent_attention.HAVE_TE
before = state()
assert before[0].__name__ == "FusedAdam" and before[2] is None
assert patches.apply_trainer("cpu") == [
    "mbridge_packages", "latent_attention_without_te", "moe_router_gemm", "moe_split_sizes", "optimizer_adam"]
bootstrap("cpu")
assert all(a is b for a, b in zip(before, state()))
from mbridge.models.qwen2 import Qwen2Bridge
assert "mbridge.models.glm4_vl" not in sys.modules
print("fine")
"""


@pytest.mark.slow
def test_patches_apply_to_the_pinned_versions_once():
    command = [sys.executable, "-W", "ignore", "-c", IN_A_TRAINER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "fine", done.stderr
