"""Settings of a run that somebody drives from outside (`asyncflow serve`), and what such a client may change of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mindspeed_asyncflow.config.section import Section

if TYPE_CHECKING:
    from mindspeed_asyncflow.config.schema import Config

# What `init_engines` may change: numbers that say what is learnt and how fast. No path, no name of code, no command, no
# size of memory or number of processes: these are the server's.
CLIENT_KEYS = frozenset(
    {
        *(f"trainer.{key}" for key in ("steps", "lr", "lr_warmup_steps", "lr_decay", "weight_decay", "grad_clip")),
        *("trainer.max_bad_steps", "trainer.save_every"),
        *(f"algorithm.{key}" for key in ("advantage_eps", "clip_low", "clip_high", "dual_clip", "gamma", "loss")),
        *("algorithm.aggregation", "algorithm.loss_horizon", "algorithm.mask_truncated"),
        *("rollout.temperature", "run.seed", "checkpoint.hf"),
        *("evaluation.every", "evaluation.temperature", "evaluation.share"),
        *("observe.samples_per_step",),
    }
)
LARGEST = 2**31 - 1


class ServiceConfig(Section):
    prompts: Literal["data", "client"] = Field(
        "data", description="Who gives prompts: the data set, or put_prompts_data and put_trajectories of the client."
    )
    rewards: Literal["scorer", "client"] = Field(
        "scorer",
        description="Who scores answers: the run's scorers, or the client by get_experience_data and "
        "put_experience_data. Evaluations are always scored by the run's scorers.",
    )
    weight_sync: Literal["run", "client"] = Field(
        "run",
        description="When replicas get a new version: as soon as it is there, or when weight_sync_notify asks for it.",
    )
    client_timeout_s: float = Field(
        600.0, gt=0, description="A run that waits for its client, who has called nothing for so long, ends."
    )
    call_timeout_s: float = Field(60.0, gt=0, description="Deadline of calls that name none.")
    linger_s: float = Field(
        600.0, ge=0, description="After the run the server answers for so long, unless the client calls stop."
    )
    max_queued: int = Field(
        4096, ge=1, description="Prompts that wait to be issued; put_prompts_data waits while there are more."
    )
    masks: bool = Field(
        False,
        description="Trajectories may hold tokens that the policy did not write, such as replies of a tool "
        "(response_mask); every answer of the run gets a mask then.",
    )
    tenant_rows: int = Field(4096, ge=0, description="Most rows of the partition of each further tenant.")
    tenant_mb: int = Field(16, ge=0, description="Most memory of the dock for each further tenant, in MiB.")
    max_body_mb: int = Field(1024, ge=1, description="Largest body of a request, in MiB.")
    completions_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Most answers of a replica for /v1/completions and /v1/chat/completions at the same time, of "
        "rollout.max_running.",
    )
    completions_waiting: int = Field(
        256, ge=0, description="Most requests that wait for room at the replicas; more are refused (429)."
    )

    @property
    def by_client(self) -> list[str]:
        """Settings by which the run waits for a client."""
        return [f"service.{key}" for key in ("prompts", "rewards", "weight_sync") if getattr(self, key) == "client"]


def override_lines(overrides: Mapping[str, Any]) -> Iterator[str]:
    """What of `overrides` a client may not change, or not to that, in words; nothing where all may be changed."""
    for key, value in overrides.items():
        if key not in CLIENT_KEYS:
            yield f"{key} is not a setting that a client may change; these are: {', '.join(sorted(CLIENT_KEYS))}"
        elif isinstance(value, int | float) and not abs(value) <= LARGEST:
            yield f"{key} {value!r:.24} is beyond {LARGEST}, the largest number that a client may give"


def rules(c: Config) -> Iterator[tuple[Literal["error", "warning"], tuple[str, ...], str]]:
    """What cannot work when clients take part in a run."""
    s = c.service
    if s.prompts == "client" and s.max_queued < c.groups_issued_per_step:
        yield (
            "error",
            ("service.max_queued", "workflow.groups_per_step"),
            f"{s.max_queued} prompts may wait and a step needs {c.groups_issued_per_step}: it would never begin; set "
            f"max_queued to {c.groups_issued_per_step} or more",
        )
    if s.weight_sync == "client" and (c.workflow.lend or c.workflow.schedule == "colocated"):
        yield (
            "error",
            ("service.weight_sync", "workflow.schedule", "workflow.lend"),
            "replicas on the trainers' devices load the newest weights at each turn: client is for replicas with "
            "devices of their own; set weight_sync to run",
        )
    room = s.tenant_mb + s.tenant_rows * 1e-3
    if s.prompts == "client" and room > c.dock.arena_mb * c.dock.pairs / 2:
        yield (
            "warning",
            ("service.tenant_mb", "dock.arena_mb"),
            f"one further tenant may fill {room:.0f} of {c.dock.arena_mb * c.dock.pairs} MiB of the dock; raise "
            "dock.arena_mb where there are several",
        )
