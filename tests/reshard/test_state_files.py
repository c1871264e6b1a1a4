"""Any layout's train state is found again by any other layout, element by element."""

from itertools import pairwise

import numpy as np
import pytest

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import TrainParallel
from mindspeed_asyncflow.errors import CheckpointError
from mindspeed_asyncflow.reshard.boxes import matrix_shape
from mindspeed_asyncflow.reshard.state_files import Piece, StateFiles, whole_tensor, write_rank
from mindspeed_asyncflow.reshard.train_layout import train_layout

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 13,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "tie_word_embeddings": False,
}
LAYOUTS = {
    "one": TrainParallel(),
    "tensor": TrainParallel(tensor=2),
    "pipeline": TrainParallel(pipeline=2),
    "both": TrainParallel(tensor=2, pipeline=2),
    "many_tensor": TrainParallel(tensor=4),
}


def layout_of(name):
    return train_layout(describe(MODEL), LAYOUTS[name])


def numbered(layout):
    """Full tensors [rows, cols] in which every element of the model has a number of its own."""
    found, first = {}, 1
    for name, tensor in layout.tensors.items():
        rows, cols = matrix_shape(tensor.shape)
        found[name] = np.arange(first, first + rows * cols, dtype=np.uint32).reshape(rows, cols)
        first += rows * cols
    return found


def local(param, full):
    """What a rank holds; padding is 0."""
    out = np.zeros(matrix_shape(param.shape), np.uint32)
    for segment in param.segments:
        place, box = segment.local, segment.box
        out[place.r0 : place.r1, place.c0 : place.c1] = full[segment.name][box.r0 : box.r1, box.c0 : box.c1]
    return out


def save(folder, layout, full, cuts):
    """Every local parameter in `cuts` flat ranges, as the ranks of a distributed optimizer have it."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    shapes = {name: tensor.shape for name, tensor in layout.tensors.items()}
    for rank, params in enumerate(layout.ranks):
        pieces = []
        for param in params:
            flat = local(param, full).reshape(-1)
            edges = [0, *sorted(rng.integers(0, len(flat) + 1, cuts - 1).tolist()), len(flat)]
            for start, stop in pairwise(edges):
                part = flat[start:stop]
                pieces.append(Piece("exp_avg", param, start, len(part), "F32", [part.tobytes()]))
        write_rank(folder, rank, pieces, shapes, {"world": layout.world_size})


@pytest.mark.parametrize("cuts", [1, 3])
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_every_layout_finds_every_element_of_every_other(tmp_path, first, second, cuts):
    layout = layout_of(first)
    full = numbered(layout)
    save(tmp_path, layout, full, cuts)
    files = StateFiles(tmp_path)
    assert files.kinds() == {"exp_avg"}
    for params in layout_of(second).ranks:
        for param in params:
            rows = matrix_shape(param.shape)[0]
            wanted = local(param, full)
            assert np.array_equal(files.local("exp_avg", param, (0, rows), "F32"), wanted)
            assert np.array_equal(files.local("exp_avg", param, (rows // 3, rows), "F32"), wanted[rows // 3 :])
    for name, matrix in full.items():
        assert np.array_equal(np.concatenate(list(whole_tensor(files, "exp_avg", name, 3))), matrix)


def test_what_is_in_no_file_is_named(tmp_path):
    layout = layout_of("tensor")
    save(tmp_path, layout, numbered(layout), 1)
    files = StateFiles(tmp_path)
    param = layout.ranks[0][0]
    with pytest.raises(CheckpointError, match=r"no weight of 'model\.embed_tokens\.weight'"):
        files.local("weight", param, (0, 1), "F32")
    with pytest.raises(CheckpointError, match="as F32, not as BF16"):
        files.local("exp_avg", param, (0, 1), "BF16")
    (tmp_path / "rank00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank00001\.safetensors cannot be read"):
        StateFiles(tmp_path)


def test_a_part_that_no_rank_wrote_is_an_error_and_not_zeros(tmp_path):
    layout = layout_of("tensor")
    shapes = {name: tensor.shape for name, tensor in layout.tensors.items()}
    param = layout.ranks[0][0]
    part = np.ones(param.shape, np.float32)
    piece = Piece("exp_avg", param, 0, part.size, "F32", [part.tobytes()])
    write_rank(tmp_path, 0, [piece], shapes, {"world": 1})
    (other,) = (p for p in layout_of("one").ranks[0] if p.name == param.name)
    with pytest.raises(CheckpointError, match=r"rows 7 to 13 of the exp_avg of 'model\.embed_tokens\.weight'"):
        StateFiles(tmp_path).local("exp_avg", other, (0, 13), "F32")


def test_the_files_are_readable_by_other_tools(tmp_path):
    from safetensors.numpy import load_file

    layout = layout_of("one")
    full = numbered(layout)
    save(tmp_path, layout, full, 1)
    stored = load_file(tmp_path / "rank00000.safetensors")
    embedding = stored["exp_avg|embedding.word_embeddings.weight|0"]
    assert np.array_equal(embedding.view(np.uint32), full["model.embed_tokens.weight"].reshape(-1))
