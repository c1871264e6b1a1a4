"""Tokens of running answers in the dock: what a replica that vanishes had sampled goes on elsewhere."""

import time

import numpy as np
import pytest

from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded
from mindspeed_asyncflow.records import Completion, PromptRow, VersionSpan
from mindspeed_asyncflow.workflow.partial import PARTIAL_COLUMNS, shortened, versions_per_token
from mindspeed_asyncflow.workflow.workers import RowBatch, sample_seed
from tests.workflow.partial_engine import Replica, expected_tokens, manifest, natural_length

GROUP, LONGEST, EVERY_S = 3, 12, 0.005


@pytest.fixture
def dock():
    with (
        DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=2, lease_s=30.0, secret="s") as server,
        DockClient(server.address, "s", wait_s=5.0) as client,
    ):
        prompts = [[PromptRow(g, m, GROUP, np.array([1, 2], np.int32), "") for m in range(GROUP)] for g in range(4)]
        client.put_groups("p", prompts)
        yield client


@pytest.fixture
def replica(dock):
    made = []

    def make(**how) -> Replica:
        how = {"group_size": GROUP, "stream_out_s": EVERY_S} | how
        made.append(Replica(dock, f"rollout{len(made)}", LONGEST, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def claimed(dock, worker, groups=4):
    return dock.claim("rollout", groups, partition="p", worker=worker, unit="groups", timeout_s=0.0)


def parts(dock, rows):
    """Tokens of the unfinished answers that the dock has, aligned with their log-probs and versions."""
    columns = dock.read(rows, PARTIAL_COLUMNS)
    ids = [x.tolist() for x in columns["partial_ids"]]
    assert [len(x) for x in columns["partial_logprobs"]] == [len(x) for x in ids]
    for tokens, logprobs, table in zip(ids, columns["partial_logprobs"], columns["partial_spans"]):
        assert np.allclose(logprobs, [-t / 7 for t in tokens])
        assert [t // 1000 for t in tokens] == versions_per_token(table).tolist()
    return ids


def grown(one, dock, rows, lengths):
    """Waits until the dock has so many tokens of the rows; the engine turns, and samples nothing."""
    deadline = time.monotonic() + 10
    while [len(x) for x in parts(dock, rows)] != lengths:
        assert time.monotonic() < deadline, f"{[len(x) for x in parts(dock, rows)]} instead of {lengths}"
        time.sleep(EVERY_S)


def seeds(claim):
    return [sample_seed(0, g, m) for g, m in zip(claim.group_ids.tolist(), claim.members.tolist())]


def test_what_a_vanished_replica_had_sampled_is_continued_by_another_one_at_a_newer_version(dock, replica):
    """Also answers that were complete and waited for their group: all but the token that ended them."""
    one, two = replica(), replica()
    one.engine.update(manifest(3))
    two.engine.update(manifest(4))
    claim = claimed(dock, "rollout0")
    lengths = [min(natural_length(s), LONGEST) for s in seeds(claim)]
    by_group = np.array(lengths).reshape(-1, GROUP).max(axis=1)
    steps = int(sorted(by_group)[0]) - 1  # no group is complete, some answers are
    assert any(n <= steps for n in lengths) and any(n > steps for n in lengths)
    dead = one.begin(claim)
    one.advance(steps)
    begun = [min(steps, n - 1) for n in lengths]
    grown(one, dock, claim.rows, begun)
    before = parts(dock, claim.rows)
    assert dock.forget_worker("rollout0") == 1  # its process is gone

    again = claimed(dock, "rollout1")
    assert again.rows.tolist() == claim.rows.tolist()
    two.release()
    report = two.worker.generate(again.claim_id, RowBatch(again.rows, again.group_ids, again.members))
    columns = dock.read(again.rows, ["response_ids", "rollout_logprobs", "response_spans"])
    for i, seed in enumerate(seeds(again)):
        ids = columns["response_ids"][i].tolist()
        versions = versions_per_token(columns["response_spans"][i])
        assert versions.tolist() == [3] * begun[i] + [4] * (lengths[i] - begun[i])
        assert ids[: begun[i]] == before[i] and ids == expected_tokens(seed, versions)
        assert np.allclose(columns["rollout_logprobs"][i], [-t / 7 for t in ids])
    assert report.samples == len(lengths) and report.tokens == sum(lengths) - sum(begun)
    assert [len(x) for x in parts(dock, again.rows)] == [0] * len(lengths)
    one.release()
    with pytest.raises(ClaimLost):  # what it would write after its end counts for nothing
        dead.result(10)


def test_a_replica_that_lives_ends_its_answers_as_if_nothing_had_been_streamed(dock, replica):
    one, claim = replica(), claimed(dock, "rollout0")
    running = one.begin(claim)
    for steps in (2, 3):
        one.advance(steps)
        time.sleep(4 * EVERY_S)
    one.release()
    report = running.result(10)
    columns = dock.read(claim.rows, ["response_ids", "response_spans"])
    for i, seed in enumerate(seeds(claim)):
        assert columns["response_ids"][i].tolist() == expected_tokens(seed, [0] * min(natural_length(seed), LONGEST))
        assert columns["response_spans"][i].tolist() == [[0, 0, len(columns["response_ids"][i])]]
    assert report.unfinished == () and [len(x) for x in parts(dock, claim.rows)] == [0] * len(claim.rows)


def test_nothing_is_streamed_where_that_is_off(dock, replica):
    one, claim = replica(stream_out_s=None), claimed(dock, "rollout0")
    running = one.begin(claim)
    one.advance(1)
    time.sleep(4 * EVERY_S)
    assert sum(map(len, parts(dock, claim.rows))) == 0
    one.release()
    running.result(10)


def test_answers_go_on_where_the_dock_has_no_room_for_their_parts(dock, replica, monkeypatch):
    """A part that finds no room is left out; the answer itself is not held up by it."""
    one, claim = replica(), claimed(dock, "rollout0")
    refused = []
    write = DockClient.write

    def full(self, rows, values, **how):
        if "partial_ids" in values and len(values["partial_ids"][0]):
            refused.append(how["timeout_s"])
            raise DeadlineExceeded("the arena is full")
        return write(self, rows, values, **how)

    monkeypatch.setattr(DockClient, "write", full)
    running = one.begin(claim)
    one.advance(1)
    Replica.until(lambda: refused)
    one.release()
    assert running.result(10).samples == len(claim.rows) and set(refused) == {0.0}


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_shortened_answer_loses_one_token_and_the_span_that_only_it_had(cut):
    spans = VersionSpan(5, 0, cut), VersionSpan(6, cut, 4)
    answer = Completion("1", np.arange(4, dtype=np.int32), np.arange(4, dtype=np.float32), "stop", spans)
    short = shortened(answer)
    assert short.token_ids.tolist() == [0, 1, 2] and short.logprobs.tolist() == [0, 1, 2]
    assert [(s.version, s.start, s.end) for s in short.spans] == [(5, 0, cut)] + ([(6, cut, 3)] if cut < 3 else [])
