"""A trainer in plain PyTorch and a rollout engine around transformers, in place of megatron-core and vLLM.

    PYTHONPATH=$PWD/examples asyncflow train configs/qwen_tiny_cpu.yaml \
        --set trainer.engine=custom_engine:PlainTrainer --set rollout.engine=custom_engine:PlainRollout

Nothing of mindspeed_asyncflow is changed: `asyncflow check` with the same settings says whether the classes have all
that a run calls. docs/extending.md explains the two protocols.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor
from transformers.utils import logging

from mindspeed_asyncflow.engines.batched import BatchEngine
from mindspeed_asyncflow.engines.sampling import gumbel_noise
from mindspeed_asyncflow.engines.training import merge_metrics
from mindspeed_asyncflow.engines.whole import WholeModel
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.records import OptimReport

logging.disable_progress_bar()


def load(setup):
    """The policy as transformers reads it, on the device of this process."""
    model = AutoModelForCausalLM.from_pretrained(setup.model_folder, dtype=getattr(torch, setup.dtype))
    return model.to(setup.platform.device())


class PlainTrainer(WholeModel):
    """One rank, or several that are data parallel: each has the whole model, and gradients are summed."""

    @staticmethod
    def check(config):
        t = config.trainer
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
            if getattr(t, name) > 1:
                raise ConfigError(f"trainer.{name}: is {getattr(t, name)}, and PlainTrainer is data parallel only")

    def __init__(self, setup, eps=1e-8):
        torch.set_num_threads(setup.trainer.threads)
        torch.manual_seed(setup.seed)
        self.temperature, self.loss_fn = setup.temperature, setup.loss_fn
        self.several = setup.world_size > 1
        if self.several:
            setup.join()
        self.model = load(setup).eval()  # no dropout: log-probabilities must be those of the rollout engine
        self.model.get_input_embeddings().padding_idx = None  # an answer may contain it, and it has a gradient then
        t, weights = setup.trainer, dict(self.model.named_parameters())
        decays = [  # weight decay spares biases and norms
            {"params": [p for p in weights.values() if p.dim() > 1], "weight_decay": t.weight_decay},
            {"params": [p for p in weights.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(decays, lr=t.lr, betas=t.betas, eps=eps)
        super().__init__(setup, weights, self.optimizer)

    def forward_backward(self, micro_batches):
        parts = []
        for batch in micro_batches:
            logprobs, entropy = self._token_numbers(batch, self.temperature)
            loss, metrics = self.loss_fn(logprobs, entropy.detach(), batch)
            loss.backward()
            parts.append(metrics)
        return merge_metrics(parts)

    @torch.no_grad()
    def logprobs(self, micro_batches, temperature=None):
        t = self.temperature if temperature is None else temperature
        return [self._token_numbers(batch, t)[0].cpu().numpy() for batch in micro_batches]

    def _token_numbers(self, batch, temperature):
        """float32 [T] log-probabilities of `targets` and entropies of a micro-batch, 0 where nothing is trained."""
        device = self.model.device
        ends = np.asarray(batch.cu_seqlens)
        samples, places = len(ends) - 1, np.asarray(batch.positions)
        owner = np.repeat(np.arange(samples), np.diff(ends))
        ids = torch.zeros(samples, int(places.max()) + 1, dtype=torch.long)
        ids[owner, places] = torch.from_numpy(batch.input_ids)  # padded on the right, where causal models do not look
        logits = self.model(input_ids=ids.to(device)).logits[owner, places].float() / temperature  # [T, V]
        every = logits.log_softmax(-1)
        picked = every.gather(1, torch.from_numpy(batch.targets).to(device)[:, None])[:, 0]
        entropy = -(every.exp() * every).sum(-1)
        mask = torch.from_numpy(np.asarray(batch.loss_mask)).to(device) > 0
        return torch.where(mask, picked, 0.0), torch.where(mask, entropy, 0.0)

    @torch.no_grad()
    def optim_step(self, denominator):
        rate, bad = self.setup.learning_rate(self.applied), ""
        for name, weight in self.weights.items():
            if weight.grad is None:  # a rank without samples still meets the others
                weight.grad = torch.zeros_like(weight)
            if self.several:
                dist.all_reduce(weight.grad)
            weight.grad.div_(denominator or 1.0)
            if not bad and not torch.isfinite(weight.grad).all():
                bad = name
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), self.setup.trainer.grad_clip)
        applied = bool(denominator) and not bad
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.applied += 1
        self.optimizer.zero_grad(set_to_none=True)
        return OptimReport(applied, math.nan if bad else float(norm) if denominator else 0.0, rate, bad)

    def close(self):
        super().close()
        if self.several:
            dist.destroy_process_group()


class PlainRollout(BatchEngine):
    """`model.generate` of transformers, a batch at a time."""

    def __init__(self, setup):
        super().__init__("transformers", setup, lambda: Generator(setup))


class Generator:
    def __init__(self, setup):
        torch.set_num_threads(setup.rollout.threads)
        self.model = load(setup).eval().requires_grad_(False)
        self.model.generation_config = GenerationConfig()  # penalties of the folder's own would change what is sampled
        self.targets = self.model.state_dict(keep_vars=True)

    def answer(self, asks):
        ids, mask = padded_left([ask.ids for ask in asks])
        stops = sorted(set().union(*(ask.stop_ids for ask in asks)))
        out = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=max(ask.max_tokens for ask in asks),
            do_sample=False,  # `Draw` has added the noise
            eos_token_id=stops or None,
            pad_token_id=0,
            logits_processor=[draw := Draw(asks)],
            return_dict_in_generate=True,
        )
        tokens, logprobs = out.sequences[:, ids.shape[1] :].cpu(), torch.stack(draw.logprobs, 1)  # [B, L], [B, L, V]
        logprobs = logprobs.gather(2, tokens[..., None])[..., 0].numpy()
        return [ended(ask, *row) for ask, row in zip(asks, zip(tokens.tolist(), logprobs.tolist()))]

    def score(self, sequences):
        ids, mask = padded_left([np.concatenate(pair) for pair in sequences])
        places = (mask.cumsum(1) - 1).clamp(min=0)
        arguments = {"input_ids": ids, "attention_mask": mask, "position_ids": places}
        with torch.no_grad():
            logits = self.model(**{k: v.to(self.model.device) for k, v in arguments.items()}).logits[:, :-1]
        every = logits.float().log_softmax(-1).gather(2, ids[:, 1:, None].to(logits.device))[..., 0].cpu().numpy()
        return [row[len(row) - len(answer) :].copy() for row, (_, answer) in zip(every, sequences)]

    def load(self, tensors):
        for name, tensor in tensors:
            self.targets[name].data.copy_(tensor)


class Draw(LogitsProcessor):
    """Samples by adding Gumbel noise and taking the largest: a token depends on its answer's seed and place alone, not
    on what else is in the batch. Keeps the log-probabilities that the token was drawn from."""

    def __init__(self, asks):
        self.asks, self.logprobs = asks, []

    def __call__(self, input_ids, scores):
        temperature = torch.tensor([ask.sampling.temperature or 1.0 for ask in self.asks])[:, None]
        every = (scores.float().cpu() / temperature).log_softmax(-1)
        places = [ask.place + len(self.logprobs) for ask in self.asks]
        noise = gumbel_noise([ask.seed for ask in self.asks], places, every.shape[1])
        noise[torch.tensor([ask.sampling.temperature == 0 for ask in self.asks])] = 0.0
        self.logprobs.append(every)
        return (every + noise).to(scores.device)


def padded_left(rows):
    """(ids, mask) int64 [B, T]: 1 on real tokens."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + [int(i) for i in row] for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def ended(ask, tokens, logprobs):
    """The answer up to the token that ends it, or to its longest."""
    stop = next((i + 1 for i, token in enumerate(tokens) if token in ask.stop_ids), ask.max_tokens)
    length = min(stop, ask.max_tokens)
    return tokens[:length], logprobs[:length]
