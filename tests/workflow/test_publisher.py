"""Ranks write their own boxes beside the next step; together they are the model."""

import contextlib
import os
import secrets
import threading

import numpy as np
import pytest
import torch

from mindspeed_asyncflow.config.model import describe
from mindspeed_asyncflow.config.parallel import TrainParallel
from mindspeed_asyncflow.errors import DeadlineExceeded, WeightSyncError
from mindspeed_asyncflow.observe.trace import Tracer
from mindspeed_asyncflow.platforms.cpu import CpuPlatform
from mindspeed_asyncflow.reshard.boxes import matrix_shape
from mindspeed_asyncflow.reshard.relay import RelayReader, RelayWriter, assemble
from mindspeed_asyncflow.reshard.relay_plan import write_plan
from mindspeed_asyncflow.reshard.train_layout import train_layout
from mindspeed_asyncflow.workflow.publisher import Publisher
from tests.reshard.models import QWEN2

MODEL = QWEN2 | dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)


@contextlib.contextmanager
def publishers(parallel, timeout_s=5.0, dtype="float32", model=MODEL):
    """(layout, shards by rank, a publisher for each rank) over one relay."""
    layout = train_layout(describe(model), parallel)
    plan = write_plan(layout)
    path = f"/dev/shm/asyncflow-{os.getpid()}-test{secrets.token_hex(4)}"
    shards = [{p.name: torch.zeros(p.shape) for p in params} for params in layout.ranks]
    made = []
    for rank, held in enumerate(shards):
        relay = RelayWriter(path, plan.table(layout, dtype), rank, range(layout.world_size))
        made.append(
            Publisher(
                lambda held=held: held,
                plan.ranks[rank],
                relay,
                platform=CpuPlatform(),
                device=torch.device("cpu"),
                name=f"trainer{rank}",
                timeout_s=timeout_s,
                tracer=Tracer("", "test", enabled=False),
            )
        )
    try:
        yield layout, shards, made
    finally:
        for publisher in made:
            publisher.close()
        assert not os.path.exists(path)


def set_weights(layout, shards, full):
    for params, held in zip(layout.ranks, shards):
        for param in params:
            matrix = held[param.name].view(matrix_shape(param.shape))
            for s in param.segments:
                at, box = s.local, s.box
                source = full[s.name].view(matrix_shape(full[s.name].shape))
                matrix[at.r0 : at.r1, at.c0 : at.c1] = source[box.r0 : box.r1, box.c0 : box.c1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "parallel", [TrainParallel(), TrainParallel(tensor=2, pipeline=2), TrainParallel(tensor=2, data=2)], ids=str
)
def test_all_ranks_together_publish_the_full_tensors(parallel, dtype):
    with publishers(parallel, dtype=dtype) as (layout, shards, ranks):
        for version in (3, 4):
            generator = torch.Generator().manual_seed(version)
            full = {n: torch.randn(t.shape, generator=generator) for n, t in layout.tensors.items()}
            set_weights(layout, shards, full)
            for rank in ranks:
                rank.start(version)
            written = [rank.result(version) for rank in ranks]
            relay = ranks[0].relay
            manifest = assemble(version, relay.table, relay.path, [w.checksums for w in written])
            reader = RelayReader(manifest)
            assert reader.verify() == manifest.fingerprint
            got = dict(reader)
            assert list(got) == list(layout.tensors)
            assert all(torch.equal(got[n], full[n].to(getattr(torch, dtype))) for n in full)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_padding_rows_of_the_vocabulary_are_not_published(tied):
    """B71: 1003 tokens padded to 1024 rows, 512 on each of two ranks; the 21 last ones hold 50."""
    model = MODEL | dict(vocab_size=1003, tie_word_embeddings=tied)
    with publishers(TrainParallel(tensor=2, vocab_multiple=128), model=model) as (layout, shards, ranks):
        for held in shards:
            for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                if name in held:
                    assert len(held[name].fill_(50.0)) == 512
        full = {n: torch.randn(t.shape) for n, t in layout.tensors.items()}
        set_weights(layout, shards, full)
        for rank in ranks:
            rank.start(1)
        relay = ranks[0].relay
        manifest = assemble(1, relay.table, relay.path, [rank.result(1).checksums for rank in ranks])
        got = dict(RelayReader(manifest))
        assert ("lm_head.weight" in got) is not tied
        assert got["model.embed_tokens.weight"].shape == (1003, 32)
        assert all(torch.equal(got[n], full[n]) for n in full)


class Gate:
    """Shards that are handed out when the gate opens."""

    def __init__(self, held):
        self.held, self.open = held, threading.Event()

    def __call__(self):
        assert self.open.wait(5)
        return self.held


def test_start_returns_at_once_and_settle_waits_until_weights_may_change():
    with publishers(TrainParallel()) as (_, shards, (publisher,)):
        publisher.shards = gate = Gate(shards[0])
        publisher.start(1)  # would hang if it wrote by itself
        threading.Timer(0.1, gate.open.set).start()
        assert publisher.settle() >= 0.05
        assert publisher.settle() < 0.05
        assert publisher.result(1).version == 1


def test_a_write_that_takes_too_long_names_rank_version_and_knob():
    with publishers(TrainParallel(), timeout_s=0.05) as (_, shards, (publisher,)):
        publisher.shards = gate = Gate(shards[0])
        publisher.start(7)
        with pytest.raises(DeadlineExceeded, match=r"trainer0 .*version 7 .*0\.05 s \(workflow\.watchdog_s\)"):
            publisher.result(7)
        gate.open.set()


def test_a_write_that_failed_is_raised_to_driver_and_optimizer_alike():
    with publishers(TrainParallel()) as (_, shards, (publisher,)):
        del shards[0]["decoder.final_layernorm.weight"]
        publisher.start(1)
        for ask in (publisher.settle, lambda: publisher.result(1), lambda: publisher.start(2)):
            with pytest.raises(KeyError, match="final_layernorm"):
                ask()


def test_only_the_version_under_way_can_be_asked_for():
    with publishers(TrainParallel()) as (_, _, (publisher,)):
        with pytest.raises(WeightSyncError, match="version 0 and is at version -1"):
            publisher.result(0)
        publisher.start(0)
        publisher.start(1)
        with pytest.raises(WeightSyncError, match="version 0 and is at version 1"):
            publisher.result(0)


def test_ranks_do_not_wait_for_each_other_and_an_incomplete_version_cannot_be_assembled():
    with publishers(TrainParallel(tensor=2)) as (_, _, ranks):
        ranks[0].start(1)
        part = ranks[0].result(1)
        relay = ranks[0].relay
        with pytest.raises(WeightSyncError, match="no writer published"):
            assemble(1, relay.table, relay.path, [part.checksums])
        assert relay.versions == ()
        ranks[1].start(1)
        both = [part.checksums, ranks[1].result(1).checksums]
        assert assemble(1, relay.table, relay.path, both).version == 1
        assert relay.versions == (1,)
        assert np.prod([len(p) > 0 for p in both])
