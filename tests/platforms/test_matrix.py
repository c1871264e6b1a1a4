import pytest

from mindspeed_asyncflow.platforms import matrix


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.10.0.post4", (2, 10, 0, 4)),
        ("2.13.0+cpu", (2, 13, 0)),
        ("0.25.1rc1", (0, 25, 1)),
        ("25.0.rc1.1", (25, 0)),
        ("2.7.1.post2+git5dd8ef3", (2, 7, 1, 2)),
        ("", ()),
    ],
)
def test_versions_are_compared_by_their_numbers(version, numbers):
    assert matrix.numbers(version) == numbers


def test_every_row_names_its_source_and_a_torch_npu_that_its_toolkit_has():
    for row in matrix.TRAINER:
        assert row.source and row.torch_npu in matrix.TORCH_NPU[row.cann[0]]
    for row in matrix.ROLLOUT:
        assert row.source and row.torch_npu in matrix.TORCH_NPU[row.cann]


def test_rows_of_replicas_rise_so_that_the_newest_fitting_one_is_found():
    versions = [matrix.numbers(row.vllm_ascend) for row in matrix.ROLLOUT]
    assert versions == sorted(versions)


@pytest.mark.parametrize(
    ("driver", "eager", "levels"), [("", True, ["warning"]), ("25.5.1", False, []), ("26.0.rc1", False, [])]
)
def test_a_driver_is_judged_by_what_graphs_want(driver, eager, levels):
    assert [level for level, _ in matrix.check_driver(driver, eager=eager)] == levels
