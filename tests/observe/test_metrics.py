"""Parts from ranks and micro-batches become one set of metrics."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_asyncflow.errors import MetricError
from mindspeed_asyncflow.observe.metrics import check_names, describe, merge_parts, metrics_page, reduce_sums

PARTS = [
    {"actor/pg_clipfrac_sum": 3.0, "actor/tokens_count": 10.0, "actor/ratio_max": 1.5, "actor/ratio_min": 0.5},
    {"actor/pg_clipfrac_sum": 0.0, "actor/tokens_count": 90.0, "actor/ratio_max": 1.1, "actor/ratio_min": 0.9},
    {"actor/pg_clipfrac_sum": 1.0, "actor/tokens_count": 0.0, "actor/ratio_max": 2.5, "actor/ratio_min": 0.1},
]


def test_a_mean_weighs_tokens_not_micro_batches():
    values = reduce_sums(PARTS[:2])
    assert values["actor/pg_clipfrac"] == pytest.approx(3 / 100)  # the mean of means would be 0.15
    assert values["actor/tokens_count"] == 100


def test_the_order_and_the_grouping_of_parts_do_not_matter():
    whole = reduce_sums(PARTS)
    for order in itertools.permutations(PARTS):
        assert reduce_sums(order) == whole
        assert reduce_sums([merge_parts(order[:2]), order[2]]) == whole
    assert (whole["actor/ratio_max"], whole["actor/ratio_min"]) == (2.5, 0.1)


def test_names_that_end_in_mean_drop_the_word_in_their_part():
    values = reduce_sums([{"reward_sum": 6.0, "samples_count": 8.0}, {"staleness/worst_sum": 4.0}])
    assert values["reward/mean"] == 0.75
    assert values["staleness/worst_mean"] == 0.5


def test_effective_sample_size_follows_its_definition():
    w = np.minimum(np.array([0.3, 1.0, 1.7, 3.0, 0.9]), 2.0)  # truncated at 2
    parts = [
        {
            "rollout_corr/is_sum": w[i].sum(),
            "rollout_corr/is_sq_sum": (w[i] ** 2).sum(),
            "actor/tokens_count": len(w[i]),
        }
        for i in (slice(0, 2), slice(2, 5))
    ]
    expected = 1 / np.mean((w / w.mean()) ** 2)
    assert reduce_sums(parts)["rollout_corr/is_eff_sample_size"] == pytest.approx(expected)


def test_no_tokens_gives_nan_not_an_error():
    assert math.isnan(reduce_sums([{"actor/entropy_sum": 0.0, "actor/tokens_count": 0.0}])["actor/entropy"])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nan_survives_a_maximum_in_any_order(order):
    parts = [{"actor/ratio_max": math.nan}, {"actor/ratio_max": 1.0}]
    assert math.isnan(reduce_sums([parts[i] for i in order])["actor/ratio_max"])


def test_an_unknown_part_is_refused_with_the_nearest_names():
    with pytest.raises(MetricError, match="actor/pg_clipfrac_sum"):
        reduce_sums([{"actor/pg_clipfraction_sum": 1.0}])


def test_a_finished_mean_sent_as_a_part_is_refused_with_the_right_key():
    with pytest.raises(MetricError, match="send it as 'reward_sum'"):
        reduce_sums([{"reward/mean": 0.5}])


def test_a_numerator_without_its_denominator_is_refused():
    with pytest.raises(MetricError, match="denominator 'actor/tokens_count'"):
        reduce_sums([{"actor/entropy_sum": 1.0}])


def test_unknown_metric_names_are_refused_with_the_nearest_one():
    check_names({"reward/mean": 1, "timing_s/step": 2})
    with pytest.raises(MetricError, match="nearest: reward/mean"):
        check_names({"reward/meen": 1})


def test_describe_gives_mean_max_min_and_nothing_for_no_values():
    assert describe("response_length", [1, 2, 6]) == {
        "response_length/mean": 3.0,
        "response_length/max": 6.0,
        "response_length/min": 1.0,
    }
    assert describe("response_length", []) == {}


def test_the_page_in_docs_is_the_table():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == metrics_page(), (
        "python -m mindspeed_asyncflow.observe.metrics > docs/metrics.md"
    )


def test_observe_loads_neither_torch_nor_tensorflow_nor_matplotlib(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from mindspeed_asyncflow.observe import log, metrics, progress, report, run_folder, summary, trace, writers\n"
        "assert 'tensorboard' not in sys.modules\n"
        f"folder = run_folder.RunFolder.create({str(tmp_path)!r}, 'x', '')\n"
        "from mindspeed_asyncflow.observe.trackers import EventFiles, Trackers\n"
        "trackers = Trackers({'tensorboard': lambda: EventFiles(folder.tensorboard)})\n"
        "writer = writers.MetricsWriter(folder, trackers); writer.write(0, {'actor/lr': 1.0}); writer.close()\n"
        "assert trackers.names == () and list(folder.tensorboard.iterdir())\n"
        "print([m for m in ('torch', 'tensorflow', 'matplotlib', 'ray') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
