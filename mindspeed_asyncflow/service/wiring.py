"""The only importer of concrete adapters: one recipe per kind of worker, run inside the worker's own process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import RolloutParallel
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.data.tokenizers import decode_answers, load_tokenizer
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.engines.base import RolloutEngine
from mindspeed_asyncflow.engines.registry import build_rollout as build_rollout_engine
from mindspeed_asyncflow.engines.registry import build_trainer as build_train_engine
from mindspeed_asyncflow.engines.setup import RolloutSetup, TrainSetup
from mindspeed_asyncflow.observe.log import setup_logging
from mindspeed_asyncflow.observe.trace import Tracer, configure
from mindspeed_asyncflow.platforms.base import Platform, current
from mindspeed_asyncflow.platforms.ports import HeldPort, hold_port
from mindspeed_asyncflow.records import SamplingSpec
from mindspeed_asyncflow.reshard.topology import Topology
from mindspeed_asyncflow.service.relays import RelayOfRank
from mindspeed_asyncflow.workflow.conversing import Conversation
from mindspeed_asyncflow.workflow.critic_worker import CriticWorker
from mindspeed_asyncflow.workflow.publisher import Publisher
from mindspeed_asyncflow.workflow.sample_log import NoSamples, SampleLog
from mindspeed_asyncflow.workflow.score_worker import ReferenceWorker, ScoreWorker
from mindspeed_asyncflow.workflow.train_worker import TrainWorker
from mindspeed_asyncflow.workflow.workers import RolloutWorker

FROZEN_S = 15.0  # from the last answer of a process that freezes to its end, beyond `faults.heartbeat_s`
IN_PLACE_BUCKET_BYTES = 64 << 20  # staging beside both shards while a replica is filled in place


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What every worker is told. Plain values: it crosses between environments."""

    config: Config
    model_folder: str
    stop_ids: tuple[int, ...]
    dock_addresses: list[str]
    dock_secret: bytes
    trace_folder: str
    log_file: str
    events_folder: str

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens


def _enter(spec: WorkerSpec, name: str) -> Tracer:
    setup_logging(name, spec.log_file, console=False)
    return configure(Path(spec.trace_folder), name, enabled=spec.config.observe.trace)


def dock_client(spec: WorkerSpec) -> DockClient:
    """One that waits for a pair that is started again. A frozen pair is killed before a call to it gives up."""
    config = spec.config
    wait_s = max(config.dock.wait_s, config.faults.heartbeat_s + FROZEN_S)
    return DockClient(spec.dock_addresses, spec.dock_secret, wait_s, restart_s=config.workflow.start_timeout_s)


def _engine_arguments(spec: WorkerSpec) -> dict[str, Any]:
    return dict(
        model_folder=spec.model_folder,
        rollout=spec.config.rollout,
        dtype=spec.config.model.dtype,
        max_model_len=spec.max_model_len,
        seed=spec.config.run.seed,
        stop_token_ids=spec.stop_ids,
    )


def _rollout_engine(spec: WorkerSpec, sleeps: bool) -> RolloutEngine:
    if spec.config.rollout.own:
        return build_rollout_engine(RolloutSetup(**_engine_arguments(spec), platform=_platform(spec), sleeps=sleeps))
    if spec.config.rollout.engine == "vllm":
        from mindspeed_asyncflow.engines.vllm.engine import VLLMEngine

        npu, native = current(spec.config.run.platform).name == "npu", spec.config.rollout.native
        return VLLMEngine(**_engine_arguments(spec), npu=npu, sleep_enabled=sleeps, native=native)
    from mindspeed_asyncflow.engines.reference import ReferenceEngine

    return ReferenceEngine(**_engine_arguments(spec))


def _rollout_arguments(spec: WorkerSpec, name: str, tracer: Tracer) -> dict[str, Any]:
    config = spec.config
    share = max(1, config.workflow.groups_per_step // config.rollout.replicas)
    return dict(
        dock=dock_client(spec),
        sampling=SamplingSpec(
            config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            stop_token_ids=spec.stop_ids,
        ),
        name=name,
        seed=config.run.seed,
        commit_groups=max(1, share // 4) if config.workflow.overlap else share,
        timeout_s=config.rollout.timeout_s,
        tracer=tracer,
        partial_rounds=config.workflow.partial_rounds,
        group_size=config.algorithm.group_size,
        stream_out_s=config.faults.stream_out_s if config.workflow.max_lag else None,
        conversation=_conversation(spec),
        masked=config.masked,
    )


def _conversation(spec: WorkerSpec) -> Conversation | None:
    turns, data = spec.config.turns, spec.config.data
    if turns.environment is None:
        return None
    from mindspeed_asyncflow.environments.pool import EnvironmentPool
    from mindspeed_asyncflow.environments.rendering import replies_of

    tokenizer = load_tokenizer(spec.model_folder, data.chat_template)
    replies = replies_of(tokenizer, data.chat, turns.role, turns.reply_start, turns.reply_end, spec.stop_ids)
    return Conversation(
        EnvironmentPool(turns),
        replies,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        clean=lambda ids: decode_answers(tokenizer, [ids], spec.stop_ids)[0],
        max_turns=turns.max_turns,
        in_rounds=spec.config.workflow.max_lag == 0,
    )


def build_rollout(spec: WorkerSpec, index: int, sleeps: bool = False) -> RolloutWorker:
    """`sleeps`: its devices are a trainer's in turn."""
    tracer = _enter(spec, name := f"rollout{index}")
    return RolloutWorker(_rollout_engine(spec, sleeps), **_rollout_arguments(spec, name, tracer))


def build_sender(spec: WorkerSpec, index: int, host: str, ports: range) -> Any:
    """It sends versions to replica `index`, whose workers meet it at `host` and one of `ports`."""
    from mindspeed_asyncflow.engines.vllm.send_worker import SendWorker

    tracer = _enter(spec, f"sender{index}")
    return SendWorker(spec.config.rollout, current(spec.config.run.platform), host, ports, tracer)


def build_reference(spec: WorkerSpec, index: int) -> ReferenceWorker:
    tracer = _enter(spec, name := f"reference{index}")
    from mindspeed_asyncflow.engines.reference import ReferenceEngine

    temperature = spec.config.rollout.temperature  # the KL term compares with the policy at this temperature
    engine = ReferenceEngine(**_engine_arguments(spec), score_temperature=temperature)
    return ReferenceWorker(engine, dock_client(spec), name=name, tracer=tracer)


def build_scorer(spec: WorkerSpec) -> ScoreWorker:
    from mindspeed_asyncflow.rewards.pool import ScorerPool

    tracer = _enter(spec, "scorer")
    tokenizer = load_tokenizer(spec.model_folder, spec.config.data.chat_template)

    def decode(answers: Any) -> list[str]:
        return decode_answers(tokenizer, [np.asarray(a) for a in answers], spec.stop_ids)

    pool = ScorerPool(spec.config.data, spec.config.reward)
    return ScoreWorker(pool, dock_client(spec), decode, spec.config, name="scorer", tracer=tracer)


def replica_of(config: Config, rank: int) -> int:
    """Data-parallel replica of a trainer rank in megatron-core's rank order (tensor, context, data, pipeline)."""
    t = config.trainer
    return rank // (t.tensor_parallel * t.context_parallel) % t.data_parallel


def leaders(config: Config) -> list[int]:
    """One rank of every data-parallel replica: the one that reports for it."""
    t = config.trainer
    return [replica * t.tensor_parallel * t.context_parallel for replica in range(t.data_parallel)]


_held: HeldPort | None = None  # in the process of the first rank: the port of the rendezvous, from choosing to use


def hold_rendezvous_port(host: str) -> HeldPort:
    """Choose and keep the port at which ranks meet; their recipe in the same process takes it over."""
    global _held
    _held = hold_port(host=host)
    return _held


def _sample_log(spec: WorkerSpec, rank: int) -> NoSamples:
    """Ranks that lead a data-parallel replica record what it trains."""
    config = spec.config
    if not config.observe.events or rank not in leaders(config):
        return NoSamples()
    share = config.observe.events_mb * 2**20 // config.trainer.data_parallel
    return SampleLog(Path(spec.events_folder), replica_of(config, rank), share)


def _platform(spec: WorkerSpec) -> Platform:
    return current(spec.config.run.platform)


def _train_engine(spec: WorkerSpec, rank: int, master: tuple[str, int]) -> Any:
    from mindspeed_asyncflow.algorithms.policy_loss import make_policy_loss

    config = spec.config
    if config.trainer.own:
        loss = make_policy_loss(config.algorithm, config.correction)
        arguments = _rank_arguments(spec, rank, master) | {"platform": _platform(spec), "loss_fn": loss}
        return build_train_engine(
            TrainSetup(spec.model_folder, config.trainer, temperature=config.rollout.temperature, **arguments)
        )
    from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap

    bootstrap(config.run.platform, config.trainer.threads)  # changes torch, so it comes before megatron is imported
    from mindspeed_asyncflow.engines.megatron.engine import MegatronTrainEngine

    return MegatronTrainEngine(
        spec.model_folder,
        config.trainer,
        temperature=config.rollout.temperature,
        loss_fn=make_policy_loss(config.algorithm, config.correction),
        **_rank_arguments(spec, rank, master),
    )


def _rank_arguments(spec: WorkerSpec, rank: int, master: tuple[str, int]) -> dict[str, Any]:
    """Of a training engine, whatever it trains."""
    config = spec.config
    return dict(
        dtype=config.model.dtype,
        rank=rank,
        world_size=config.trainer.world_size,
        master_address=master[0],
        master_port=master[1],
        seed=config.run.seed,
        timeout_s=config.workflow.start_timeout_s,
        platform=config.run.platform,
        held_port=_held if rank == 0 else None,
    )


def build_critic(spec: WorkerSpec, rank: int, master: tuple[str, int]) -> CriticWorker:
    from mindspeed_asyncflow.algorithms.value_loss import make_value_loss
    from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap

    name, config = f"critic{rank}", spec.config
    tracer = _enter(spec, name)
    bootstrap(config.run.platform, config.critic.threads)  # as for a trainer rank
    from mindspeed_asyncflow.engines.megatron.critic import MegatronCritic

    engine = MegatronCritic(
        spec.model_folder,
        config.critic_ranks,
        loss_fn=make_value_loss(config.critic),
        **_rank_arguments(spec, rank, master),
    )
    return CriticWorker(
        engine,
        dock_client(spec),
        config.algorithm,
        name=name,
        replica=replica_of(config, rank),
        leads=rank in leaders(config),
        tracer=tracer,
        conversations=config.masked,
    )


def _trainer_arguments(
    spec: WorkerSpec, rank: int, engine: Any, tracer: Tracer, relay: RelayOfRank | None
) -> dict[str, Any]:
    """`relay`: None where versions are not stored."""
    from mindspeed_asyncflow.reshard.relay import RelayWriter
    from mindspeed_asyncflow.reshard.relay_plan import write_plan
    from mindspeed_asyncflow.reshard.unstored import UnstoredWriter

    name, config, platform = f"trainer{rank}", spec.config, _platform(spec)
    plan = write_plan(engine.layout)
    table = plan.table(engine.layout, config.model.dtype)
    writer = (
        UnstoredWriter(table)
        if relay is None
        else RelayWriter(relay.path, table, rank, relay.writers, config.workflow.keep_versions)
    )
    publisher = Publisher(
        engine.shards,
        plan.ranks[rank],
        writer,
        platform=platform,
        device=platform.device(),
        name=name,
        timeout_s=config.workflow.watchdog_s,
        tracer=tracer,
    )
    return dict(
        engine=engine,
        dock=dock_client(spec),
        algorithm=config.algorithm,
        correction=config.correction,
        name=name,
        replica=replica_of(config, rank),
        publisher=publisher,
        tracer=tracer,
        samples=_sample_log(spec, rank),
        conversations=config.masked,
    )


def build_trainer(
    spec: WorkerSpec, rank: int, master: tuple[str, int], relay: RelayOfRank, gives: bool = False
) -> TrainWorker:
    """`gives`: its device is used by replicas in turn."""
    tracer = _enter(spec, f"trainer{rank}")
    engine = _train_engine(spec, rank, master)
    arguments = _trainer_arguments(spec, rank, engine, tracer, relay)
    if not gives:
        return TrainWorker(**arguments)
    from mindspeed_asyncflow.platforms.memory import DeviceMemory
    from mindspeed_asyncflow.workflow.sharing import GivingTrainWorker, SwappedDevice

    return GivingTrainWorker(**arguments, device=SwappedDevice(engine, DeviceMemory(_platform(spec))))


class OneProcess:
    """A trainer rank and the replica on its device, in place of each other: `rollout`, and `trainer` when it is there.

    The engine answers with the model folder's weights until `rollout.rest()`, which must come before `add_trainer`.
    """

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        from mindspeed_asyncflow.engines.megatron.bootstrap import bootstrap

        self.tracer = _enter(spec, f"trainer{rank}")
        platform = bootstrap(spec.config.run.platform, spec.config.trainer.threads)
        from mindspeed_asyncflow.engines.reference import ReferenceEngine
        from mindspeed_asyncflow.platforms.memory import DeviceMemory
        from mindspeed_asyncflow.workflow.sharing import FilledRolloutWorker

        self.spec, self.rank, self.memory = spec, rank, DeviceMemory(platform)
        self.served = ReferenceEngine(**_engine_arguments(spec), memory=self.memory)
        name = f"rollout{rank}"
        tracer = Tracer(spec.trace_folder, name, enabled=spec.config.observe.trace)
        self.rollout = FilledRolloutWorker(self.served, **_rollout_arguments(spec, name, tracer))
        self.trainer: TrainWorker | None = None

    def add_trainer(self, master: tuple[str, int], topology: Topology) -> None:
        """Collective. `topology`: of all ranks."""
        from mindspeed_asyncflow.platforms.memory import HostPool
        from mindspeed_asyncflow.reshard.in_place import InPlace
        from mindspeed_asyncflow.reshard.rollout_layout import rollout_layout
        from mindspeed_asyncflow.workflow.sharing import FilledDevice, GivingTrainWorker

        spec, config = self.spec, self.spec.config
        engine = _train_engine(spec, self.rank, master)
        shape = describe(json.loads((Path(spec.model_folder) / "config.json").read_text(encoding="utf-8")))
        in_place = InPlace(
            engine,
            self.served,
            rollout_layout(shape, RolloutParallel(replicas=config.rollout.replicas)),
            rank=self.rank,
            memory=self.memory,
            pool=HostPool(self.memory.platform),
            bucket_bytes=IN_PLACE_BUCKET_BYTES,
            topology=topology,
            timeout_s=config.workflow.watchdog_s,
        )
        device = FilledDevice(in_place, self.memory)
        arguments = _trainer_arguments(spec, self.rank, engine, self.tracer, relay=None)
        self.trainer, self.rollout.device = GivingTrainWorker(**arguments, device=device), device

    def close(self) -> None:
        if self.trainer is not None:
            self.trainer.close()
        self.rollout.close()
