"""Settings of what a run does about processes that die or freeze."""

from __future__ import annotations

from pydantic import Field

from mindspeed_asyncflow.config.section import Section


class FaultsConfig(Section):
    heartbeat_s: float = Field(
        30.0,
        ge=1,
        description="A process that answers no ping for so long is frozen: it is killed and replaced. Longer than any "
        "library keeps Python from running at a stretch.",
    )
    max_restarts: int = Field(
        3, ge=0, description="Most replacements of one component (each replica counts for itself) in a run; 0: none."
    )
    stream_out_s: float | None = Field(
        2.0,
        gt=0,
        description="So often the tokens of running answers go into the dock, from where others continue them if the "
        "replica is lost; null: never. With max_lag 0 lost answers are sampled again from their seeds instead.",
    )
