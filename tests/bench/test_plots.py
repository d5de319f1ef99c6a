"""Charts: well-formed, to scale, and of any data."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from foretell.bench.plots import bar_chart, histogram, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def parsed(text: str) -> ET.Element:
    """The chart as a tree; names of colours are used and nothing comes from elsewhere."""
    assert "href" not in text
    assert "url(" not in text
    return ET.fromstring(text)


def texts(chart: str) -> list[str]:
    return [node.text or "" for node in parsed(chart).iter(f"{SVG}text")]


def lines(chart: str) -> list[list[tuple[float, float]]]:
    """Points of each line of a line chart, in the picture's units."""
    found = [n.get("d", "") for n in parsed(chart).iter(f"{SVG}path") if n.get("class") == "line"]
    point = re.compile(r"(-?[\d.]+) (-?[\d.]+)")
    drawn = [d for d in found if "h22" not in d]
    return [[(float(a), float(b)) for a, b in point.findall(d)] for d in drawn]


def test_points_lie_to_scale_inside_the_picture() -> None:
    chart = line_chart({"a": [(0, 0.0), (5, 0.5), (10, 1.0)]}, "T", "step", "share", percent=True)
    ((left, bottom), (middle, half), (right, top)) = lines(chart)[0]
    assert 0 < left < middle < right < 460
    assert middle == pytest.approx((left + right) / 2, abs=0.1)
    assert half == pytest.approx((bottom + top) / 2, abs=0.1)
    assert top < bottom
    assert {"T", "step", "share", "0%", "100%", "0", "10"} <= set(texts(chart))


def test_doublings_are_evenly_apart_and_each_has_its_tick() -> None:
    picture = line_chart({"a": [(b, 1.0) for b in (1, 2, 4, 8)]}, "t", "x", "y", doubling=True)
    across = [float(x) for x in re.findall(r'<circle[^>]* cx="([0-9.]+)"', picture)]
    steps = [after - before for before, after in pairwise(across)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.02)
    for written in ("1", "2", "4", "8"):
        assert f">{written}</text>" in picture
    assert "a: 1 at 8" in picture


def test_each_tick_is_written_once() -> None:
    for high in (1.0, 0.7, 3e-4, 12_345.0, 7e6):
        labels = texts(line_chart({"a": [(0, 0.0), (high, high)]}, "T", "", ""))
        ticks = [label for label in labels if re.match(r"[\d.]+(e-\d+|k|M)?$", label)]
        # 0 stands on both axes
        assert all(ticks.count(label) <= 2 for label in ticks), ticks
        assert 6 <= len(ticks) <= 24


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_point_that_is_not_finite_interrupts_its_line(bad: float) -> None:
    chart = line_chart({"a": [(0, 1), (1, 2), (2, bad), (3, 2), (4, 1)]}, "T", "x", "y")
    path = next(n for n in parsed(chart).iter(f"{SVG}path") if n.get("class") == "line")
    assert path.get("d", "").count("M") == 2
    assert "nan" not in chart
    assert "inf" not in chart


@pytest.mark.parametrize("points", [[], [(1, math.nan)], [(3, 2.0)], [(0, 5.0), (1, 5.0)]])
def test_charts_of_little_or_nothing_are_drawn(points: list[tuple[float, float]]) -> None:
    parsed(line_chart({"a": points}, "T", "x", "y"))
    parsed(histogram({"a": [y for _, y in points]}, "T", "x"))
    parsed(bar_chart({"a": {f"{x}": y for x, y in points}}, "T", "x"))
    parsed(bar_chart({}, "T", "x"))


def test_names_are_text() -> None:
    name = '<script>"&'
    for chart in (
        line_chart({name: [(0, 1), (1, 2)], "b": [(0, 2)]}, name, name, name),
        bar_chart({name: {name: 1.0, "b": 2.0}}, name, name),
        histogram({name: [1.0, 2.0], "b": [3.0]}, name, name),
    ):
        assert name in texts(chart)
        assert "<script" not in chart


def test_a_long_legend_breaks_into_lines_inside_the_picture() -> None:
    series = {f"position {i}": [(0.0, i), (1.0, i + 1)] for i in range(12)}
    root = parsed(line_chart(series, "T", "x", "y"))
    placed = [t for t in root.iter(f"{SVG}text") if (t.text or "").startswith("position")]
    assert len({t.get("y") for t in placed}) >= 3
    assert all(float(t.get("x", "0")) + 8 * len(t.text or "") <= 460 for t in placed)
    height = float(root.get("viewBox", "").split()[3])
    assert all(y <= height for line in lines(line_chart(series, "T", "x", "y")) for _, y in line)


def test_bars_are_as_long_as_their_values() -> None:
    chart = bar_chart({"one": {"chain": 1.0, "tree": 2.0}, "two": {"tree": 4.0}}, "T", "τ")
    widths = [float(r.get("width", "0")) for r in parsed(chart).iter(f"{SVG}rect")]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.1)
    assert widths[2] == pytest.approx(4 * widths[0], abs=0.1)
    assert {"1.00", "2.00", "4.00", "chain", "tree", "one", "two"} <= set(texts(chart))


def test_the_last_bin_counts_what_lies_beyond() -> None:
    chart = histogram({"a": [0.5, 1.5, 1.5, 99.0]}, "T", "ms", bins=4, high=4)
    path = next(n for n in parsed(chart).iter(f"{SVG}path") if n.get("class") == "line")
    heights = [float(v) for v in re.findall(r"V(-?[\d.]+)", path.get("d", ""))]
    floor = heights[-1]
    sizes = [floor - h for h in heights[:-1]]
    assert sizes[1] == pytest.approx(2 * sizes[0], abs=0.2)
    assert sizes[2] == 0
    assert sizes[3] == pytest.approx(sizes[0], abs=0.2)
