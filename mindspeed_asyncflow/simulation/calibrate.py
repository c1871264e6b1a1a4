"""Factors that make a simulated rate equal to a measured one, for few measured points and as few factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.errors import ConfigError
from mindspeed_asyncflow.planner.work import Work
from mindspeed_asyncflow.simulation.compare import put
from mindspeed_asyncflow.simulation.pricing import priced
from mindspeed_asyncflow.simulation.run import simulate

TOLERANCE = 0.005
ROUNDS = 12


def fit(
    config: Config, work: Work, keys: Sequence[str], tokens_per_s: float, say: Callable[[str], None] = lambda text: None
) -> tuple[float, float]:
    """One factor, put into all `keys` (scales of times), with which `config` simulates to `tokens_per_s`.

    Returns the factor and the rate that it gives. Raises `ConfigError` where no factor up to 100 does: then what the
    keys scale is not what the run waits for.
    """

    def rate(factor: float) -> float:
        changed = config
        for key in keys:
            changed = put(changed, key, factor)
        found = simulate(*priced(changed, work)).tokens_per_s
        say(f"{', '.join(keys)} = {factor:.4g}: {found:,.0f} tokens/s, {tokens_per_s:,.0f} measured")
        return found

    low, high = 0.01, 100.0  # rates fall with the factor
    factor, found = 1.0, rate(1.0)
    for _ in range(ROUNDS):
        if abs(found / tokens_per_s - 1) <= TOLERANCE:
            return factor, found
        low, high = (factor, high) if found > tokens_per_s else (low, factor)
        guess = factor * found / tokens_per_s  # exact where all times scale
        factor = guess if low < guess < high else (low * high) ** 0.5
        found = rate(factor)
    raise ConfigError(
        f"{', '.join(keys)}: no factor gives {tokens_per_s:,.0f} tokens/s (nearest: {found:,.0f} at {factor:.3g})"
    )
