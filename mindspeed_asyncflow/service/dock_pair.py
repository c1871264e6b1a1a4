"""A controller/warehouse pair of the dock in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.memory import journal_path
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.observe.log import get_logger


def build_pair(
    config: Config, secret: bytes, pair: int, arena_path: str, host: str, port: int = 0, life: int | None = 0
) -> DockServer:
    """Controller/warehouse pair number `pair`, which listens on `host`. `life`: of an empty pair, how often it has lost
    its memory before; None: it goes on from what a dead one has left at `arena_path`. The process ends when its thread
    fails, so that this is noticed."""
    a = config.algorithm
    if life:
        for damaged in (arena_path, journal_path(arena_path)):
            Path(damaged).unlink(missing_ok=True)
    return DockServer(
        GRPO_COLUMNS,
        grpo_tasks(
            with_reference=a.kl_coef > 0,
            kl_in_reward=a.kl_reward,
            token_level=a.token_level,
            critic=a.with_critic,
            service=config.service.prompts == "client",
        ),
        arena_mb=config.dock.arena_mb,
        lease_s=config.dock.lease_s,
        host=host,
        port=port or (config.dock.port + pair if config.dock.port else 0),
        secret=secret,
        pair=pair,
        max_rows=config.dock.max_rows,
        arena_path=arena_path,
        restart=life is None,
        failed=_end_process,
        life=life or 0,
    ).start()


def _end_process(error: BaseException) -> None:
    get_logger("dock").error("the dock pair ends: %s: %s", type(error).__name__, error)
    os._exit(1)
