"""How scorer, reference and dock pairs are started again when their process is lost (supervision.py says when).

scorer, reference   a new process, which begins again with what the dead one held
dock pair           a new process on the arena and the journal that the dead one has left in shared memory, at the same
                    address: clients go on, rows are all there, claims are offered again. Where that memory is
                    gone or damaged, an empty pair: the prompts of its rows are issued again
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.pair import PairClient
from mindspeed_asyncflow.errors import DockMemoryLost
from mindspeed_asyncflow.observe.log import get_logger
from mindspeed_asyncflow.observe.run_folder import RunFolder
from mindspeed_asyncflow.service import wiring
from mindspeed_asyncflow.service.actors import Remote
from mindspeed_asyncflow.service.cleanup import shm_path
from mindspeed_asyncflow.service.dock_pair import build_pair
from mindspeed_asyncflow.service.supervision import Kept, Supervision
from mindspeed_asyncflow.service.workers import Workers
from mindspeed_asyncflow.workflow.dock_port import ThreadDock
from mindspeed_asyncflow.workflow.run import Run


class Keeping(Workers):
    """Base of `Starting`."""

    supervision: Supervision
    spec: wiring.WorkerSpec
    dock: ThreadDock | None = None
    scorer: Any  # a `Remote` until it is built, then `Kept`
    references: list[Any]  # the same
    outside: Any = None  # an `outside.Outside`, where somebody drives the run from there
    run: Run | None

    def __init__(self, config: Config, folder: RunFolder) -> None:
        super().__init__(config, folder)
        self._lives: Counter[int] = Counter()  # how often each pair has lost its memory

    def spawn_scorer(self) -> Remote:
        return self.spawn("scorer", concurrency=2)

    def spawn_reference(self, index: int) -> Remote:
        return self.spawn(f"reference{index}", **self.sides.reference())

    def keep_scorer(self, scorer: Remote) -> Any:
        kept = self._keep(scorer, self.spawn_scorer, lambda new: new.build(wiring.build_scorer, self.spec))
        return kept if self.outside is None else self.outside.scorer(kept)

    def keep_references(self, references: Sequence[Remote]) -> list[Kept]:
        return [self._keep_reference(i, reference) for i, reference in enumerate(references)]

    def _keep_reference(self, index: int, reference: Remote) -> Kept:
        return self._keep(
            reference,
            lambda: self.spawn_reference(index),
            lambda new: new.build(wiring.build_reference, self.spec, index),
        )

    def keep_pairs(self, pairs: Sequence[Remote]) -> None:
        for index, pair in enumerate(pairs):
            self._keep_pair(index, pair)

    def _keep_pair(self, index: int, pair: Remote) -> None:
        def spawn() -> Remote:
            return self.spawn(pair.name, node=self.places[pair.name].node)

        self._keep(pair, spawn, lambda new: self._pair_again(index, new))

    async def _pair_again(self, index: int, pair: Remote) -> None:
        """On the memory of the dead one; where that is gone or damaged, empty."""
        spec, addresses = self.spec, self.spec.dock_addresses
        host, _, port = addresses[index].rpartition(":")
        where = (spec.config, spec.dock_secret, index, shm_path(f"arena{index}"), host, int(port))
        try:
            await pair.build(build_pair, *where, None)
        except DockMemoryLost as error:
            get_logger("service").warning("%s begins empty: %s", pair.name, error)
            self._lives[index] += 1
            await pair.build(build_pair, *where, self._lives[index])
            if len(addresses) > 1:
                await asyncio.to_thread(_join, index, addresses, spec.dock_secret)
        if self.run is not None:  # a damaged journal may have ended early, and said nothing
            self.run.job.spawn(self.run.issue_again())

    def _keep(self, worker: Remote, spawn: Callable[[], Remote], build: Callable[[Remote], Awaitable[Any]]) -> Kept:
        async def again() -> Remote:
            new = spawn()
            try:
                await self.in_time({new.name: build(new)})
            except BaseException:  # boundary: what does not come up is ended, and the error goes on
                new.kill()
                raise
            return new

        return self.supervision.keep(worker, again)

    async def close(self) -> None:
        self.supervision.close()
        await super().close()

    def kill(self) -> None:
        super().kill()
        if self.dock is not None:  # threads that wait for a pair to come back do so no more
            self.dock.client.close()


def _join(index: int, addresses: Sequence[str], secret: bytes) -> None:
    with PairClient(addresses[index], secret) as pair:
        pair.join(index, addresses)
