"""`asyncflow export`: what a run's checkpoint becomes for transformers, and what is said where there is none."""

import json

import numpy as np
import pytest

from mindspeed_asyncflow.cli import main
from mindspeed_asyncflow.observe import checkpoints
from mindspeed_asyncflow.reshard import hf_folder
from mindspeed_asyncflow.reshard.boxes import Box
from mindspeed_asyncflow.reshard.layout import LocalParam, Segment
from mindspeed_asyncflow.reshard.state_files import Piece, write_rank

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def tensors():
    """Names and bfloat16 bits of a whole tiny model."""
    prefix, rng = "model.layers.0.", np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (11, 8), "model.norm.weight": (8,)}
    shapes |= {f"{prefix}{n}_layernorm.weight": (8,) for n in ("input", "post_attention")}
    for name, rows in (("q", 8), ("k", 4), ("v", 4)):
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (rows, 8), f"{prefix}self_attn.{name}_proj.bias": (rows,)}
    shapes |= {f"{prefix}self_attn.o_proj.weight": (8, 8), f"{prefix}mlp.down_proj.weight": (8, 12)}
    shapes |= {f"{prefix}mlp.{n}_proj.weight": (12, 8) for n in ("gate", "up")}
    return {name: rng.integers(0x3C00, 0x3F80, shape).astype(np.uint16) for name, shape in shapes.items()}


def save(run, step, scale=0):
    """A checkpoint of two ranks, each with half of the rows of every tensor."""
    partial = checkpoints.begin(run / "checkpoints", step)
    (partial / "trainer" / "model").mkdir(parents=True)
    (partial / "trainer" / "model" / "config.json").write_text(json.dumps(CONFIG))
    whole = {name: bits + scale for name, bits in tensors().items()}
    for rank in range(2):
        pieces = []
        for name, bits in whole.items():
            rows = (len(bits) + 1) // 2
            part = bits[rank * rows : (rank + 1) * rows]
            cols = part[0].size
            box = Box(rank * rows, rank * rows + len(part), 0, cols)
            param = LocalParam(f"local.{name}", part.shape, (Segment(name, box),))
            pieces.append(Piece("weight", param, 0, part.size, "BF16", [part.tobytes()]))
        shapes = {name: bits.shape for name, bits in whole.items()}
        write_rank(partial / "trainer", rank, pieces, shapes, {"world": 2})
    files = checkpoints.sums(partial)
    checkpoints.complete(partial, files, step=step, version=step, config="")
    return whole


@pytest.fixture
def run(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {}\n")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("largest", [1 << 30, 200], ids=["one_file", "several_files"])
def test_transformers_loads_what_the_ranks_saved(run, monkeypatch, capsys, largest):
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(hf_folder, "LARGEST_FILE", largest)
    save(run, 1)
    whole = save(run, 2, scale=1)
    assert main(["export", str(run)]) == 0
    out = run / "export" / "step_000002"
    assert capsys.readouterr().out.strip() == str(out)
    assert (out / "model.safetensors").exists() == (largest > 200)
    loaded = AutoModelForCausalLM.from_pretrained(out, torch_dtype=torch.bfloat16).state_dict()
    for name, bits in whole.items():
        assert np.array_equal(loaded[name].view(torch.uint16).numpy(), bits), name


def test_a_step_may_be_named(run, capsys):
    save(run, 1)
    save(run, 2)
    assert main(["export", str(run), "--step", "1", "--out", str(run / "mine")]) == 0
    assert (run / "mine" / "config.json").is_file() and (run / "mine" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "no complete checkpoint; trainer.save_every"),
        (["--step", "7"], 1, "step_000007 is no complete checkpoint"),
        (["--out", "."], 2, "exists already; name a new folder with --out"),
    ],
    ids=["none", "other_step", "taken"],
)
def test_what_cannot_be_exported_is_explained(run, capsys, arguments, status, said):
    if arguments:
        save(run, 1)
    assert main(["export", str(run), *arguments]) == status
    assert said in capsys.readouterr().err


def test_a_damaged_state_is_not_exported(run, capsys):
    save(run, 1)
    path = run / "checkpoints" / "step_000001" / "trainer" / "rank00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["export", str(run)]) == 1
    assert "another checksum" in capsys.readouterr().err
    assert not (run / "export" / "step_000001").exists()
