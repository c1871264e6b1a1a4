"""mbridge's Hugging Face converters on megatron's local layer spec: Qwen2, Qwen3, Qwen3-MoE and DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mbridge.core.safetensor_io import SafeTensorIO
from mbridge.models.deepseek_v3 import DeepseekV3Bridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mindspeed_asyncflow.config.schema import TrainerConfig
from mindspeed_asyncflow.engines.megatron.model import PackedModel, PolicyModel, ValueModel
from mindspeed_asyncflow.errors import DataError
from mindspeed_asyncflow.platforms.base import Platform
from mindspeed_asyncflow.platforms.modules import layer_spec

# parts of a layer, as settings and as megatron call them
RECOMPUTED = {"attention": "core_attn", "mlp": "mlp", "experts": "moe"}


def transformer_settings(trainer: TrainerConfig, platform: Platform) -> dict[str, Any]:
    """megatron `TransformerConfig` fields that follow from our settings rather than from the model."""
    settings: dict[str, Any] = {
        "sequence_parallel": trainer.sequence_parallel,
        # gradients are sums over tokens; the engine divides once, at the optimizer step
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # all micro-batches of a pipeline call are padded to one length instead
        "variable_seq_lengths": False,
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": trainer.moe_grouped_gemm,
    }
    if overlaps(trainer, platform):
        # shared experts compute while tokens are under way; no layer without such experts reads it
        settings |= {"moe_grouped_gemm": True, "moe_shared_expert_overlap": True}
    if trainer.recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif trainer.mindspeed.recompute:
        parts = [RECOMPUTED[part] for part in trainer.mindspeed.recompute]
        settings |= {"recompute_granularity": "selective", "recompute_modules": parts}
    if trainer.virtual_pipeline:
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if trainer.pipeline_layers is not None:
        settings["pipeline_model_parallel_layout"] = stage_contents(trainer.pipeline_layers)
    return settings | platform.transformer_overrides()


def overlaps(trainer: TrainerConfig, platform: Platform) -> bool:
    return trainer.mindspeed.moe_overlap != "off" and platform.name == "npu"


def stage_contents(layers: Sequence[int]) -> list[list[str]]:
    """megatron's list of what each (virtual) pipeline stage holds, for stages of `layers` decoder layers."""
    stages = [["decoder"] * count for count in layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


class _LocalSpec:
    """Mixed into an mbridge class: our layer spec, our model class, and the names that the local spec uses."""

    # the local spec has norms of their own where Transformer Engine fuses them into the next linear layer
    _OTHER_MAPPING = {"input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"]}

    def __init__(
        self,
        hf_config: Any,
        *,
        settings: dict[str, Any],
        overlap: bool,
        temperature: float,
        values: bool,
        **kwargs: Any,
    ) -> None:
        self._overlap = overlap
        self._settings, self._temperature, self._values = settings, temperature, values
        super().__init__(hf_config, **kwargs)  # type: ignore[call-arg]

    def _adjust_mapping_for_shared_weights(self) -> None:
        if getattr(self.hf_config, "tie_word_embeddings", False):  # type: ignore[attr-defined]
            # an own dictionary: mbridge would change the one of the class, for every later model
            self._DIRECT_MAPPING = self._DIRECT_MAPPING | {  # type: ignore[has-type]
                "output_layer.weight": "model.embed_tokens.weight"
            }

    def _build_base_config(self, **kwargs: Any) -> Any:
        return super()._build_base_config(**(kwargs | self._settings))  # type: ignore[misc]

    SCALINGS: tuple[str, ...] = ()  # of rotary angles, beside none

    def _rope(self) -> dict[str, Any]:
        """The rotary settings of config.json. Raises `DataError` for a scaling that this trainer does not compute."""
        config = self.hf_config  # type: ignore[attr-defined]
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if rope.get("rope_type", "default") not in ("default", *self.SCALINGS):
            raise DataError(f"rotary scaling {rope['rope_type']!r} is not supported by the trainer for this model type")
        return dict(rope)

    def _rope_theta(self) -> float:
        return float(self._rope().get("rope_theta") or self.hf_config.rope_theta)  # type: ignore[attr-defined]

    def _scaled_frequencies(self) -> torch.Tensor | None:
        """float32 [D/2]; None where they are those of the base alone."""
        rope = self._rope()
        if rope.get("rope_type", "default") == "default":
            return None
        config = self.hf_config  # type: ignore[attr-defined]
        frequencies, length = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        if length != 1.0:
            raise DataError(
                f"rotary scaling {rope['rope_type']!r} also makes rotated parts {length:g} times as long; only mscale "
                "equal to mscale_all_dim is supported by the trainer"
            )
        return frequencies.float()

    def _model_provider(self, post_model_creation_callbacks: Any = ()) -> Any:
        hf_config = self.hf_config  # type: ignore[attr-defined]
        divisor = self.make_vocab_size_divisible_by or 1  # type: ignore[attr-defined]
        self.vocab_size = hf_config.vocab_size
        self.padded_vocab_size = -(-self.vocab_size // divisor) * divisor

        def provide(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> PackedModel:
            config = self.config  # type: ignore[attr-defined]
            common: dict[str, Any] = dict(
                config=config,
                transformer_layer_spec=layer_spec(config, vp_stage, self._overlap),
                vocab_size=self.padded_vocab_size,
                max_sequence_length=hf_config.max_position_embeddings,
                pre_process=pre_process,
                post_process=post_process,
                position_embedding_type="rope",
                rotary_base=self._rope_theta(),
                inv_freq=self._scaled_frequencies(),
                vp_stage=vp_stage,
            )
            if self._values:
                return ValueModel(**common)
            tied = getattr(hf_config, "tie_word_embeddings", False)
            return PolicyModel(
                **common,
                share_embeddings_and_output_weights=tied,
                temperature=self._temperature,
                true_vocab=self.vocab_size,
            )

        return provide

    def _weight_name_mapping_mcore_local_to_global(self, model: Any, consider_ep: bool = True) -> dict[str, str]:
        names = super()._weight_name_mapping_mcore_local_to_global(model, consider_ep)  # type: ignore[misc]
        first = 0
        if consider_ep and self.mpu.ep_size > 1:  # type: ignore[attr-defined]
            first = self.config.num_moe_experts // self.mpu.ep_size * self.mpu.ep_rank  # type: ignore[attr-defined]
        for local, name in names.items():
            if self._values:  # the head that takes the place of the vocabulary's
                names[local] = name.replace("output_layer.", "value_head.")
            if ".local_experts." in name:  # experts.local_experts.3.linear_fc1.weight -> experts.linear_fc1.weight3
                head, tail = name.split(".local_experts.")
                expert, layer, kind = tail.split(".")
                names[local] = f"{head}.{layer}.{kind}{int(expert) + first}"
        return names

    def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
        if name.startswith("value_head."):
            return [name]
        if name.endswith("pre_mlp_layernorm.weight"):
            return [f"model.layers.{name.split('.')[2]}.post_attention_layernorm.weight"]
        return super()._weight_name_mapping_mcore_to_hf(name)  # type: ignore[misc]


class _LocalQwen2(_LocalSpec, Qwen2Bridge):
    pass


class _LocalQwen3(_LocalSpec, Qwen3Bridge):
    pass


class _LocalQwen3MoE(_LocalSpec, Qwen3MoEBridge):
    pass


class _LocalDeepseekV3(_LocalSpec, DeepseekV3Bridge):
    """Latent attention, leading dense layers, shared experts. Multi-token prediction is no part of the policy.

    Under YaRN the frequencies are other ones and attention scores are scaled, which megatron derives from
    `rotary_scaling_factor` and `mscale_all_dim`."""

    SCALINGS = ("yarn",)

    _ATTENTION_MAPPING = DeepseekV3Bridge._ATTENTION_MAPPING | {
        "self_attention.q_layernorm.weight": ["model.layers.{layer_number}.self_attn.q_a_layernorm.weight"],
        "self_attention.kv_layernorm.weight": ["model.layers.{layer_number}.self_attn.kv_a_layernorm.weight"],
    }

    def _build_config(self) -> Any:
        hf = self.hf_config
        dense = min(hf.first_k_dense_replace, hf.num_hidden_layers)
        rope = self._rope()
        return self._build_base_config(
            qk_layernorm=True,
            q_lora_rank=hf.q_lora_rank,
            kv_lora_rank=hf.kv_lora_rank,
            qk_head_dim=hf.qk_nope_head_dim,
            qk_pos_emb_head_dim=hf.qk_rope_head_dim,
            v_head_dim=hf.v_head_dim,
            rope_type="rope",
            rotary_base=self._rope_theta(),
            rotary_scaling_factor=float(rope.get("factor") or 1.0),
            mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
            num_moe_experts=hf.n_routed_experts,
            moe_layer_freq=[0] * dense + [1] * (hf.num_hidden_layers - dense),
            moe_ffn_hidden_size=hf.moe_intermediate_size,
            moe_shared_expert_intermediate_size=hf.moe_intermediate_size * hf.n_shared_experts,
            moe_shared_expert_overlap=False,
            moe_router_topk=hf.num_experts_per_tok,
            moe_router_num_groups=hf.n_group,
            moe_router_group_topk=hf.topk_group,
            moe_router_score_function="sigmoid",
            moe_router_topk_scaling_factor=hf.routed_scaling_factor,
            moe_router_dtype="fp32",
            moe_router_load_balancing_type="none",
            # the bias is a weight of the policy; balancing would change it without the optimizer knowing
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.0,
        )

    def _get_safetensor_io(self, weights_path: str) -> Any:
        if getattr(self.hf_config, "quantization_config", None):
            return super()._get_safetensor_io(weights_path)  # released checkpoints hold fp8 blocks
        return SafeTensorIO(self._get_actual_hf_path(weights_path))


BRIDGES = {
    "qwen2": _LocalQwen2,
    "qwen3": _LocalQwen3,
    "qwen3_moe": _LocalQwen3MoE,
    "deepseek_v3": _LocalDeepseekV3,
}


def make_bridge(
    folder: str, trainer: TrainerConfig, platform: Platform, dtype: torch.dtype, *, temperature: float, values: bool
) -> Any:
    """The converter of the model in `folder`, for the parallel groups that megatron has now; `values`: the model gives
    values in place of log-probabilities."""
    hf_config = AutoConfig.from_pretrained(folder)
    if hf_config.model_type not in BRIDGES:
        raise DataError(f"{folder}: model type {hf_config.model_type!r} is not one of {', '.join(sorted(BRIDGES))}")
    if getattr(hf_config, "use_sliding_window", False):
        raise DataError(f"{folder}: sliding-window attention is not supported by the trainer")
    return BRIDGES[hf_config.model_type](
        hf_config,
        dtype=dtype,
        make_vocab_size_divisible_by=trainer.tensor_parallel,
        settings=transformer_settings(trainer, platform),
        overlap=overlaps(trainer, platform),
        temperature=temperature,
        values=values,
    )
