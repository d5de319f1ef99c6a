"""Two gloo processes against one, both ways of sharing a run out, and what goes wrong in one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from foretell.train.metrics import read_rows
from tests.train.ranks import run
from tests.train.tiny import TinyBatches


def two(path, *, kind="quiet", check=True, **changes) -> subprocess.CompletedProcess:
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "-m", "tests.train.ranks", str(path), json.dumps(changes), kind,
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=check, text=True, capture_output=True,
        timeout=200,
    )  # fmt: skip


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process that takes both ranks' batches in each step."""
    path = tmp_path_factory.mktemp("one")
    run(path, {"accumulate": 2})
    return path


def assert_same_run(path, one) -> None:
    ours, expected = (read_rows(p / "metrics.jsonl") for p in (path, one))
    assert len(ours) == len(expected) == 8
    for a, b in zip(ours, expected, strict=True):
        assert a.keys() == b.keys()
        assert (a["step"], a["epoch"], a["tokens"]) == (b["step"], b["epoch"], b["tokens"])
        for name in ("loss", "agreed", "matched", "grad_norm", "lr"):
            assert a[name] == pytest.approx(b[name], rel=2e-4, abs=1e-6), name
        if "held_out" in b:
            assert a["held_out"]["loss"] == pytest.approx(b["held_out"]["loss"], rel=2e-4)
    head, wanted = (load_file(p / "head" / "model.safetensors") for p in (path, one))
    assert head.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(head[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_ranks_equal_one_process_with_their_batches(tmp_path, one, fsdp):
    two(tmp_path, fsdp=fsdp)
    assert_same_run(tmp_path, one)


@pytest.mark.parametrize("first", ["ddp", "fsdp", "one"])
def test_a_checkpoint_of_either_goes_on_in_the_other(tmp_path, one, first):
    """The first half of a run in one way, the second in the next."""
    if first == "one":
        run(tmp_path, {"accumulate": 2})
    else:
        two(tmp_path, fsdp=first == "fsdp")
    shutil.rmtree(tmp_path / "step-00000008")
    shutil.rmtree(tmp_path / "head")
    if first == "fsdp":
        run(tmp_path, {"accumulate": 2})
    else:
        two(tmp_path, fsdp=True)
    assert_same_run(tmp_path, one)


def test_a_bad_batch_of_one_rank_stops_all(tmp_path):
    done = two(tmp_path, kind="poisoned", check=False, save_every=1)
    assert done.returncode != 0
    assert "step 3: the loss is not finite" in done.stderr
    assert "step 2 is saved" in done.stderr
    assert not (tmp_path / "bad-batch.pt").exists()
    bad = torch.load(tmp_path / "bad-batch-1.pt", weights_only=True)
    assert torch.equal(bad["batches"][0]["tokens"], TinyBatches().make(5).tokens)


def test_a_rank_that_dies_ends_the_other(tmp_path):
    done = two(tmp_path, kind="dying", check=False)
    assert done.returncode != 0
    assert not (tmp_path / "head").exists()


def test_fsdp_alone_says_how_to_start():
    with pytest.raises(ValueError, match="torchrun"):
        run(None, {"fsdp": True})  # type: ignore[arg-type]
