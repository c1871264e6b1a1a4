"""Answers that are interrupted and go on, on any replica: tokens, log-probs and versions stay aligned."""

import contextlib
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_asyncflow.config.schema import AlgorithmConfig, Config, RolloutConfig
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded, EngineError, WeightSyncError
from mindspeed_asyncflow.records import Completion, GenRequest, PromptRow, SamplingSpec, VersionSpan
from mindspeed_asyncflow.rewards.pool import Score
from mindspeed_asyncflow.workflow.partial import (
    PARTIAL_COLUMNS,
    Tray,
    round_end,
    span_table,
    spans_of,
    versions_per_token,
)
from mindspeed_asyncflow.workflow.score_worker import ScoreWorker
from mindspeed_asyncflow.workflow.train_worker import ChunkRules, TrainWorker
from mindspeed_asyncflow.workflow.workers import RolloutWorker, RowBatch, sample_seed
from tests.engines.bench import make_engine, make_model
from tests.workflow.partial_engine import QUIET, Replica, expected_tokens, manifest, natural_length

LONGEST, GROUP = 12, 3
ANSWER = ["response_ids", "rollout_logprobs", "response_spans", "finish"]


@pytest.fixture(scope="module")
def dock():
    with (
        DockServer(GRPO_COLUMNS, grpo_tasks(False), arena_mb=2, lease_s=30.0, secret="s") as server,
        DockClient(server.address, "s", wait_s=5.0) as client,
    ):
        yield client


@pytest.fixture
def replica(dock):
    made = []

    def make(**how) -> Replica:
        made.append(Replica(dock, f"rollout{len(made)}", LONGEST, **({"group_size": GROUP} | how)))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Rows:
    """Prompt groups in a partition of their own."""

    names = itertools.count()

    def __init__(self, dock: DockClient) -> None:
        self.dock, self.name = dock, f"part {next(self.names)}"
        self._workers: set[str] = set()

    def put(self, groups: int) -> np.ndarray:
        prompt = np.array([1, 2], np.int32)
        made = [[PromptRow(g, m, GROUP, prompt, "") for m in range(GROUP)] for g in range(groups)]
        return np.concatenate(self.dock.put_groups(self.name, made))

    def claim(self, count: int, worker: str = "w", task: str = "rollout", **how):
        self._workers.add(worker)
        how = {"unit": "rows", "policy": "oldest", "timeout_s": 0.0} | how
        return self.dock.claim(task, count, partition=self.name, worker=worker, **how)

    def close(self) -> None:
        for worker in self._workers:
            self.dock.forget_worker(worker)
        self.dock.close_partition(self.name)


@pytest.fixture
def rows(dock):
    made = Rows(dock)
    yield made
    made.close()


def part_of(dock, rows) -> list[int]:
    """Tokens of the unfinished answer of each row."""
    columns = dock.read(rows, PARTIAL_COLUMNS)
    sizes = [len(ids) for ids in columns["partial_ids"]]
    assert [len(x) for x in columns["partial_logprobs"]] == sizes
    assert [len(versions_per_token(t)) for t in columns["partial_spans"]] == sizes
    return sizes


def check_answers(dock, rows, group_ids, members, longest=LONGEST) -> None:
    """Every token, its log-prob and its version are those that the engine gave at that place."""
    columns = dock.read(rows, ANSWER)
    for i, (group, member) in enumerate(zip(group_ids.tolist(), members.tolist())):
        seed = sample_seed(0, group, member)
        ids, table = columns["response_ids"][i], columns["response_spans"][i]
        assert len(ids) == min(longest, natural_length(seed))
        assert columns["finish"][i] == (natural_length(seed) > longest)
        assert table[0, 1] == 0 and table[-1, 2] == len(ids) and (table[1:, 1] == table[:-1, 2]).all()
        assert (table[:, 2] > table[:, 1]).all() and (table[1:, 0] != table[:-1, 0]).all()
        assert ids.tolist() == expected_tokens(seed, versions_per_token(table))
        np.testing.assert_allclose(columns["rollout_logprobs"][i], -ids / 7, rtol=1e-6)


# -- the rule of rounds ------------------------------------------------------------------------------------------------


@given(
    longest=st.integers(1, 500),
    rounds=st.integers(1, 9),
    cuts=st.lists(st.integers(0, 500), max_size=12),
)
def test_at_most_n_rounds_end_by_their_budget_whatever_interrupts_them(longest, rounds, cuts):
    have = by_budget = 0
    cuts = list(cuts)
    while have < longest:
        end = round_end(have, longest, rounds)
        assert have < end <= longest
        cut = have + (cuts.pop() if cuts else longest)  # tokens that this round has time for
        by_budget += cut >= end
        have = min(end, cut)
    assert by_budget <= rounds


def test_without_rounds_an_answer_may_take_all_its_tokens_at_once():
    assert [round_end(k, 100, None) for k in (0, 7, 99)] == [100] * 3
    assert [round_end(k, 100, 3) for k in (0, 33, 34, 67, 68, 99)] == [34, 34, 68, 68, 100, 100]


def test_spans_survive_as_a_table():
    spans = (VersionSpan(4, 0, 3), VersionSpan(5, 3, 5))
    assert spans_of(span_table(spans)) == spans and spans_of(span_table(())) == ()
    assert versions_per_token(span_table(spans)).tolist() == [4, 4, 4, 5, 5]


def test_members_of_a_whole_group_are_committed_together_and_others_one_by_one():
    rows, groups = np.array([1, 2, 3, 4, 5]), np.array([7, 7, 8, 9, 9])
    answers = {i: Completion(str(i), np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", ()) for i in rows.tolist()}

    def order(tray: Tray, ends: list[tuple[int, bool]]) -> list[list[int]]:
        given = [tray.ended(answers[i], complete) for i, complete in ends] + [tray.rest()]
        return [[int(a.request_id) for a in each] for each in given]

    ends = [(1, True), (3, True), (4, True), (5, False), (2, True)]
    assert order(Tray(rows, groups, 2, 1), ends) == [[], [3], [], [4], [1, 2], []]
    assert order(Tray(rows, groups, 2, 2), ends) == [[], [], [], [3, 4], [], [1, 2]]
    assert order(Tray(rows, groups, None, 9), ends) == [[], [], [], [], [], [3, 4, 1, 2]]


# -- interrupted at any place ------------------------------------------------------------------------------------------


PLAY = st.lists(
    st.tuples(
        st.integers(0, 1),  # replica
        st.integers(1, 2 * GROUP + 1),  # rows
        st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=3),  # steps, then new weights?
        st.booleans(),  # stopped, or left alone until the round ends
    ),
    max_size=7,
)


def play(replicas: list[Replica], rows: Rows, schedule, rounds) -> None:
    """Rounds on two replicas as the schedule says, then until every answer is complete."""
    dock, total, sampled, version = rows.dock, 0, 0, 0
    by_budget: dict[int, int] = {}
    everything = [*schedule, *[(i % 2, 99, [], False) for i in range(2 * (rounds or 1))]]
    for number, count, moves, stopped in everything:
        replica = replicas[number]
        try:
            got = rows.claim(count, f"rollout{number}")
        except DeadlineExceeded:
            break  # nothing is left
        before = dict(zip(got.rows.tolist(), part_of(dock, got.rows)))
        running = replica.begin(got)
        for steps, fresh in moves:
            replica.advance(steps)
            if fresh:
                version += 1
                replica.engine.update(manifest(version))
        if stopped:
            replica.worker.stop()
            left = running.result(0.0)  # it has nothing more to do
        else:
            replica.release()
            left = running.result(10.0)
        sampled += left.tokens
        total += left.samples
        after = part_of(dock, np.array(left.unfinished)) if left.unfinished else []
        for row, tokens in zip(left.unfinished, after):
            end = round_end(before[row], LONGEST, rounds)
            assert before[row] <= tokens <= end and (stopped or tokens == end)
            by_budget[row] = by_budget.get(row, 0) + (tokens == end)
        assert replica.worker.running() == 0
    assert max(by_budget.values(), default=0) < (rounds or 1), "and one more that ended the answer"
    at_rollout = dock.stats()["partitions"][rows.name]["tasks"]["rollout"]
    assert (at_rollout["done"], at_rollout["claimed"], at_rollout["ready"]) == (4 * GROUP, 0, 0)
    done = rows.claim(99, task="reward", unit="groups")
    assert len(done) == total == 4 * GROUP
    check_answers(dock, done.rows, done.group_ids, done.members)
    assert sampled == sum(len(ids) for ids in dock.read(done.rows, ["response_ids"])["response_ids"])
    tables = dock.read(done.rows, ["response_spans"])["response_spans"]
    assert done.version_min.tolist() == [t[:, 0].min() for t in tables]
    assert done.version_max.tolist() == [t[:, 0].max() for t in tables]
    assert sum(dock.stats()["column_bytes"][name] for name in PARTIAL_COLUMNS) == 0


ROUNDS = st.sampled_from([None, 2, 3, 5])


@settings(max_examples=5, deadline=None)
@given(schedule=PLAY, rounds=ROUNDS)
def test_any_interruptions_and_updates_on_any_replicas_leave_every_token_with_its_version(dock, schedule, rounds):
    """B31: spans tile [0, L), ids, log-probs and versions are aligned, nothing is sampled twice or lost; B94: no part
    of an answer stays in the dock."""
    interrupted(dock, schedule, rounds)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(schedule=PLAY, rounds=ROUNDS)
def test_many_more_interruptions_leave_every_token_with_its_version(dock, schedule, rounds):
    """B31, B94"""
    interrupted(dock, schedule, rounds)


def interrupted(dock: DockClient, schedule, rounds) -> None:
    rows = Rows(dock)
    rows.put(4)
    replicas = [Replica(dock, f"rollout{i}", LONGEST, group_size=GROUP, partial_rounds=rounds) for i in range(2)]
    try:
        play(replicas, rows, schedule, rounds)
    finally:
        for each in replicas:
            each.close()
        rows.close()
    assert dock.stats()["payload_bytes"] == 0


def test_a_stop_returns_when_the_rows_can_be_claimed_again_with_what_they_have(dock, replica, rows):
    handles = rows.put(2)
    first, second = replica(), replica()
    got = rows.claim(6)
    running = first.begin(got)
    first.advance(2)
    assert first.worker.running() == sum(natural_length(sample_seed(0, g, m)) > 2 for g in (0, 1) for m in range(3))
    stopped = first.worker.stop()
    again = rows.claim(6)
    assert len(again) == stopped and set(again.rows.tolist()) <= set(handles.tolist())
    report = running.result(0.0)
    assert sorted(report.unfinished) == sorted(again.rows.tolist()) and report.samples == 6 - stopped
    assert part_of(dock, again.rows) == [2] * stopped
    assert first.worker.stop() == 0, "nothing runs"
    going_on = second.begin(again)
    second.release()
    assert going_on.result(10.0).unfinished == ()
    done = rows.claim(2, task="reward", unit="groups")
    check_answers(dock, done.rows, done.group_ids, done.members)


def test_an_answer_of_three_replicas_and_four_versions_knows_which_sampled_what(dock, replica, rows):
    """B31, B46: stopped at version 4, gone on elsewhere at 5, where 6 comes while it runs, and ended at an old 3."""
    rows.put(1)
    member = max(range(GROUP), key=lambda m: natural_length(sample_seed(0, 0, m)))
    length = min(LONGEST, natural_length(sample_seed(0, 0, member)))
    assert length > 7
    for versions, steps in (((4,), (3,)), ((5, 6), (2, 1))):
        one = replica()
        one.engine.update(manifest(versions[0]))
        running = one.begin(rows.claim(GROUP))
        one.advance(steps[0])
        for version, more in zip(versions[1:], steps[1:]):
            one.engine.update(manifest(version))
            one.advance(more)
        one.worker.stop()
        running.result(0.0)
    last = replica()
    last.engine.update(manifest(3))
    going_on = last.begin(rows.claim(GROUP))
    last.release()
    assert going_on.result(5.0).served == ((3, "of 3"),)
    done = rows.claim(1, task="reward", unit="groups")
    check_answers(dock, done.rows, done.group_ids, done.members)
    table = dock.read(done.rows, ["response_spans"])["response_spans"][member]
    assert table.tolist() == [[4, 0, 3], [5, 3, 5], [6, 5, 6], [3, 6, length]]
    assert (done.version_min[member], done.version_max[member]) == (3, 6)


def test_a_stop_that_comes_before_the_engine_has_the_rows_ends_them_too(dock, replica, rows, monkeypatch):
    rows.put(1)
    one = replica()
    stopping = []

    def generate(requests, timeout_s, stream):
        thread = threading.Thread(target=one.worker.stop)
        thread.start()
        stopping.append(thread)
        one.until(lambda: one.worker._stopped)
        return type(one.engine).generate(one.engine, requests, timeout_s, stream)

    one.backend.permits = 0
    monkeypatch.setattr(one.engine, "generate", generate)
    got = rows.claim(3)
    report = one.worker.generate(got.claim_id, RowBatch(got.rows, got.group_ids, got.members))
    stopping[0].join(5.0)
    assert sorted(report.unfinished) == got.rows.tolist() and report.tokens == 0 and report.served == ()
    assert part_of(dock, rows.claim(3).rows) == [0] * 3


def test_calls_at_the_same_time_are_stopped_together(dock, replica, rows):
    rows.put(2)
    one = replica()
    first, second = one.begin(rows.claim(3)), one.begin(rows.claim(3))
    assert one.worker.running() == 6 and one.worker.stop() == 6
    assert len(first.result(0.0).unfinished) == len(second.result(0.0).unfinished) == 3


def test_a_load_that_fails_is_an_error_and_not_a_stop(dock, replica, rows):
    """Nothing is written for answers of an engine that is DIRTY; their rows are offered again when it is forgotten."""
    handles = rows.put(1)
    one = replica()
    running = one.begin(rows.claim(3, "rollout0"))
    one.backend.broken = True
    with pytest.raises(WeightSyncError):
        one.engine.update(manifest(1))
    with pytest.raises(EngineError, match=r"rollout0: .*'abort' after 0 tokens .engine DIRTY"):
        running.result(5.0)
    assert one.worker.running() == 0 and one.worker.stop() == 0
    dock.forget_worker("rollout0")
    again = rows.claim(3)
    assert again.rows.tolist() == handles.tolist() and part_of(dock, again.rows) == [0] * 3


def test_rows_that_a_lost_replica_has_answered_are_not_answered_again(dock, replica, rows):
    """B46: an answer is done in the call that writes it, so that what is offered again has no result yet."""
    rows.put(4)
    one = replica()
    got = rows.claim(12, "rollout0")
    running = one.begin(got)
    one.advance(9)  # it dies here: nobody hears of it any more
    lengths = [natural_length(sample_seed(0, g, m)) for g, m in zip(got.group_ids.tolist(), got.members.tolist())]
    ended = [all(n <= 9 for n, g in zip(lengths, got.group_ids) if g == group) for group in range(4)]
    tasks = lambda: dock.stats()["partitions"][rows.name]["tasks"]["rollout"]  # noqa: E731
    one.until(lambda: tasks()["done"] == GROUP * sum(ended))
    dock.forget_worker("rollout0")
    assert 0 < sum(ended) < 4
    again = rows.claim(12)
    assert sorted(set(again.group_ids.tolist())) == [g for g in range(4) if not ended[g]]
    one.release()
    with pytest.raises(ClaimLost, match="forgotten"):
        running.result(5.0)
    other = replica()
    going_on = other.begin(again)
    other.release()
    assert going_on.result(5.0).samples == len(again)
    done = rows.claim(4, task="reward", unit="groups")
    check_answers(dock, done.rows, done.group_ids, done.members)


def test_an_engine_that_rests_serves_again_after_the_next_load(dock, replica, rows):
    rows.put(1)
    one = replica()
    running = one.begin(rows.claim(3))
    one.advance(1)
    one.worker.rest()
    assert len(running.result(0.0).unfinished) <= 3 and one.engine.state == "SLEEPING"
    one.worker.rouse()
    one.worker.load(manifest(5))
    assert one.engine.state == "RUNNING"
    going_on = one.begin(rows.claim(3))
    one.release()
    assert going_on.result(5.0).unfinished == ()
    done = rows.claim(1, task="reward", unit="groups")
    check_answers(dock, done.rows, done.group_ids, done.members)
    one.worker.rest()
    one.worker.rouse()
    one.worker.rest()  # also when it was not loaded in between
    assert one.engine.state == "SLEEPING"


@pytest.mark.slow
def test_sampled_answers_of_a_model_are_the_same_whenever_and_wherever_they_are_interrupted(dock, rows, tmp_path):
    """Random numbers depend on seed and place only, so tokens are equal; log-probs within 1e-4. Stops at any moment."""
    folder, longest = make_model(tmp_path / "model", "dense", 3), 60
    engines = [make_engine("reference", folder, RolloutConfig(max_running=64, timeout_s=60.0)) for _ in range(2)]
    how = {"seed": 0, "commit_groups": 1, "timeout_s": 60.0, "tracer": QUIET, "group_size": GROUP, "partial_rounds": 3}
    workers = [RolloutWorker(e, dock, SamplingSpec(longest), name=f"rollout{i}", **how) for i, e in enumerate(engines)]
    rows.put(6)
    stops, stopped = np.random.default_rng(1), [0]

    def answer(number: int) -> None:
        with contextlib.suppress(DeadlineExceeded):
            while True:
                got = rows.claim(5, f"rollout{number}", timeout_s=1.0)
                workers[number].generate(got.claim_id, RowBatch(got.rows, got.group_ids, got.members))

    threads = [threading.Thread(target=answer, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        stopped[0] += workers[int(stops.integers(2))].stop()
        threads[0].join(float(stops.uniform(0.01, 0.1)))
    done = rows.claim(6, task="reward", unit="groups")
    assert len(done) == 6 * GROUP and stopped[0] > 10
    requests = [
        GenRequest(str(r), np.array([1, 2], np.int32), SamplingSpec(longest), sample_seed(0, g, m))
        for r, g, m in zip(done.rows.tolist(), done.group_ids.tolist(), done.members.tolist())
    ]
    whole = {int(a.request_id): a for a in engines[0].generate(requests, 60.0)}
    columns = dock.read(done.rows, ANSWER)
    for i, row in enumerate(done.rows.tolist()):
        assert columns["response_ids"][i].tolist() == whole[row].token_ids.tolist()
        assert np.abs(columns["rollout_logprobs"][i] - whole[row].logprobs).max() < 1e-4
        assert columns["response_spans"][i].tolist() == [[0, 0, longest]]
    for engine in engines:
        engine.close()


# -- what the trainer makes of it --------------------------------------------------------------------------------------


class Recording:
    """A train engine that keeps its micro-batches."""

    def __init__(self) -> None:
        self.batches: list = []

    def forward_backward(self, micro_batches):
        self.batches += micro_batches
        return {"actor/tokens_count": sum(b.num_valid_tokens for b in micro_batches)}


def answered(rows: Rows, spans: list[tuple[VersionSpan, ...]]):
    """Scored rows of one group with answers of these spans, claimed for training."""
    rows.put(1)
    got = rows.claim(3)
    sizes = [s[-1].end for s in spans]
    ids = [np.arange(10, 10 + n, dtype=np.int32) for n in sizes]
    rows.dock.write(
        got.rows,
        {
            "response_ids": ids,
            "rollout_logprobs": [-i.astype(np.float32) for i in ids],
            "response_spans": [span_table(s) for s in spans],
            "finish": np.zeros(3, np.uint8),
            "reward": np.zeros(3, np.float32),
            "advantage": np.ones(3, np.float32),
        },
        claim_id=got.claim_id,
        versions=([min(v.version for v in s) for s in spans], [max(v.version for v in s) for s in spans]),
        done=True,
    )
    claim = rows.claim(1, task="train", unit="groups")
    versions = dict(zip(claim.rows.tolist(), zip(claim.version_min.tolist(), claim.version_max.tolist())))
    groups = {r: (int(g), int(m)) for r, g, m in zip(claim.rows.tolist(), claim.group_ids, claim.members)}
    return claim.rows.tolist(), versions, groups


def masks(engine: Recording) -> dict[int, tuple[list[int], list[float], list[float]]]:
    """Loss mask, advantages and log-probs of each row's answer tokens, whatever micro-batch it is in."""
    found = {}
    for batch in engine.batches:
        for i, row in enumerate(batch.rows.tolist()):
            at = slice(int(batch.cu_seqlens[i]) + 1, int(batch.cu_seqlens[i + 1]))  # after the prompt's first token
            found[row] = tuple(x[at].tolist() for x in (batch.loss_mask, batch.advantages, batch.rollout_logprobs))
    return found


@pytest.mark.parametrize(("oldest_allowed", "mask"), [(None, [1] * 5), (4, [1] * 5), (5, [0, 0, 0, 1, 1])])
def test_tokens_of_versions_that_are_too_old_are_masked_and_no_others(dock, rows, oldest_allowed, mask):
    """B31: three tokens of version 4, two of version 5; B44: the oldest trained token counts."""
    spans = [(VersionSpan(4, 0, 3), VersionSpan(5, 3, 5)), (VersionSpan(5, 0, 2),), (VersionSpan(4, 0, 4),)]
    handles, versions, groups = answered(rows, spans)
    engine = Recording()
    worker = TrainWorker(engine, dock, AlgorithmConfig(), name="t", replica=0, publisher=None, tracer=QUIET)
    report = worker.train([[handles[:2], handles[2:]]], versions, groups, ChunkRules(7, oldest_allowed))
    found = masks(engine)
    assert found[handles[0]][0] == found[handles[0]][1] == mask
    assert found[handles[0]][2] == [-float(10 + i) * m for i, m in enumerate(mask)]
    assert found[handles[1]][0] == [1, 1]
    assert found[handles[2]][0] == [float(oldest_allowed != 5)] * 4
    assert report.sums["actor/tokens_count"] == sum(mask) + 2 + (4 if oldest_allowed != 5 else 0)
    assert report.masked_tokens == (7 if oldest_allowed == 5 else 0)
    whole = {handles[0]: 4, handles[1]: 5, handles[2]: 4}
    assert report.oldest_trained == ({handles[0]: 5, handles[1]: 5} if oldest_allowed == 5 else whole)


@given(
    lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=3, max_size=3),
    first=st.lists(st.lists(st.integers(0, 6), min_size=5, max_size=5), min_size=3, max_size=3),
    oldest_allowed=st.integers(0, 7),
)
@settings(max_examples=15, deadline=None)
def test_masks_and_reports_say_the_same_for_any_spans(dock, lengths, first, oldest_allowed):
    ends = [np.cumsum(row).tolist() for row in lengths]
    spans = [
        tuple(VersionSpan(v, e - n, e) for v, n, e in zip(versions, sizes, row))
        for versions, sizes, row in zip(first, lengths, ends)
    ]
    rows = Rows(dock)
    handles, versions, groups = answered(rows, spans)
    engine = Recording()
    worker = TrainWorker(engine, dock, AlgorithmConfig(), name="t", replica=0, publisher=None, tracer=QUIET)
    report = worker.train([[handles]], versions, groups, ChunkRules(7, oldest_allowed))
    of_tokens = {r: versions_per_token(span_table(s)) for r, s in zip(handles, spans)}
    for row, mask in masks(engine).items():
        assert mask[0] == (of_tokens[row] >= oldest_allowed).tolist()
    kept = {r: v[v >= oldest_allowed] for r, v in of_tokens.items()}
    assert report.oldest_trained == {r: v.min() for r, v in kept.items() if len(v)}
    assert report.masked_tokens + report.sums["actor/tokens_count"] == sum(map(len, of_tokens.values()))
    rows.close()


# -- groups that teach nothing -----------------------------------------------------------------------------------------


class Scores:
    def __init__(self, values) -> None:
        self.values = values

    def score(self, answers):
        return [Score(v, "" if v is not None else "abstained") for v in self.values]


@pytest.mark.parametrize("dynamic", [True, False])
def test_groups_of_equal_rewards_are_named_and_not_offered_where_the_algorithm_samples_dynamically(dock, rows, dynamic):
    rows.put(3)
    got = rows.claim(9)
    ids = [np.array([1], np.int32)] * 9
    values = {"response_ids": ids, "rollout_logprobs": [np.zeros(1, np.float32)] * 9, "finish": np.zeros(9, np.uint8)}
    dock.write(got.rows, values, claim_id=got.claim_id, versions=([0] * 9, [0] * 9), done=True)
    claim = rows.claim(3, task="reward", unit="groups")
    config = Config(algorithm=AlgorithmConfig(group_size=GROUP, dynamic_sampling=dynamic))
    pool = Scores([1.0, 0.0, 1.0, 1.0, None, 1.0, 0.0, 0.0, 0.0])
    scorer = ScoreWorker(pool, dock, lambda answers: ["x"] * len(answers), config, name="s", tracer=QUIET)
    report = scorer.score(claim.claim_id, RowBatch(claim.rows, claim.group_ids, claim.members))
    assert report.flat == ((1, 2) if dynamic else ())
    assert list(report.unscored) == [int(claim.rows[4])]
    train = rows.claim(9, task="train")
    assert train.group_ids.tolist() == ([0] * 3 if dynamic else [0] * 3 + [1] * 2 + [2] * 3)
