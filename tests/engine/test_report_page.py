"""The report's page: whole, escaped, and true to what was measured."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from foretell.bench.environment import environment
from foretell.bench.report import summarize
from foretell.bench.report_page import report_page
from foretell.bench.run import Arm, BenchConfig, measure
from foretell.bench.timeline import Recorder, record, timeline
from tests import tiny
from tests.engine.test_bench import CONVERSATIONS, arms

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Checker(HTMLParser):
    """Every tag is closed by its own; nothing is loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attributes) -> None:
        values = dict(attributes)
        assert tag != "script"
        assert "src" not in values
        assert not values.get("href")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text += data


def checked(page: str) -> str:
    """The page's text."""
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert not re.search(r"url\(|@import", page)
    return " ".join(checker.text.split())


def about(**bench) -> dict:
    setting = {"max_tokens": 9, "temperature": 0.0, "batch": 1, "seed": 0, "limit": None} | bench
    return {"model": "a <b> c", "weights": "int8", "bench": setting, "environment": environment()}


def test_the_page_holds_what_was_measured():
    both = arms()
    measurement = measure(both, CONVERSATIONS, BenchConfig(max_tokens=9), room=100)
    lines = summarize(measurement, both)
    sweep = {1: {"fast": 0.9}, 2: {"fast": 1.5}, 4: {"fast": 1.0}, 8: {"fast": 0.5}}
    text = checked(report_page(lines, measurement, sweep, {}, about()))
    assert "a <b> c in int8, 3 conversations, greedy, 1 at once" in text
    for part in ("Speed-up by category", "Acceptance by position", "Tokens for each target pass",
                 "Time between tokens", "Break-even by batch", "2.00x"):  # fmt: skip
        assert part in text
    assert "Not slower are: fast at 2, 4." in text
    without = checked(report_page(lines, measurement, {}, {}, about(temperature=0.7)))
    assert "Break-even" not in without
    assert "temperature 0.7" in without


def test_a_recorded_stretch_is_drawn_to_scale():
    llm = tiny.llm("draft-model:weights=int4,k=4")
    both = [Arm("plain", llm, speculate=False), Arm("fast & good", llm)]
    steps = record(both, tiny.prompts(1)[0], 0, 0.0)
    assert set(steps) == {"plain", "fast & good"}
    assert [step.counts["emitted"] for step in steps["plain"]] == [1] * 8
    assert all(step.counts["drafted"] for step in steps["fast & good"])
    picture = timeline(steps)
    checked(picture)
    assert "fast &amp; good: " in picture
    widths = [
        float(x) + float(w)
        for x, w in re.findall(r'x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', picture)
    ]
    assert max(widths) <= 900.1
    assert timeline({"plain": []}) == ""


def test_a_recorder_forgets_a_step_that_failed():
    recorder = Recorder()
    for name in ("schedule", "propose", "schedule", "forward"):
        recorder.phase(name, 0.0, 1.0)
    recorder.step({"emitted": 1})
    assert [name for name, _, _ in recorder.steps[0].phases] == ["schedule", "forward"]
