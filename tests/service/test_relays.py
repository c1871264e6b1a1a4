"""Which node gets a relay file, a server, a mirror: pure, from places of processes."""

from mindspeed_asyncflow.service.relays import Place, over_loopback, plan_relays

A, B, C = Place("a", "10.0.0.1"), Place("b", "10.0.0.2"), Place("c", "10.0.0.3")


def paths(relays):
    return [rank.path for rank in relays.ranks] + [mirror.path for mirror in relays.mirrors]


def test_on_one_node_there_is_one_file_that_all_ranks_write_and_nothing_else():
    relays = plan_relays([A, A], [A, A])
    assert [rank.writers for rank in relays.ranks] == [(0, 1)] * 2 and len(set(paths(relays))) == 1
    assert relays.servers == {} and relays.mirrors == ()


def test_only_replicas_elsewhere_use_a_mirror_and_those_of_one_node_share_it():
    relays = plan_relays([A, A], [B, A, C, B])
    assert [(m.ip, m.replicas) for m in relays.mirrors] == [(B.ip, (0, 3)), (C.ip, (2,))]
    assert relays.servers == {0: A.ip}
    assert len(set(paths(relays))) == 3


def test_trainers_on_two_nodes_write_and_serve_a_file_each_and_every_replica_needs_both():
    relays = plan_relays([A, B, A, B], [B, C])
    assert [rank.writers for rank in relays.ranks] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert relays.ranks[0] == relays.ranks[2] != relays.ranks[1]
    assert relays.servers == {0: A.ip, 1: B.ip}
    assert [m.replicas for m in relays.mirrors] == [(0,), (1,)]
    assert len(set(paths(relays))) == 4  # also where two nodes of Ray share a machine's memory


def test_a_mirror_can_be_asked_for_on_the_trainers_node():
    relays = plan_relays([A], [A, A], always_mirror=True)
    assert [(m.ip, m.replicas) for m in relays.mirrors] == [(A.ip, (0, 1))] and relays.servers == {0: A.ip}


def test_processes_listen_on_the_loopback_as_long_as_one_node_has_them_all():
    assert over_loopback({"driver": A, "dock0": A}) == {name: Place("a", "127.0.0.1") for name in ("driver", "dock0")}
    assert over_loopback({"driver": A, "dock0": B}) == {"driver": A, "dock0": B}
