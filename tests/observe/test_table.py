"""Rules of the metric table itself."""

from mindspeed_asyncflow.observe.table import METRICS


def test_names_are_unique_and_every_row_is_documented():
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names))
    for m in METRICS:
        assert m.unit and m.definition.endswith("."), m.name


def test_no_two_metrics_share_a_part_unless_one_is_the_denominator_of_others():
    parts = [m.part for m in METRICS if m.reducer != "ess"]
    assert len(parts) == len(set(parts))


def test_means_have_a_denominator_that_is_itself_summed_and_others_have_none():
    summed = {m.part for m in METRICS if m.reducer == "sum"}
    for m in METRICS:
        if m.reducer in ("mean", "ess"):
            assert m.per in summed, m.name
        else:
            assert not m.per, m.name


def test_parts_end_in_the_word_that_says_how_they_merge():
    endings = {"mean": ("_sum",), "sum": ("_sum", "_count"), "max": ("max",), "min": ("min",)}
    for m in METRICS:
        if m.reducer in endings:
            assert m.part.endswith(endings[m.reducer]), m.name


def test_a_verl_alias_belongs_to_one_metric():
    aliases = [m.alias for m in METRICS if m.alias]
    assert len(aliases) == len(set(aliases))
