"""`foretell train report`: what training did and what came of it, as one page without assets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from markupsafe import Markup

from foretell.bench.environment import told
from foretell.bench.page import render
from foretell.bench.plots import bar_chart, line_chart
from foretell.files import write_whole
from foretell.models.checkpoint import read_json
from foretell.train.curves import curves, held_out
from foretell.train.metrics import Row, read_rows, span


def write_report(run: Path) -> Path:
    """Writes ``report.html`` into a run's directory; whole or not at all.

    Raises:
        ValueError: there is nothing to report, or a file is damaged.
    """
    rows = read_rows(run / "fit" / "metrics.jsonl")
    evaluation = run / "evaluation.json"
    found = read_json(evaluation) if evaluation.is_file() else None
    if not rows and found is None:
        raise ValueError(
            f"{run}: neither fit/metrics.jsonl nor evaluation.json is here; "
            "run foretell train fit or evaluate first"
        )
    path = run / "report.html"
    try:
        html = page(run.resolve().name, rows, found)
    except (LookupError, TypeError, AttributeError, TemplateError) as error:
        if found is None:
            raise
        raise ValueError(
            f"{evaluation} is damaged ({type(error).__name__}: {error}): run foretell train "
            "evaluate again"
        ) from error
    write_whole(path, html.encode())
    return path


def page(name: str, rows: list[Row], found: Row | None) -> str:
    """The page's HTML.

    Args:
        name: the run's.
        rows: of metrics.jsonl.
        found: evaluation.json, None if there is none.
    """
    totals = _totals(found)
    values: dict[str, Any] = {
        "found": found,
        "problems": [],
        "curves": curves(rows) if rows else [],
    }
    if found is not None:
        each = [line for line in found["summary"] if line not in totals]
        each.sort(key=lambda line: (line["temperature"], line["scheme"]))
        values |= {"totals": totals, "categories": each, "problems": found["problems"]}
        values |= {"charts": _charts(found, totals), "facts": _facts(found)}
    title, intro, cards = f"Training {name}", _intro(rows, found), _cards(rows, totals)
    return render("training.html", title=title, intro=intro, cards=cards, **values)


def _intro(rows: list[Row], found: Row | None) -> str:
    said: list[str] = []
    if found is not None:
        target = Path(str(found["engine"][0]["model"])).name
        said.append(f"A head of {found['method']} for {target}")
    if rows:
        last = rows[-1]
        said.append(f"{last['step']:,} steps")
        if last.get("tokens"):
            said.append(f"{last['tokens']:,} tokens")
        if last.get("seconds"):
            said.append(span(last["seconds"]))
    return " · ".join(said)


def _cards(rows: list[Row], totals: list[Row]) -> list[tuple[str, str]]:
    """Numbers to see first, and what they are."""
    cards: list[tuple[str, str]] = []
    for line in totals:
        if line["temperature"] == 0:
            cards.append((f"{line['tau']:.2f}", f"τ, {line['scheme']}, greedy"))
            cards.append((f"{line['speedup']:.2f}x", f"speed-up, {line['scheme']}, greedy"))
    looks = [row for _, row in held_out(rows)]
    if (last := (looks or rows)[-1:]) and (matched := last[0].get("matched")):
        where = "held out" if looks else "training"
        cards.append((f"{matched[0]:.1%}", f"first guess right, {where}"))
    return cards


def _totals(found: Row | None) -> list[Row]:
    """The last line of each temperature and scheme, which is over all prompts."""
    lines = (found or {}).get("summary", [])
    return list({(line["temperature"], line["scheme"]): line for line in lines}.values())


def _charts(found: Row, totals: list[Row]) -> list[Markup]:
    def by_position(key: str, title: str, of: str) -> Markup:
        series = {
            f"{line['scheme']}, {_warmth(line['temperature'])}": list(enumerate(line[key], 1))
            for line in totals
        }
        return line_chart(series, title, "draft position", of, percent=True)

    def by_category(key: str, title: str, unit: str) -> Markup:
        groups: dict[str, dict[str, float]] = {}
        for line in found["summary"]:
            if line["temperature"] == 0:
                groups.setdefault(line["category"], {})[line["scheme"]] = line[key]
        return bar_chart(groups, title, unit)

    return [
        by_position("cumulative", "Drafts accepted up to a position", "of all drafts"),
        by_position("acceptance", "Accepted of those that got there", "of arrivals"),
        by_category("tau", "τ by category, greedy", "tokens a pass"),
        by_category("speedup", "Speed-up, greedy", "times plain decoding"),
    ]


def _facts(found: Row) -> dict[str, Any]:
    return {
        "head": found["head"],
        "drafts": ", ".join(f"{name} {value}" for name, value in found["evaluate"].items()),
        "weights": found["engine"][0]["weights"],
        "prompts": found["bench"]["prompts"],
        "longest answer": f"{found['bench']['max_tokens']} tokens",
        "batch": found["bench"]["batch"],
        **told(found["environment"]),
    }


def _warmth(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"
