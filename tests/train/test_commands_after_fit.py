"""`foretell train evaluate`, `export` and `report` as commands: flags, output, exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretell.cli import main
from foretell.train import evaluate as evaluating
from foretell.train.agreement import Agreement
from foretell.train.evaluate import Evaluation
from tests import heads, tiny
from tests.train.test_report import evaluation, metrics


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "fit" / "head").mkdir(parents=True)
    heads.write(*heads.eagle3(), tmp_path / "fit" / "head")
    return tmp_path


def test_export_says_what_it_wrote(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = str(tiny.model("f32").path), run / "out"
    command = ["train", "export", "--run", str(run), "--out", str(out), "--model", model]
    assert main([*command, "--format", "speculators", "--verifier", "org/target"]) == 0
    assert f"wrote {out}: eagle3, 15 tensors" in capsys.readouterr().out
    settings = json.loads((out / "config.json").read_text())
    verifier = settings["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    assert main([*command, "--format", "medusa"]) == 2
    assert "vLLM's Medusa layout has no place" in capsys.readouterr().err
    assert main([*command, "--format", "onnx"]) == 2
    assert "choose one of foretell, eagle, speculators, medusa" in capsys.readouterr().err
    assert main([*command, "--head", str(run / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_report_says_where_it_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "report", "--run", str(run)]) == 2
    assert "neither fit/metrics.jsonl nor" in capsys.readouterr().err
    rows = "".join(json.dumps(row) + "\n" for row in metrics())
    (run / "fit" / "metrics.jsonl").write_text(rows)
    (run / "evaluation.json").write_text(json.dumps(evaluation()))
    assert main(["train", "report", "--run", str(run)]) == 0
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(("problems", "status"), [([], 0), (["NOT THE SAME TEXT: x"], 1)])
def test_evaluate_ends_with_1_if_its_numbers_mean_nothing(
    problems: list[str],
    status: int,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []

    def measured(*args: Any, **kwargs: Any) -> Evaluation:
        asked.append((args, kwargs))
        return Evaluation("head", "mtp", Agreement(weights="f32"), problems=problems)

    monkeypatch.setattr(evaluating, "evaluate", measured)
    more = ["--nodes", "12", "--max-tokens", "9", "--weights", "f32", "--limit", "2"]
    assert main(["train", "evaluate", "--run", str(run), *more]) == status
    (where, config, bench, engine), kwargs = asked[0]
    assert where == run
    assert (config.nodes, bench.max_tokens, engine.weights, kwargs["limit"]) == (12, 9, "f32", 2)
    assert ("NOT VALID" in capsys.readouterr().out) == bool(problems)
    assert main(["train", "evaluate", "--run", str(run), "--topk", "1"]) == 2
