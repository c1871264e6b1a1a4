"""What vLLM's own layers keep of full weights, for each tensor-parallel rank. Run in a process of its own: prints JSON.

Full weights number their elements; a slice is told by its first and last element and its shape.
"""

import contextlib
import json
import os
import sys
from unittest.mock import patch

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
import torch
import vllm.model_executor.layers.linear as linear
import vllm.model_executor.layers.vocab_parallel_embedding as vocabulary
import vllm.model_executor.parameter as parameter
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map


def numbered(rows: int, cols: int) -> torch.Tensor:
    return torch.arange(rows * cols, dtype=torch.float64).view(rows, cols)


def describe(part: torch.Tensor) -> list:
    return [list(part.shape), int(part[0, 0]), int(part[-1, -1])] if part.numel() else [list(part.shape), 0, 0]


def slices(rank: int, size: int, sizes: dict[str, int]) -> dict[str, list]:
    hidden, heads, kv, dim = (sizes[k] for k in ("hidden", "heads", "kv_heads", "head_dim"))
    qkv = linear.QKVParallelLinear(hidden, dim, heads, kv, bias=False, params_dtype=torch.float64)
    for name, rows in (("q", heads * dim), ("k", kv * dim), ("v", kv * dim)):
        qkv.weight.weight_loader(qkv.weight, numbered(rows, hidden), name)
    own_q, own_kv = heads // size * dim, max(1, kv // size) * dim
    q, k, v = qkv.weight.split([own_q, own_kv, own_kv])
    gate_up = linear.MergedColumnParallelLinear(hidden, [sizes["ffn"]] * 2, bias=False, params_dtype=torch.float64)
    for index in (0, 1):
        gate_up.weight.weight_loader(gate_up.weight, numbered(sizes["ffn"], hidden), index)
    gate, up = gate_up.weight.chunk(2)
    down = linear.RowParallelLinear(sizes["ffn"], hidden, bias=False, params_dtype=torch.float64)
    down.weight.weight_loader(down.weight, numbered(hidden, sizes["ffn"]))
    out = linear.RowParallelLinear(heads * dim, hidden, bias=False, params_dtype=torch.float64)
    out.weight.weight_loader(out.weight, numbered(hidden, heads * dim))
    head = vocabulary.ParallelLMHead(sizes["vocab"], hidden, params_dtype=torch.float64)
    head.weight.weight_loader(head.weight, numbered(sizes["vocab"], hidden))
    true = head.shard_indices.num_org_elements
    parts = dict(q_proj=q, k_proj=k, v_proj=v, gate_proj=gate, up_proj=up, down_proj=down.weight, o_proj=out.weight)
    return {name: describe(t) for name, t in parts.items()} | {"lm_head": describe(head.weight[:true])}


def main() -> None:
    cases = json.loads(sys.stdin.read())
    found = []
    for sizes in cases["dense"]:
        for rank in range(sizes["tensor"]):
            with contextlib.ExitStack() as stack:
                stack.enter_context(set_current_vllm_config(VllmConfig()))
                for module in (linear, vocabulary, parameter):
                    for name, value in (("rank", rank), ("world_size", sizes["tensor"])):
                        stack.enter_context(
                            patch.object(module, f"get_tensor_model_parallel_{name}", lambda value=value: value)
                        )
                found.append(slices(rank, sizes["tensor"], sizes))
    maps = []
    for experts, size in cases["experts"]:
        for rank in range(size):
            _, local, _ = determine_expert_map(size, rank, experts)
            maps.append([i for i, at in enumerate(local.tolist()) if at >= 0])
    print(json.dumps({"dense": found, "experts": maps}))


if __name__ == "__main__":
    main()
