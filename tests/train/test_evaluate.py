"""Evaluation: trainer and engine compute the same, and what is measured is told truly."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from foretell.bench.run import BenchConfig
from foretell.config import EngineConfig
from foretell.llm import LLM
from foretell.models.frozen import FrozenTarget
from foretell.models.head import Head
from foretell.models.trainable_new import new_head
from foretell.train import evaluate as evaluating
from foretell.train.agreement import Agreement, agreement
from foretell.train.config import EvaluateConfig
from foretell.train.evaluate import evaluate, find_head, show
from tests import heads, tiny

TEXT = tiny.prompts(8, seed=5, longest=90)[-1]
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"norms": False},
    "eagle restored": {},
    "eagle deep": {"num_layers": 2},
    "eagle wide": {"taps": (1, 0, -1)},
    "eagle3": {},
    "mtp": {},
    "medusa": {"num_heads": 3},
    "medusa deep": {"num_heads": 2, "num_layers": 2},
}
REDUCED = torch.tensor([1, 2, 3, 5, 8, 13, 21, 34, 40, 41, 42, 55, 60])


def written(kind: str, path: Path, draft_ids: torch.Tensor | None = None) -> str:
    """Writes a random head as training would, and returns its scheme."""
    method = kind.split()[0]
    target = FrozenTarget.open(str(tiny.model("f32").path))
    head = new_head(method, target, draft_ids=draft_ids, seed=1, **KINDS[kind])
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=g)
    path.mkdir(parents=True)
    heads.write(head.tensors(), head.config, path)
    return method


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_trainer_and_engine_agree(kind: str, reduced: bool, tmp_path: Path) -> None:
    path = tmp_path / "head"
    method = written(kind, path, REDUCED if reduced else None)
    # Prompts of more than one chunk: features come in several parts.
    llm = tiny.llm(
        f"{method}:model={path},depth=2",
        prefix_caching=False,
        max_num_batched_tokens=32,
        max_num_seqs=4,
    )
    found = agreement(llm, path, TEXT)
    assert not found.not_compared
    assert found.positions >= (len(TEXT) - 1) * (KINDS[kind].get("num_heads", 1))
    assert found.difference < 1e-3
    assert found.spread > 0.1
    assert found.same_guess > 0.99


@pytest.mark.parametrize("kind", ["eagle", "eagle-norms", "eagle3", "mtp-deepseek", "mtp-qwen"])
def test_heads_of_others_agree_too(kind: str) -> None:
    llm = tiny.llm(f"{heads.scheme(kind)},depth=2", prefix_caching=False)
    found = agreement(llm, heads.written(kind), TEXT)
    assert found.positions == len(TEXT)
    assert found.difference < 1e-3


def test_an_engine_that_computes_something_else_is_seen() -> None:
    path = heads.written("eagle-norms")
    llm = tiny.llm(f"eagle:model={path},depth=2", prefix_caching=False)
    head = llm.engine.drafter.head
    assert isinstance(head, Head)
    llm.engine.drafter.head = replace(head, norm_embed=None)
    found = agreement(llm, path, TEXT)
    assert found.difference > 0.1
    assert found.same_guess < 0.9
    llm.engine.drafter.head = head  # and nothing of the watching is left behind
    assert agreement(llm, path, TEXT).difference < 1e-3


def test_formats_are_named_and_what_cannot_be_compared_says_why() -> None:
    llm = tiny.llm(f"{heads.scheme('eagle-norms')},depth=2", weights="int8", prefix_caching=False)
    found = agreement(llm, heads.written("eagle-norms"), TEXT)
    assert found.weights == "int8"
    assert 1e-3 < found.difference < 2
    assert "int8" in str(found)
    llm = tiny.llm(heads.scheme("medusa"), prefix_caching=False)
    found = agreement(llm, heads.written("medusa"), TEXT)
    assert "projections of their own" in found.not_compared
    assert "not compared" in str(found)


# ---- the whole


class WithText(LLM):
    """The tiny target with a tokenizer of one character a token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tokenizer = Letters()  # type: ignore[assignment]


class Letters:
    has_chat_template = True

    def apply_chat_template(self, messages: list[dict[str, str]], tools: Any = None) -> list[int]:
        text = "".join(message["content"] for message in messages)
        return [2 + ord(letter) % 60 for letter in text]

    def encode(self, text: str) -> list[int]:
        return [2 + ord(letter) % 60 for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(48 + token) for token in ids)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


PROMPTS = [
    {"id": 1, "category": "a", "turns": ["To be or not", "and then"]},
    {"id": 2, "category": "a", "turns": ["that is the question"]},
    {"id": 3, "category": "b", "prompt": "whether tis nobler in the mind"},
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("foretell.bench.arms.LLM", WithText)
    heads_path = tmp_path / "run" / "fit" / "head"
    written("eagle restored", heads_path)
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, PROMPTS)))
    return tmp_path / "run"


def evaluated(run: Path, **options: Any) -> Any:
    engine = EngineConfig(
        model=str(tiny.model("f32").path),
        weights="f32",
        kv_memory="8MiB",
        max_model_len=200,
        page_size=4,
        threads=1,
    )
    return evaluate(
        run,
        EvaluateConfig(k=3, depth=3, topk=2, nodes=6),
        BenchConfig(max_tokens=12),
        engine,
        prompts=run.parent / "prompts.jsonl",
        **options,
    )


def test_chain_and_tree_are_measured_at_both_temperatures(run: Path) -> None:
    result = evaluated(run)
    assert result.valid, result.problems
    assert result.method == "eagle"
    assert [(t, line.scheme) for t, line in result.totals()] == [
        (0.0, "chain"), (0.0, "tree"), (1.0, "chain"), (1.0, "tree"),
    ]  # fmt: skip
    for _, line in result.totals():
        assert line.category == "all"
        assert line.num_answers == line.num_identical == 4
        assert 1 <= line.tau <= 4
        assert line.drafted[0] > 0
    assert result.agreement.difference < 1e-3
    written_down = json.loads((run / "evaluation.json").read_text())
    assert written_down["valid"]
    assert written_down["complete"]
    assert len(written_down["summary"]) == 3 * 2 * 2  # a, b and all; chain and tree; 0 and 1
    assert len(written_down["answers"]) == 4 * 3 * 2
    for row in written_down["summary"]:
        shares = row["cumulative"]
        assert shares == sorted(shares, reverse=True)
        assert all(0 <= share <= 1 for share in shares)
    assert [sample["category"] for sample in written_down["samples"]] == ["a", "b"]
    for sample in written_down["samples"]:
        assert len("".join(text for text, _ in sample["pieces"])) in (11, 12)  # the end is no text


def test_the_tables_say_what_was_found(run: Path) -> None:
    out = io.StringIO()
    show(evaluated(run), Console(file=out, width=80, force_terminal=True, color_system=None))
    text = out.getvalue()
    assert "chain" in text
    assert "tree" in text
    assert "4/4" in text
    assert "same hidden states" in text
    assert "NOT VALID" not in text
    assert max(map(len, text.split("Trainer and engine")[0].splitlines())) <= 80


def test_another_text_is_never_called_valid(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = WithText.generate

    def broken(self: LLM, prompts: Any, params: Any = None, *, speculate: bool = True) -> Any:
        answers = generate(self, prompts, params, speculate=speculate)
        if speculate:
            answers[0].token_ids[-1] += 1
        return answers

    monkeypatch.setattr(WithText, "generate", broken)
    result = evaluated(run)
    assert not result.valid
    assert any("NOT THE SAME TEXT" in problem for problem in result.problems)
    assert json.loads((run / "evaluation.json").read_text())["valid"] is False
    out = io.StringIO()
    show(result, Console(file=out, width=80))
    assert "NOT VALID" in out.getvalue()


def test_a_drafter_that_fails_is_never_called_valid(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluating, "agreement", lambda *_: Agreement(weights="f32"))

    def fail(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("foretell.drafters.eagle.Eagle.propose", fail)
    result = evaluated(run)
    assert any("the drafter failed" in problem for problem in result.problems)


def test_an_interruption_keeps_what_is_whole(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, calls = WithText.generate, [0]

    def interrupted(self: LLM, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 12:
            raise KeyboardInterrupt
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(WithText, "generate", interrupted)
    result = evaluated(run)
    assert not result.valid
    assert list(result.lines) == [0.0]
    assert json.loads((run / "evaluation.json").read_text())["complete"] is False

    (run / "evaluation.json").write_text('{"valid": true}')
    calls[0] = 0
    assert not evaluated(run).written  # what was whole before stays
    assert (run / "evaluation.json").read_text() == '{"valid": true}'


def test_a_run_without_a_finished_head_gives_its_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run foretell train fit first"):
        find_head(tmp_path)
    for step in ("step-00000500", "step-00001500", ".step-00009000.partial"):
        (tmp_path / "fit" / step / "head").mkdir(parents=True)
    assert find_head(tmp_path).parent.name == "step-00001500"
    (tmp_path / "fit" / "head").mkdir()
    assert find_head(tmp_path) == tmp_path / "fit" / "head"


def test_a_tree_of_one_child_is_refused() -> None:
    with pytest.raises(ValueError, match="topk=1 is a chain"):
        EvaluateConfig(topk=1)
