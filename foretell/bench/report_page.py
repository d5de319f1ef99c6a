"""`foretell bench --report`: what was measured, as one page to forward."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from html import escape
from typing import Any

from foretell.bench import plots
from foretell.bench.page import page
from foretell.bench.report import TOTAL, Line, percentile
from foretell.bench.run import PLAIN, Measured, Measurement
from foretell.bench.timeline import Step, timeline

Sweep = Mapping[int, Mapping[str, float]]
"""Speed-up by conversations at once, then by scheme."""


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
    schemes = list(totals)
    charts = [
        _figure(
            plots.bar_chart(_by_category(lines), "Speed-up by category", "times plain decoding"),
            "Median over conversations of each one's own ratio of decoding speeds, prefill left "
            "out. Below 1 a scheme is slower than plain decoding.",
        ),
        _figure(
            plots.line_chart(
                {
                    name: [(i + 1.0, rate) for i, rate in enumerate(line.acceptance)]
                    for name, line in totals.items()
                },
                "Acceptance by position",
                "position in the draft",
                "accepted",
                low=0.0,
                high=1.0,
                percent=True,
            ),
            "Of the drafts that were right up to a position, how many were right there too.",
        ),
        _figure(
            plots.histogram(
                {name: _taus(measurement.answers, name) for name in schemes},
                "Tokens for each target pass (τ)",
                "τ of an answer",
                bins=24,
            ),
            "One value an answer. Plain decoding is 1 by definition.",
        ),
        _figure(
            plots.histogram(
                _gaps(measurement.answers, [*schemes, PLAIN]),
                "Time between tokens",
                "milliseconds",
                high=_reach(measurement.answers),
            ),
            "Tokens that come in one step have 0 between them; what is right of plain decoding's "
            "hump is a reader's wait for a longer step. The last bin holds all beyond it.",
        ),
    ]
    if sweep:
        charts.append(_figure(*_break_even(sweep, schemes)))
    picture = timeline(steps)
    body = (
        f"<style>{plots.STYLE}{_STYLE}</style>"
        '<p class="eyebrow">foretell bench</p><h1>Speculative decoding, measured</h1>'
        f"<p class=lead>{escape(_lead(totals, about))}</p>"
        + "".join(_card(line) for line in totals.values())
        + f'<div class="charts">{"".join(charts)}</div>'
    )
    if picture:
        body += "<h2>Steps as they followed each other</h2>" + _figure(
            f'<div class="wide"><div class="timeline">{picture}</div></div>',
            "One prompt, eight steps that are typical of it, all to one scale. Above each step "
            "the tokens it gave.",
        )
    body += _tables(lines) + "<h2>How it was measured</h2>" + _facts(about)
    return page("Speculative decoding, measured", body)


_STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr));
  gap: 1.2rem 2rem; margin: 1.6rem 0; align-items: start; }
.timeline { min-width: 38rem; } .card .name { font-weight: 600; overflow-wrap: anywhere; }
.total td { font-weight: 700; } .numbers th:first-child { width: 11rem; }
.card.slower { border-left-color: var(--fail); }
@media print { .charts { grid-template-columns: 1fr 1fr; gap: 1rem; } .timeline { min-width: 0; }
  .numbers { font-size: .72rem; } .numbers th:first-child { width: auto; } }
"""


def _lead(totals: dict[str, Line], about: dict[str, Any]) -> str:
    some = next(iter(totals.values()))
    setting = about["bench"]
    kind = "greedy" if not setting["temperature"] else f"temperature {setting['temperature']:g}"
    return (
        f"{about['model']} in {about['weights']}, {some.num_conversations} conversations, {kind}, "
        f"{setting['batch']} at once; each prompt plainly and with each scheme, in turns."
    )


def _card(line: Line) -> str:
    facts = {
        "speed-up": f"{line.speedup:.2f}x",
        "tokens a second": f"{line.speed:.0f}",
        "plainly": f"{line.plain_speed:.0f}",
        "tokens a pass (τ)": f"{line.tau:.2f}",
        "end to end": f"{line.end_to_end:.2f}x",
        "same text": f"{line.num_identical}/{line.num_answers}",
    }
    counts = "".join(
        f"<div><b>{value}</b><span>{name}</span></div>" for name, value in facts.items()
    )
    slower = " slower" if line.speedup < 1 else ""
    return (
        f'<section class="card{slower}"><div class="name">{escape(line.scheme)}</div>'
        f"<div class=counts>{counts}</div></section>"
    )


def _by_category(lines: SequenceOf[Line]) -> dict[str, dict[str, float]]:
    groups: dict[str, dict[str, float]] = {}
    for line in lines:
        groups.setdefault(line.category, {})[line.scheme] = line.speedup
    return groups


def _taus(answers: list[Measured], arm: str) -> list[float]:
    return [a.num_tokens / a.num_passes for a in answers if a.arm == arm and a.num_passes]


def _gaps(answers: list[Measured], arms: list[str]) -> dict[str, list[float]]:
    return {name: [1000 * gap for a in answers if a.arm == name for gap in a.gaps] for name in arms}


def _reach(answers: list[Measured]) -> float:
    """So far that 99 of 100 values lie before the end."""
    return 1000 * percentile([gap for a in answers for gap in a.gaps], 99) or 1.0


def break_even(points: SequenceOf[tuple[float, float]]) -> float | None:
    """Where a speed-up falls below 1 for the first time, on the straight line between the points
    beside it; None where it never does."""
    before: tuple[float, float] | None = None
    for batch, speedup in points:
        if speedup < 1:
            if before is None:
                return batch
            return before[0] + (batch - before[0]) * (before[1] - 1) / (before[1] - speedup)
        before = batch, speedup
    return None


def _break_even(sweep: Sweep, schemes: list[str]) -> tuple[str, str]:
    series: dict[str, list[tuple[float, float]]] = {
        name: [(float(batch), values[name]) for batch, values in sweep.items()] for name in schemes
    }
    told: list[str] = []
    for name, points in series.items():
        at = break_even(points)
        last = f"still ahead at {points[-1][0]:.0f}" if at is None else f"up to {at:.1f} at once"
        told.append(f"{name}: {'never ahead' if at == points[0][0] else last}")
    level = [(float(batch), 1.0) for batch in sweep]
    chart = plots.line_chart(
        {**series, PLAIN: level},
        "Break-even by batch",
        "conversations at once",
        "times plain decoding",
        low=0.0,
    )
    return chart, "Where a line falls below 1 the scheme no longer pays. " + "; ".join(told) + "."


def _figure(chart: str, caption: str) -> str:
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _tables(lines: SequenceOf[Line]) -> str:
    """One for each scheme."""
    head = ("category", "plain tok/s", "tok/s", "speed-up", "quartiles", "τ", "ITL p50/p99, ms",
            "plain ITL", "TTFT, ms", "same text")  # fmt: skip
    out = ""
    for scheme in dict.fromkeys(line.scheme for line in lines):
        rows: list[str] = []
        for line in (line for line in lines if line.scheme == scheme):
            low, high = line.speedup_quartiles
            cells = [
                line.category,
                f"{line.plain_speed:.1f}",
                f"{line.speed:.1f}",
                f"{line.speedup:.2f}x",
                f"{low:.2f}-{high:.2f}",
                f"{line.tau:.2f}",
                "/".join(f"{1000 * gap:.1f}" for gap in line.itl),
                "/".join(f"{1000 * gap:.1f}" for gap in line.plain_itl),
                f"{1000 * line.ttft:.0f}",
                f"{line.num_identical}/{line.num_answers}",
            ]
            kind = " class=total" if line.category == TOTAL else ""
            rows.append(f"<tr{kind}>{_cells('td', cells)}</tr>")
        out += (
            f"<h2>{escape(scheme)}</h2><div class=wide><table class=numbers>"
            f"<tr>{_cells('th', head)}</tr>{''.join(rows)}</table></div>"
        )
    return out


def _cells(tag: str, cells: SequenceOf[str]) -> str:
    return "".join(
        f"<{tag}{' class=number' if i else ''}>{escape(cell)}</{tag}>"
        for i, cell in enumerate(cells)
    )


def _facts(about: dict[str, Any]) -> str:
    place = about["environment"]
    facts = {
        "processor": f"{place['cpu']}, threads: {place['threads']}",
        "versions": ", ".join(f"{name} {v}" for name, v in place["packages"].items()),
        "commit": place["commit"] or "none",
        "settings": ", ".join(f"{name}={v}" for name, v in about["bench"].items()),
        "command": place["command"],
    }
    rows = "".join(
        f"<tr><th scope=row>{name}</th><td>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f'<div class="wide"><table class="facts">{rows}</table></div>'
