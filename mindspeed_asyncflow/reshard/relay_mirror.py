"""The relay of a node without trainers: versions are pulled once from the nodes that wrote them and read by anybody.

Replicas of the node call `pull` when they want a version, from any process or thread. One of them fetches it, shard by
shard and in bounded chunks, straight into the file of the node; the others wait and find it there. A shard counts as
present when its bytes have the published checksum, so that a pull which broke off is taken up where it was.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.delta import BLOCK_BYTES
from mindspeed_asyncflow.reshard.fingerprint import fingerprint
from mindspeed_asyncflow.reshard.relay_fetch import Fetch, Peer, ask_info, ask_table
from mindspeed_asyncflow.reshard.relay_file import RelayFile
from mindspeed_asyncflow.reshard.relay_link import MOST_FETCH_BYTES, NEWEST, NO_ANCHOR
from mindspeed_asyncflow.reshard.relay_table import RelayTable, table_from_text

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class PullReport:
    """What one pull moved. `full_bytes`: of the shards that it fetched; `wire_bytes`: received, frames included."""

    version: int
    full_bytes: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0
    drops: int = 0  # connections that broke on the way

    @property
    def saved(self) -> float:
        """Share of the bytes that needed not to be sent."""
        return 1 - self.wire_bytes / self.full_bytes if self.full_bytes else 0.0


class RelayMirror:
    """`path`: the file of this node (under /dev/shm), shared by all mirrors that name it; made at the first pull.

    `secret`: as the servers'. `keep`: versions that stay here, in `keep` + 1 times the bytes of what is pulled.
    `chunk_bytes`: most that one request asks for.
    """

    def __init__(self, path: str, secret: bytes, keep: int = 3, chunk_bytes: int = CHUNK_BYTES) -> None:
        if not 0 < chunk_bytes <= MOST_FETCH_BYTES:
            raise WeightSyncError(f"a mirror asks for 1 to {MOST_FETCH_BYTES} bytes at once, got {chunk_bytes}")
        self.path, self.keep, self.chunk_bytes = path, keep, chunk_bytes
        self.report = PullReport(NEWEST)  # of the last pull through this object
        self._secret = secret
        self._file: RelayFile | None = None
        self._opening = threading.Lock()

    def pull(
        self,
        manifest: WeightManifest | None,
        sources: str | Sequence[str],
        timeout_s: float,
        *,
        names: Collection[str] | None = None,
        delta: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> WeightManifest:
        """Bring a version (None: the newest that all `sources` have) to this node; the manifest of the local copy.

        `sources`: addresses of the relay servers that together hold it. `names`: only these tensors. `delta`: fetch
        what differs from the newest version that is here, in blocks of `block_bytes`. Raises `DeadlineExceeded` when
        no byte came for `timeout_s`, `WeightSyncError` when the version is not to be had or has other bytes.
        """
        began = time.monotonic()
        addresses = [sources] if isinstance(sources, str) else list(sources)
        what = "the newest weight version" if manifest is None else f"weight version {manifest.version}"
        if not addresses:
            raise WeightSyncError(f"{what} was to be pulled, but sources={sources!r} names no relay server")
        peers = [Peer(address, self._secret, timeout_s, what) for address in addresses]
        newest = [] if manifest else [peer.insist(lambda link: ask_info(link, NEWEST)) for peer in peers]
        version = manifest.version if manifest else min(info[0] for info in newest)
        file = self._open(peers[0])
        wanted = np.arange(len(file.table.shards)) if names is None else file.table.shards_of(names)
        drops = full = 0
        with file.pulling(timeout_s, f"{what} from {', '.join(addresses)} into {self.path}"):
            if not _has(file, version, wanted):
                expected = None if manifest is None else manifest.fingerprint
                full = self._fetch(file, version, expected, peers, wanted, block_bytes if delta else 0)
            local = file.manifest(version, names)
            here = file.crc[file.slot_of(version)].copy()
        if manifest is not None and local.fingerprint != manifest.fingerprint:
            raise WeightSyncError(
                f"weight version {version} in {self.path} has the fingerprint {local.fingerprint}, published was "
                f"{manifest.fingerprint}: another run's relay"
            )
        for peer, (of, digest, crc, present) in zip(peers, newest):
            _check_layout(peer, digest, file)
            if of == version and (crc != here)[present > 0].any():
                raise WeightSyncError(f"weight version {version} in {self.path} has other bytes: another run's relay")
        received, drops = sum(peer.received for peer in peers), sum(peer.drops for peer in peers)
        self.report = PullReport(version, full, received, time.monotonic() - began, drops)
        return local

    def _open(self, peer: Peer) -> RelayFile:
        with self._opening:
            if self._file is None:
                table = table_from_text(peer.insist(ask_table))
                self._file = RelayFile.join(self.path, table, (0,), self.keep, go_on=True)
            return self._file

    def _fetch(
        self, file: RelayFile, version: int, expected: str | None, peers: Sequence[Peer], wanted: np.ndarray, block: int
    ) -> int:  # fmt: skip
        """Fetch what is missing; its bytes in full."""
        crc, owner = _ask_all(peers, version, file)
        if expected is not None and fingerprint(file.table.digest, crc) != expected:
            raise WeightSyncError(
                f"weight version {version} at {', '.join(peer.address for peer in peers)} is not the one that was "
                f"published with fingerprint {expected}"
            )
        slot = file.assign(version)
        missing = wanted[file.present[slot][wanted] == 0]
        file.allocate(missing.tolist())
        file.crc[slot][:] = crc
        anchor = max((v for v in file.versions() if v != version), default=NO_ANCHOR) if block else NO_ANCHOR
        with ThreadPoolExecutor(len(peers), thread_name_prefix="relay-pull") as threads:
            runs = []
            for place, peer in enumerate(peers):
                shards = missing[owner[missing] == place]
                fetch = Fetch(file, slot, version, shards, anchor, block or BLOCK_BYTES, self.chunk_bytes)
                runs.append(threads.submit(fetch.run, peer))
            for run in runs:
                run.result()
        file.fill(slot, version, 0, missing, crc[missing])
        return sum(file.table.shards[i].nbytes for i in missing.tolist())

    def close(self) -> None:
        """Leave the file; the last one out removes it. What readers have mapped stays readable."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> RelayMirror:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _has(file: RelayFile, version: int, wanted: np.ndarray) -> bool:
    return any(file.complete(s) == version and bool(file.present[s][wanted].all()) for s in range(file.slots))


def _check_layout(peer: Peer, digest: bytes, file: RelayFile) -> None:
    if digest != file.table.digest:
        raise WeightSyncError(f"{peer.address} serves another layout than {file.path} holds; start a new mirror")


def _ask_all(peers: Sequence[Peer], version: int, file: RelayFile) -> tuple[np.ndarray, np.ndarray]:
    """(crc uint32 [S], place of the peer that has it, int64 [S]) of all shards. Raises `WeightSyncError`."""
    table: RelayTable = file.table
    crc = np.zeros(len(table.shards), np.uint32)
    owner = np.full(len(table.shards), -1)
    for place, peer in enumerate(peers):
        _, digest, sums, present = peer.insist(lambda link: ask_info(link, version))
        _check_layout(peer, digest, file)
        mine = (owner < 0) & (present > 0)
        crc[mine], owner[mine] = sums[mine], place
    if (owner < 0).any():
        first = table.describe(int(np.argmax(owner < 0)))
        raise WeightSyncError(f"no relay server that was named has {first} of weight version {version}")
    return crc, owner
