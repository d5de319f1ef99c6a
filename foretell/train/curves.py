"""Charts of a training run, from its metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from typing import Any

from markupsafe import Markup

from foretell.bench.plots import Points, line_chart
from foretell.train.metrics import Row

_POINTS = 300
"""Points of a line; of more the means of neighbours are drawn."""


def curves(rows: list[Row]) -> list[Markup]:
    """Charts over steps: loss, learning rate, acceptance by draft position, τ."""
    own, looks = [(row["step"], row) for row in rows], held_out(rows)
    where, judged = ("held out", looks) if looks else ("training", own)
    both = {"training": own, "held out": looks} if looks else {"training": own}

    def line(title: str, y: str, points: Mapping[str, Points], **axis: Any) -> Markup:
        return line_chart(points, title, "step", y, **axis)

    losses = {name: _points(of, lambda row: row["loss"]) for name, of in both.items()}
    rates = {"learning rate": _points(own, lambda row: row.get("lr"))}
    likeliest = f"Guesses that are the target's likeliest, {where}"
    accepted = f"Accepted at temperature 1, {where}"
    taus: dict[str, Points] = {
        label: points
        for label, key in (("greedy", "matched"), ("temperature 1", "agreed"))
        if (points := _points(judged, lambda row, key=key: expected_tau(row.get(key))))
    }
    independent = "tokens a pass, positions taken as independent"
    first = {name: _points(of, lambda row: _at(row, "matched", 0)) for name, of in both.items()}
    charts = [
        line("Loss", "mean over wanted tokens", losses),
        line("Learning rate", "", rates, low=0),
        line(likeliest, "by draft position", _by_position(judged, "matched"), percent=True),
        line(accepted, "by draft position", _by_position(judged, "agreed"), percent=True),
        line(f"τ that a chain would reach, {where}", independent, taus, low=1),
    ]
    if looks:
        title = "First guess: training and held out"
        charts.append(line(title, "the target's likeliest", first, percent=True))
    return charts


def expected_tau(accepted: list[float] | None) -> float | None:
    """Tokens a target pass of a chain whose positions are accepted with these chances, the
    target's own token included."""
    return 1 + sum(accumulate(accepted, mul)) if accepted else None


def held_out(rows: list[Row]) -> list[tuple[int, Row]]:
    """Steps with what was found on the texts that were held out."""
    return [(row["step"], row["held_out"]) for row in rows if row.get("held_out")]


def _by_position(rows: list[tuple[int, Row]], key: str) -> dict[str, Points]:
    depth = max((len(row.get(key) or ()) for _, row in rows), default=0)
    return {
        f"position {i + 1}": _points(rows, lambda row, i=i: _at(row, key, i)) for i in range(depth)
    }


def _at(row: Row, key: str, i: int) -> float | None:
    values = row.get(key) or ()
    return values[i] if len(values) > i else None


def _points(rows: list[tuple[int, Row]], of: Any) -> list[tuple[float, float]]:
    """(step, value) where there is one; of very many the means of neighbours."""
    points = [(step, value) for step, row in rows if (value := of(row)) is not None]
    size = max(1, math.ceil(len(points) / _POINTS))
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
