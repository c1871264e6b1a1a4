"""Which node gets a relay file and a server, and who maps it: pure, from places of processes."""

from mindspeed_asyncflow.service.relays import Place, over_loopback, plan_relays

A, B, C = Place("a", "10.0.0.1"), Place("b", "10.0.0.2"), Place("c", "10.0.0.3")


def test_on_one_node_there_is_one_file_that_all_ranks_write_and_its_replicas_map():
    relays = plan_relays([A, A])
    assert [rank.writers for rank in relays.ranks] == [(0, 1)] * 2 and len({rank.path for rank in relays.ranks}) == 1
    assert relays.maps(A) and not relays.maps(B)
    assert relays.servers == {0: A.ip}


def test_trainers_on_two_nodes_write_and_serve_a_file_each_and_no_replica_maps_all_of_it():
    relays = plan_relays([A, B, A, B])
    assert [rank.writers for rank in relays.ranks] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert relays.ranks[0] == relays.ranks[2] != relays.ranks[1]
    assert relays.ranks[0].path != relays.ranks[1].path  # also where two nodes of Ray share a machine's memory
    assert relays.servers == {0: A.ip, 1: B.ip}
    assert not any(map(relays.maps, (A, B, C)))


def test_a_mirror_can_be_asked_for_on_the_trainers_node():
    assert not plan_relays([A], always_mirror=True).maps(A)


def test_processes_listen_on_the_loopback_as_long_as_one_node_has_them_all():
    assert over_loopback({"driver": A, "dock0": A}) == {name: Place("a", "127.0.0.1") for name in ("driver", "dock0")}
    assert over_loopback({"driver": A, "dock0": B}) == {"driver": A, "dock0": B}
