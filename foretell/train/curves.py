"""Charts of a training run, from its metrics.jsonl."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul
from typing import Any

from foretell.bench.plots import Points, line_chart
from foretell.train.metrics import Row

_POINTS = 300
"""Points of a line; of more the means of neighbours are drawn."""


def curves(rows: list[Row]) -> list[str]:
    """Charts over steps: loss, learning rate, acceptance by draft position, τ."""
    own = [(row["step"], row) for row in rows]
    looks = held_out(rows)
    where, judged = ("held out", looks) if looks else ("training", own)
    both = {"training": own, "held out": looks} if looks else {"training": own}
    charts = [
        line_chart(
            {name: _points(of, lambda row: row["loss"]) for name, of in both.items()},
            "Loss",
            "step",
            "mean over wanted tokens",
        ),
        line_chart(
            {"learning rate": _points(own, lambda row: row.get("lr"))},
            "Learning rate",
            "step",
            "",
            low=0,
        ),
        line_chart(
            _by_position(judged, "matched"),
            f"Guesses that are the target's likeliest, {where}",
            "step",
            "by draft position",
            low=0,
            high=1,
            percent=True,
        ),
        line_chart(
            _by_position(judged, "agreed"),
            f"Accepted at temperature 1, {where}",
            "step",
            "by draft position",
            low=0,
            high=1,
            percent=True,
        ),
        line_chart(
            {
                label: points
                for label, key in (("greedy", "matched"), ("temperature 1", "agreed"))
                if (points := _points(judged, lambda row, key=key: expected_tau(row.get(key))))
            },
            f"τ that a chain would reach, {where}",
            "step",
            "tokens a pass, positions taken as independent",
            low=1,
        ),
        line_chart(
            {
                name: _points(of, lambda row: _first(row.get("matched")))
                for name, of in both.items()
            },
            "First guess: training and held out",
            "step",
            "the target's likeliest",
            low=0,
            high=1,
            percent=True,
        ),
    ]
    return charts if looks else charts[:-1]


def expected_tau(accepted: list[float] | None) -> float | None:
    """Tokens a target pass of a chain whose positions are accepted with these chances, the
    target's own token included."""
    if not accepted:
        return None
    return 1 + sum(accumulate(accepted, mul))


def held_out(rows: list[Row]) -> list[tuple[int, Row]]:
    """Steps with what was found on the texts that were held out."""
    return [(row["step"], row["held_out"]) for row in rows if row.get("held_out")]


def _by_position(rows: list[tuple[int, Row]], key: str) -> dict[str, Points]:
    depth = max((len(row.get(key) or ()) for _, row in rows), default=0)
    return {
        f"position {i + 1}": _points(
            rows, lambda row, i=i: row[key][i] if len(row.get(key) or ()) > i else None
        )
        for i in range(depth)
    }


def _first(values: list[float] | None) -> float | None:
    return values[0] if values else None


def _points(rows: list[tuple[int, Row]], of: Any) -> list[tuple[float, float]]:
    """(step, value) where there is one; of very many the means of neighbours."""
    points = [(step, value) for step, row in rows if (value := of(row)) is not None]
    size = max(1, math.ceil(len(points) / _POINTS))
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
