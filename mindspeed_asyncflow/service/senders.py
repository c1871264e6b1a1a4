"""Versions by vllm-ascend's own transfer: for each replica a process beside a trainer rank that sends them to it.

    trainer ranks ──► relay of their node ──► sender i, on the device of a trainer rank ──► devices of replica i

One sender for each replica, so that each replica loads at its own boundary, several load at the same time, and what
happens to one pair does not reach the others. A sender that is lost takes its replica with it, and the other way round:
a half-finished broadcast cannot be taken up again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from mindspeed_asyncflow.errors import PlatformError, WeightSyncError, WorkerLost
from mindspeed_asyncflow.platforms.devices import VISIBLE_ENV, visible_to
from mindspeed_asyncflow.records import UpdateReport, WeightManifest
from mindspeed_asyncflow.service import wiring
from mindspeed_asyncflow.service.actors import Remote
from mindspeed_asyncflow.service.workers import Workers

GRACE_S = 10.0  # one side of a transfer has ended: the other one ends within this time, or is stuck in a broadcast
ANY_PORT = range(1)


class Senders:
    """`ranks`: the trainer ranks, all on one node, whose relay senders read. Raises `PlatformError` where they are not.

    Lives in the driver's event loop.
    """

    def __init__(self, workers: Workers, ranks: Sequence[Remote]) -> None:
        self.workers, self.ranks = workers, ranks
        self._pairs: dict[int, tuple[Remote, Remote]] = {}  # sender and replica, by index of the replica
        places = [workers.places[rank.name] for rank in ranks]
        if len({place.node for place in places}) > 1:
            found, transfer = ", ".join(sorted({place.ip for place in places})), workers.config.rollout.ascend.transfer
            raise PlatformError(
                f"rollout.ascend.transfer={transfer}: a sender reads the relay of one node, and trainer ranks are on "
                f"{found}: set it to relay"
            )

    async def add(
        self, index: int, replica: Remote, building: Coroutine[Any, Any, Any], spec: wiring.WorkerSpec
    ) -> None:
        """Start the sender of a replica beside `building`, which starts the replica, and let them meet."""
        self.drop(index)
        rank = self.ranks[index % len(self.ranks)]
        place, sides = self.workers.places[rank.name], self.workers.sides
        started = sides.replica(index)  # as the replica's: both are ranks of one communicator
        if devices := await rank.devices():
            started["environment"] |= {VISIBLE_ENV: visible_to(devices)}
        sender = self.workers.spawn(f"sender{index}", node=place.node, **started)
        self._pairs[index] = sender, replica
        ports = sides.ports.engines[index] if sides.ports is not None and sides.ports.engines else ANY_PORT
        await asyncio.gather(sender.build(wiring.build_sender, spec, index, place.ip, ports), building)
        port = await sender.get("port")
        await asyncio.gather(sender.join(), replica.method("engine.join")(place.ip, port))

    def drop(self, index: int) -> None:
        """Replica `index` is gone, and with it its sender."""
        if index in self._pairs:
            self._pairs.pop(index)[0].kill()

    async def load(self, index: int, manifest: WeightManifest) -> UpdateReport:
        """Replica `index` loads a version that its sender gives it.

        Raises `WeightSyncError` where the version is not, or no longer, in the relay, or did not arrive as it was
        sent; `WorkerLost` where one of the two is lost, after ending the other one.
        """
        if index not in self._pairs:
            raise WorkerLost(f"rollout{index} has gone")
        sender, replica = self._pairs[index]
        try:
            await sender.ready(manifest)
            return await self._transfer(sender, replica, manifest)
        except WorkerLost:
            for worker in (sender, replica):
                worker.kill()
            raise

    async def _transfer(self, sender: Remote, replica: Remote, manifest: WeightManifest) -> UpdateReport:
        sending = asyncio.ensure_future(sender.send(manifest))
        loading = asyncio.ensure_future(replica.load(manifest))
        both = (sending, loading)
        for task in both:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised below, or not at all
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)  # whoever calls has a deadline for all of it
        await asyncio.wait(both, timeout=GRACE_S)
        failed = {n: e for n, t in (("sent", sending), ("loaded", loading)) if t.done() and (e := t.exception())}
        what = f"weight version {manifest.version} from {sender.name} to {replica.name}"
        late = [task for task in both if not task.done()]
        if late:
            stuck = sender.name if late[0] is sending else replica.name
            raise WorkerLost(f"{what}: {stuck} is stuck {GRACE_S:g} s after the other side ended {_said(failed)}")
        lost = next((e for e in failed.values() if isinstance(e, WorkerLost)), None)
        if lost is not None:
            raise lost
        if "sent" in failed and not isinstance(failed["sent"], WeightSyncError):  # somewhere in the middle
            raise WorkerLost(f"{what} broke off {_said(failed)}") from failed["sent"]
        if "sent" in failed:
            raise failed["sent"]
        return loading.result()


def _said(failed: dict[str, BaseException]) -> str:
    return "; ".join(f"(not {verb}: {error})" for verb, error in failed.items())
