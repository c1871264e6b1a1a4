"""What docs/data.md shows is what is read."""

import json
import re
from pathlib import Path

import numpy as np
import yaml

from mindspeed_asyncflow.config.intake import DataConfig
from mindspeed_asyncflow.data.files import FIELDS_LIMIT, Files
from mindspeed_asyncflow.data.prompts import PromptSet
from mindspeed_asyncflow.data.readers import ENDINGS
from mindspeed_asyncflow.data.sources import Source, Sources, make_sources
from mindspeed_asyncflow.data.stream import PromptStream

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


class Bytes:
    """A tokenizer of bytes."""

    bos_token_id = None

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [list(text.encode()) for text in texts]}


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_every_format_of_the_page_has_the_same_rows(tmp_path):
    for kind in ("jsonl", "json", "csv"):
        file = tmp_path / f"rows.{kind}"
        file.write_text(blocks(kind)[0], encoding="utf-8")
        read = [(problem.prompt, problem.truth) for problem in Files(str(file)).problems(9, seed=0)]
        assert read == [("2 + 2 =", "4"), ("3 + 4 =", "7")]
    assert all(f"`{ending}`" in PAGE or f"rows{ending}`" in PAGE for ending in ENDINGS)
    assert f"{FIELDS_LIMIT:,} characters" in PAGE


def test_the_mapped_row_of_the_page_becomes_the_prompt_and_fields_that_it_shows(tmp_path):
    data = DataConfig(**yaml.safe_load(blocks("yaml")[0])["data"], heldout=0)
    row, fields = blocks("json")[1:]
    (tmp_path / "train.jsonl").write_text(row, encoding="utf-8")
    source = Source(Files(str(tmp_path / "train.jsonl"), data.columns), 9)
    (prompt,) = PromptSet.build(Sources([source]), Bytes(), data, seed=0).train
    assert (prompt.text, prompt.truth, json.loads(prompt.fields)) == ("2 + 2 =", "4", json.loads(fields))


def test_the_mix_of_the_page_has_the_shares_that_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(blocks("jsonl")[0], encoding="utf-8")
    data = DataConfig(**yaml.safe_load(blocks("yaml")[1])["data"])
    prompts = PromptSet.build(make_sources(data), Bytes(), data, seed=0)
    assert prompts.sizes == [300, 2] and len(prompts.heldout) == 50
    stream = PromptStream(prompts, 0, epochs=1, drop_last=True, batch=100)
    sources = [json.loads(prompt.fields)["source"] for batch in stream for _, _, prompt in batch]
    assert np.bincount(sources).tolist() == [225, 75]
