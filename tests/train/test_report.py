"""The report: whole without assets, true to the files, and there with any part missing."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from foretell.train.curves import curves, expected_tau
from foretell.train.report import page, write_report

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Balanced(HTMLParser):
    """Collects text and checks that every element is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.marked: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "mark":
            self.marked.append(data)
        if not self.open or self.open[-1] != "style":
            self.words.append(data)


def metrics(steps: int = 30, held_out: bool = True) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i in range(1, steps + 1):
        row = {
            "step": 10 * i, "epoch": 0, "loss": 3 / i, "parts": {"kl": 3 / i}, "lr": 1e-3 / i,
            "agreed": [0.5, 0.25], "matched": [0.6, 0.5], "grad_norm": 0.1, "tokens": 1000 * i,
            "seconds": 60.0 * i,
        }  # fmt: skip
        if held_out and i % 5 == 0:
            row["held_out"] = {"loss": 4 / i, "agreed": [0.4, 0.2], "matched": [0.55, 0.5]}
        rows.append(row)
    return rows


def line(category: str, scheme: str, temperature: float, tau: float) -> dict[str, Any]:
    return {
        "temperature": temperature, "category": category, "scheme": scheme, "tau": tau,
        "acceptance": [0.6, 0.5], "cumulative": [0.6, 0.3], "plain_speed": 40.0, "speed": 70.0,
        "speedup": 1.75, "end_to_end": 1.6, "num_identical": 4, "num_answers": 4,
    }  # fmt: skip


def evaluation(**changes: Any) -> dict[str, Any]:
    lines = [
        line(category, scheme, temperature, tau)
        for temperature in (0.0, 1.0)
        for category, tau in (("qa", 1.5), ("chat", 2.5), ("all", 2.0))
        for scheme in ("chain", "tree")
    ]
    return {
        "head": "run/fit/head", "method": "mtp", "valid": True, "problems": [],
        "evaluate": {"k": 4, "depth": 5}, "summary": lines, "samples": [
            {"category": "qa", "prompt": "Is 1 < 2?", "tau": 2.0,
             "pieces": [["Yes, ", True], ["1 < 2", False], [" & so on", True]]},
        ],
        "agreement": {"says": "Trainer and engine (int8) differ by 0.2"},
        "bench": {"prompts": "default", "max_tokens": 96, "batch": 1},
        "engine": [{"model": "smollm2", "weights": "int8"}],
        "environment": {"cpu": "c", "threads": 2, "packages": {"torch": "2"}, "commit": None,
                        "command": "foretell train evaluate"},
    } | changes  # fmt: skip


def written(run: Path, rows: list[dict[str, Any]], found: dict[str, Any] | None) -> Balanced:
    (run / "fit").mkdir(parents=True)
    if rows:
        (run / "fit" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if found:
        (run / "evaluation.json").write_text(json.dumps(found))
    path = write_report(run)
    assert path == run / "report.html"
    text = path.read_text()
    assert not re.search(r"(src|href)=\"(?!data:)|@import|url\(|<script", text)
    assert set(re.findall(r"https?://[^\"<]*", text)) <= {"http://www.w3.org/2000/svg"}
    return Balanced(text)


def test_everything_is_on_the_page(tmp_path: Path) -> None:
    shown = written(tmp_path / "first", metrics(), evaluation())
    text = " ".join(shown.words)
    for part in (
        "Training first", "A head of mtp for smollm2", "300 steps", "30,000 tokens", "30 min",
        "2.00", "1.75x", "55.0%", "Loss", "Learning rate", "By category", "tree, T = 1", "4/4",
        "Trainer and engine (int8)", "Is 1 < 2?", "foretell train evaluate",
    ):  # fmt: skip
        assert part in text, part
    assert "Not valid" not in text
    # What the draft guessed, the legend's own word first.
    assert shown.marked == ["Marked", "Yes, ", " & so on"]


def test_totals_are_those_over_all_prompts(tmp_path: Path) -> None:
    text = page("x", [], evaluation())
    before, after = text.split("By category")
    assert before.count("<tr>") == 1 + 4
    assert after.count("<tr>") == 1 + 8
    assert "chat" not in before.split("In the engine")[1]
    alone = evaluation(summary=[line("all", "chain", 0.0, 2.0)])
    assert "By category" not in page("x", [], alone)


def test_a_page_is_there_before_and_without_training(tmp_path: Path) -> None:
    text = " ".join(written(tmp_path / "a", metrics(held_out=False), None).words)
    assert "Not measured yet" in text
    assert "60.0%" in text
    assert "First guess: training and held out" not in text
    text = " ".join(written(tmp_path / "b", [], evaluation()).words)
    assert "Learning rate" not in text
    (tmp_path / "c").mkdir()
    with pytest.raises(ValueError, match=r"neither fit/metrics\.jsonl nor evaluation\.json"):
        write_report(tmp_path / "c")


def test_what_is_not_valid_says_so(tmp_path: Path) -> None:
    problem = "NOT THE SAME TEXT: <b>"
    shown = written(tmp_path / "r", metrics(), evaluation(valid=False, problems=[problem]))
    assert f"Not valid: {problem}" in " ".join(shown.words)


@pytest.mark.parametrize("steps", [1, 2, 5000])
def test_runs_of_any_length_are_drawn(steps: int) -> None:
    charts = curves(metrics(steps))
    assert len(charts) == (6 if steps >= 5 else 5)
    assert all(len(chart) < 40_000 for chart in charts)


def test_a_head_that_counts_nothing_and_a_torn_line_are_no_trouble(tmp_path: Path) -> None:
    rows = [{"step": i, "loss": 1.0, "lr": 0.1} for i in range(3)]
    run = tmp_path / "r"
    (run / "fit").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo'
    (run / "fit" / "metrics.jsonl").write_text(lines)
    Balanced(write_report(run).read_text())


@pytest.mark.parametrize("damaged", ["3", "{}", '{"step": 1}', '{"step": "x", "loss": 1}', "\xff"])
def test_rows_that_are_none_are_left_out(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "fit").mkdir()
    lines = f'{{"step": 1, "loss": 1.0}}\n{damaged}\n'
    (tmp_path / "fit" / "metrics.jsonl").write_bytes(lines.encode("latin-1"))
    Balanced(write_report(tmp_path).read_text())


@pytest.mark.parametrize("damaged", ['{"engine": []}', "{}", '{"summary": [3]}', "[]"])
def test_a_damaged_evaluation_is_one_line(damaged: str, tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text(damaged)
    with pytest.raises(ValueError, match=r"evaluation.json"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_tau_of_a_chain_adds_up_what_gets_through() -> None:
    assert expected_tau([0.5, 0.5, 0.5]) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tau([1.0, 1.0]) == 3
    assert expected_tau([]) is None
    assert expected_tau(None) is None
