"""What the operator should give, in float64, and the operator over shards that are all in this process."""

import torch

from mindspeed_asyncflow.platforms.vocabulary import Sums, logprob_and_entropy, rebased, vocabulary_stats


def in_float64(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies), float64 [N], of logits [N, V] of any type; differentiable."""
    logprobs = (logits.double() / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def cut(logits: torch.Tensor, shards: int) -> list[torch.Tensor]:
    """[N, V] -> that many [N, ceil(V / shards)], the last ones with padding of +50, which must not count."""
    width = -(-logits.shape[1] // shards)
    padded = torch.nn.functional.pad(logits, (0, shards * width - logits.shape[1]), value=50.0)
    return [part.clone() for part in padded.split(width, dim=1)]


def over_shards(
    shards: list[torch.Tensor], targets: torch.Tensor, temperature: float, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities, entropies), float32 [N], of logits cut into `shards`; what ranks do, without ranks."""
    width = shards[0].shape[1]
    stats = [
        vocabulary_stats(
            shard,
            targets,
            first=i * width,
            live=min(max(vocab_size - i * width, 0), width),
            temperature=temperature,
        )
        for i, shard in enumerate(shards)
    ]
    top = torch.stack([part.top for part in stats]).amax(0)
    parts = [rebased(part, top, temperature) for part in stats]
    sums = Sums(*(torch.stack(column).sum(0) for column in zip(*parts)))
    return logprob_and_entropy(sums, top, temperature)


def gradients(
    shards: list[torch.Tensor], targets: torch.Tensor, temperature: float, vocab_size: int, slopes: torch.Tensor
) -> torch.Tensor:
    """Gradient [N, V] of sum(slopes[0] * logprob + slopes[1] * entropy)."""
    leaves = [shard.clone().requires_grad_() for shard in shards]
    logprob, entropy = over_shards(leaves, targets, temperature, vocab_size)
    (slopes[0] * logprob + slopes[1] * entropy).sum().backward()
    whole = torch.cat([leaf.grad for leaf in leaves], dim=1)
    assert not whole[:, vocab_size:].any()
    return whole[:, :vocab_size]


def gradients_in_float64(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, slopes: torch.Tensor
) -> torch.Tensor:
    leaf = logits.double().requires_grad_()
    logprob, entropy = in_float64(leaf, targets, temperature)
    (slopes[0] * logprob + slopes[1] * entropy).sum().backward()
    return leaf.grad


def assert_values(
    found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor], atol: float = 1e-5
) -> None:
    """The tolerances of README.md: a log-probability of -200 has steps of 1.5e-5 in fp32."""
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1.2e-7, atol=atol)
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=0, atol=atol)


def assert_gradient(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """bf16 rounds to 8 bits; in fp32 the entropy's part cancels."""
    rtol = 2**-8 if found.dtype is torch.bfloat16 else 1e-3
    torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=1e-6)
