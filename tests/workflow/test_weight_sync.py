import asyncio

import numpy as np
import pytest

from mindspeed_asyncflow.errors import WeightSyncError
from mindspeed_asyncflow.records import UpdateReport, WeightManifest
from mindspeed_asyncflow.workflow.weight_sync import WeightSync

PROBE = [(np.array([1, 2], np.int32), np.array([3, 4], np.int32))]


def manifest(version, fingerprint="f"):
    return WeightManifest(version, "nowhere", 0, 0, (), f"{fingerprint}{version}")


class Replica:
    """Serves version v with log-probabilities -v; `fault` breaks it in a named way."""

    def __init__(self, fault=""):
        self.version, self.fault = 0, fault

    async def load(self, m):
        if self.fault != "did not load":
            self.version = m.version
        fingerprint = "other" if self.fault == "other bytes" else m.fingerprint
        return UpdateReport(m.version, 0.01, fingerprint)

    async def score(self, sequences):
        return (1 if self.fault == "did not load" else self.version), [np.full(2, -float(self.version), np.float32)]


def bring_up(replica):
    sync = WeightSync([replica], "float32")
    sync.probe = PROBE
    sync.publish(manifest(1), [np.full(2, -1.0, np.float32)])
    asyncio.run(sync.bring_up(0))
    return sync


def test_a_correct_load_is_served_and_measured():
    sync = bring_up(Replica())
    assert sync.served == [1] and sync.gap_max == 0.0 and not sync.is_behind(0)


@pytest.mark.parametrize("fault", ["did not load", "other bytes"])
def test_weights_that_are_not_the_published_ones_stop_the_run(fault):
    with pytest.raises(WeightSyncError, match="rollout0"):
        bring_up(Replica(fault))


def test_a_nan_in_the_engine_is_not_taken_for_a_small_gap():
    class Broken(Replica):
        async def score(self, sequences):
            return self.version, [np.full(2, np.nan, np.float32)]

    with pytest.raises(WeightSyncError, match="nan"):
        bring_up(Broken())


def test_a_replica_that_skips_versions_is_compared_at_the_one_it_serves():
    sync = WeightSync([Replica()], "float32")
    sync.probe = PROBE
    for version in (1, 2, 3):
        sync.publish(manifest(version), [np.full(2, -float(version), np.float32)])
    asyncio.run(sync.bring_up(0))
    assert sync.served == [3] and sync.gap_max == 0.0
