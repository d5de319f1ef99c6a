"""Advice: what it recommends, how sure it is, and what it makes of other hardware."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from foretell.bench import advise as advising
from foretell.bench.advise import (
    Finding,
    _median,
    _print,
    _print_prediction,
    _ratios,
    bootstrap,
)
from foretell.bench.report import Line, summarize
from foretell.bench.roofline import GPUS, Roofline, parse_hardware
from foretell.bench.run import PLAIN, BenchConfig, Measurement
from foretell.bench.workloads import parse
from foretell.cli import main
from foretell.config import EngineConfig, SpeculationConfig
from tests.train import rig


class Page(Console):
    def __init__(self) -> None:
        super().__init__(file=io.StringIO())
        self.lines: list[str] = []

    def print(self, text, **_) -> None:
        self.lines += text.split("\n")


def advice(*findings: Finding) -> list[str]:
    page = Page()
    _print(page, list(findings), BenchConfig(), EngineConfig(), None)
    return page.lines


def found(scheme: str, batch: int, speedup: float, spread: float = 0.1) -> Finding:
    return Finding(
        scheme,
        batch,
        speedup,
        speedup - spread,
        speedup + spread,
        speedup,
        80.0,
        50.0,
        2.0,
        [0.7, 0.5],
        3,
    )


def test_the_best_scheme_with_flags_that_can_be_pasted():
    lines = advice(
        found("eagle:k=3", 1, 1.8),
        found("prompt-lookup:k=8", 1, 1.4),
        found("eagle:k=3", 8, 1.2),
        found("eagle:k=3", 32, 1.0),
    )
    text = "\n".join(lines)
    assert "Use eagle:k=3: 1.80x (1.70-1.90) at 1 at once" in text
    assert "up to 8 at once" in text
    serve = next(line for line in lines if "foretell serve" in line)
    words = shlex.split(serve)
    config = SpeculationConfig.parse(words[words.index("--speculation") + 1])
    assert config is not None
    assert (config.method, config.k) == ("eagle", 3)


def test_flags_say_what_was_measured_with():
    page, engine = Page(), EngineConfig(model="my model", weights="bf16", threads=3, max_num_seqs=8)
    _print(page, [found("auto", 4, 1.8)], BenchConfig(), engine, Path("a b.jsonl"))
    serve, bench = (shlex.split(line, comments=True) for line in page.lines[-2:])
    same = ["--speculation", "auto", "--model", "my model", "--weights", "bf16"]
    same += ["--max-num-seqs", "8", "--threads", "3"]
    assert serve == ["foretell", "serve", *same]
    assert bench[:-4] == ["foretell", "bench", *same, "--prompts", "a b.jsonl", "--batch", "4"]


def test_it_promises_what_the_bench_prints(tmp_path, monkeypatch):
    """Whole conversations, and the same numbers of them."""
    model, lines = rig.write_model(tmp_path / "m"), list[Line]()
    turns = [json.dumps({"id": f"c{i}", "turns": ["ab" * (i + 1), "cd"]}) for i in range(3)]
    (tmp_path / "own.jsonl").write_text("\n".join(turns))

    def watched(measurement, arms):
        lines.extend(summarize(measurement, arms))
        return lines

    monkeypatch.setattr(advising, "summarize", watched)
    (finding,) = advising.advise(
        ["prompt-lookup:k=3"], BenchConfig(max_tokens=6), rig.engine(model),
        prompts=tmp_path / "own.jsonl", batches=[2], console=Page(),
    )  # fmt: skip
    line = next(line for line in lines if line.scheme == finding.scheme)
    assert (line.num_conversations, line.num_answers) == (6, 12)  # three batches of two
    promised = (finding.speedup, finding.end_to_end, finding.speed, finding.plain_speed)
    assert promised == (line.speedup, line.end_to_end, line.speed, line.plain_speed)


def test_dont_where_it_might_be_nothing():
    text = "\n".join(advice(found("prompt-lookup:k=8", 1, 1.1, spread=0.2)))
    assert "Don't speculate" in text
    assert "70%" in text  # why
    assert "foretell serve" not in text


def test_what_surely_pays_goes_before_what_may_pay_more():
    lines = advice(
        found("prompt-lookup", 1, 1.2, spread=0.5),
        found("eagle", 1, 1.1, spread=0.02),
    )
    assert "Use eagle: 1.10x" in "\n".join(lines)


def test_what_no_draft_pays_for_is_not_worth_a_try():
    one, other = found("prompt-lookup", 1, 1.0, spread=0.01), found("eagle", 4, 1.7, spread=0.1)
    assert "worth a try" in "\n".join(advice(one, other))
    assert "worth a try" not in "\n".join(advice(one, replace(other, depth=0)))


def test_a_wide_interval_is_no_verdict_on_drafts():
    text = "\n".join(
        advice(found("prompt-lookup", 1, 1.2, spread=0.5), found("eagle", 4, 1.9, spread=0.2))
    )
    assert "it may pay or not" in text
    assert "--sample" in text
    assert "At 4 at once eagle gives 1.90x" in text


def test_the_interval_is_narrower_with_more_prompts():
    few = [[[1.0]], [[1.5]], [[2.0]]]
    many = few * 20
    low, high = bootstrap(few)
    assert (low, high) == (1.0, 2.0)
    inner = bootstrap(many)
    assert low <= inner[0] <= 1.5 <= inner[1] <= high
    assert inner[1] - inner[0] < high - low
    assert bootstrap([]) == (0.0, 0.0)


def test_what_ran_at_one_moment_shares_its_noise():
    """Four conversations at once, three times: a batch's answers are alike."""
    moments = [[1.7], [0.9], [0.8]]
    low, high = bootstrap([moments] * 4)
    assert (low, high) == (0.8, 1.7)


def test_a_prompt_that_was_asked_again_to_fill_a_batch_counts_once():
    def answer(arm: str, name: str, gap: float) -> Any:
        return SimpleNamespace(arm=arm, id=name, gaps=[gap] * 4)

    names = ["a.b.0", "x.1", "a.b.2", "x.3"]
    answers = [answer(PLAIN, name, 2.0) for name in names]
    answers += [answer("s", name, 1.0 if name[0] == "a" else 4.0) for name in names]
    ratios = _ratios(Measurement(answers=answers), "s", 2)
    assert ratios == [[[2.0], [2.0]], [[0.5], [0.5]]]
    assert _median(ratios, range(2)) == 1.25
    assert _ratios(Measurement(answers=answers), "s", 1) == [[[2.0, 2.0]], [[0.5, 0.5]]]


def test_a_bench_afterwards_begins_with_what_each_load_began_with(tmp_path, monkeypatch):
    """Else it would know what the advice did not, and come out otherwise."""
    monkeypatch.setattr("foretell.engine.kept.home", lambda: tmp_path / "home")
    engine = rig.engine(rig.write_model(tmp_path / "m"))
    advising.advise(
        ["prompt-lookup:k=3"], BenchConfig(max_tokens=8), engine,
        batches=[1, 2], sample=2, console=Page(),
    )  # fmt: skip
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["costs"]


def test_no_advice_from_half_a_measurement_and_little_trust_in_one_prompt(tmp_path, monkeypatch):
    model = rig.write_model(tmp_path / "m")
    (tmp_path / "one.jsonl").write_text('{"prompt": "abcabcabc"}')
    page = Page()

    def advise(batches: list[int]) -> list[Finding]:
        return advising.advise(
            ["prompt-lookup:k=3"], BenchConfig(max_tokens=4), rig.engine(model),
            prompts=tmp_path / "one.jsonl", batches=batches, console=page,
        )  # fmt: skip

    advise([1])
    assert "Only 1 prompts" in "\n".join(page.lines)
    measure, cut = advising.measure, Measurement(complete=False)
    monkeypatch.setattr(advising, "measure", lambda *_: cut)
    with pytest.raises(KeyboardInterrupt):
        advise([1])
    page.lines.clear()
    monkeypatch.setattr(
        advising, "measure", lambda *given: cut if given[2].batch == 2 else measure(*given)
    )
    assert [f.batch for f in advise([1, 2])] == [1]
    assert "Interrupted: not tried with 2 at once and more." in page.lines


@pytest.mark.parametrize("gpu", GPUS)
def test_a_roofline_has_its_two_sides(gpu):
    line = Roofline(gpu, 8e9)
    one, few, many = (line.seconds(rows, 0, rows) for rows in (1, 16, 4096))
    assert few < 1.05 * one  # bound by reading weights
    assert many > 4 * one  # bound by arithmetic
    assert Roofline(gpu, 8e9, tp=4).seconds(1, 0, 1) < one
    assert 30 <= line.layers <= 45
    assert 75 <= Roofline(gpu, 70e9).layers <= 85


def test_a_prediction_knows_how_rarely_there_is_a_draft():
    """Lookup may be right whenever it finds something and still find next to nothing."""
    seldom = Finding("prompt-lookup", 1, 1.0, 1.0, 1.0, 1.0, 50.0, 50.0, 1.08, [0.6, 0.5], 2)
    assert seldom.share == pytest.approx(0.08 / 0.9)
    assert replace(seldom, tau=1.9).share == pytest.approx(1)
    assert replace(seldom, acceptance=[]).share == 0
    line = Roofline("H100", 70e9, 8)
    always, _ = line.speedup("prompt-lookup", seldom.acceptance, 1, 500)
    now, _ = line.speedup("prompt-lookup", seldom.acceptance, 1, 500, seldom.share)
    assert always > 1.5
    assert 1 < now <= seldom.tau


def test_drafts_pay_less_the_more_run_at_once():
    line = Roofline("H100", 70e9, 8)
    ups = [line.speedup("eagle:k=5", [0.8] * 5, batch, 500) for batch in (1, 16, 64, 256, 1024)]
    assert ups[0][0] > 2
    assert ups[-1] == (1.0, 0)
    assert all(a[0] >= b[0] - 0.05 for a, b in pairwise(ups))
    assert line.speedup("prompt-lookup:k=5", [0.0] * 5, 1, 500) == (1.0, 0)
    page = Page()
    _print_prediction(page, [found("eagle:k=5", 1, 2.0)], line, 500)
    text = "\n".join(page.lines)
    assert "not measured" in text
    assert "same acceptance" in text


@pytest.mark.parametrize(
    "text",
    ["", "gpu=H100", "gpu=H100,target=70", "gpu=H100,target=7B,tp=x", "gpu=H100,target=7B,x=1"],
)
def test_hardware_that_is_none(text):
    with pytest.raises(ValueError, match="write for example"):
        parse_hardware(text)


def test_hardware():
    assert parse_hardware("gpu=h100,target=70B,tp=8") == Roofline("H100", 70e9, 8)
    assert parse_hardware("gpu=A100,target=500M") == Roofline("A100", 5e8)
    with pytest.raises(ValueError, match="choose one of A100"):
        parse_hardware("gpu=B300,target=70B")


def test_logged_conversations_are_prompts():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
    lines = [{"messages": messages}, {"custom_id": "7", "body": {"messages": messages[:2]}}]
    found = parse("\n".join(json.dumps(line) for line in lines), "log")
    assert [c.turns for c in found] == [("Hello", "Bye"), ("Hello",)]
    with pytest.raises(ValueError, match="at least one message"):
        parse(json.dumps({"messages": messages[:1]}), "log")


def test_a_wrong_prediction_needs_no_model(capsys):
    assert main(["advise", "--model", "./no", "--predict", "gpu=Z"]) == 2
    assert "gpu=H100,target=70B" in capsys.readouterr().err
