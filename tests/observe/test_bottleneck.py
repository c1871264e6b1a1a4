"""The sentence names the side that others wait for, and advises only what can help."""

import itertools
import re
from dataclasses import replace

import pytest

from mindspeed_asyncflow.config import describe_keys, parse_config
from mindspeed_asyncflow.config.checks import check
from mindspeed_asyncflow.config.machine import Machine
from mindspeed_asyncflow.observe.bottleneck import MOST_LAG, Sizes, averaged, bottleneck, kind, whole_run

ONE_NODE = Sizes(replicas=2, data_parallel=2)
BOX = Machine(cpus=2, npus=0, memory_bytes=1 << 36, free_memory_bytes=1 << 36, shm_bytes=1 << 34, disk_bytes=1 << 40)
NODE = replace(BOX, npus=16)
DRIVEN = Sizes.of(parse_config("service: {prompts: client, rewards: client}"), NODE)


def said(trainer, rollout, sizes=ONE_NODE, **more):
    return bottleneck({"idle/trainer": trainer, "idle/rollout": rollout, **more}, sizes)


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        (
            said(0.31, 0.12, Sizes(nodes=4)),
            "rollout-bound: trainer waits 31 %; try workflow.max_lag 2 or move one node to rollout",
        ),
        (said(0.31, 0.02), "rollout-bound: trainer waits 31 %; try rollout.replicas 3 and trainer.data_parallel 1"),
        (said(0.31, 0.02, Sizes()), "rollout-bound: trainer waits 31 %; try rollout.replicas 2"),
        (said(0.02, 0.4), "trainer-bound: rollout waits 40 %; try trainer.data_parallel 3 and rollout.replicas 1"),
        (said(0.02, 0.4, Sizes(nodes=2)), "trainer-bound: rollout waits 40 %; try move one node to the trainer"),
        (said(0.04, 0.06), "balanced: trainer waits 4 %, rollout waits 6 %"),
        (
            said(0.45, 0.5, Sizes(max_lag=0)),
            "trainer and rollout wait for each other, 45 % and 50 %; try workflow.max_lag 1",
        ),
        (
            said(0.3, 0.3, Sizes(max_lag=2)),
            "trainer and rollout wait for each other, 30 % and 30 %; try workflow.max_lag 3 with "
            "workflow.keep_versions 4",
        ),
        (
            said(0.4, 0.55, Sizes(overlap=False, max_lag=0)),
            "trainer-bound: rollout waits 55 %; try workflow.overlap true or trainer.data_parallel 2",
        ),
        (
            said(0.3, 0.1, **{"queue/reward": 200}),
            "scorer-bound: trainer waits 30 %, 200 answers wait for a score; try reward.workers 2",
        ),
        (
            said(0.6, 0.5, Sizes(shared=True)),
            "taking turns: rollout 50 %, trainer 40 %, neither 10 % of the time",
        ),
        (
            said(0.9, 0.9, DRIVEN),
            "waiting for the client: trainer waits 90 %, rollout waits 90 % (service.prompts, service.rewards)",
        ),
        (
            said(0.9, 0.9, DRIVEN, **{"queue/reward": 200}),
            "waiting for the client: trainer waits 90 %, 200 answers wait for its rewards; try to score several groups "
            "at the same time",
        ),
        (said(0.31, 0.02, DRIVEN), "rollout-bound: trainer waits 31 %; try rollout.replicas 2"),
        (bottleneck({"idle/trainer": 0.5}, ONE_NODE), ""),
    ],
)  # fmt: skip
def test_the_sentence(sentence, expected):
    assert sentence == expected


GRID = list(itertools.product([i / 20 for i in range(21)], repeat=2))


def test_more_lag_is_advised_only_where_both_sides_wait_and_never_beyond_the_bound():
    for (trainer, rollout), lag in itertools.product(GRID, range(7)):
        sentence = said(trainer, rollout, Sizes(max_lag=lag, keep_versions=lag + 1))
        advised = re.findall(r"workflow\.max_lag (\d+)", sentence)
        assert (advised == [str(lag + 1)]) == (min(trainer, rollout) >= 0.1 and lag < MOST_LAG), sentence
        if advised:
            assert f"workflow.keep_versions {lag + 2}" in sentence


def test_a_side_that_is_busy_is_never_given_less_and_one_that_waits_never_more():
    for trainer, rollout in GRID:
        sentence = said(trainer, rollout)
        if "rollout.replicas 3" in sentence:
            assert trainer >= 0.1 and trainer > rollout
        if "trainer.data_parallel 3" in sentence:
            assert rollout >= 0.1 and rollout > trainer


def test_every_setting_that_is_advised_exists():
    keys = {doc.path for doc in describe_keys()}
    sizes = [Sizes(), ONE_NODE, Sizes(overlap=False), Sizes(shared=True), Sizes(max_lag=0), Sizes(nodes=2)]
    for (trainer, rollout), size, queue in itertools.product(GRID, sizes, (0, 999)):
        named = re.findall(r"[a-z]+\.[a-z_]+", said(trainer, rollout, size, **{"queue/reward": queue}))
        assert set(named) <= keys


def test_sizes_are_those_of_the_settings():
    config = parse_config('{"rollout": {"replicas": 24}, "trainer": {"data_parallel": 8}, "reward": {"workers": 3}}')
    sizes = Sizes.of(config, NODE)
    per_node = config.cluster.device.devices_per_node
    assert (sizes.replicas, sizes.data_parallel, sizes.scorers, sizes.max_lag) == (24, 8, 3, 1)
    assert sizes.nodes == -(-32 // per_node)
    turns = config.model_copy(update={"workflow": config.workflow.model_copy(update={"schedule": "colocated"})})
    assert Sizes.of(turns, NODE).shared and Sizes.of(turns, NODE).nodes == -(-8 // per_node)


@pytest.mark.parametrize("cpus", range(1, 9))
def test_what_is_advised_on_cpus_never_lets_processes_take_turns(cpus):
    """Whatever is said to be tried, `asyncflow check` has no warning about CPUs for it."""
    box = replace(BOX, cpus=cpus)
    for ranks, tensor, replicas, threads, shares in itertools.product(
        (1, 2, 3), (1, 2), (1, 2), (1, 2), ((0.3, 0.0), (0.0, 0.3), (0.3, 0.15), (0.15, 0.3))
    ):
        settings = [f"trainer.data_parallel={ranks}", f"trainer.tensor_parallel={tensor}", f"rollout.threads={threads}"]
        config = parse_config(f"rollout: {{replicas: {replicas}}}", settings)
        sentence = said(*shares, Sizes.of(config, box))
        advised = re.findall(r"((?:trainer|rollout)\.\w+) (\d+)", sentence)
        tried = parse_config(f"rollout: {{replicas: {replicas}}}", [*settings, *(f"{k}={v}" for k, v in advised)])
        warned = [f for f in check(tried, box) if "CPUs wanted" in f.message]
        assert not (advised and warned), (settings, sentence, warned)
        if not advised:
            assert "max_lag" in sentence or sentence.endswith(
                ("no CPUs for more replicas", "no CPUs for more trainer ranks")
            )


def test_on_two_cpus_a_rank_and_a_replica_are_all_and_on_npus_cpus_do_not_count():
    config = parse_config("{}")
    assert said(0.0, 0.21, Sizes.of(config, BOX)) == (
        "trainer-bound: rollout waits 21 %; the machine has no CPUs for more trainer ranks"
    )
    assert kind(said(0.0, 0.21, Sizes.of(config, BOX))) == "trainer-bound"
    for sizes in (Sizes.of(config, NODE), Sizes.of(config, replace(BOX, cpus=3))):
        assert said(0.0, 0.21, sizes) == "trainer-bound: rollout waits 21 %; try trainer.data_parallel 2"


def test_steps_are_averaged_over_those_that_have_a_value():
    steps = [{"idle/trainer": 0.2, "idle/rollout": None}, {"idle/trainer": 0.4, "idle/rollout": 0.1}, {"x": 1.0}]
    assert averaged(steps) == pytest.approx({"idle/trainer": 0.3, "idle/rollout": 0.1})


def test_a_whole_run_has_the_mean_of_its_replicas_and_of_what_waited():
    found = whole_run({"trainer": 0.3, "rollout0": 0.1, "rollout1": 0.2}, [10.0, 20.0])
    assert found == pytest.approx({"idle/trainer": 0.3, "idle/rollout": 0.15, "queue/reward": 15.0})
    assert whole_run({"trainer": 0.3}, [])["idle/rollout"] == 0  # no replica was there at the end


def test_the_kind_is_its_first_words():
    assert [kind(said(*shares)) for shares in ((0.5, 0.0), (0.0, 0.5), (0.0, 0.0), (0.5, 0.5))] == [
        "rollout-bound",
        "trainer-bound",
        "balanced",
        "trainer and rollout wait for each other",
    ]
