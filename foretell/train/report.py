"""`foretell train report`: what training did and what came of it, as one page without assets."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from foretell.bench.plots import STYLE, bar_chart, line_chart
from foretell.models.checkpoint import read_json
from foretell.train.curves import curves, held_out
from foretell.train.files import write_whole
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
    except (KeyError, IndexError, TypeError, AttributeError) as error:
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
    template = resources.files("foretell.train").joinpath("report.html").read_text("utf-8")
    parts = [_cards(rows, found)]
    if rows:
        parts += ["<h2>Training</h2>", _grid(curves(rows))]
    if found is not None:
        parts += ["<h2>In the engine</h2>", _evaluation(found)]
        if found.get("samples"):
            parts += ["<h2>Answers</h2>", _answers(found["samples"])]
        parts += ["<h2>Measured on</h2>", _facts(found)]
    else:
        parts.append("<p class=dim>Not measured yet: run <code>foretell train evaluate</code>.</p>")
    return Template(template).substitute(
        title=escape(f"Training {name}"),
        style=STYLE,
        intro=_intro(rows, found),
        body="\n".join(parts),
    )


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
    out = f"<p class=dim>{escape(' · '.join(said))}</p>"
    for problem in (found or {}).get("problems", []):
        out += f"<p class=bad>Not valid: {escape(problem)}</p>"
    return out


def _cards(rows: list[Row], found: Row | None) -> str:
    cards: list[tuple[str, str]] = []
    for line in _totals(found):
        if line["temperature"] == 0:
            cards.append((f"{line['tau']:.2f}", f"τ, {line['scheme']}, greedy"))
            cards.append((f"{line['speedup']:.2f}x", f"speed-up, {line['scheme']}, greedy"))
    if looks := held_out(rows):
        if matched := looks[-1][1].get("matched"):
            cards.append((f"{matched[0]:.1%}", "first guess right, held out"))
    elif rows and rows[-1].get("matched"):
        cards.append((f"{rows[-1]['matched'][0]:.1%}", "first guess right, training"))
    inner = "".join(
        f'<div class="card"><b>{escape(value)}</b><span class="dim">{escape(what)}</span></div>'
        for value, what in cards
    )
    return f'<div class="cards">{inner}</div>' if cards else ""


# ---- evaluation


def _totals(found: Row | None) -> list[Row]:
    """The last line of each temperature and scheme, which is over all prompts."""
    lines = (found or {}).get("summary", [])
    return list({(line["temperature"], line["scheme"]): line for line in lines}.values())


def _evaluation(found: Row) -> str:
    totals = _totals(found)
    names = {id(line): f"{line['scheme']}, {_warmth(line['temperature'])}" for line in totals}
    charts = [
        line_chart(
            {
                names[id(line)]: [(i + 1.0, share) for i, share in enumerate(line["cumulative"])]
                for line in totals
            },
            "Drafts accepted up to a position",
            "draft position",
            "of all drafts",
            low=0,
            high=1,
            percent=True,
        ),
        line_chart(
            {
                names[id(line)]: [(i + 1.0, share) for i, share in enumerate(line["acceptance"])]
                for line in totals
            },
            "Accepted of those that got there",
            "draft position",
            "of arrivals",
            low=0,
            high=1,
            percent=True,
        ),
    ]
    for key, title in (("tau", "τ by category, greedy"), ("speedup", "Speed-up, greedy")):
        groups: dict[str, dict[str, float]] = {}
        for line in found.get("summary", []):
            if line["temperature"] == 0:
                groups.setdefault(line["category"], {})[line["scheme"]] = line[key]
        unit = "tokens a pass" if key == "tau" else "times plain decoding"
        charts.append(bar_chart(groups, title, unit))
    note = f"<p class=dim>{escape(found['agreement']['says'])}</p>"
    return _table(found) + note + _grid(charts, "charts pairs")


def _table(found: Row) -> str:
    """All prompts together, and the categories where somebody wants them."""
    totals = _totals(found)
    each = [line for line in found.get("summary", []) if line not in totals]
    each.sort(key=lambda line: (line["temperature"], line["scheme"]))
    out = _rows(totals)
    if each:
        out += f"<details><summary>By category</summary>{_rows(each)}</details>"
    return out


def _rows(lines: list[Row]) -> str:
    columns = (
        "drafts", "prompts", "τ", "accepted by position, %", "plain tok/s", "tok/s", "speed-up",
        "end to end", "same text",
    )  # fmt: skip
    out = ["<thead><tr>", *(f"<th>{escape(name)}</th>" for name in columns), "</tr></thead><tbody>"]
    for line in lines:
        cells = (
            f"{line['scheme']}, {_warmth(line['temperature'])}",
            line["category"],
            f"{line['tau']:.2f}",
            " ".join(f"{100 * share:.0f}" for share in line["acceptance"][:6]) or "-",
            f"{line['plain_speed']:.1f}",
            f"{line['speed']:.1f}",
            f"{line['speedup']:.2f}x",
            f"{line['end_to_end']:.2f}x",
            f"{line['num_identical']}/{line['num_answers']}",
        )
        out.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return f'<div class="wide"><table>{"".join(out)}</tbody></table></div>'


def _answers(samples: Iterable[Row]) -> str:
    out = [
        "<p class=dim>Greedy answers with the tree. <mark>Marked</mark> text was guessed by the "
        "draft and accepted, the rest written by the target.</p>"
    ]
    for sample in samples:
        prompt = " ".join(sample["prompt"].split())
        short = prompt if len(prompt) <= 110 else f"{prompt[:109]}…"
        text = "".join(
            f"<mark>{escape(piece)}</mark>" if drafted else escape(piece)
            for piece, drafted in sample["pieces"]
        )
        out.append(
            f'<div class="card sample"><details><summary>{escape(short)} '
            f"({escape(sample['category'])}, τ {sample['tau']:.2f})</summary>"
            f'<div class="text dim">{escape(sample["prompt"])}</div></details>'
            f'<div class="text">{text}</div></div>'
        )
    return "".join(out)


def _facts(found: Row) -> str:
    environment, engine = found["environment"], found["engine"][0]
    facts = {
        "head": found["head"],
        "drafts": ", ".join(f"{name} {value}" for name, value in found["evaluate"].items()),
        "weights": engine["weights"],
        "prompts": found["bench"]["prompts"],
        "longest answer": f"{found['bench']['max_tokens']} tokens",
        "batch": found["bench"]["batch"],
        "processor": f"{environment['cpu']}, threads: {environment['threads']}",
        "versions": ", ".join(f"{n} {v}" for n, v in environment["packages"].items()),
        "commit": environment["commit"] or "unknown",
        "command": environment["command"],
    }
    inner = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in facts.items())
    return f'<div class="card"><dl>{inner}</dl></div>'


def _grid(charts: Iterable[str], kind: str = "charts") -> str:
    return f'<div class="{kind}">{"".join(f"<div class=card>{c}</div>" for c in charts)}</div>'


def _warmth(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"T = {temperature:g}"
