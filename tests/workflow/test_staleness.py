import asyncio

import pytest

from mindspeed_asyncflow.workflow.staleness import StalenessWindow


def test_a_resumed_window_allows_only_its_own_batches():
    """B42: max_lag 2 at version 50 with nothing in flight opens batches 50, 51 and 52 (12 groups of 4), not 212."""
    window = StalenessWindow(2, version=50)
    assert [batch for batch in range(50, 300) if window.may_issue(batch)] == [50, 51, 52]


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_lag_stays_within_the_bound_when_weights_are_loaded_before_sampling(max_lag):
    """B44: a slow trainer; each batch is sampled with the version that is newest when the window lets it in."""

    async def simulate():
        window, sampled = StalenessWindow(max_lag), {}

        async def feed():
            for batch in range(8):
                await window.wait_to_issue(batch)
                sampled[batch] = window.version

        async def train():
            for step in range(8):
                while step not in sampled:
                    await asyncio.sleep(0)
                assert sampled[step] >= window.oldest_allowed()
                await asyncio.sleep(0)
                await window.advance(step + 1)

        await asyncio.wait_for(asyncio.gather(feed(), train()), timeout=5)
        return sampled

    sampled = asyncio.run(simulate())
    assert [batch - version for batch, version in sorted(sampled.items())] == [min(b, max_lag) for b in range(8)]


def test_version_rises_by_one_per_global_batch():
    window = StalenessWindow(1)
    with pytest.raises(ValueError, match="0 -> 2"):
        asyncio.run(window.advance(2))


def test_issued_equals_trained_plus_dropped_plus_open():
    window = StalenessWindow(1)
    window.issued, window.trained = 20, 12
    window.dropped.update({"stale": 3, "unscored": 1})
    assert window.open == 4
