"""Names of engines: the project's own, and those of a user."""

from __future__ import annotations

TRAIN_ENGINES = ("megatron",)
ROLLOUT_ENGINES = ("vllm", "reference", "simulated")

# Of the project, MODULE:CLASS, or that of an entry point.
ENGINE_NAME = r"^[A-Za-z_][\w.-]*(:[A-Za-z_]\w*)?$"
YOURS = "or an engine of your own: MODULE:CLASS, or the name of an entry point (docs/extending.md)"
