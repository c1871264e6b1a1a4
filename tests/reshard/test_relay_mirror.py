"""Rules of the relay between nodes: each shard once per node, never a wrong byte, never a wait without an end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError
from mindspeed_asyncflow.records import WeightManifest
from mindspeed_asyncflow.reshard.boxes import Box
from mindspeed_asyncflow.reshard.relay import RelayReader, RelayWriter, assemble, manifest_to_json
from mindspeed_asyncflow.reshard.relay_file import RelayFile
from mindspeed_asyncflow.reshard.relay_mirror import RelayMirror
from mindspeed_asyncflow.reshard.relay_server import RelayServer
from mindspeed_asyncflow.reshard.relay_table import make_table
from tests.reshard.whole_writer import WholeWriter

SECRET = b"of this run"
SHAPES = {"embed": (300, 64), "big": (1000, 128), "norm": (7,), "none": (0, 4), "head": (64, 300)}
FULL_BYTES = 4 * (300 * 64 + 1000 * 128 + 7 + 64 * 300)


def tensors(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


class Nodes:
    """A trainer node, and paths for other nodes."""

    def __init__(self) -> None:
        self._name = f"/dev/shm/asyncflow-test-{uuid.uuid4().hex}"
        self.writer = WholeWriter(f"{self._name}-trainer")
        self.manifest = self.writer.publish(1, tensors(1))
        self._closing: list[RelayServer | RelayMirror] = []

    def server(self, bytes_per_s: float | None = None, path: str = "", port: int = 0) -> RelayServer:
        made = RelayServer(path or self.writer.path, SECRET, ports=range(port, port + 1), bytes_per_s=bytes_per_s)
        self._closing.append(made)
        return made

    def path(self, node: str = "a") -> str:
        return f"{self._name}-{node}"

    def mirror(self, node: str = "a", chunk_bytes: int = 50_000, secret: bytes = SECRET) -> RelayMirror:
        made = RelayMirror(self.path(node), secret, chunk_bytes=chunk_bytes)
        self._closing.append(made)
        return made

    def close(self) -> None:
        for one in self._closing:
            one.close()
        self.writer.close()
        left = [name for name in os.listdir("/dev/shm") if os.path.join("/dev/shm", name).startswith(self._name)]
        assert left == []


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


def same(manifest: WeightManifest, seed: int) -> bool:
    reader = RelayReader(manifest)
    reader.verify()
    got = dict(reader)
    return all(torch.equal(got[name], tensor) for name, tensor in tensors(seed) if name in got)


@pytest.mark.parametrize("chunk_bytes", [1000, 50_000, 4 << 20])
def test_a_pulled_version_is_the_published_one_whatever_the_chunk(nodes: Nodes, chunk_bytes: int) -> None:
    """Tensors larger than a chunk, and chunks of many tensors."""
    server, mirror = nodes.server(), nodes.mirror(chunk_bytes=chunk_bytes)
    local = mirror.pull(nodes.manifest, server.address, 10.0)
    assert same(local, 1)
    assert (local.version, local.fingerprint, local.checksums) == (
        1,
        nodes.manifest.fingerprint,
        nodes.manifest.checksums,
    )
    assert local.path == mirror.path != nodes.manifest.path
    assert mirror.report.full_bytes == FULL_BYTES
    assert FULL_BYTES <= mirror.report.wire_bytes <= 1.15 * FULL_BYTES + 10_000


def test_replicas_that_ask_together_and_later_bring_each_shard_over_once(nodes: Nodes) -> None:
    server = nodes.server(bytes_per_s=2e6)
    mirrors = [nodes.mirror() for _ in range(3)]  # as of three processes
    with ThreadPoolExecutor(6) as threads:
        locals_ = list(threads.map(lambda i: mirrors[i % 3].pull(nodes.manifest, server.address, 10.0), range(6)))
    assert len({local.path for local in locals_}) == 1 and all(same(local, 1) for local in locals_)
    assert server.sent_bytes <= 1.15 * FULL_BYTES + 20_000
    before = server.sent_bytes
    late = nodes.mirror()
    assert same(late.pull(nodes.manifest, server.address, 10.0), 1)
    assert server.sent_bytes - before < 500 and late.report.full_bytes == 0  # asks for the table only


@pytest.mark.slow
def test_two_processes_bring_each_shard_over_once(nodes: Nodes) -> None:
    code = (
        "import sys; from mindspeed_asyncflow.reshard.relay import RelayReader, manifest_from_json\n"
        "from mindspeed_asyncflow.reshard.relay_mirror import RelayMirror\n"
        "mirror = RelayMirror(sys.argv[1], b'of this run')\n"
        "local = mirror.pull(manifest_from_json(sys.argv[3]), sys.argv[2], 20.0)\n"
        "print(RelayReader(local).verify(), mirror.report.full_bytes, flush=True); sys.stdin.readline(); mirror.close()"
    )
    server = nodes.server(bytes_per_s=4e6)
    command = [sys.executable, "-c", code, nodes.path(), server.address, manifest_to_json(nodes.manifest)]
    root = Path(__file__).resolve().parents[2]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    running = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    said = [process.stdout.readline().split() for process in running]
    for process in running:
        process.communicate("\n", timeout=20)
    assert {line[0] for line in said} == {nodes.manifest.fingerprint}
    assert sorted(int(line[1]) for line in said) == [0, FULL_BYTES]
    assert server.sent_bytes <= 1.15 * FULL_BYTES + 20_000


def test_a_late_joiner_gets_the_newest_version(nodes: Nodes) -> None:
    for version in (2, 3, 4):
        nodes.writer.publish(version, tensors(version))
    local = nodes.mirror().pull(None, nodes.server().address, 10.0)
    assert local.version == 4 and same(local, 4)


def test_a_node_keeps_the_last_three_versions_and_an_evicted_one_is_named(nodes: Nodes) -> None:
    server, mirror = nodes.server(), nodes.mirror()
    pulled = [mirror.pull(nodes.manifest, server.address, 10.0)]
    for version in (2, 3, 4):
        pulled.append(mirror.pull(nodes.writer.publish(version, tensors(version)), server.address, 10.0))
    for local in pulled[1:]:
        assert same(local, local.version)
    with pytest.raises(WeightSyncError, match=r"version 1 .* keeps 2, 3, 4"):
        RelayReader(pulled[0])
    with pytest.raises(WeightSyncError, match=r"version 1 is not in the relay .*-trainer .* keeps 2, 3, 4"):
        mirror.pull(nodes.manifest, server.address, 10.0)
    assert same(pulled[1], 2)


def test_a_version_evicted_while_it_is_pulled_never_becomes_complete(nodes: Nodes) -> None:
    server, mirror = nodes.server(bytes_per_s=1.5e6), nodes.mirror(chunk_bytes=20_000)

    def evict() -> None:
        while not server.sent_bytes > 150_000:
            time.sleep(0.005)
        for version in (2, 3, 4):
            nodes.writer.publish(version, tensors(version))

    thread = threading.Thread(target=evict)
    thread.start()
    with pytest.raises(WeightSyncError, match=r"version 1 is not in the relay .* keeps 2, 3, 4"):
        mirror.pull(nodes.manifest, server.address, 10.0)
    thread.join()
    assert RelayFile.look(mirror.path).versions() == ()
    assert same(mirror.pull(None, server.address, 10.0), 4)


def test_kept_versions_stay_while_another_is_pulled_and_when_the_pull_fails(nodes: Nodes) -> None:
    fast, slow, mirror = nodes.server(), nodes.server(bytes_per_s=1.5e6), nodes.mirror(chunk_bytes=20_000)
    kept = [mirror.pull(nodes.manifest, fast.address, 10.0)]
    kept += [mirror.pull(nodes.writer.publish(v, tensors(v)), fast.address, 10.0) for v in (2, 3)]
    fourth = nodes.writer.publish(4, tensors(4))

    def cut() -> None:
        while slow.sent_bytes < 150_000:
            time.sleep(0.005)
        slow.close()

    thread = threading.Thread(target=cut)
    thread.start()
    with pytest.raises(DeadlineExceeded):
        mirror.pull(fourth, slow.address, 0.3)
    thread.join()
    assert all(same(local, local.version) for local in kept)
    assert same(mirror.pull(nodes.writer.publish(5, tensors(5)), fast.address, 10.0), 5)
    assert RelayFile.look(mirror.path).versions() == (2, 3, 5)


def test_a_slot_given_away_during_a_pull_is_marked_with_nothing_of_it(nodes: Nodes) -> None:
    server, mirror = nodes.server(bytes_per_s=1.5e6), nodes.mirror(chunk_bytes=20_000)
    mirror.pull(nodes.manifest, server.address, 10.0, names=["norm"])
    second = nodes.writer.publish(2, tensors(2))
    other = RelayFile.join(mirror.path, RelayFile.look(mirror.path).table, (0,), 3)
    before = server.sent_bytes

    def give_away() -> None:
        while server.sent_bytes < before + 20_000:
            time.sleep(0.002)
        for version in (3, 4, 5):
            other.assign(version)

    thread = threading.Thread(target=give_away)
    thread.start()
    with pytest.raises(WeightSyncError, match=r"version 2 was overtaken in .* by 5"):
        mirror.pull(second, server.address, 10.0)
    thread.join()
    (slot,) = (s for s in range(other.slots) if other.assigned[s][0] == 5)
    marked = other.present[slot].any()
    other.close()
    assert not marked


@pytest.mark.parametrize("sources", [[], "", "localhost", ":80", "localhost:", "localhost:http", ["a:1", "a:70000"]])
def test_what_is_no_address_is_refused_by_value(nodes: Nodes, sources: str | list[str]) -> None:
    wrong = sources[-1] if sources and not isinstance(sources, str) else sources
    with pytest.raises(WeightSyncError, match=re.escape(repr(wrong))):
        nodes.mirror().pull(nodes.manifest, sources, 5.0)


@pytest.mark.slow
def test_a_slow_link_is_waited_for_as_long_as_bytes_come(nodes: Nodes) -> None:
    server, mirror = nodes.server(bytes_per_s=5e5), nodes.mirror()
    began = time.monotonic()
    assert same(mirror.pull(nodes.manifest, server.address, 0.6), 1)
    assert time.monotonic() - began > 2 * 0.6


def test_a_dropped_link_is_taken_up_where_it_was(nodes: Nodes) -> None:
    server, mirror = nodes.server(bytes_per_s=1.5e6), nodes.mirror(chunk_bytes=4 << 20)  # one request for all

    def cut() -> None:
        for limit in (100_000, 200_000, 400_000):
            while server.sent_bytes < limit:
                time.sleep(0.002)
            server.drop_connections()

    thread = threading.Thread(target=cut)
    thread.start()
    assert same(mirror.pull(nodes.manifest, server.address, 5.0), 1)
    thread.join()
    assert mirror.report.drops == 3
    assert mirror.report.wire_bytes <= FULL_BYTES + 50_000, "what had landed was asked for again"


def test_a_server_that_comes_back_is_found_again_and_one_that_does_not_ends_the_wait(nodes: Nodes) -> None:
    first = nodes.server(bytes_per_s=1e6)
    mirror = nodes.mirror()
    port = int(first.address.rpartition(":")[2])

    def restart() -> None:
        while first.sent_bytes < 100_000:
            time.sleep(0.002)
        first.close()
        time.sleep(0.2)
        nodes.server(port=port)

    thread = threading.Thread(target=restart)
    thread.start()
    assert same(mirror.pull(nodes.manifest, first.address, 5.0), 1)
    thread.join()
    following = nodes.writer.publish(2, tensors(2))
    gone = nodes.server()
    gone.close()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=rf"{gone.address} sent nothing of weight version 2 .*deadline 0.3"):
        mirror.pull(following, gone.address, 0.3)
    assert time.monotonic() - began < 2.0


@pytest.mark.slow
def test_a_pull_of_a_process_that_was_killed_is_finished_by_the_next(nodes: Nodes) -> None:
    code = (
        "import sys; from mindspeed_asyncflow.reshard.relay_mirror import RelayMirror\n"
        "RelayMirror(sys.argv[1], b'of this run', chunk_bytes=10_000).pull(None, sys.argv[2], 20.0)"
    )
    server = nodes.server(bytes_per_s=1e6)
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen([sys.executable, "-c", code, nodes.path(), server.address], cwd=root) as process:
        while server.sent_bytes < 200_000:
            assert process.poll() is None
            time.sleep(0.005)
        process.kill()
    assert RelayFile.look(nodes.path()).versions() == ()
    mirror = nodes.mirror()
    assert same(mirror.pull(nodes.manifest, server.address, 5.0), 1)
    assert 0 < mirror.report.full_bytes < FULL_BYTES  # the first tensor had arrived


def test_who_waits_for_another_process_that_makes_no_progress_gives_up(nodes: Nodes) -> None:
    server, mirror = nodes.server(), nodes.mirror()
    mirror.pull(nodes.manifest, server.address, 5.0)
    following = nodes.writer.publish(2, tensors(2))
    other = RelayFile.join(mirror.path, RelayFile.look(mirror.path).table, (0,), 3)
    silent = pytest.raises(DeadlineExceeded, match=r"weight version 2 from .* made no progress for 0.2 s")
    with other.pulling(1.0, "x"), silent:
        mirror.pull(following, server.address, 0.2)
    other.close()
    assert same(mirror.pull(following, server.address, 5.0), 2)


def test_a_subset_and_then_another_come_over_without_what_is_there(nodes: Nodes) -> None:
    server, mirror = nodes.server(), nodes.mirror()
    some = mirror.pull(nodes.manifest, server.address, 5.0, names=["norm", "embed"])
    assert [param.name for param in some.params] == ["embed", "norm"]
    assert some.fingerprint == nodes.manifest.fingerprint
    assert same(some, 1) and mirror.report.full_bytes == 4 * (300 * 64 + 7)
    with pytest.raises(WeightSyncError, match="only a part of version 1, not 'big'"):
        RelayFile.look(mirror.path).manifest(1)
    reader = RelayReader(some)
    more = mirror.pull(nodes.manifest, server.address, 5.0, names=["head", "embed"])
    assert same(more, 1) and mirror.report.full_bytes == 4 * 64 * 300
    reader.check()
    with pytest.raises(WeightSyncError, match=r"no tensors \['other'\]"):
        mirror.pull(nodes.manifest, server.address, 5.0, names=["other"])


def test_a_version_spread_over_two_trainer_nodes_is_put_together(nodes: Nodes) -> None:
    parts = {
        0: [("w", Box(0, 100, 0, 64)), ("v", Box(0, 50, 0, 30))],
        1: [("w", Box(100, 200, 0, 64)), ("v", Box(0, 50, 30, 60))],
    }
    table = make_table({"w": (200, 64), "v": (50, 60)}, "float32", parts)
    full = {"w": torch.randn(200, 64), "v": torch.randn(50, 60)}
    writers = [RelayWriter(nodes.path(f"trainer{rank}"), table, rank, (rank,)) for rank in (0, 1)]
    try:
        crc = [
            w.publish(3, [(name, box, full[name][box.r0 : box.r1, box.c0 : box.c1]) for name, box in parts[w.rank]])
            for w in writers
        ]
        manifest = assemble(3, table, writers[0].path, crc)
        servers = [nodes.server(path=w.path) for w in writers]
        mirror = nodes.mirror()
        with pytest.raises(WeightSyncError, match="no relay server that was named has 'w' rows 0 to 100"):
            mirror.pull(manifest, servers[1].address, 5.0)
        local = mirror.pull(manifest, [s.address for s in servers], 5.0)
        reader = RelayReader(local)
        assert reader.verify() == manifest.fingerprint
        assert all(torch.equal(tensor, full[name]) for name, tensor in reader)
    finally:
        for writer in writers:
            writer.close()


def test_a_mirror_can_serve_other_nodes(nodes: Nodes) -> None:
    first = nodes.mirror("a")
    first.pull(nodes.manifest, nodes.server().address, 5.0)
    chained = nodes.server(path=first.path)
    assert same(nodes.mirror("b").pull(nodes.manifest, chained.address, 5.0), 1)


def test_differences_are_lossless_and_report_what_they_saved(nodes: Nodes) -> None:
    server, mirror = nodes.server(), nodes.mirror()
    mirror.pull(nodes.manifest, server.address, 5.0, delta=True)  # no anchor: in full
    assert mirror.report.saved < 0.01
    later = [(name, tensor.clone()) for name, tensor in tensors(1)]
    later[1][1][::50] += 1.0
    manifest = nodes.writer.publish(2, later)
    local = mirror.pull(manifest, server.address, 5.0, delta=True)
    assert RelayReader(local).verify() == manifest.fingerprint
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(RelayReader(local), later, strict=True))
    assert mirror.report.full_bytes == FULL_BYTES and mirror.report.saved > 0.9
    assert same(mirror.pull(nodes.writer.publish(3, tensors(3)), server.address, 5.0, delta=True), 3)  # all other
    assert mirror.report.saved < 0.01


def test_an_anchor_that_the_server_has_lost_or_knows_otherwise_costs_only_the_saving(nodes: Nodes) -> None:
    server, mirror = nodes.server(), nodes.mirror()
    mirror.pull(nodes.manifest, server.address, 5.0)
    for version in (2, 3, 4):
        manifest = nodes.writer.publish(version, tensors(version))
    assert same(mirror.pull(manifest, server.address, 5.0, delta=True), 4)
    with open(mirror.path, "r+b") as raw:  # the anchor here is damaged
        file = RelayFile.look(mirror.path)
        raw.seek(file.payload_at(file.slot_of(4)))
        raw.write(b"other bytes")
    close = [(name, tensor + 0) for name, tensor in tensors(4)]
    close[1][1][0, 0] += 1
    local = mirror.pull(nodes.writer.publish(5, close), server.address, 5.0, delta=True)
    assert RelayReader(local).verify()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(RelayReader(local), close, strict=True))


def test_a_relay_that_was_made_anew_is_what_its_server_serves(nodes: Nodes) -> None:
    path, other = nodes.path("again"), [("w", torch.ones(3))]
    with WholeWriter(path) as writer:
        writer.publish(1, tensors(1))
        server, mirror = nodes.server(path=path), nodes.mirror()
        assert same(mirror.pull(None, server.address, 5.0), 1)
    assert same(nodes.mirror("b").pull(None, server.address, 5.0), 1)  # until there is another
    with WholeWriter(path) as writer:
        writer.publish(1, tensors(2))
        assert same(nodes.mirror("c").pull(None, server.address, 5.0), 2)
        with pytest.raises(WeightSyncError, match=r"version 1 in .* has other bytes: another run's relay"):
            mirror.pull(None, server.address, 5.0)
    with WholeWriter(path) as writer:
        manifest = writer.publish(1, other)
        with pytest.raises(WeightSyncError, match="serves another layout"):
            mirror.pull(None, server.address, 5.0)
        local = nodes.mirror("d").pull(manifest, server.address, 5.0)
        assert torch.equal(dict(RelayReader(local))["w"], torch.ones(3))


def test_another_runs_versions_and_wrong_secrets_are_not_taken(nodes: Nodes) -> None:
    from dataclasses import replace

    server = nodes.server()
    with pytest.raises(WeightSyncError, match="not the one that was published with fingerprint 00"):
        nodes.mirror().pull(replace(nodes.manifest, fingerprint="00"), server.address, 5.0)
    with pytest.raises(DeadlineExceeded, match="another secret"):
        nodes.mirror("b", secret=b"guess").pull(nodes.manifest, server.address, 0.2)
    assert server.bad_frames > 0
    mirror = nodes.mirror()
    mirror.pull(nodes.manifest, server.address, 5.0)
    with pytest.raises(WeightSyncError, match="another run's relay"):
        mirror.pull(replace(nodes.manifest, fingerprint="00"), server.address, 5.0)
    other = nodes.path("other")
    with WholeWriter(other) as writer:
        manifest = writer.publish(2, [("w", torch.ones(3))])
        with pytest.raises(WeightSyncError, match="serves another layout"):
            mirror.pull(manifest, nodes.server(path=other).address, 5.0)
