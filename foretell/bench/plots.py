"""Charts as SVG, to stand inline in an HTML page without assets, scripts or dependencies.

Colours come from the CSS variables of pages/plots.css, which a page includes once: it serves light
and dark screens and paper. Lines differ in their dashes too, for prints without colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

Points = SequenceOf[tuple[float, float]]

_DASHES = ("", "7 4", "2 4")
_WIDTH, _LEFT, _RIGHT, _HEIGHT = 460, 54, 16, 210  # of the picture, its margins, and the plot
_TITLE, _ROW, _LETTER = 30, 20, 8  # heights of a title and a line of text; width of a letter


class Picture:
    """An SVG picture that grows, in units of which it is ``width`` wide."""

    def __init__(self, name: str, width: int = _WIDTH) -> None:
        self.width = width
        given = {"class": "plot", "role": "img", "aria-label": name}
        self._root = ElementTree.Element("svg", given)
        self._root.set("xmlns", "http://www.w3.org/2000/svg")

    def add(self, tag: str, *, text: str = "", hint: str = "", **attributes: Any) -> None:
        """Adds an element; attributes that are empty are left out, ``hint`` comes on hovering."""
        given = {
            name.strip("_").replace("_", "-"): value if isinstance(value, str) else f"{value:.2f}"
            for name, value in attributes.items()
            if value != ""
        }
        node = ElementTree.SubElement(self._root, tag, given)
        node.text = text
        if hint:
            ElementTree.SubElement(node, "title").text = hint

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "") -> None:
        self.add("text", text=text, x=x, y=y, class_=kind, text_anchor=anchor)

    def bar(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        style: str,
        hint: str = "",
        rx: int = 0,
    ) -> None:
        self.add("rect", x=x, y=y, width=width, height=height, rx=rx, style=style, hint=hint)

    def title(self, title: str) -> None:
        self.text(8, 19, title, "title")

    def legend(self, names: list[str], *, dashed: bool = False) -> float:
        """The legend below the title, and how far down it reaches; one name alone needs none."""
        x, y = 8.0, _TITLE + 16.0
        if len(names) < 2:
            return _TITLE
        for i, name in enumerate(names):
            wide = 30 + _LETTER * len(name) + 14
            if x > 8 and x + wide > _WIDTH:
                x, y = 8.0, y + _ROW
            style = f"stroke:{colour(i)};stroke-width:{3 if dashed else 10}"
            dash = _DASHES[i % len(_DASHES)] if dashed else ""
            line = f"M{x:.1f} {y - 4.5:.1f}h22"
            self.add("path", class_="line", d=line, style=style, stroke_dasharray=dash)
            self.text(x + 28, y, name, "label")
            x += wide
        return y + 4

    def svg(self, height: float) -> Markup:
        self._root.set("viewBox", f"0 0 {self.width} {height:.0f}")
        return Markup(ElementTree.tostring(self._root, "unicode", short_empty_elements=False))


def colour(i: int) -> str:
    return f"var(--plot-{i % 8})"


def line_chart(
    series: Mapping[str, Points],
    title: str,
    x: str,
    y: str,
    *,
    low: float | None = None,
    percent: bool = False,
    doubling: bool = False,
) -> Markup:
    """Lines through points (x, y). One that is not finite interrupts its line.

    Args:
        series: by the name in the legend; a single one needs no legend.
        x, y: what the axes say.
        low: where the y axis begins; by default as the points need.
        percent: y is a share from 0 to 1, written as per cent.
        doubling: x is logarithmic, with a tick at each point.
    """
    if doubling:
        series = {name: [(math.log2(px), py) for px, py in own] for name, own in series.items()}
    shown = {name: _pieces(points) for name, points in series.items()}
    finite = [p for pieces in shown.values() for piece in pieces for p in piece]
    if not finite:
        return _empty(title)
    each = sorted({p[0] for p in finite})
    across = _ticks(each[0], each[-1], tight=True)
    if doubling and len(each) > 1:
        across = [each[0], *each, each[-1]]
    heights = [0.0, 1.0] if percent else [p[1] for p in finite]
    up = _ticks(min(heights) if low is None else low, max(heights))
    frame = _Frame(
        title, across, up, list(shown), x, y, percent=percent, dashed=True, doubling=doubling
    )
    for i, (name, pieces) in enumerate(shown.items()):
        path = " ".join(
            "M" + "L".join(f"{frame.at_x(px):.1f} {frame.at_y(py):.1f}" for px, py in piece)
            for piece in pieces
        )
        dash, style = _DASHES[i % len(_DASHES)], f"stroke:{colour(i)}"
        frame.add("path", class_="line", d=path, style=style, stroke_dasharray=dash)
        few = sum(map(len, pieces)) <= 40
        for px, py in (p for piece in pieces if few or len(piece) == 1 for p in piece):
            at = 2**px if doubling else px
            hint = f"{name}: {f'{py:.1%}' if percent else f'{py:.4g}'} at {at:g}"
            cx, cy, fill = frame.at_x(px), frame.at_y(py), f"fill:{colour(i)}"
            frame.add("circle", hint=hint, style=fill, cx=cx, cy=cy, r=2.6)
    return frame.svg(frame.height)


def bar_chart(groups: Mapping[str, Mapping[str, float]], title: str, x: str) -> Markup:
    """Horizontal bars from 0, each with its value; groups lie one below the other.

    Args:
        groups: by label, then by the name in the legend; values are at least 0.
        x: what the values are.
    """
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    values = [value for bars in groups.values() for value in bars.values() if math.isfinite(value)]
    if not values:
        return _empty(title)
    picture = Picture(title)
    picture.title(title)
    top = max([*values, 0]) or 1
    left = min(0.4 * _WIDTH, 14 + _LETTER * max(map(len, groups)))
    wide = _WIDTH - left - 58  # the largest value stands behind its bar
    at = picture.legend(names) + 12
    thick, gap = (16, 10) if len(names) == 1 else (13, 12)
    most = int((left - 10) / _LETTER)  # letters of a label
    for label, bars in groups.items():
        short = label if len(label) <= most else label[: most - 1] + "…"
        picture.text(left - 8, at + thick * len(bars) / 2 + 4, short, "label", "end")
        for name, value in bars.items():
            number = f"{value:.{2 if value < 100 else 0}f}" if math.isfinite(value) else "-"
            size = wide * value / top if math.isfinite(value) else 0
            style, hint = f"fill:{colour(names.index(name))}", f"{label}, {name}: {number}"
            picture.bar(left, at + 1, size, thick - 2, style, hint)
            picture.text(left + size + 6, at + thick / 2 + 4.5, number)
            at += thick
        at += gap
    picture.text(left + wide / 2, at + 8, x, anchor="middle")
    return picture.svg(at + 20)


def histogram(
    series: Mapping[str, SequenceOf[float]],
    title: str,
    x: str,
    *,
    bins: int = 40,
    high: float | None = None,
) -> Markup:
    """How values are spread, from 0 on: in each bin the share of a series' values, as steps.

    Args:
        high: the last bin's end, which counts what lies beyond it too; by default the maximum.
    """
    kept = {name: [v for v in values if math.isfinite(v)] for name, values in series.items()}
    every = [value for values in kept.values() for value in values]
    if not every:
        return _empty(title)
    low, high = min(0, *every), max(every) if high is None else high
    size = (high - low) / bins or 1
    shares: list[list[float]] = []
    for values in kept.values():
        counts = [0] * bins
        for value in values:
            counts[min(bins - 1, int((min(value, high) - low) / size))] += 1
        shares.append([count / max(1, len(values)) for count in counts])
    across = _ticks(low, low + bins * size, tight=True)
    up = _ticks(0, max(map(max, shares)))
    frame = _Frame(title, across, up, list(kept), x, "share of values", percent=True)
    for i, share in enumerate(shares):
        corners = [f"M{frame.at_x(low):.1f} {frame.at_y(0):.1f}"]
        for place, part in enumerate(share):
            corners.append(f"V{frame.at_y(part):.1f}H{frame.at_x(low + (place + 1) * size):.1f}")
        path = "".join([*corners, f"V{frame.at_y(0):.1f}Z"])
        style = f"stroke:{colour(i)};fill:{colour(i)};fill-opacity:.18"
        frame.add("path", class_="line", d=path, style=style)
    return frame.svg(frame.height)


class _Frame(Picture):
    """Axes with a grid, and where a value lies in them."""

    def __init__(
        self,
        title: str,
        across: list[float],
        up: list[float],
        names: list[str],
        x: str,
        y: str,
        *,
        percent: bool,
        dashed: bool = False,
        doubling: bool = False,
    ) -> None:
        super().__init__(title)
        self.title(title)
        self.across, self.up = across, up
        self.top = self.legend(names, dashed=dashed) + 18 + _ROW  # the y axis's own line
        self.text(_LEFT - 46, self.top - 18, y)
        bottom, right = self.top + _HEIGHT, _WIDTH - _RIGHT
        for value in up[1:-1]:
            at = self.at_y(value)
            self.add("path", class_="grid", d=f"M{_LEFT} {at:.1f}H{right}")
            text = f"{100 * value:.4g}%" if percent else _number(value)
            self.text(_LEFT - 7, at + 4.5, text, anchor="end")
        for value in across[1:-1]:
            at = self.at_x(value)
            self.add("path", class_="grid", d=f"M{at:.1f} {bottom}v5")
            anchor = "end" if at > right - 12 else "middle"
            text = _number(2**value if doubling else value)
            self.text(min(at, right), bottom + 19, text, anchor=anchor)
        self.text((_LEFT + right) / 2, bottom + 38, x, anchor="middle")
        self.height = bottom + 46

    def at_x(self, value: float) -> float:
        low, high = self.across[0], self.across[-1]
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(self, value: float) -> float:
        low, high = self.up[0], self.up[-1]
        value = min(max(value, low), high)
        return self.top + (high - value) / (high - low) * _HEIGHT


def _ticks(low: float, high: float, *, tight: bool = False) -> list[float]:
    """An axis: its two ends, and between them round values 1, 2 or 5 times a power of ten apart.

    Args:
        tight: the ends are the values' own rather than round ones.
    """
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(i * step, 12) for i in range(first, last + 1)]
    if not tight:
        return [ticks[0], *ticks, ticks[-1]]
    return [low, *(t for t in ticks if low <= t + 1e-9 * step and t <= high + 1e-9 * step), high]


def _pieces(points: Iterable[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Points between those that are not finite."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if all(map(math.isfinite, point)):
            pieces[-1].append(point)
        else:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _number(value: float) -> str:
    if abs(value) >= 1e4:
        size, unit = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k")
        return f"{value / size:.4g}{unit}"
    if 0 < abs(value) < 1e-3:
        digits, power = f"{value:.3e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def _empty(title: str) -> Markup:
    picture = Picture(title)
    picture.title(title)
    picture.text(8, _TITLE + 20, "no data")
    return picture.svg(_TITLE + 34)
