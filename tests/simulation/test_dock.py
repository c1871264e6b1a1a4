import asyncio

import numpy as np
import pytest

from mindspeed_asyncflow.errors import ClaimLost, DeadlineExceeded, DockError, StaleHandle
from mindspeed_asyncflow.records import PromptRow
from mindspeed_asyncflow.simulation import clock
from mindspeed_asyncflow.simulation.dock import SimDock, Truth


def truth(groups, members):
    return Truth(10 * groups + members + 1, np.ones(len(groups)), np.zeros(len(groups), bool))


def groups_of(*ids, size=2):
    return [[PromptRow(g, m, size, np.zeros(4, np.int32), "") for m in range(size)] for g in ids]


def on_dock(main, **how):
    async def run():
        return await main(SimDock(truth, with_reference=False, **how))

    return clock.run(run())


async def answer(dock, claim):
    slots = dock.slots(claim.rows)
    dock.rows.generated(slots, dock.rows.target[slots], np.full(len(slots), 3), np.full(len(slots), 3))
    dock.answered(claim.claim_id, slots)
    dock.finish(claim.claim_id)


def test_a_parked_claim_is_answered_by_the_put():
    async def main(dock):
        async def late():
            await asyncio.sleep(7)
            await dock.put_groups(groups_of(5))

        task = asyncio.create_task(late())
        claim = await dock.claim("rollout", 1, worker="a")
        await task
        return claim, asyncio.get_running_loop().time()

    claim, at = on_dock(main)
    assert at == 7
    assert claim.group_ids.tolist() == [5, 5]
    assert claim.members.tolist() == [0, 1]


def test_a_claim_with_a_deadline_ends_at_it_and_takes_nothing():
    async def main(dock):
        with pytest.raises(DeadlineExceeded, match=r"'a' waited 2\.0 s"):
            await dock.claim("rollout", 1, worker="a", timeout_s=2.0)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)
        await dock.put_groups(groups_of(0))
        return await dock.claim("rollout", 1, worker="b", timeout_s=0.0)

    assert len(on_dock(main)) == 2


def test_a_claim_whose_asker_is_cancelled_gives_its_rows_to_the_next():
    async def main(dock):
        gone = asyncio.create_task(dock.claim("rollout", 1, worker="a"))
        await asyncio.sleep(1)
        await dock.put_groups(groups_of(0))  # answers the parked claim; its task has not run yet
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        return await dock.claim("rollout", 1, worker="b", timeout_s=0.0)

    assert len(on_dock(main)) == 2


def test_an_asker_that_is_forgotten_and_cancelled_at_once_leaves_its_rows_to_others():
    async def main(dock):
        gone = asyncio.create_task(dock.claim("rollout", 1, worker="a"))
        await asyncio.sleep(1)
        await dock.put_groups(groups_of(0))
        gone.cancel()
        await dock.forget_worker("a")
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await dock.claim("rollout", 1, worker="b", timeout_s=0.0)

    assert len(on_dock(main)) == 2


def test_every_call_costs_a_round_trip():
    async def main(dock):
        await dock.put_groups(groups_of(0))
        claim = await dock.claim("rollout", 1, worker="a")
        await dock.done(claim.claim_id)
        return asyncio.get_running_loop().time()

    assert on_dock(main, claim_s=0.25) == pytest.approx(0.75)


def test_answers_become_ready_for_scoring_with_versions_and_tokens():
    async def main(dock):
        await dock.put_groups(groups_of(1))
        await answer(dock, await dock.claim("rollout", 1, worker="a"))
        return await dock.claim("reward", 1, worker="s")

    claim = on_dock(main)
    assert claim.version_min.tolist() == [3, 3]
    assert claim.tokens.tolist() == [4 + 11, 4 + 12]


def test_the_law_is_the_controllers():
    async def main(dock):
        await dock.put_groups(groups_of(1))
        await answer(dock, await dock.claim("rollout", 1, worker="a"))
        scored = await dock.claim("reward", 1, worker="s")
        dock.scored(scored.claim_id, dock.slots(scored.rows))
        dock.finish(scored.claim_id)
        return await dock.claim("train", 1, worker="t", min_version=4)

    claim = on_dock(main)
    assert not len(claim)
    assert [(group, reason) for group, _, reason in claim.dropped] == [(1, "stale")]


def test_a_result_of_a_forgotten_worker_is_refused():
    async def main(dock):
        await dock.put_groups(groups_of(1))
        claim = await dock.claim("rollout", 1, worker="a")
        assert await dock.forget_worker("a") == 1
        again = await dock.claim("rollout", 1, worker="b", timeout_s=0.0)
        with pytest.raises(ClaimLost, match="'a' was forgotten"):
            await answer(dock, claim)
        return again

    assert len(on_dock(main)) == 2


def test_freed_rows_are_stale():
    async def main(dock):
        await dock.put_groups(groups_of(1))
        claim = await dock.claim("rollout", 1, worker="a")
        await dock.done(claim.claim_id)
        await dock.free(claim.rows)
        with pytest.raises(StaleHandle):
            dock.slots(claim.rows)
        assert dock.part.rows.count == 0

    on_dock(main)


def test_only_numbers_can_be_read():
    async def main(dock):
        await dock.put_groups(groups_of(1))
        claim = await dock.claim("rollout", 1, worker="a")
        assert (await dock.read(claim.rows, ["reward"]))["reward"].tolist() == [1.0, 1.0]
        with pytest.raises(DockError, match="no values of response_ids"):
            await dock.read(claim.rows, ["response_ids"])

    on_dock(main)


def test_rows_know_how_many_of_their_tokens_are_young_enough():
    async def main(dock):
        await dock.put_groups(groups_of(3))  # 31 and 32 tokens
        rows, slots = dock.rows, np.array([0, 1])
        rows.generated(slots, np.array([31, 32]), np.array([1, 4]), np.array([4, 4]))
        rows.note_span(np.array([0]), np.array([10]), 1)
        rows.note_span(np.array([0]), np.array([25]), 2)
        return [rows.younger(slots, oldest).tolist() for oldest in (1, 2, 3, 5)]

    assert on_dock(main) == [[31, 32], [21, 32], [6, 32], [0, 0]]
