"""What a pair tells a client that has shown the secret, and where clients of its node find it."""

from __future__ import annotations

import numpy as np

from mindspeed_asyncflow.dock.arena import Arena
from mindspeed_asyncflow.dock.columns import column_table
from mindspeed_asyncflow.dock.member import Member


def local_name(arena: Arena) -> str:
    """Of the socket for clients on the arena's node, in the abstract namespace: nothing is left of it afterwards."""
    return f"asyncflow-dock-{arena.token[:16].hex()}"


def hello(member: Member, arena: Arena) -> dict:
    schema = member.node.schema
    return {
        "columns": column_table(schema),
        "tasks": [[t.name, list(t.columns)] for t in schema.tasks.values()],
        "pair": member.node.pair,
        "life": member.memory.life,
        "addresses": member.peers.addresses,
        "forgotten": member.peers.forgotten,
        "local": local_name(arena),
        "arena_path": arena.path,
        "arena_bytes": len(arena.bytes),
        "arena_token": np.frombuffer(arena.token, np.uint8),
    }
