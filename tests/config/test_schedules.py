"""Rules between the settings of the workflow: what cannot work together is refused with the keys to turn."""

import pytest

from mindspeed_asyncflow.config.schedules import rules
from mindspeed_asyncflow.config.schema import Config


def errors_of(**sections):
    return [keys for level, keys, _ in rules(Config.model_validate(sections)) if level == "error"]


@pytest.mark.parametrize(
    ("sections", "first_keys"),
    [
        ({"workflow": {"schedule": "colocated", "max_lag": 1}}, "workflow.schedule"),
        ({"workflow": {"schedule": "colocated", "max_lag": 0, "update": "in_flight"}}, "workflow.schedule"),
        ({"workflow": {"schedule": "colocated", "max_lag": 0}, "rollout": {"replicas": 2}}, "workflow.schedule"),
        ({"workflow": {"lend": True, "max_lag": 0}}, "workflow.lend"),
        ({"workflow": {"lend": True}, "rollout": {"tensor_parallel": 2}}, "workflow.lend"),
        ({"workflow": {"partial_rounds": 2, "max_lag": 0}}, "workflow.partial_rounds"),
        ({"workflow": {"partial_rounds": 9}}, "workflow.partial_rounds"),
        ({"workflow": {"repack_below": 2}}, "workflow.repack_below"),
        ({"workflow": {"lanes": 2}}, "workflow.lanes"),
        ({"workflow": {"take": "ready", "max_lag": 0}}, "workflow.take"),
        ({"workflow": {"stale": "mask", "max_lag": 0}}, "workflow.stale"),
        ({"workflow": {"oversample": 2, "overlap": False, "max_lag": 0}}, "workflow.oversample"),
        ({"rollout": {"min_replicas": 2}}, "rollout.min_replicas"),
        ({"rollout": {"min_replicas": 1, "replicas": 2}, "workflow": {"max_lag": 0}}, "rollout.min_replicas"),
    ],
)
def test_schedules_that_cannot_work_are_refused_with_their_keys(sections, first_keys):
    assert [keys[0] for keys in errors_of(**sections)] == [first_keys]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"workflow": {"schedule": "colocated", "max_lag": 0}},
        {
            "workflow": {"schedule": "colocated", "max_lag": 0},
            "trainer": {"tensor_parallel": 2},
            "rollout": {"tensor_parallel": 2},
        },
        {"workflow": {"lend": True, "max_lag": 2}},
        {"workflow": {"partial_rounds": 2, "stale": "mask", "take": "ready", "oversample": 1.5}},
        {"workflow": {"lanes": 2, "update": "in_flight"}},
        {"workflow": {"repack_below": 4}, "rollout": {"replicas": 2, "min_replicas": 1}},
    ],
)
def test_schedules_that_work_have_no_error(sections):
    assert errors_of(**sections) == []


def test_what_may_be_open_is_the_admission_bound_with_the_surplus_of_oversampling():
    config = Config.model_validate({"workflow": {"max_lag": 2, "groups_per_step": 10, "oversample": 1.25}})
    assert config.most_samples_open == (2 * 10 + 13) * config.algorithm.group_size


def test_loading_in_flight_without_lag_is_said_to_have_no_effect():
    def warned(**workflow):
        found = rules(Config.model_validate({"workflow": workflow}))
        return [keys[0] for level, keys, text in found if level == "warning" and "in_flight" in text]

    assert warned(max_lag=0, update="in_flight") == ["workflow.update"]
    assert warned(max_lag=1, update="in_flight") == warned(max_lag=0, update="delayed") == []
