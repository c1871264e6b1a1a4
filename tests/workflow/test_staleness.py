import asyncio

import pytest

from mindspeed_asyncflow.workflow.staleness import StalenessWindow


def test_a_resumed_window_allows_only_its_own_batches():
    """B42: max_lag 2 at version 50 with nothing in flight opens batches 50, 51 and 52 (12 groups of 4), not 212."""
    window = StalenessWindow(2, version=50)
    assert [batch for batch in range(50, 300) if window.may_issue(batch)] == [50, 51, 52]


@pytest.mark.parametrize("publish_turns", [0, 7])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_lag_stays_within_the_bound_when_weights_are_loaded_before_sampling(max_lag, publish_turns):
    """B44: a slow trainer; each batch is sampled with the version that can be loaded when the window lets it in. A
    version that is published late (in the next step) holds admission back, never the law."""

    async def simulate():
        window, sampled = StalenessWindow(max_lag), {}

        async def feed():
            for batch in range(8):
                await window.wait_to_issue(batch)
                sampled[batch] = window.published

        async def publish(version):
            for _ in range(publish_turns):
                await asyncio.sleep(0)
            await window.publish(version)

        async def train():
            written = None
            for step in range(8):
                while step not in sampled:
                    await asyncio.sleep(0)
                assert sampled[step] >= max(window.oldest_allowed(), window.needed_for(step))
                if written is not None:
                    await written  # the optimizer waits for the version before
                window.advance(step + 1)
                written = asyncio.create_task(publish(step + 1))
            await window.wait_published(8)

        await asyncio.wait_for(asyncio.gather(feed(), train()), timeout=5)
        return sampled

    sampled = asyncio.run(simulate())
    lags = [batch - version for batch, version in sorted(sampled.items())]
    assert lags == [min(b, max_lag) for b in range(8)]


def test_version_rises_by_one_per_global_batch():
    window = StalenessWindow(1)
    with pytest.raises(ValueError, match="0 -> 2"):
        window.advance(2)


def test_admission_follows_the_published_version_and_the_law_the_trained_one():
    window = StalenessWindow(1)
    window.advance(1)
    assert window.oldest_allowed() == 0 and not window.may_issue(2)
    asyncio.run(window.publish(1))
    assert window.may_issue(2) and not window.may_issue(3)


@pytest.mark.parametrize("version", [0, 2])
def test_only_a_trained_version_that_is_newer_can_be_published(version):
    window = StalenessWindow(1)
    window.advance(1)
    with pytest.raises(ValueError, match=f"version {version} cannot be published: 0 is, 1 is trained"):
        asyncio.run(window.publish(version))


def test_issued_equals_trained_plus_dropped_plus_open():
    window = StalenessWindow(1)
    window.issued, window.trained = 20, 12
    window.dropped.update({"stale": 3, "unscored": 1})
    assert window.open == 4


@pytest.mark.parametrize("version", [0, 1, 10])
@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_the_window_is_the_published_bounds_on_staleness(max_lag, version):
    """F23: (max_lag + version + 1) batches are issued at most, those in flight and accepted included. F24: of these
    (1 + max_lag) are not trained yet, and what is open comes off. F25: with steps that count from 1, tokens are as old
    as (step - 1) - max_lag."""
    window, rows = StalenessWindow(max_lag, version), 64
    admitted = rows * sum(window.may_issue(batch) for batch in range(100))
    assert admitted == (max_lag + version + 1) * rows
    assert admitted - version * rows == (1 + max_lag) * rows
    step = version + 1
    assert window.oldest_allowed() == (step - 1) - max_lag
    if (max_lag, version) == (4, 10):
        assert admitted - 900 == 60
