"""Options of the NPU memory allocator."""

import pytest

from mindspeed_asyncflow.errors import PlatformError
from mindspeed_asyncflow.platforms.allocator import GENERAL, OWN, allocator_environment


@pytest.mark.parametrize(
    "present, wanted",
    [
        ({}, {OWN: "expandable_segments:False"}),
        ({OWN: "expandable_segments:True"}, {OWN: "expandable_segments:False"}),
        ({OWN: "page_size:1g, expandable_segments:True"}, {OWN: "page_size:1g,expandable_segments:False"}),
        ({OWN: "max_split_size_mb:64"}, {OWN: "max_split_size_mb:64,expandable_segments:False"}),
        ({GENERAL: "page_size:1g"}, {GENERAL: "page_size:1g,expandable_segments:False"}),
    ],
)
def test_other_options_stay_and_the_variable_that_is_in_use_is_kept(present, wanted):
    assert allocator_environment(present, False, "k") == wanted


def test_growing_segments_and_options_that_exclude_them_are_refused_with_the_setting():
    present = {OWN: "garbage_collection_threshold:0.8"}
    with pytest.raises(PlatformError, match=r"garbage_collection_threshold:0\.8.*set placement\.x=false"):
        allocator_environment(present, True, "placement.x")


def test_both_variables_at_once_are_refused():
    with pytest.raises(PlatformError, match="unset PYTORCH_ALLOC_CONF"):
        allocator_environment({OWN: "a:1", GENERAL: "b:2"}, True, "k")
