"""How the processes of a run start, what connects them, and replicas that come and go.

replicas                     processes                                    start
with devices of their own    one each                                     beside everything else; late ones join
on the trainers' devices     one each, near the ranks that it belongs to  first, and asleep before trainers start
in place                     that of the trainer rank                     the same
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindspeed_asyncflow.config.feasibility import in_place, needed_replicas, own_replicas, sharing_replicas
from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.data.prompts import PromptSet
from mindspeed_asyncflow.data.stream import PromptStream
from mindspeed_asyncflow.data.tokenizers import stop_token_ids
from mindspeed_asyncflow.errors import WorkerLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.observe.writers import EvaluationsWriter
from mindspeed_asyncflow.platforms.devices import VISIBLE_ENV, visible_to
from mindspeed_asyncflow.service import wiring
from mindspeed_asyncflow.service.actors import BESIDE, Part, Remote
from mindspeed_asyncflow.service.assignment import assign, rank_topology
from mindspeed_asyncflow.service.keeping import Keeping
from mindspeed_asyncflow.service.mirrors import Mirrors
from mindspeed_asyncflow.service.placement import nodes
from mindspeed_asyncflow.service.relays import plan_relays
from mindspeed_asyncflow.service.replicas import Replicas
from mindspeed_asyncflow.service.senders import Senders
from mindspeed_asyncflow.service.supervision import Supervision
from mindspeed_asyncflow.service.workers import BESIDE_TRAINING
from mindspeed_asyncflow.workflow.answering import GRACE_S
from mindspeed_asyncflow.workflow.clock import now
from mindspeed_asyncflow.workflow.dock_port import ThreadDock
from mindspeed_asyncflow.workflow.evaluating import Evaluation
from mindspeed_asyncflow.workflow.events import NoEvents
from mindspeed_asyncflow.workflow.recorder import StepRecorder
from mindspeed_asyncflow.workflow.run import Run
from mindspeed_asyncflow.workflow.turns import NoTurns, Turns
from mindspeed_asyncflow.workflow.weight_sync import WeightSync
from mindspeed_asyncflow.workflow.workers import Question

PARTITION = "train"
NOTICED_S = 5.0  # the death of a process is known so long after a call of it has failed
CALLS_BESIDE_ANSWERS = 8  # of one replica at a time: load, fetch, stop, count, evaluation; three for clients (desk.py)


class Starting(Keeping):
    """Base of `Session`: from nothing to processes that are connected."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        model_folder: str,
        tokenizer: Any,
        prompts: PromptSet,
        recorder: StepRecorder,
        outside: Any = None,  # an `outside.Outside`, where somebody drives the run from there
    ) -> None:
        super().__init__(config, folder)
        self.tokenizer, self.outside = tokenizer, outside
        self.model_folder = model_folder
        self.stop_ids = stop_token_ids(model_folder, tokenizer)
        self.prompts, self.recorder = prompts, recorder
        self.stream: Any = None if outside is None else outside.prompts
        if self.stream is None:
            d = config.data
            self.stream = PromptStream(prompts, config.run.seed, d.epochs, d.drop_last, config.workflow.groups_per_step)
        self.events = NoEvents()
        self.in_place = in_place(config)
        self.threads = config.workflow.lanes + CALLS_BESIDE_ANSWERS  # of one replica
        self.trainers: list[Any] = []
        self.sharing: dict[int, Any] = {}  # replicas on devices of trainer ranks, by index
        self.senders: Senders | None = None  # where weights do not come through the relay
        self.turns: Turns = NoTurns()
        self.dock: ThreadDock | None = None
        self.run: Run | None = None
        self.evaluation: Evaluation | None = None  # as soon as workers are connected
        self._probe: list[tuple[np.ndarray, np.ndarray]] | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._joining: set[int] = set()  # replicas that are awaited
        self._watching: list[asyncio.Task[None]] = []

    async def start(self, say: Callable[[str], None]) -> None:
        """Start every worker; an error names the ones that did not come up."""
        config, secret = self.config, secrets.token_bytes(16)
        self.home = assign(config, nodes())
        say("starting dock")
        self.pairs = [self.spawn(f"dock{i}") for i in range(config.dock.pairs)]
        ranks = self.spawn_trainers(beside=self.threads if self.in_place else 0)
        self.references = [self.spawn_reference(0)] if config.algorithm.kl_coef > 0 else []
        self.critics = self.spawn_critics()
        self.scorer = self.spawn_scorer()
        self.supervision = Supervision(config.faults, self.events.note)
        self.replicas = Replicas(
            lambda index: self.spawn_replica(index, config.rollout.tensor_parallel, concurrency=self.threads),
            own_replicas(config),
            needed_replicas(config),
            config.workflow.start_timeout_s,
            self._build_replica,
            config.faults.heartbeat_s,
        )
        self.replicas.lost = self._lost
        all_placed = await self.replicas.find()
        fixed = [*self.pairs, *ranks, *self.critics, *self.references, self.scorer]
        known = {f"rollout{i}": place for i, place in self.replicas.places.items()}
        await self.find_places(fixed, known, all_there=all_placed)
        addresses = await self.start_dock(self.pairs, secret)
        self.spec = wiring.WorkerSpec(
            config, self.model_folder, self.stop_ids, addresses, secret,
            str(self.folder.trace), str(self.folder.log), str(self.folder.events),
        )  # fmt: skip
        claimers = (config.rollout.replicas + sharing_replicas(config)) * config.workflow.lanes + 5
        self.dock = ThreadDock(wiring.dock_client(self.spec), PARTITION, claimers)
        say(self._who_starts())
        await self._start_workers(ranks)
        await self.connect()

    def _who_starts(self) -> str:
        config = self.config
        critics = f"{config.critic_size} critic rank(s), " if config.critic_size else ""
        lent = f" and {sharing_replicas(config)} on lent devices" if config.workflow.lend else ""
        return (
            f"starting {config.trainer.world_size} trainer rank(s), {critics}"
            f"{config.rollout.replicas} rollout replica(s){lent} ({config.rollout.engine}), scorer"
        )

    async def _start_workers(self, ranks: Sequence[Remote]) -> None:
        """Replicas on trainers' devices before the trainers, everything else at the same time."""
        spec = self.spec
        self._plan_ways(ranks)
        self.replicas.start()
        others = {r.name: r.build(wiring.build_reference, spec, i) for i, r in enumerate(self.references)}
        others["scorer"] = self.scorer.build(wiring.build_scorer, spec)
        critics = self.start_critics(self.critics, spec)
        await asyncio.gather(self.in_time(others), self.start_ranks(ranks), critics, self.replicas.enough())
        self.scorer, self.references = self.keep_scorer(self.scorer), self.keep_references(self.references)
        self.keep_pairs(self.pairs)

    async def start_group(self) -> None:
        """Trainer and critic ranks, and the replicas on their devices, in place of those that are gone; everything else
        is up, and nobody uses it."""
        ranks = self.spawn_trainers(beside=self.threads if self.in_place else 0)
        self.critics = self.spawn_critics()
        await self.find_places_again([*ranks, *self.critics])
        self._plan_ways(ranks)
        await asyncio.gather(self.start_ranks(ranks), self.start_critics(self.critics, self.spec))
        await self.connect()

    def end_group(self) -> None:
        """Their processes are killed."""
        for watch in self._watching:
            watch.cancel()
        for member in self.group():
            member.kill()
            self.workers.remove(member)
        self._watching, self.sharing, self.turns = [], {}, NoTurns()

    def group(self) -> list[Remote]:
        """Processes that are of no use without each other: trainer and critic ranks, and replicas on their devices."""
        names = ("trainer", "critic", *(f"rollout{i}" for i in self.sharing))
        return [w for w in self.workers if w.name.rstrip("0123456789") in names or w.name in names]

    def _plan_ways(self, ranks: Sequence[Remote]) -> None:
        config = self.config
        self.relays = plan_relays([self.places[r.name] for r in ranks], always_mirror=config.workflow.relay == "mirror")
        if self.senders is not None:
            self.senders.ranks = ranks
        elif config.rollout.native:
            self.senders = Senders(self, ranks)

    async def start_ranks(self, ranks: Sequence[Remote]) -> None:
        """Trainer ranks, and the replicas on their devices."""
        spec = self.spec
        if self.in_place:
            self.sharing = {i: Part(r, "rollout", f"rollout{i}", BESIDE) for i, r in enumerate(ranks)}
            self.trainers = [Part(r, "trainer", r.name, aside=BESIDE_TRAINING) for r in ranks]
            master = await self.rendezvous(ranks[0])
            await self.in_time({r.name: r.build(wiring.OneProcess, spec, i) for i, r in enumerate(ranks)})
            await self._put_to_rest()
            topology = rank_topology(nodes(), [self.places[r.name].node for r in ranks])
            await self.in_time({r.name: r.add_trainer(master, topology) for r in ranks})
            return
        self.trainers = list(ranks)
        first = own_replicas(self.config)
        for index in range(first, first + sharing_replicas(self.config)):
            self.sharing[index] = await self._spawn_beside(index, ranks, index - first)
        await self.in_time({r.name: r.build(wiring.build_rollout, spec, i, True) for i, r in self.sharing.items()})
        await self._put_to_rest()
        await self.start_trainers(ranks, spec, self.relays.ranks, gives=bool(self.sharing))

    async def _spawn_beside(self, index: int, ranks: Sequence[Remote], number: int) -> Remote:
        """A replica on the devices of its trainer ranks, which Ray counts for those only."""
        size = self.config.rollout.tensor_parallel
        beside = ranks[number * size : (number + 1) * size]
        devices = [d for rank in beside for d in await self.within(rank.devices(), f"{rank.name} to name its device")]
        started = self.sides.replica(index, sleeps=True)
        if devices:
            started["environment"] |= {VISIBLE_ENV: visible_to(devices)}
        node = self.places[beside[0].name].node
        worker = self.spawn(f"rollout{index}", concurrency=self.threads, node=node, **started)
        self._watching.append(asyncio.ensure_future(self._watch(index, worker)))
        return worker

    async def _put_to_rest(self) -> None:
        """Sharing replicas leave their devices to the trainers, after the first one has given the probe answers."""
        if not self.sharing:
            return
        if not own_replicas(self.config):
            self._probe = await self._choose_probe(next(iter(self.sharing.values())))
        await self.in_time({f"rollout{i} (going to sleep)": w.rest() for i, w in self.sharing.items()})

    async def _build_replica(self, index: int) -> None:
        remote = self.replicas.remotes[index]
        self.home[remote.name] = self.replicas.places[index].node  # one in its place runs where a mirror knows it
        building = remote.build(wiring.build_rollout, self.spec, index)
        await (building if self.senders is None else self.senders.add(index, remote, building, self.spec))

    async def connect(self) -> None:
        """Ways of weights from trainers to replicas, and turns where they share devices."""
        config = self.config
        table = await self.within(self.trainers[0].table(), "trainer0 to describe the relay")
        self.rollouts: dict[int, Any] = {**self.replicas.up, **self.sharing}
        self.mirrors = Mirrors(self.relays, config.workflow, self.rollouts, self._serve_relays)
        for index in sorted(self.rollouts):
            await self.within(self._need_mirror(index), f"rollout{index} to take a mirror")
        total = own_replicas(config) + sharing_replicas(config)
        self.sync = WeightSync(
            [self.rollouts.get(i) for i in range(total)],
            config.model.dtype,
            self.relays.ranks[0].path,
            table,
            update=config.workflow.update,
            keep=config.workflow.keep_versions,
            mirrors=self.mirrors.all(),
            busy=self.recorder.busy,
            events=self.events,
            patience_s=config.rollout.timeout_s + GRACE_S,
            hangs=self._hangs,
            carry=self.senders.load if self.senders is not None else None,
        )
        self.mirrors.sync = self.sync
        if self.sharing:
            lend = config.workflow.lend
            self.turns = Turns(self.trainers, self.sharing, interrupt=lend, emptied=self.sync.emptied)
        self.evaluation = Evaluation(
            config,
            self.prompts.heldout,
            self.sync,
            self.turns,
            self.scorer,
            self.recorder,
            EvaluationsWriter(self.folder),
        )

    async def _need_mirror(self, index: int) -> None:
        if not self.in_place and self.senders is None:
            await self.mirrors.need(index, self._replica_places())

    def _replica_places(self) -> dict[int, Any]:
        """Places of all replicas that are there or starting."""
        first, size = own_replicas(self.config), self.config.rollout.tensor_parallel
        beside = {i: self.places[f"trainer{(i - first) * size}"] for i in self.sharing}
        return {**self.replicas.places, **beside}

    async def _serve_relays(self, servers: Mapping[int, str], secret: bytes) -> Sequence[str]:
        serving = asyncio.gather(
            *(self.trainers[rank].serve(ip, secret, self.sides.relay()) for rank, ip in servers.items())
        )
        return await self.within(serving, "the trainer ranks to serve the relay")

    async def _choose_probe(self, worker: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        """Answers of the starting policy to a few prompts: fixed for the run."""
        count = self.config.workflow.probe_answers
        if not count:
            return []
        chosen = (self.prompts.heldout or self.prompts.train)[:count]
        asked = worker.answer([Question((-1, i), p.ids) for i, p in enumerate(chosen)], None, True)
        answers = await self.within(asked, f"{worker.name} to answer the probe prompts")
        return [(p.ids, a.token_ids) for p, a in zip(chosen, answers) if len(a.token_ids)]

    # ---- replicas that come and go -----------------------------------------------------------------------------------

    @property
    def _running(self) -> Run | None:
        return None if self.run is None or self.run.over else self.run

    async def _join_late(self, index: int) -> None:
        """A replica that is not up yet joins the run when it is; without it the run goes on."""
        assert self.run is not None
        if index in self._joining:
            return
        self._joining.add(index)
        try:
            await self._up(index)
        except Exception as error:  # boundary: a warning, as long as the run has other replicas
            self.rollouts.pop(index, None)
            await self.run.give_up(index, error)
            return
        finally:
            self._joining.discard(index)
        self.run.join(index, self.rollouts[index])

    async def _up(self, index: int) -> None:
        """Replica `index` is up, and knows how to get weights."""
        await self.replicas.later(index)
        self.rollouts[index] = self.replicas.up[index]
        await self._need_mirror(index)
        if index not in self.replicas.up:
            raise WorkerLost(f"rollout{index} died as soon as it was up")

    async def _up_again(self, index: int) -> None:
        self.replicas.replace(index)
        await self._up(index)

    def _comes_back(self, index: int) -> bool:
        """Whether a dead replica gets a new process; those on trainers' devices do not."""
        again = self.supervision.restarts[f"rollout{index}"] < self.config.faults.max_restarts
        return again and index in self.replicas.remotes

    def _lost(self, index: int, error: WorkerLost) -> None:
        """The process of a replica is dead."""
        self.rollouts.pop(index, None)
        if self.senders is not None:
            self.senders.drop(index)
        self.turns.forget(index)
        if index in self._joining or self.evaluation is None:  # whoever waits for it notices
            return
        if self._comes_back(index):
            self._joining.add(index)
        task = asyncio.ensure_future(self._go_on(index, error))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _go_on(self, index: int, error: WorkerLost) -> None:
        """What a dead replica held goes to others, and a new process takes its place, in the run if one is on."""
        if (run := self._running) is not None:
            await asyncio.wait([run.job.spawn(run.answering.lost(index, error))])
        else:
            self.sync.retire(index)
        await self._replace_mirror(index)
        if index not in self._joining:
            return
        try:
            await self.supervision.replace(f"rollout{index}", error, lambda: self._up_again(index))
        except Exception as failed:  # boundary: a warning, as long as there are other replicas
            self.rollouts.pop(index, None)
            if (run := self._running) is not None:
                run.job.spawn(run.give_up(index, failed))
            return
        finally:
            self._joining.discard(index)
        if (run := self._running) is not None:
            run.join(index, self.rollouts[index])
        else:
            self.sync.join(index, self.rollouts[index])

    async def somebody(self, before: set[int]) -> bool:
        """Where a call of one of the replicas `before` failed: waits until a loss is known, and where nobody is left
        for whoever comes back. Whether to try again with those that are there."""
        until = now() + NOTICED_S
        while set(self.rollouts) == before and self.rollouts:
            if now() > until:
                return False
            await asyncio.sleep(NOTICED_S / 50)
        while not self.rollouts and self._leaving:
            await asyncio.wait(self._leaving, return_when=asyncio.FIRST_COMPLETED)
        return bool(self.rollouts)

    async def _watch(self, index: int, remote: Remote) -> None:
        """A replica on lent devices."""
        try:
            await remote.watch(self.config.faults.heartbeat_s)
        except WorkerLost as error:
            self._lost(index, error)

    async def _replace_mirror(self, index: int) -> None:
        for stranded in await self.mirrors.lost(index):
            get_logger("service").warning("rollout%d leaves: no way to weights is left on its node", stranded)
            self.rollouts.pop(stranded, None)
            if self.run is not None:
                await self.run.leave(stranded)

    def _hangs(self, index: int, error: WorkerLost) -> None:
        self._end(index)
        self._lost(index, error)

    def _end(self, index: int) -> None:
        """End the process of a replica that hangs; one in a trainer's process cannot go alone."""
        worker = self.rollouts.get(index)
        if isinstance(worker, Remote):
            worker.kill()
