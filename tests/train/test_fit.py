"""The command on real heads over a tiny target."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from foretell.models.frozen import FrozenTarget
from foretell.models.trainable_files import open_head
from foretell.train.features import open_batches
from foretell.train.fit import fit_head, split
from foretell.train.fit_config import FitConfig
from foretell.train.metrics import read_rows
from tests.tiny import write_model
from tests.train.stored import write_features

QUICK = {
    "max_len": 64, "batch_tokens": 128, "epochs": 6.0, "lr": 0.01, "log_every": 1, "threads": 1,
    "validate_every": 20, "save_every": 15, "autocast": "off",
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("target"), layers=6)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa"])
def test_every_scheme_learns_and_resumes(tmp_path, target, method):
    config = FitConfig(method=method, **QUICK)
    taps = (1, 2, -1) if method == "eagle3" else (-1,)
    run = write_features(tmp_path / "run", target, taps=taps)
    head = fit_head(config, run)
    assert head == run / "fit" / "head"
    rows = read_rows(run / "fit" / "metrics.jsonl")
    assert rows[-1]["matched"][0] > rows[0]["matched"][0] + 0.1
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "held_out" in rows[-1]
    opened = open_head(method, head, FrozenTarget.open(str(target)))
    assert json.loads((head / "config.json").read_text()) == opened.config
    names = {name.rsplit(".", 1)[0] for name in opened.tensors()}
    assert not [name for name in names if "embed_tokens" in name or "lm_head" in name]

    steps = sorted(run.glob("fit/step-*"))
    assert (steps[0] / "head" / "model.safetensors").exists()
    for step in steps[1:]:  # as if the run had ended after its first checkpoint
        step.rename(tmp_path / step.name)
    fit_head(config, run)
    again = read_rows(run / "fit" / "metrics.jsonl")
    strip = lambda rows: [{**row, "seconds": 0} for row in rows]  # noqa: E731
    assert strip(again) == strip(rows)


def test_a_reduced_vocabulary_and_fine_tuning(tmp_path, target):
    run = write_features(tmp_path / "run", target)
    (run / "ids.json").write_text(json.dumps(list(range(0, 64, 2))[::-1]))
    config = FitConfig(method="mtp", draft_vocab=str(run / "ids.json"), **QUICK)
    head = fit_head(config, run)
    opened = open_head("mtp", head, FrozenTarget.open(str(target)))
    assert opened.draft_ids.tolist() == list(range(0, 64, 2))
    other = write_features(tmp_path / "other", target)
    fit_head(FitConfig(method="mtp", init=str(head), **QUICK), other)
    first, last = (read_rows(r / "fit" / "metrics.jsonl")[0] for r in (other, run))
    assert first["loss"] < last["loss"]
    with pytest.raises(ValueError, match="draft_vocab was None and is"):
        fit_head(FitConfig(method="mtp", **QUICK, draft_vocab=str(run / "ids.json")), other)
    (run / "ids.json").write_text("[1, 64]")
    with pytest.raises(ValueError, match="from 0 to 63"):
        fit_head(config, run)
    (run / "ids.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="not a list of token ids"):
        fit_head(config, run)


def test_an_eagle_head_learns_to_read_more_layers(tmp_path, target):
    run = write_features(tmp_path / "run", target, taps=(1, 3, -1))
    fit_head(FitConfig(method="eagle", **QUICK), run)
    shutil.move(run / "fit", tmp_path / "before")
    head = tmp_path / "before" / "head"
    fitted = fit_head(FitConfig(method="eagle", init=str(head), taps="3,1,-1", **QUICK), run)
    before, after = (read_rows(fit / "metrics.jsonl") for fit in (tmp_path / "before", run / "fit"))
    assert after[0]["loss"] < before[0]["loss"]
    opened = open_head("eagle", fitted, FrozenTarget.open(str(target)))
    assert opened.taps == (3, 1, -1)
    assert opened.fuse_up.weight.abs().max() > 0
    fitted = shutil.move(fitted, tmp_path / "wide")
    shutil.rmtree(run / "fit")
    again = fit_head(FitConfig(method="eagle", init=str(fitted), **QUICK | {"max_steps": 1}), run)
    assert open_head("eagle", again, FrozenTarget.open(str(target))).taps == (3, 1, -1)
    with pytest.raises(ValueError, match="must be layers from 0, each once"):
        FitConfig(method="eagle", taps="1,1")


def test_held_out_texts_are_in_no_epoch(tmp_path, target):
    run = write_features(tmp_path / "run", target, texts=60)
    batches = open_batches(run, max_len=64, batch_tokens=128)
    train, held_out = split(batches, 0.1, 2)
    assert held_out is not None
    assert train.num_batches(0, 2) >= 1
    assert held_out.num_batches(0, 2) >= 1
    learnt = {
        tuple(row.tolist()) for e in range(3) for batch in train.epoch(e) for row in batch.tokens
    }
    looked = {tuple(row.tolist()) for batch in held_out.epoch(0) for row in batch.tokens}
    assert looked
    assert not learnt & looked
    assert sum(len(rows) for rows in (train.rows, held_out.rows)) == len(batches.rows)
    assert split(batches, 0.0, 1) == (batches, None)
    with pytest.raises(ValueError, match="--held-out 0"):
        split(batches, 0.1, 1000)


def test_no_features_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="run foretell train features first"):
        fit_head(FitConfig(), tmp_path)


def test_bf16_on_a_real_head(tmp_path, target):
    run = write_features(tmp_path / "run", target)
    fit_head(FitConfig(method="mtp", **(QUICK | {"autocast": "bf16", "max_steps": 4})), run)
    rows = read_rows(run / "fit" / "metrics.jsonl")
    assert all(torch.tensor(row["loss"]).isfinite() for row in rows)
