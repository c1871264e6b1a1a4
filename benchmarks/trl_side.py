"""TRL's GRPOTrainer on the same model, prompts, rewards and sizes. Runs in its own environment, .venv-trl.

    .venv-trl/bin/python benchmarks/trl_side.py SPEC.json RESULT.json

SPEC is written by main_job.py (`trl.specification`); RESULT holds seconds and mean reward of each step, the share of
the time that goes into generation, and the greedy held-out score after the last step.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the very same task and scorer as on our side

import datasets
import torch
import transformers
import trl

from mindspeed_asyncflow.data.tasks import Task, build_task


class Watch(transformers.TrainerCallback):
    """Wall-clock of each optimizer step, generation included, and of generation alone."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.generate_s = 0.0
        self.generated_at: list[float] = []  # generate_s at each mark

    def on_train_begin(self, args, state, control, **kwargs):
        self._mark()

    def on_step_end(self, args, state, control, **kwargs):
        self._mark()
        print(f"step {state.global_step}: {self.marks[-1] - self.marks[-2]:.3f} s", flush=True)

    def _mark(self) -> None:
        self.marks.append(time.perf_counter())
        self.generated_at.append(self.generate_s)

    def timed(self, generate):
        def call(*args, **kwargs):
            began = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generate_s += time.perf_counter() - began

        return call


class Scorer:
    """The task's reward as TRL wants it. `step_rewards`: mean over each batch, in order."""

    __name__ = "task"

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.special = set(tokenizer.all_special_ids)
        self.step_rewards: list[float] = []
        self.tokens = 0

    def __call__(self, completions: list[str], completion_ids: list[list[int]], truth: list[str], **_) -> list[float]:
        rows = zip(completions, completion_ids, truth)
        rewards = [self.score(text, ids, expected) for text, ids, expected in rows]
        self.step_rewards.append(sum(rewards) / len(rewards))
        self.tokens += sum(map(len, completion_ids))
        return rewards

    def score(self, text: str, ids: list[int], truth: str) -> float:
        finished = bool(ids) and ids[-1] == self.tokenizer.eos_token_id
        body = ids[:-1] if finished else ids
        if not self.special.isdisjoint(body):  # TRL leaves special tokens out of the text; in the middle they count
            text = self.tokenizer.decode(body, skip_special_tokens=False)
        return self.task.score(text, truth, finished) or 0.0


def settings(spec: dict[str, Any], folder: str) -> trl.GRPOConfig:
    """The same algorithm as `spec`; everything else set to what is fastest for a small model on a CPU."""
    samples = spec["prompts_per_step"] * spec["group_size"]
    return trl.GRPOConfig(
        output_dir=folder,
        seed=spec["seed"],
        use_cpu=True,
        bf16=False,  # TRL's default is True
        activation_checkpointing=False,  # TRL's default is True
        max_steps=spec["steps"],
        per_device_train_batch_size=spec["device_batch"],
        gradient_accumulation_steps=samples // spec["device_batch"],
        num_generations=spec["group_size"],
        max_completion_length=spec["max_new_tokens"],
        temperature=spec["temperature"],
        shuffle_dataset=False,  # the prompts come in our order
        max_grad_norm=spec["grad_clip"],
        beta=0.0,
        num_iterations=1,
        epsilon=spec["clip_low"],
        epsilon_high=spec["clip_high"],
        loss_type="dapo",  # token mean over the batch
        scale_rewards="group",
        use_vllm=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def optimizer_of(spec: dict[str, Any], model: torch.nn.Module):
    """AdamW with the learning rate of each step as our trainer has it."""
    rates = spec["rates"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1.0, betas=tuple(spec["betas"]), eps=1e-8, weight_decay=0.0, fused=True
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[min(step, len(rates) - 1)])


@torch.no_grad()
def heldout_score(model: Any, scorer: Scorer, heldout: list[dict[str, str]], max_new_tokens: int) -> float:
    """Mean score of greedy answers."""
    tokenizer, scores = scorer.tokenizer, []
    model.eval()
    for start in range(0, len(heldout), 64):
        part = heldout[start : start + 64]
        inputs = tokenizer([row["prompt"] for row in part], return_tensors="pt", padding=True, padding_side="left")
        inputs.pop("token_type_ids", None)
        output = model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        for row, ids in zip(part, output[:, inputs["input_ids"].shape[1] :].tolist()):
            if tokenizer.eos_token_id in ids:
                ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            scores.append(scorer.score(text, ids, row["truth"]))
    return sum(scores) / len(scores)


def main(spec_file: str, result_file: str) -> None:
    spec = json.loads(Path(spec_file).read_text(encoding="utf-8"))
    torch.set_num_threads(spec["threads"])
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(spec["model"], local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32, local_files_only=True)
    watch, scorer = Watch(), Scorer(build_task(spec["task"], spec["task_options"]), tokenizer)
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=scorer,
        args=settings(spec, os.path.dirname(os.path.abspath(result_file))),
        train_dataset=datasets.Dataset.from_list(spec["prompts"]),
        processing_class=tokenizer,
        callbacks=[watch],
        optimizers=optimizer_of(spec, model),
    )
    model.generate = watch.timed(model.generate)
    load_before = os.getloadavg()[0]
    trainer.train()
    load_after = os.getloadavg()[0]
    marks, generated = watch.marks, watch.generated_at
    result = {
        "step_s": [b - a for a, b in itertools.pairwise(marks)],
        "generate_s": [b - a for a, b in itertools.pairwise(generated)],
        "rewards": scorer.step_rewards,
        "answer_tokens_mean": scorer.tokens / (spec["steps"] * spec["prompts_per_step"] * spec["group_size"]),
        "heldout_greedy": None,
        "load": [load_before, load_after],
        "threads": torch.get_num_threads(),
        "versions": {name: sys.modules[name].__version__ for name in ("trl", "transformers", "torch")},
    }
    if spec["heldout"]:
        result["heldout_greedy"] = heldout_score(model, scorer, spec["heldout"], spec["max_new_tokens"])
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
