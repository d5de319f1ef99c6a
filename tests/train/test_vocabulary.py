"""Which tokens a small vocabulary has: the most frequent of the answers, prompts not counted."""

from __future__ import annotations

import json

import pytest
import torch

from foretell.cli import main
from foretell.models.head_reader import draft_ids
from foretell.train.vocabulary import draft_vocabulary
from tests import tiny
from tests.train import rig

ROWS = [
    {"tokens": [9, 9, 9, 9, 5, 5, 7], "spans": [[4, 7]]},
    {"tokens": [8, 5, 7, 3, 8], "spans": [[1, 2], [3, 4]]},
]


def test_answers_are_ranked_and_the_rest_filled_up_from_below(model, tmp_path, capsys):
    rig.write_rows(tmp_path / "answers.jsonl", ROWS)
    flags = [f"--model={model}", f"--run={tmp_path}"]
    assert main(["train", "draft-vocab", *flags, "--size=6", "--size=1"]) == 0
    assert json.loads((tmp_path / "draft_vocab.json").read_text()) == [5, 3, 7, 0, 1, 2]
    said = capsys.readouterr().out
    assert "6 tokens cover 100.00%" in said
    assert "1 tokens cover 60.00%" in said
    found = draft_ids(str(tmp_path / "draft_vocab.json"), tmp_path, tiny.VOCAB)
    assert torch.equal(found.sort().values, torch.tensor([0, 1, 2, 3, 5, 7]))


def test_what_cannot_be_ranked(model, tmp_path):
    with pytest.raises(ValueError, match="make it with foretell train prepare"):
        draft_vocabulary(tmp_path, model, [4])
    rig.write_rows(tmp_path / "samples.jsonl", [{"tokens": [3], "spans": []}])
    with pytest.raises(ValueError, match="no text has an answer"):
        draft_vocabulary(tmp_path, model, [4])
    for size in (0, 65):
        with pytest.raises(ValueError, match="from 1 to the vocabulary's 64"):
            draft_vocabulary(tmp_path, model, [size])
