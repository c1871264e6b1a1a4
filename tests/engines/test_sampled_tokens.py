"""A sampler that gives what no policy gives stops its engine, whichever engine it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mindspeed_asyncflow.engines.base import EngineCaps
from mindspeed_asyncflow.engines.lifecycle import PAUSE_MODES
from mindspeed_asyncflow.engines.step_backend import Finished
from mindspeed_asyncflow.engines.stepped import SteppedEngine
from mindspeed_asyncflow.engines.weights import read_folder
from mindspeed_asyncflow.errors import EngineError
from mindspeed_asyncflow.records import GenRequest
from tests.engines.bench import ask, prompt


class OneToken:
    """See `StepBackend`: every answer is one token, the given one."""

    caps = EngineCaps("one token", PAUSE_MODES, (), ("relay",), False)
    token_count = 100

    def __init__(self, token: int, logprob: float) -> None:
        self.token, self.logprob = token, logprob
        self.waiting: list[GenRequest] = []

    def check(self, request: GenRequest) -> None: ...

    def admit(self, requests: Sequence[GenRequest]) -> None:
        self.waiting += requests

    def step(self) -> list[Finished]:
        done, self.waiting = self.waiting, []
        return [Finished(r.request_id, [self.token], [self.logprob], "stop") for r in done]

    def close(self) -> None: ...


@pytest.mark.parametrize(("token", "logprob"), [(100, -np.inf), (100, -1.0), (99, -np.inf)])
def test_an_answer_with_an_impossible_token_reaches_nobody(token: int, logprob: float) -> None:
    """Known issue 9, B71."""
    backend: Any = OneToken(99, -1.0)
    engine = SteppedEngine("one token", lambda: backend, start_timeout_s=5.0, command_timeout_s=5.0)
    (done,) = engine.generate([ask("good", prompt(1), 3)], 5.0)
    assert done.token_ids.tolist() == [99]
    backend.token, backend.logprob = token, logprob
    with pytest.raises(EngineError, match=f"id {token} with log-probability .*the tokenizer has 100 ids"):
        list(engine.generate([ask("bad", prompt(1), 3)], 5.0))
    with pytest.raises(EngineError, match="it broke"):
        engine.pause()
    engine.close()


def test_the_tokenizer_says_which_rows_of_the_vocabulary_are_padding(tmp_path: Path) -> None:
    config = {"vocab_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": torch.zeros(128, 4)}, tmp_path / "model.safetensors")
    assert (read_folder(str(tmp_path)).token_count, read_folder(str(tmp_path)).cache_parts) == (128, 2)
    tokenizer = {"model": {"vocab": {"a": 0, "b": 5}}, "added_tokens": [{"id": 9, "content": "<end>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_folder(str(tmp_path)).token_count == 10
    unigram = {"model": {"vocab": [["a", -1.0]] * 300}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(unigram))
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 512}))
    assert (read_folder(str(tmp_path)).token_count, read_folder(str(tmp_path)).cache_parts) == (128, 1)
