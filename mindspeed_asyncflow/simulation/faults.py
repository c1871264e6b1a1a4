"""What happens to the workers of a simulated run, at which virtual second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_asyncflow.errors import ConfigError

FORMS = {
    "slow": "slow:INDEX:FACTOR[:SECOND] (takes FACTOR times as long)",
    "leave": "leave:INDEX:SECOND",
    "die": "die:INDEX:SECOND",
    "join": "join:INDEX:SECOND (is not there before)",
    "unscored": "unscored:SHARE (of answers that get no score)",
}


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    index: int = -1  # replica
    at_s: float = 0.0
    amount: float = 1.0  # factor or share


def parse(texts: Sequence[str], replicas: int) -> list[Fault]:
    """`simulation.faults`. Raises `ConfigError` naming the value."""
    return [_parse(text, replicas) for text in texts]


def _parse(text: str, replicas: int) -> Fault:
    kind, *rest = text.split(":")
    form = FORMS.get(kind)
    try:
        if form is None:
            raise ValueError(f"kinds are {', '.join(FORMS)}")
        numbers = [float(part) for part in rest]
        if kind == "unscored" and len(numbers) == 1 and 0 <= numbers[0] <= 1:
            return Fault(kind, amount=numbers[0])
        if kind == "slow" and 2 <= len(numbers) <= 3 and numbers[1] > 0:
            at_s = numbers[2] if len(numbers) == 3 else 0.0
            return Fault(kind, _index(numbers[0], replicas), at_s, numbers[1])
        if kind in ("leave", "die", "join") and len(numbers) == 2 and numbers[1] >= 0:
            return Fault(kind, _index(numbers[0], replicas), numbers[1])
        raise ValueError(f"the form is {form}")
    except ValueError as error:
        raise ConfigError(f"simulation.faults: {text!r}: {error}") from None


def _index(number: float, replicas: int) -> int:
    if number != int(number) or not 0 <= number < replicas:
        raise ValueError(f"there are replicas 0 to {replicas - 1} (rollout.replicas)")
    return int(number)
