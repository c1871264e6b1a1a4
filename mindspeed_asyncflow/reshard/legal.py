"""Refusals that name the setting, the reason and the nearest sizes that would do."""

from __future__ import annotations

from collections.abc import Callable

from mindspeed_asyncflow.errors import ConfigError


def nearest(wanted: int, is_legal: Callable[[int], bool], largest: int) -> str:
    """The legal sizes closest to `wanted` from below and above, as text; sizes up to `largest` are tried."""
    below = next((n for n in range(min(wanted, largest), 0, -1) if is_legal(n)), None)
    above = next((n for n in range(wanted + 1, largest + 1) if is_legal(n)), None)
    found = [str(n) for n in (below, above) if n is not None]
    return " or ".join(found) or "none"


def divides(knob: str, size: int, what: str, number: int) -> None:
    """Raise `ConfigError` unless `number` can be cut into `size` equal parts."""
    if size < 1 or number % size:
        legal = nearest(size, lambda n: number % n == 0, number)
        raise ConfigError(f"{knob}={size} does not divide {what} ({number}); nearest legal: {legal}")


def serves_kv_heads(knob: str, size: int, kv_heads: int, heads: int) -> None:
    """Raise `ConfigError` unless `size` divides the key/value heads or is a multiple of them."""

    def is_legal(n: int) -> bool:
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not is_legal(size):
        raise ConfigError(
            f"{knob}={size} cannot cut {heads} attention heads with {kv_heads} key/value heads; "
            f"nearest legal: {nearest(size, is_legal, heads)}"
        )
