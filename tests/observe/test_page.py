"""The page loads nothing and names every colour that charts use, in light and dark."""

from mindspeed_asyncflow.observe.charts import COLORS
from mindspeed_asyncflow.observe.page import page


def test_every_chart_colour_has_a_light_and_a_dark_value():
    html = page("t", "")
    for i in range(COLORS):
        assert html.count(f"--c{i}:#") == 2
        assert f".c{i}{{--c:var(--c{i})}}" in html


def test_the_title_is_text():
    assert "<b>" not in page("<b>", "")
