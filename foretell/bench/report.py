"""Tables from what was measured: for the terminal, for Markdown, and as data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from foretell.bench.run import Arm, Measured, Measurement

TOTAL = "all"


@dataclass(frozen=True)
class Line:
    """One category under one scheme, beside plain decoding of the same prompts. Times in seconds.

    A decoding speed leaves the first token out (prefill). Medians are over conversations.
    """

    category: str
    scheme: str
    num_conversations: int
    plain_speed: float
    """Tokens per second for one conversation, median; 0 if no answer had two tokens."""
    speed: float
    speedup: float
    """Median of each conversation's own ratio."""
    speedup_quartiles: tuple[float, float]
    end_to_end: float
    """Plain total time over the scheme's, prefill included; by tokens each second."""
    tau: float
    acceptance: list[float]
    """[depth] of the drafts that reached a depth with all before accepted, how many were accepted
    there too (a lower bound where drafts differ in length)."""
    accepted: list[int]
    drafted: list[int]
    plain_itl: tuple[float, float]
    """p50 and p99 of the time between tokens; tokens that came in one step have 0 between them."""
    itl: tuple[float, float]
    plain_itl_mean: float
    itl_mean: float
    plain_ttft: float
    """Median time to the first token."""
    ttft: float
    num_answers: int
    num_identical: int
    same_text: bool
    """Does the scheme promise plain decoding's text?"""


def summarize(measurement: Measurement, arms: SequenceOf[Arm]) -> list[Line]:
    """One line for each category and scheme, in order of appearance, and then the totals."""
    plain, *schemes = arms
    categories = list(dict.fromkeys(answer.category for answer in measurement.answers))
    if len(categories) > 1:
        categories.append(TOTAL)
    lines: list[Line] = []
    for category in categories:
        own = [a for a in measurement.answers if category in (a.category, TOTAL)]
        before = [a for a in own if a.arm == plain.name]
        for arm in schemes:
            lines.append(_line(category, arm, before, [a for a in own if a.arm == arm.name]))
    return lines


def _line(category: str, arm: Arm, plain: list[Measured], own: list[Measured]) -> Line:
    before, after = speeds(plain), speeds(own)
    ratios = [after[name] / before[name] for name in before if name in after]
    accepted, drafted = _by_position(own)
    reached = [min(a, d) for a, d in zip([*drafted[:1], *accepted], drafted, strict=False)]
    return Line(
        category=category,
        scheme=arm.name,
        num_conversations=len({answer.id for answer in own}),
        plain_speed=_median(before.values()),
        speed=_median(after.values()),
        speedup=_median(ratios),
        speedup_quartiles=(percentile(ratios, 25), percentile(ratios, 75)),
        end_to_end=_ratio(_throughput(own), _throughput(plain)),
        tau=_ratio(sum(a.num_tokens for a in own), sum(a.num_passes for a in own)),
        acceptance=[_ratio(a, r) for a, r in zip(accepted, reached, strict=True)],
        accepted=accepted,
        drafted=drafted,
        plain_itl=_itl(plain),
        itl=_itl(own),
        plain_itl_mean=_mean([gap for answer in plain for gap in answer.gaps]),
        itl_mean=_mean([gap for answer in own for gap in answer.gaps]),
        plain_ttft=_median([answer.ttft for answer in plain]),
        ttft=_median([answer.ttft for answer in own]),
        num_answers=len(own),
        num_identical=sum(answer.differs_at is None for answer in own),
        same_text=arm.same_text,
    )


def speeds(answers: list[Measured]) -> dict[str, float]:
    """Tokens per second of each conversation, all of its turns together."""
    gaps: dict[str, list[float]] = {}
    for answer in answers:
        gaps.setdefault(answer.id, []).extend(answer.gaps)
    return {name: len(each) / sum(each) for name, each in gaps.items() if sum(each) > 0}


def _by_position(answers: list[Measured]) -> tuple[list[int], list[int]]:
    """[depth] draft tokens accepted at each depth, and drafts that reached it."""
    depth = max((len(answer.drafted_by_position) for answer in answers), default=0)
    accepted, drafted = [0] * depth, [0] * depth
    for answer in answers:
        for total, counts in (
            (accepted, answer.accepted_by_position),
            (drafted, answer.drafted_by_position),
        ):
            for position, count in enumerate(counts):
                total[position] += count
    return accepted, drafted


def _throughput(answers: list[Measured]) -> float:
    return _ratio(sum(a.num_tokens for a in answers), sum(a.wall for a in answers))


def _itl(answers: list[Measured]) -> tuple[float, float]:
    gaps = [gap for answer in answers for gap in answer.gaps]
    return percentile(gaps, 50), percentile(gaps, 99)


def percentile(values: SequenceOf[float], percent: float) -> float:
    """Linear interpolation between closest ranks; 0 of nothing."""
    return float(np.percentile(values, percent)) if values else 0.0


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _ratio(one: float, other: float) -> float:
    return one / other if other else 0.0


# ---- showing

COLUMNS = (
    *("category", "scheme", "plain tok/s", "tok/s", "speed-up", "quartiles", "end to end", "τ"),
    *("accepted by depth, %", "ITL p50/p99, ms", "plain ITL", "TTFT, ms", "plain TTFT"),
    "same text",
)


def cells(line: Line) -> list[str]:
    """What stands in each of the `COLUMNS`."""
    low, high = line.speedup_quartiles
    return [
        line.category,
        line.scheme,
        f"{line.plain_speed:.1f}",
        f"{line.speed:.1f}",
        f"{line.speedup:.2f}x",
        f"{low:.2f}-{high:.2f}",
        f"{line.end_to_end:.2f}x",
        f"{line.tau:.2f}",
        " ".join(f"{100 * rate:.0f}" for rate in line.acceptance[:5]) or "-",
        "/".join(f"{1000 * gap:.1f}" for gap in line.itl),
        "/".join(f"{1000 * gap:.1f}" for gap in line.plain_itl),
        f"{1000 * line.ttft:.0f}",
        f"{1000 * line.plain_ttft:.0f}",
        f"{line.num_identical}/{line.num_answers}",
    ]


# Two tables, so that each fits on a terminal of 80 columns.
_SPEED = (0, 1, 2, 3, 4, 5, 6, 7, 13)
_LATENCY = (0, 1, 8, 9, 10, 11, 12)


def markdown(lines: list[Line]) -> str:
    """The same two tables for a README."""
    tables: list[str] = []
    for chosen in (_SPEED, _LATENCY):
        rows = [[COLUMNS[i] for i in chosen], ["---" if i < 2 else "---:" for i in chosen]]
        for line in lines:
            own = cells(line)
            bold = "**" if line.category == TOTAL else ""
            rows.append([f"{bold}{own[i]}{bold}" for i in chosen])
        tables.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
    return "\n\n".join(tables) + "\n"


def tables(lines: list[Line], narrow: bool = True) -> list[Table]:
    """Two for each scheme: speeds, then acceptance and latencies.

    Args:
        narrow: headers may break into lines, so that it fits into 80 columns.
    """
    shown: list[Table] = []
    for scheme in dict.fromkeys(line.scheme for line in lines):
        own = [line for line in lines if line.scheme == scheme]
        for title, chosen in (("speed", _SPEED), ("acceptance and latency", _LATENCY)):
            table = Table(
                title=f"{scheme}: {title}",
                title_justify="left",
                box=box.SIMPLE_HEAD,
                pad_edge=False,
                collapse_padding=True,
            )
            rows = [[cells(line)[i] for i in chosen if i != 1] for line in own]
            for place, i in enumerate(i for i in chosen if i != 1):
                header, width = COLUMNS[i], max(len(row[place]) for row in rows)
                if narrow and len(header) > width:  # a cell may not break
                    header = header.replace(" ", "\n")
                table.add_column(Text(header), justify="right" if i else "left", no_wrap=True)
            for line, row in zip(own, rows, strict=True):
                table.add_row(*map(Text, row), style="bold" if line.category == TOTAL else None)
            shown.append(table)
    return shown


def say(console: Console, text: str, style: str | None = None) -> None:
    """Prints plain text, broken into lines by the terminal alone."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def show_tables(lines: list[Line], console: Console) -> None:
    """Prints `tables`, as wide as they are: a narrow terminal breaks their lines, but nothing is
    cut off."""
    before = console.width
    for table in tables(lines, narrow=console.is_terminal):
        free = console.options.update(max_width=1000)
        console.width = max(before, console.measure(table, options=free).maximum)
        console.print(table)
        console.width = before


def histogram(lines: list[Line], width: int = 40) -> str:
    """How far drafts get: for each scheme and depth the share of drafts accepted up to there."""
    last = {line.scheme: line for line in lines}  # totals come last
    out: list[str] = []
    for scheme, line in last.items():
        out.append(f"{scheme}: {line.drafted[0] if line.drafted else 0} drafts, τ {line.tau:.2f}")
        for depth, (count, rate) in enumerate(
            zip(line.accepted, line.acceptance, strict=True), start=1
        ):
            share = count / line.drafted[0]
            bar = "█" * round(share * width)
            out.append(f"  depth {depth:>2} {bar:<{width}} {share:>4.0%}  ({rate:.0%} of arrivals)")
    return "\n".join(out)


def broken_promises(measurement: Measurement, arms: SequenceOf[Arm]) -> list[str]:
    """Answers that are not plain decoding's although the scheme promises it; should be empty."""
    promised = {arm.name for arm in arms if arm.same_text}
    return [
        f"{answer.id} turn {answer.turn}, {answer.arm}: token {answer.differs_at} differs"
        for answer in measurement.answers
        if answer.arm in promised and answer.differs_at is not None
    ]
