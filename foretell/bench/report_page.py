"""`foretell bench --report`: what was measured, as one page to forward."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from markupsafe import Markup

from foretell.bench.environment import told
from foretell.bench.page import render
from foretell.bench.plots import bar_chart, histogram, line_chart
from foretell.bench.report import COLUMNS, TOTAL, Line, cells, percentile
from foretell.bench.run import PLAIN, Measured, Measurement
from foretell.bench.timeline import Step, timeline

Sweep = Mapping[int, Mapping[str, float]]
"""Speed-up by conversations at once, then by scheme."""
_SHOWN = [i for i in range(len(COLUMNS)) if COLUMNS[i] not in ("scheme", "end to end")]


def report_page(
    lines: SequenceOf[Line],
    measurement: Measurement,
    sweep: Sweep,
    steps: dict[str, list[Step]],
    about: dict[str, Any],
) -> str:
    """The page, complete in itself.

    Args:
        sweep: empty where it was not measured.
        about: model, weights, bench settings and environment.
    """
    totals = {line.scheme: line for line in lines}  # the last line of each scheme is its total
    by_category: dict[str, dict[str, float]] = {}
    for line in lines:
        by_category.setdefault(line.category, {})[line.scheme] = line.speedup
    answers, bench, some = measurement.answers, about["bench"], next(iter(totals.values()))
    kind = "greedy" if not bench["temperature"] else f"temperature {bench['temperature']:g}"
    return render(
        "bench.html",
        lead=f"{about['model']} in {about['weights']}, {some.num_conversations} conversations, "
        f"{kind}, {bench['batch']} at once; each prompt plainly and with each scheme, in turns.",
        totals=totals.values(),
        charts=_charts(by_category, totals, answers, sweep),
        picture=timeline(steps),
        columns=[COLUMNS[i] for i in _SHOWN],
        tables={
            name: [
                (line.category == TOTAL, [cells(line)[i] for i in _SHOWN])
                for line in lines
                if line.scheme == name
            ]
            for name in totals
        },
        about=told(about["environment"])
        | {"settings": ", ".join(f"{name}={value}" for name, value in bench.items())},
    )


def _charts(
    by_category: dict[str, dict[str, float]],
    totals: dict[str, Line],
    answers: list[Measured],
    sweep: Sweep,
) -> list[tuple[Markup, str]]:
    """Charts and what stands below them."""
    acceptance = {name: list(enumerate(t.acceptance, 1)) for name, t in totals.items()}
    taus = {name: [a.num_tokens / a.num_passes for a in answers if a.arm == name and a.num_passes]
            for name in totals}  # fmt: skip
    gaps = {name: [1000 * gap for a in answers if a.arm == name for gap in a.gaps]
            for name in (*totals, PLAIN)}  # fmt: skip
    # So far that 99 of 100 values lie before the end.
    reach = percentile([gap for each in gaps.values() for gap in each], 99) or 1.0
    charts = [
        (
            bar_chart(by_category, "Speed-up by category", "times plain decoding"),
            "Median over conversations of each one's own ratio of decoding speeds, prefill left "
            "out. Below 1 a scheme is slower than plain decoding.",
        ),
        (
            line_chart(
                acceptance, "Acceptance by position", "position in the draft", "accepted",
                percent=True,
            ),
            "Of the drafts that were right up to a position, how many were right there too.",
        ),
        (
            histogram(taus, "Tokens for each target pass (τ)", "τ of an answer", bins=24),
            "One value an answer. Plain decoding is 1 by definition.",
        ),
        (
            histogram(gaps, "Time between tokens", "milliseconds", high=reach),
            "Tokens that come in one step have 0 between them; what is right of plain decoding's "
            "hump is a reader's wait for a longer step. The last bin holds all beyond it.",
        ),
    ]  # fmt: skip
    return [*charts, _break_even(sweep, list(totals))] if sweep else charts


def _break_even(sweep: Sweep, schemes: list[str]) -> tuple[Markup, str]:
    series: dict[str, list[tuple[float, float]]] = {
        name: [(float(batch), values[name]) for batch, values in sweep.items()] for name in schemes
    }
    ahead = [
        f"{name} at {', '.join(f'{at:.0f}' for at, up in points if up >= 1) or 'none of them'}"
        for name, points in series.items()
    ]
    series[PLAIN] = [(float(batch), 1.0) for batch in sweep]
    axes = ("conversations at once", "times plain decoding")
    chart = line_chart(series, "Break-even by batch", *axes, low=0.0, doubling=True)
    return chart, "Below 1 a scheme does not pay. Not slower are: " + "; ".join(ahead) + "."
