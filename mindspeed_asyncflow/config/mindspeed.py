"""What MindSpeed does in a trainer on NPUs: fused operators, memory for time, and arguments of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mindspeed_asyncflow.config.section import Section

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import Config

Raw = tuple[Literal["error", "warning"], tuple[str, ...], str]
KEY = "trainer.mindspeed"

# Arguments of MindSpeed that are a setting here, and the setting.
NAMED = {
    "use_fused_rmsnorm": f"{KEY}.fused_rmsnorm",
    "use_fused_swiglu": f"{KEY}.fused_swiglu",
    "use_fused_rotary_pos_emb": f"{KEY}.fused_rope",
    "use_flash_attn": f"{KEY}.flash_attention",
    "swap_attention": f"{KEY}.swap_attention",
    "swap_modules": f"{KEY}.swap_attention",
    "context_parallel_algo": f"{KEY}.context_parallel",  # ring attention is our own, in platforms/ring.py
    "moe_alltoall_overlap_comm": f"{KEY}.moe_overlap",
    "moe_allgather_overlap_comm": f"{KEY}.moe_overlap",
    "moe_fb_overlap": f"{KEY}.moe_overlap",
    "moe_grouped_gemm": "trainer.moe_grouped_gemm",
    "reuse_fp32_param": f"{KEY}.reuse_fp32_param",  # our own, in engines/megatron/halves.py
}
_TREE = "it imports megatron.training, which is in Megatron-LM's source tree and not in the megatron-core package"
_NAMES = "it changes the modules whose weights checkpoints and weight updates know by name"

# Overlaps that cannot work with megatron-core 0.16, by what MindSpeed core_r0.16.0 (e4772499) has in
# mindspeed/core/transformer/moe/moe_feature.
OVERLAPS = {
    "allgather": "its experts are made without process groups (overlap/experts.py:36), without which megatron's class "
    "for them cannot be made, and called with one argument more than they take (overlap/moe_layer.py:149)",
    "forward_backward": "its schedule, experts and collectives import megatron.training (fb_overlap/adaptor.py:24), "
    "which is in Megatron-LM's source tree and not in the megatron-core package, and it runs layers in an order of its "
    "own, without the trimmed last layer of this trainer",
}
_MLP = "dense layers have an MLP of our own; trainer.mindspeed.recompute computes it again as a whole"
_LINEAR = "it takes the place of linear layers that megatron's local layer specification does not use"

# Arguments of MindSpeed that cannot work with this trainer, and why.
REFUSED = {
    "smart_swap": _TREE,
    "swap_optimizer": "swaps and checkpoints of this trainer look for the state of the optimizer on the device",
    "virtual_optimizer": _TREE,
    "ema_decay": _TREE,
    "layerzero": _TREE,
    "quant_states": _TREE,
    "quant_grads": _TREE,
    "balanced_moe_experts": _TREE,
    "hccl_group_buffer": f"{_TREE}; the variable HCCL_BUFFSIZE sets the buffers",
    "hccl_group_buffer_adaptive": f"{_TREE}; the variable HCCL_BUFFSIZE sets the buffers",
    "npu_deterministic": f"{_TREE}; the variable HCCL_DETERMINISTIC=true makes collectives deterministic",
    "recompute_norm": "norms are our own; trainer.mindspeed.recompute names what can be computed again",
    "recompute_activation_function": _MLP,
    "reset_attention_mask": "samples are packed by their lengths, which core attention gets with the batch",
    "gemm_gradient_accumulation_fusion": "weights of grouped experts lie transposed to what it adds gradients to",
    "moe_tp_extend_ep": _NAMES,
    "moe_zero_memory": "it computes experts again from weights that lie as MindSpeed's own experts have them "
    "(overlap/moe_layer_overlap_all2all.py:316)",
    "tp_2d": _NAMES,
    "noop_layers": _NAMES,
    "use_ascend_mc2": _LINEAR,
    "use_ascend_coc": _LINEAR,
    "optimizer_selection": "the state of fused_adamw is the one that checkpoints hold on every platform",
    "transformer_impl": "layers are those of megatron's local specification, with norm and attention of our own",
    "schedules_method": "pipelines are cut by trainer.virtual_pipeline and trainer.pipeline_layers",
}

ON_CPU = ("recompute", "context_parallel", "reuse_fp32_param")  # what the CPU platform takes


class MindSpeedConfig(Section):
    """The CPU platform has no fused operators and no second memory to swap to: it takes only ON_CPU from here."""

    fused_rmsnorm: bool = Field(True, description="NPU: npu_rms_norm; false: the formula in torch.")
    fused_swiglu: bool = Field(True, description="NPU: npu_swiglu; false: the formula in torch.")
    fused_rope: bool = Field(True, description="NPU: npu_rotary_mul; false: the formula in torch.")
    flash_attention: bool = Field(
        True, description="NPU: npu_fusion_attention over packed samples; false: torch's attention over padded ones."
    )
    swap_attention: bool = Field(
        False, description="NPU: what attention keeps for the backward pass waits in pinned host memory."
    )
    recompute: list[Literal["attention", "mlp", "experts"]] = Field(
        [], description="Parts of each layer computed again in the backward pass, where trainer.recompute is too much."
    )
    context_parallel: Literal["ulysses", "ring"] = Field(
        "ulysses",
        description="How trainer.context_parallel cuts attention. ulysses: ranks change tokens for heads; ring: keys "
        "and values go round the ranks, each of which holds a stripe of every sample; any number of heads.",
    )
    moe_overlap: Literal["off", "alltoall", "allgather", "forward_backward"] = Field(
        "off",
        description="NPU: messages between expert-parallel ranks beside computation. alltoall: MindSpeed's overlap of "
        "both exchanges, with grouped experts; the others are refused, and why is said.",
    )
    reuse_fp32_param: bool = Field(
        False,
        description="bf16 models: a weight is the high half of its fp32 master too, and only the low half is kept "
        "beside it. Train state takes 2 bytes less for each master, an optimizer step longer; results stay the same.",
    )
    arguments: dict[str, bool | int | float | str] = Field(
        {}, description="Further arguments of MindSpeed, with underscores; those that cannot work here are refused."
    )


def master_bytes(c: Config) -> int:
    """Of a parameter, beside the parameter itself."""
    if c.model.dtype != "bfloat16":
        return 0
    return 2 if c.trainer.mindspeed.reuse_fp32_param else 4


def rules(c: Config) -> Iterator[Raw]:
    m, t = c.trainer.mindspeed, c.trainer
    if m.context_parallel == "ring" and t.context_parallel == 1:
        yield (
            "warning",
            (f"{KEY}.context_parallel", "trainer.context_parallel"),
            "is ring, which has no use: trainer.context_parallel is 1; leave it out",
        )
    yield from _overlap(c)
    if m.reuse_fp32_param and c.model.dtype != "bfloat16":
        yield (
            "warning",
            (f"{KEY}.reuse_fp32_param", "model.dtype"),
            f"is true, which has no use: a model in {c.model.dtype} has no masters; leave it out",
        )
    if t.recompute and m.recompute:
        yield (
            "error",
            (f"{KEY}.recompute", "trainer.recompute"),
            f"{m.recompute} are parts of what trainer.recompute computes again anyhow; set one of them",
        )
    if t.recompute and m.swap_attention:
        yield (
            "error",
            (f"{KEY}.swap_attention", "trainer.recompute"),
            "with trainer.recompute nothing of a layer is kept for the backward pass: there is nothing to swap; "
            "set one of them",
        )
    if m.swap_attention and "attention" in m.recompute:
        yield (
            "error",
            (f"{KEY}.swap_attention", f"{KEY}.recompute"),
            "what is computed again is not kept: there is nothing to swap; set one of them",
        )
    for name in sorted(m.arguments):
        where = (f"{KEY}.arguments",)
        if name.startswith("-") or "-" in name:
            yield "error", where, f"{name!r}: write {name.strip('-').replace('-', '_')!r}, without a value true"
        elif name in NAMED:
            yield "error", (*where, NAMED[name]), f"{name} is set by {NAMED[name]}"
        elif name in REFUSED:
            yield "error", where, f"{name} cannot be used: {REFUSED[name]}"
    if c.run.platform == "cpu":
        yield from _unused(m)


def _overlap(c: Config) -> Iterator[Raw]:
    m, key = c.trainer.mindspeed, f"{KEY}.moe_overlap"
    if m.moe_overlap in OVERLAPS:
        yield "error", (key,), f"is {m.moe_overlap}: {OVERLAPS[m.moe_overlap]}; use alltoall"
    elif m.moe_overlap == "alltoall" and c.trainer.expert_parallel == 1:
        yield (
            "error",
            (key, "trainer.expert_parallel"),
            "is alltoall: one expert-parallel rank has nobody to exchange tokens with; raise trainer.expert_parallel "
            "or use off",
        )
    if m.moe_overlap != "off" and "experts" in m.recompute:
        yield (
            "error",
            (key, f"{KEY}.recompute"),
            "a layer whose messages overlap runs its own backward pass, so its experts cannot be computed again by "
            "themselves; leave experts out of the list, or set trainer.recompute",
        )


def _unused(m: MindSpeedConfig) -> Iterator[Raw]:
    for name, field in type(m).model_fields.items():
        if name not in ON_CPU and getattr(m, name) != field.get_default(call_default_factory=True):
            yield "warning", (f"{KEY}.{name}", "run.platform"), "has no use: the platform is cpu; leave it out"
