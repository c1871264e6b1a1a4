import pytest

from mindspeed_asyncflow.config.schema import Config
from mindspeed_asyncflow.service.wiring import leaders, replica_of


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), [(1, 1, 1, 1), (2, 1, 1, 2), (2, 1, 2, 2), (1, 2, 3, 2)])
def test_every_replica_has_one_leader_and_equally_many_ranks(tp, cp, dp, pp):
    config = Config.model_validate(
        {"trainer": {"tensor_parallel": tp, "context_parallel": cp, "data_parallel": dp, "pipeline_parallel": pp}}
    )
    ranks = [replica_of(config, r) for r in range(config.trainer.world_size)]
    assert [ranks.count(replica) for replica in range(dp)] == [tp * cp * pp] * dp
    assert [ranks[leader] for leader in leaders(config)] == list(range(dp))
