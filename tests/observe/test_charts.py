"""Pictures are well-formed and show every finite value inside their frame."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from mindspeed_asyncflow.observe.charts import Bar, H, Series, W, bar_chart, gantt, line_chart, ticks

SHAPES = [
    [(0, 0.0)],
    [(0, 0.0), (1, 0.0)],
    [(0, -3.0), (1, 5e6), (2, math.nan), (3, 1e-9)],
    [(7, 2.0), (8, math.inf), (9, 2.0)],
]


def parse(html: str) -> ET.Element:
    return ET.fromstring(f"<div>{html}</div>")


@pytest.mark.parametrize("points", SHAPES)
def test_lines_stay_in_the_frame(points):
    root = parse(line_chart([Series("a < b", points)]))
    path = "".join(e.get("d", "") for e in root.iter("path"))
    coordinates = [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+),([-\d.]+)", path)]
    coordinates += [(float(e.attrib["cx"]), float(e.attrib["cy"])) for e in root.iter("circle")]
    assert len(coordinates) == sum(math.isfinite(y) for _, y in points)
    assert all(0 <= x <= W and 0 <= y <= H for x, y in coordinates)


def test_a_value_that_is_not_finite_leaves_a_gap():
    root = parse(line_chart([Series("a", [(0, 1.0), (1, 2.0), (2, math.nan), (3, 1.0), (4, 2.0)])]))
    assert next(root.iter("path")).get("d", "").count("M") == 2


def test_ticks_are_round_and_inside():
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 3) == [3]
    assert all(-7 <= t <= 123 for t in ticks(-7, 123))


def test_bars_show_shares():
    text = "".join(parse(bar_chart(["0", "1"], [1, 3], x_label="lag")).itertext())
    assert "25%" in text and "75%" in text


def test_a_span_that_leaves_the_window_is_cut_at_it():
    root = parse(gantt([("trainer", [Bar("step", -5.0, 50.0)])], 10.0))
    bar = next(root.iter("rect"))
    assert float(bar.attrib["x"]) >= 150 and float(bar.attrib["x"]) + float(bar.attrib["width"]) <= 991


def test_more_names_than_colours_share_the_last_one():
    bars = [Bar(f"name{i}", i, i + 1 - i / 100) for i in range(12)]
    html = gantt([("lane", bars)], 12.0)
    assert "others" in html and "c8" not in html
