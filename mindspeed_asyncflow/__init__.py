"""Asynchronous streaming RL post-training, Ascend first."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`Client` and `AsyncClient` of a served run (web/client.py), loaded by whoever needs them."""
    if name in ("Client", "AsyncClient"):
        from mindspeed_asyncflow.web import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
