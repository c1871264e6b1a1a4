"""What the rest of the package calls the dock: the verbs of `PairClient`."""

from __future__ import annotations

from mindspeed_asyncflow.dock.pair import Claim, PairClient

__all__ = ["Claim", "DockClient"]


class DockClient(PairClient):
    """The dock of a run."""
