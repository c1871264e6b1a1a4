"""What a tracker is."""

from __future__ import annotations

from collections.abc import Mapping


class Tracker:
    """Takes the metrics of one step after the other. What its methods raise ends it, and nothing else."""

    def write(self, step: int, at: float, metrics: Mapping[str, float]) -> None:
        """`step`: 0-based; a run that went back to a checkpoint writes some again. `at`: epoch seconds. May wait for
        the disk only."""
        raise NotImplementedError

    def pause(self) -> None:
        """Files in the run folder may be changed until the next write."""

    def finish(self) -> None:
        """No write follows. Does not wait."""

    def close(self, deadline: float) -> None:
        """After `finish`. Waits until `deadline` on the monotonic clock at most."""
