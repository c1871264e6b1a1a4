"""Rows of tenants and answers from outside, on a real dock without a run."""

import asyncio
import contextlib
import secrets
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.dock.client import DockClient
from mindspeed_asyncflow.dock.columns import GRPO_COLUMNS, grpo_tasks
from mindspeed_asyncflow.dock.server import DockServer
from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded, DockFull, ServiceError
from mindspeed_asyncflow.records import Completion, PromptRow, VersionSpan
from mindspeed_asyncflow.service.partitions import TenantStore, _bytes
from mindspeed_asyncflow.service.verbs import Prompt, Trajectory, TrajectoryGroup
from mindspeed_asyncflow.workflow.checkpoint import settle

CONFIG = Config.model_validate({"algorithm": {"group_size": 2}, "service": {"tenant_rows": 8}})
CODES = {letter: code for code, letter in enumerate("abcdefgh>")}


class Letters:
    """A tokenizer of single letters."""

    bos_token_id, pad_token_id, chat_template = None, None, None

    def __len__(self):
        return len(CODES)

    def __call__(self, texts, add_special_tokens=False):
        return {"input_ids": [[CODES[letter] for letter in text] for text in texts]}

    def decode(self, ids):
        return "".join(list(CODES)[i] for i in ids)

    def batch_decode(self, rows, **_):
        return [self.decode(row) for row in rows]


@pytest.fixture(params=[1, 2])
def dock(request):
    secret = secrets.token_bytes(8)
    with contextlib.ExitStack() as stack:
        servers = [
            DockServer(GRPO_COLUMNS, grpo_tasks(False, service=True), arena_mb=4, secret=secret, pair=pair).start()
            for pair in range(request.param)
        ]
        for server in servers:
            stack.callback(server.close)
        yield stack.enter_context(DockClient([server.address for server in servers], secret, 5.0))


def store(dock, name="b", config=CONFIG):
    session = SimpleNamespace(dock=SimpleNamespace(client=dock), tokenizer=Letters(), stop_ids=(8,))
    return TenantStore(name, SimpleNamespace(session=session, config=config))


def code_of(error):
    return error.value.status, error.value.code


async def every(store, task, columns):
    """All groups that wait for `task`, one claim after the other."""
    while (claim := await store.get(task, columns, 1, 0.3)).claim:
        yield claim


def test_rows_of_a_tenant_go_through_every_task_and_leave_the_dock(dock):
    async def main():
        b = store(dock)
        done = await b.put_prompts([Prompt("ab>", "ba"), Prompt("cd>", "dc")])
        assert done == {"accepted": 2, "first": 0, "queued": 4}
        asked = []
        async for claim in every(b, "rollout", ["prompt", "truth", "prompt_ids"]):
            asked += zip(claim.columns["prompt"], claim.columns["truth"])
            answers = {"response_ids": [np.array([1, 8])] * 2, "rollout_logprobs": [[-0.5, -0.1]] * 2}
            assert await b.put(claim.claim, claim.rows, answers | {"finish": np.zeros(2, np.int64)}) == {"left": 0}
        assert sorted(asked) == [("ab>", "ba")] * 2 + [("cd>", "dc")] * 2
        async for claim in every(b, "reward", ["response"]):
            assert claim.columns["response"] == ["b", "b"] and claim.members.tolist() == [0, 1]
            first = {"reward": [1.0], "score": [1.0], "advantage": [0.5]}
            assert await b.put(claim.claim, claim.rows[:1], first) == {"left": 1}
            rest = {"reward": [0.0], "score": [0.0], "advantage": [-0.5]}
            assert await b.put(claim.claim, claim.rows[1:], rest) == {"left": 0}
        async for claim in every(b, "train", ["advantage", "rollout_logprobs"]):
            assert claim.columns["advantage"].tolist() == [0.5, -0.5]
            await b.put(claim.claim, claim.rows, {})
        return await b.status()

    assert asyncio.run(main())["rows"] == 0
    assert dock.stats()["partitions"]["tenant.b"]["rows"] == 0


def test_tenants_do_not_see_each_others_rows_claims_or_groups(dock):
    async def main():
        b, c = store(dock), store(dock, "c")
        await b.put_prompts([Prompt("ab>")])
        held = await b.get("rollout", [], 1, 2.0)
        assert (await c.get("rollout", [], 1, 0.0)).claim == 0
        await c.put_prompts([Prompt("cd>")])
        mine = await c.get("rollout", ["prompt"], 1, 2.0)
        assert mine.groups.tolist() == [0, 0] and mine.columns["prompt"] == ["cd>"] * 2
        with pytest.raises(ServiceError) as refused:
            await c.put(held.claim, held.rows, {})
        assert code_of(refused) == (404, "unknown_claim")
        with pytest.raises(ServiceError) as refused:
            await c.put(mine.claim, held.rows, {"finish": [0, 0]})
        assert code_of(refused) == (422, "rows")
        assert await b.put(held.claim, held.rows, {}) == {"left": 0}

    asyncio.run(main())


def test_a_tenant_gets_no_more_of_the_dock_than_its_share(dock):
    async def main():
        b = store(dock)
        await b.put_prompts([Prompt("ab>")] * 4)
        with pytest.raises(ServiceError, match=r"service\.tenant_rows \(8\)") as refused:
            await b.put_prompts([Prompt("ab>")])
        assert code_of(refused) == (507, "full")
        claim = await b.get("rollout", [], 1, 2.0)
        huge = [np.zeros(5 << 20, np.int32)] * 2
        with pytest.raises(ServiceError, match=r"service\.tenant_mb"):
            await b.put(claim.claim, claim.rows, {"response_ids": huge})
        assert await b.put(claim.claim, claim.rows, {}) == {"left": 0}

    asyncio.run(main())


def test_calls_at_the_same_time_get_no_more_than_the_share_together(dock):
    async def main():
        b = store(dock)
        calls = [b.put_prompts([Prompt("ab>")] * 2) for _ in range(20)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        refused = [answer for answer in done if isinstance(answer, ServiceError)]
        assert [answer["first"] for answer in done if isinstance(answer, dict)] == [0, 2]
        assert len(refused) == 18 and {answer.code for answer in refused} == {"full"}
        return (await b.status())["rows"]

    assert asyncio.run(main()) == dock.stats()["partitions"]["tenant.b"]["rows"] == 8


def test_what_a_caller_who_left_has_put_is_counted_and_what_failed_is_not(dock, monkeypatch):
    async def main():
        b = store(dock)
        put, begun = dock.put_groups, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow(*args):
            loop.call_soon_threadsafe(begun.set)
            return put(*args)

        def fails(*args):
            raise DockFull("no room")

        monkeypatch.setattr(dock, "put_groups", slow)
        leaving = asyncio.ensure_future(b.put_prompts([Prompt("ab>")] * 3))
        await begun.wait()
        leaving.cancel()
        assert (await b.status())["rows"] == 6
        await asyncio.wait([leaving])
        monkeypatch.setattr(dock, "put_groups", fails)
        with pytest.raises(DockFull):
            await b.put_prompts([Prompt("ab>")])
        monkeypatch.setattr(dock, "put_groups", put)
        while (await b.status())["bytes"] == 0 or len(b._rows) < 6:
            await asyncio.sleep(0)
        assert (await b.put_prompts([Prompt("ab>")]))["queued"] == 8

    asyncio.run(main())
    assert dock.stats()["partitions"]["tenant.b"]["rows"] == 8


def test_the_mask_of_an_answer_counts():
    answer = Completion("", np.zeros(8, np.int32), np.zeros(8, np.float32), "stop", ())
    row = PromptRow(0, 1, 2, np.array([1]), "", answer=answer)
    masked = replace(row, answer=replace(answer, mask=np.ones(8, np.uint8)))
    assert _bytes(masked) - _bytes(row) == 8


def test_halves_of_a_claim_that_come_at_the_same_time_finish_it(dock):
    async def main():
        b = store(dock)
        await b.put_prompts([Prompt("ab>")])
        claim = await b.get("rollout", [], 1, 2.0)
        left = await asyncio.gather(*(b.put(claim.claim, claim.rows[i : i + 1], {"finish": [0]}) for i in (0, 1)))
        assert sorted(answer["left"] for answer in left) == [0, 1]
        with pytest.raises(ServiceError) as refused:
            await b.put(claim.claim, claim.rows, {"finish": [0, 0]})
        assert code_of(refused) == (404, "unknown_claim")

    asyncio.run(main())


def test_a_claim_that_ended_is_forgotten_when_its_rows_are_claimed_again(dock):
    async def main():
        b = store(dock)
        await b.put_prompts([Prompt("ab>")])
        for _ in range(3):
            claim = await b.get("rollout", [], 1, 2.0)
            await b.dock.release(claim.claim)  # as its lease does
        assert list(b._claims) == [claim.claim]
        with pytest.raises(ClaimLost):
            await b.put(claim.claim, claim.rows, {"finish": [0, 0]})
        assert not b._claims and (await b.status())["rows"] == 2

    asyncio.run(main())


def test_rows_that_the_dock_has_lost_do_not_count_for_ever(dock):
    async def main():
        b = store(dock)
        await b.put_prompts([Prompt("ab>")] * 4)
        claim = await b.get("rollout", [], 1, 2.0)
        dock.close_partition("tenant.b")
        await b.dock.release(claim.claim)  # rows and claim are gone, as with a pair that is started again
        with pytest.raises(ClaimLost, match="lost 8 of your rows"):
            await b.put(claim.claim, claim.rows, {"finish": [0, 0]})
        assert (await b.status())["rows"] == 0 and not b._claims
        await b.put_prompts([Prompt("ab>")] * 4)
        dock.close_partition("tenant.b")
        assert (await b.put_prompts([Prompt("ab>")] * 3))["queued"] == 6

    asyncio.run(main())


def test_puts_of_tenants_take_no_thread_of_the_run(dock, monkeypatch):
    async def main():
        b, named = store(dock), []
        for name in ("put_groups", "write", "done"):
            call = getattr(dock, name)

            def watched(*args, call=call, **how):
                named.append(threading.current_thread().name)
                return call(*args, **how)

            monkeypatch.setattr(dock, name, watched)
        answers = [Trajectory(np.array([1]), np.array([-0.1]), version=0)] * 2
        await b.put_trajectories([TrajectoryGroup(Prompt("ab>"), answers, np.ones(2), np.ones(2))])
        claim = await b.get("train", [], 1, 2.0)
        await b.put(claim.claim, claim.rows, {})
        return named

    assert all(name.startswith("dock") for name in asyncio.run(main()))


def test_a_call_that_is_refused_has_written_nothing_and_its_claim_is_held_still(dock):
    async def main():
        b = store(dock)
        await b.put_prompts([Prompt("ab>")])
        with pytest.raises(ServiceError) as refused:
            await b.get("rollout", ["nope"], 1, 2.0)
        assert code_of(refused) == (422, "columns")
        with pytest.raises(ServiceError) as refused:
            await b.get("training", [], 1, 2.0)
        assert code_of(refused) == (404, "unknown_task")
        claim = await b.get("rollout", [], 1, 2.0)
        with pytest.raises(ServiceError):
            await b.put(claim.claim, claim.rows, {"response_ids": [[1], [2]], "finish": [0, 999]})
        await b.put(claim.claim, claim.rows, {"response_ids": [[1], [2]], "finish": [0, 1]})
        assert (await b.get("reward", ["finish"], 1, 2.0)).columns["finish"].tolist() == [0, 1]

    asyncio.run(main())


def test_trajectories_of_a_tenant_skip_the_task_rollout(dock):
    async def main():
        b = store(dock)
        answers = [Trajectory(np.array([1, 2]), np.array([-0.1, -0.2]), version=7)] * 2
        rewards, advantages = np.array([1.0, 2.0]), np.array([-1.0, 1.0])
        await b.put_trajectories([TrajectoryGroup(Prompt("ab>"), answers, rewards, advantages)])
        assert (await b.get("rollout", [], 1, 0.0)).claim == 0
        train = await b.get("train", ["reward", "advantage", "response_spans"], 1, 2.0)
        assert train.columns["reward"].tolist() == [1, 2] and train.columns["advantage"].tolist() == [-1, 1]
        assert train.columns["response_spans"][0].tolist() == [[7, 0, 2]]

    asyncio.run(main())


def group(number, answered):
    answer = Completion("", np.array([1, 2], np.int32), np.zeros(2, np.float32), "length", (VersionSpan(3, 0, 2),))
    given = answer if answered else None
    return [PromptRow(number, m, 2, np.array([number, 8], np.int32), "t", answer=given) for m in range(2)]


def test_replicas_are_offered_prompts_only_and_scorers_the_answers_that_came_with_them(dock):
    handles = dock.put_groups("train", [group(0, True), group(1, False), group(2, True), group(3, False)])
    assert dock.read(handles[2], ["prompt_ids"])["prompt_ids"][0].tolist() == [2, 8]
    offered = set()
    with contextlib.suppress(DeadlineExceeded):
        while True:
            claim = dock.claim("rollout", 9, partition="train", worker="r", unit="groups", timeout_s=0.2)
            offered |= set(claim.group_ids.tolist())
    assert offered == {1, 3}
    scored, versions = set(), set()
    with contextlib.suppress(DeadlineExceeded):
        while True:
            claim = dock.claim("reward", 9, partition="train", worker="s", unit="groups", timeout_s=0.2)
            scored |= set(claim.group_ids.tolist())
            versions |= set(claim.version_min.tolist())
    assert scored == {0, 2} and versions == {3}


def test_a_cut_of_the_run_leaves_tenants_out_and_keeps_answers_from_outside(dock, tmp_path):
    async def fill():
        await store(dock).put_prompts([Prompt("ab>")])

    asyncio.run(fill())
    dock.put_groups("train", [group(0, True), group(1, False)])
    dock.snapshot(tmp_path / "cut", only=("train",))
    dock.close_partition("train")
    dock.restore(tmp_path / "cut")
    held = settle(dock, "train", {0, 1})
    assert held[0].sampled == 3 and held[1].sampled is None and held[0].samples == held[1].samples == 2
    claim = dock.claim("rollout", 9, partition="train", worker="r", unit="groups", timeout_s=2.0)
    assert set(claim.group_ids.tolist()) == {1}
    assert dock.stats()["partitions"]["tenant.b"]["rows"] == 2
