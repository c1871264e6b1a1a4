"""The sentence names the side that others wait for, and advises only what can help."""

import itertools
import re

import pytest

from mindspeed_asyncflow.config import describe_keys, parse_config
from mindspeed_asyncflow.observe.bottleneck import MOST_LAG, Sizes, averaged, bottleneck, kind, whole_run

ONE_NODE = Sizes(replicas=2, data_parallel=2)
DRIVEN = Sizes.of(parse_config("service: {prompts: client, rewards: client}"))


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
    sizes = Sizes.of(config)
    per_node = config.cluster.device.devices_per_node
    assert (sizes.replicas, sizes.data_parallel, sizes.scorers, sizes.max_lag) == (24, 8, 3, 1)
    assert sizes.nodes == -(-32 // per_node)
    turns = config.model_copy(update={"workflow": config.workflow.model_copy(update={"schedule": "colocated"})})
    assert Sizes.of(turns).shared and Sizes.of(turns).nodes == -(-8 // per_node)


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
