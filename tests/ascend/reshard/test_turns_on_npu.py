"""Allgather-swap on the NPU platform: the product's path over a stand-in for torch_npu's device and for HCCL."""

import pytest

from tests.ascend.reshard import turns_ranks
from tests.reshard.ranks import Ranks
from tests.reshard.test_in_place import CASES

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4, turns_ranks.MODULES) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_calls_on_an_npu_are_those_on_a_cpu_and_so_is_every_bit(ranks, case):
    """Collectives, releases, restores and copies, each thread's in their order."""
    on_npu = ranks.run(turns_ranks.turns, case=case, name="npu", times=2)
    on_cpu = ranks.run(turns_ranks.turns, case=case, name="cpu", times=2)
    for there, here in zip(on_npu, on_cpu):
        assert there["calls"] == here["calls"]
        assert there["books"] == here["books"]
        assert there["group_bytes"] == 2 * MIB  # the smallest buffer, twice; a CPU has none
        assert here["group_bytes"] == 0
        kinds = {thread: {call[0] for call in calls} for thread, calls in there["calls"].items()}
        assert {"new_group", "all_reduce", "release", "restore"} <= kinds["main"]
        assert {"copy", "release", "pin"} <= kinds["swap-out"]
        assert kinds["swap-back"] == {"copy"}
    assert any(call[0] == "batch" for call in on_npu[0]["calls"]["main"])


def test_a_pair_of_layouts_has_one_group_for_all_its_turns(ranks):
    for seen in ranks.run(turns_ranks.turns, case=CASES[0], name="npu", times=3):
        groups = [call for call in seen["calls"]["main"] if call[0] == "new_group"]
        assert groups == [("new_group", (0, 1, 2, 3))]


def test_a_peer_that_is_silent_ends_the_wait_at_its_deadline(ranks):
    """A handle of HCCL waits for nobody and knows no deadline."""
    late, *others = ranks.run(turns_ranks.with_a_silent_peer, wait_s=0.5)
    for rank, (seconds, said) in enumerate(others, 1):
        assert said.startswith(f"DeadlineExceeded: rank {rank} waited")
        assert 0.5 <= seconds < 1.5  # its peer's silence is as long
    assert late[1] == ""  # the others' part was under way


def test_what_the_device_reports_as_failed_is_a_lost_peer(ranks):
    for said in ranks.run(turns_ranks.failed_work):
        assert said.startswith("rank 7 lost a peer, bucket 2: the device reports that it failed")


def test_buffers_are_no_larger_than_a_bucket_and_the_bound_of_the_environment(ranks):
    def size(bucket_bytes: int, **environment: str):
        return ranks.run(turns_ranks.without_room, bucket_bytes=bucket_bytes, environment=environment)[0]

    assert size(64 * MIB) == (128 * MIB, "")
    assert size(300 * MIB) == (400 * MIB, "")
    assert size(64 * MIB, HCCL_BUFFSIZE="16") == (32 * MIB, "")


def test_a_group_without_room_is_refused_before_it_is_made_and_the_knob_named(ranks):
    made, said = ranks.run(turns_ranks.without_room, bucket_bytes=600 * MIB, environment={"HCCL_BUFFSIZE": "600"})[0]
    assert made == 0
    assert said.startswith("PlatformError: the group of TP2 to TP1 takes 1200 MiB of device memory for its buffers")
    assert "1024 MiB are free" in said and "set HCCL_BUFFSIZE" in said


def test_a_storage_is_freed_when_its_copy_is_done_and_not_before(ranks):
    assert ranks.run(turns_ranks.hasty_swap, hasty=False) == ["None"] * 4
    for said in ranks.run(turns_ranks.hasty_swap, hasty=True):  # the stand-in sees it
        assert said == "a storage was freed under a copy that is still to be done"


def test_a_copy_beside_the_computation_needs_pinned_memory(ranks):
    for said in ranks.run(turns_ranks.unpinned):
        assert "pinned memory" in said


def test_a_message_with_gaps_is_refused_by_name(ranks):
    for rank, said in enumerate(ranks.run(turns_ranks.with_gaps)):
        assert said.startswith(
            f"rank {rank}, bucket 3, step 0: 0 bytes from rank {(rank + 1) % 4}: (4,) with strides (2,)"
        )
