"""Charts as SVG text, to stand inline in an HTML page without assets, scripts or dependencies.

Colours come from the CSS variables in `STYLE`, which a page includes once: it serves light and
dark screens and paper. Lines differ in their dashes too, for prints without colour.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from html import escape

Points = SequenceOf[tuple[float, float]]

STYLE = """
:root {
  --plot-ink: #1d1c1a; --plot-dim: #6b6862; --plot-grid: #e4e1da;
  --plot-0: #2b5fd9; --plot-1: #c4501b; --plot-2: #0a7d4b; --plot-3: #8a3fb5;
  --plot-4: #a87900; --plot-5: #127c93; --plot-6: #c2306f; --plot-7: #5d5a55;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --plot-ink: #eceae4; --plot-dim: #a3a097; --plot-grid: #35342f;
    --plot-0: #8fb0ff; --plot-1: #ff9d6b; --plot-2: #6ee0a8; --plot-3: #d3a1f2;
    --plot-4: #e8c15a; --plot-5: #70cfe3; --plot-6: #ff94bd; --plot-7: #b5b2aa;
  }
}
svg.plot { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg.plot text { fill: var(--plot-dim); }
svg.plot .title { fill: var(--plot-ink); font-size: 15px; font-weight: 600; }
svg.plot .label { fill: var(--plot-ink); }
svg.plot .grid { stroke: var(--plot-grid); stroke-width: 1; }
svg.plot .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
"""
"""CSS of every chart, for a page's <style>."""

_COLOURS = 8
_DASHES = ("", "7 4", "2 4")
_WIDTH, _LEFT, _RIGHT, _HEIGHT = 460, 54, 16, 210  # of the picture, its margins, and the plot
_TITLE, _ROW, _LETTER = 30, 20, 8  # heights of a title and a line of text; width of a letter


def line_chart(
    series: Mapping[str, Points],
    title: str,
    x: str,
    y: str,
    *,
    low: float | None = None,
    high: float | None = None,
    percent: bool = False,
) -> str:
    """Lines through points (x, y). One that is not finite interrupts its line.

    Args:
        series: by the name in the legend; a single one needs no legend.
        x, y: what the axes say.
        low, high: ends of the y axis; by default as the points need.
        percent: y is a share and is written as per cent.
    """
    shown = {name: list(points) for name, points in series.items()}
    finite = [p for points in shown.values() for p in points if _finite(p)]
    if not finite:
        return _empty(title)
    across = _ticks(min(p[0] for p in finite), max(p[0] for p in finite), tight=True)
    heights = [p[1] for p in finite]
    up = _ticks(min(heights) if low is None else low, max(heights) if high is None else high)
    frame = _Frame(title, across, up, _legend(list(shown), dashed=True), x, y, percent=percent)
    for i, (name, points) in enumerate(shown.items()):
        pieces = _pieces(points)
        path = " ".join(
            "M" + "L".join(f"{frame.at_x(px):.1f} {frame.at_y(py):.1f}" for px, py in piece)
            for piece in pieces
        )
        frame.add(f'<path class="line" d="{path}" style="stroke:{_colour(i)}"{_dash(i)}/>')
        count = sum(map(len, pieces))
        for px, py in (p for piece in pieces if count <= 40 or len(piece) == 1 for p in piece):
            value = f"{py:.1%}" if percent else f"{py:.4g}"
            frame.add(
                f'<circle cx="{frame.at_x(px):.1f}" cy="{frame.at_y(py):.1f}" r="2.6" '
                f'style="fill:{_colour(i)}"><title>{escape(name)}: {value} at {px:g}</title>'
                "</circle>"
            )
    return frame.svg()


def bar_chart(
    groups: Mapping[str, Mapping[str, float]], title: str, x: str, *, percent: bool = False
) -> str:
    """Horizontal bars from 0, each with its value; groups lie one below the other.

    Args:
        groups: by label, then by the name in the legend; values are at least 0.
        x: what the values are.
    """
    names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    values = [value for bars in groups.values() for value in bars.values() if math.isfinite(value)]
    if not values:
        return _empty(title)
    top = max([*values, 0]) or 1
    left = min(0.4 * _WIDTH, 14 + _LETTER * max(map(len, groups)))
    wide = _WIDTH - left - 58  # the largest value stands behind its bar
    legend, down = _legend(names)
    out, at = [legend], down + 6
    thick, gap = (16, 10) if len(names) == 1 else (13, 12)
    for label, bars in groups.items():
        middle = at + thick * len(bars) / 2
        out.append(_text(left - 8, middle + 4, _short(label, left), "label", "end"))
        for name, value in bars.items():
            number = _measure(value, percent)
            size = wide * value / top if math.isfinite(value) else 0
            out.append(
                f'<rect x="{left:.1f}" y="{at + 1:.1f}" width="{size:.1f}" height="{thick - 2}" '
                f'rx="2" style="fill:{_colour(names.index(name))}">'
                f"<title>{escape(label)}, {escape(name)}: {number}</title></rect>"
            )
            out.append(_text(left + size + 6, at + thick / 2 + 4.5, number))
            at += thick
        at += gap
    out.append(_text(left + wide / 2, at + 8, x, anchor="middle"))
    return _svg(title, out, at + 20)


def histogram(
    series: Mapping[str, SequenceOf[float]],
    title: str,
    x: str,
    *,
    bins: int = 40,
    high: float | None = None,
) -> str:
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
    shares: dict[str, list[float]] = {}
    for name, values in kept.items():
        counts = [0] * bins
        for value in values:
            counts[min(bins - 1, int((min(value, high) - low) / size))] += 1
        shares[name] = [count / max(1, len(values)) for count in counts]
    up = _ticks(0, max(max(share) for share in shares.values()))
    across = _ticks(low, low + bins * size, tight=True)
    frame = _Frame(title, across, up, _legend(list(kept)), x, "share of values", percent=True)
    for i, share in enumerate(shares.values()):
        corners = [f"M{frame.at_x(low):.1f} {frame.at_y(0):.1f}"]
        for place, part in enumerate(share):
            corners.append(f"V{frame.at_y(part):.1f}H{frame.at_x(low + (place + 1) * size):.1f}")
        corners.append(f"V{frame.at_y(0):.1f}Z")
        frame.add(
            f'<path class="line" d="{"".join(corners)}" '
            f'style="stroke:{_colour(i)};fill:{_colour(i)};fill-opacity:.18"/>'
        )
    return frame.svg()


class _Frame:
    """Axes with a grid, and where a value lies in them."""

    def __init__(
        self,
        title: str,
        across: list[float],
        up: list[float],
        legend: tuple[str, float],
        x: str,
        y: str,
        *,
        percent: bool,
    ) -> None:
        self.title, self.across, self.up = title, across, up
        head, self.top = legend
        self.top += 18 + _ROW  # the y axis's own line
        self.out = [head, _text(_LEFT - 46, self.top - 18, y)]
        bottom, right = self.top + _HEIGHT, _WIDTH - _RIGHT
        for value in up[1:-1]:
            at = self.at_y(value)
            self.out.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>')
            text = f"{100 * value:.4g}%" if percent else _number(value)
            self.out.append(_text(_LEFT - 7, at + 4.5, text, anchor="end"))
        for value in across[1:-1]:
            at = self.at_x(value)
            self.out.append(f'<path class="grid" d="M{at:.1f} {bottom}v5"/>')
            anchor = "end" if at > right - 12 else "middle"
            self.out.append(_text(min(at, right), bottom + 19, _number(value), anchor=anchor))
        self.out.append(_text((_LEFT + right) / 2, bottom + 38, x, anchor="middle"))
        self.height = bottom + 46

    def at_x(self, value: float) -> float:
        low, high = self.across[0], self.across[-1]
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def at_y(self, value: float) -> float:
        low, high = self.up[0], self.up[-1]
        value = min(max(value, low), high)
        return self.top + (high - value) / (high - low) * _HEIGHT

    def add(self, text: str) -> None:
        self.out.append(text)

    def svg(self) -> str:
        return _svg(self.title, self.out, self.height)


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
        if _finite(point):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _finite(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _number(value: float) -> str:
    if abs(value) >= 1e4:
        size, unit = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k")
        return f"{value / size:.4g}{unit}"
    return f"{value:.4g}".replace("e-0", "e-")


def _measure(value: float, percent: bool) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.0%}" if percent else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _legend(names: list[str], *, dashed: bool = False) -> tuple[str, float]:
    """The legend and how far down it reaches; one name alone needs none."""
    at_x, at_y = 8.0, _TITLE + 16.0
    if len(names) < 2:
        return "", _TITLE
    out: list[str] = []
    for i, name in enumerate(names):
        wide = 30 + _LETTER * len(name) + 14
        if at_x > 8 and at_x + wide > _WIDTH:
            at_x, at_y = 8.0, at_y + _ROW
        out.append(
            f'<path class="line" d="M{at_x:.1f} {at_y - 4.5:.1f}h22" '
            f'style="stroke:{_colour(i)};stroke-width:{3 if dashed else 10}"'
            f"{_dash(i) if dashed else ''}/>"
        )
        out.append(_text(at_x + 28, at_y, name, "label"))
        at_x += wide
    return "".join(out), at_y + 4


def _short(text: str, room: float) -> str:
    most = int((room - 10) / _LETTER)
    return text if len(text) <= most else text[: most - 1] + "…"


def _colour(i: int) -> str:
    return f"var(--plot-{i % _COLOURS})"


def _dash(i: int) -> str:
    dash = _DASHES[i % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    extra = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>'


def _empty(title: str) -> str:
    return _svg(title, [_text(8, _TITLE + 20, "no data")], _TITLE + 34)


def _svg(title: str, parts: list[str], height: float) -> str:
    name = escape(title, quote=True)
    head = _text(8, 19, title, "title")
    return (
        f'<svg class="plot" role="img" aria-label="{name}" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'xmlns="http://www.w3.org/2000/svg">{head}{"".join(parts)}</svg>'
    )
