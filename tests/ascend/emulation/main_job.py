"""The main job, with trainer ranks on NPUs or on the CPU and everything else the same."""

import json
from pathlib import Path
from typing import Any

from emulated import ROOT, run_python

# What `asyncflow train` does behind its checks of the machine, which has neither a driver nor /dev/davinci* here.
TRAIN = """
import sys
from pathlib import Path
from mindspeed_asyncflow.config import load_config
from mindspeed_asyncflow.service import launch
sys.exit(launch.train(load_config(sys.argv[1], sys.argv[3:]), Path(sys.argv[2]), []))
"""
# A model with experts and a tokenizer that knows the task.
EXPERTS = """
import sys, torch, transformers
from mindspeed_asyncflow.data.char_tokenizer import CHARACTERS, make_char_tokenizer
tokenizer = make_char_tokenizer(CHARACTERS)
torch.manual_seed(0)
config = transformers.Qwen3MoeConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, moe_intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    norm_topk_prob=True, max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id, tie_word_embeddings=False,
)
transformers.Qwen3MoeForCausalLM(config).save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""
SETTINGS = (
    "rollout.engine=reference",
    "trainer.steps=3",
    "workflow.max_lag=0",
    "workflow.overlap=false",
    "workflow.groups_per_step=4",
    "algorithm.group_size=4",
    "evaluation.prompts=0",
    "workflow.probe_answers=2",
    "workflow.start_timeout_s=600",
    "observe.tensorboard=false",
    "observe.trace=false",
)
TRAINED = ("actor/loss", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/ratio_mean", "reward/mean")


def make_expert_model(folder: Path) -> str:
    run_python(EXPERTS, str(folder), emulated=False)
    return str(folder)


def train(folder: Path, settings: tuple[str, ...], *, emulated: bool) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, of the names in TRAINED."""
    platform = (f"run.platform={'npu' if emulated else 'cpu'}",)
    config = str(ROOT / "configs" / "qwen_tiny_cpu.yaml")
    run_python(TRAIN, config, str(folder), *SETTINGS, *settings, *platform, emulated=emulated, devices=4, timeout_s=900)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in TRAINED} for row in rows]
