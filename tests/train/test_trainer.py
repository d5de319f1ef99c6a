"""The loop: what it learns, what it writes, what it refuses, and that it goes on where it was."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from foretell.files import alone
from foretell.spec.training import Rule
from foretell.train.fit_config import FitConfig
from foretell.train.metrics import read_rows
from foretell.train.trainer import Trainer
from tests.train.tiny import TinyBatches, TinyHead, quiet_loss, tiny_loss


def trainer(path, *, loss=tiny_loss, batches=None, held_out=None, head=None, **changes) -> Trainer:
    restart = changes.pop("restart", False)
    settings = {"autocast": "off", "log_every": 1, "save_every": 3, "max_steps": 10, "lr": 0.01}
    return Trainer(
        head or TinyHead(), loss, batches or TinyBatches(), FitConfig(**(settings | changes)),
        Rule(), path, held_out=held_out, restart=restart,
    )  # fmt: skip


def losses(path) -> list[float]:
    return [row["loss"] for row in read_rows(path / "metrics.jsonl")]


def test_loss_falls_and_the_head_is_written(tmp_path):
    one = TinyBatches(1)
    run = trainer(tmp_path, batches=one, loss=quiet_loss, max_steps=60)
    final = run.fit()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert rows[-1]["agreed"][0] > rows[0]["agreed"][0]
    assert {"epoch", "parts", "matched", "lr", "grad_norm", "tokens", "seconds"} <= rows[0].keys()
    assert final == tmp_path / "head"
    assert json.loads((final / "config.json").read_text()) == run.head.config
    written = load_file(final / "model.safetensors")
    assert written.keys() == dict(run.head.tensors()).keys()
    for name, tensor in run.head.tensors().items():
        assert torch.equal(written[name], tensor)
    assert "embedding" not in written


def test_only_what_requires_gradients_changes_or_is_kept(tmp_path):
    head = TinyHead()
    before = {n: p.clone() for n, p in head.named_parameters()}
    trainer(tmp_path, head=head, max_steps=3).fit()
    for name, p in head.named_parameters():
        assert torch.equal(p, before[name]) == (name == "embedding"), name
    state = torch.load(tmp_path / "step-00000003" / "state.pt", weights_only=True)
    assert "embedding" not in state["module"]


def test_the_learning_rate_rises_and_falls():
    config = FitConfig(lr=1.0, warmup=0.1)
    rates = [config.learning_rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert 0.1 <= rates[-1] < 0.102


@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_a_resumed_run_equals_an_unbroken_one(tmp_path, ema):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trainer(whole, ema=ema, log_every=4, epochs=3, held_out=TinyBatches(1, 9)).fit()

    class Gone(Exception):
        pass

    count = 0

    def dies(head, batch):
        nonlocal count
        count += 1
        if count > 8:
            raise Gone
        return tiny_loss(head, batch)

    run = trainer(broken, ema=ema, log_every=4, loss=dies, held_out=TinyBatches(1, 9))
    with pytest.raises(Gone):
        run.fit()
    assert run.checkpoints.steps() == [3, 6]
    other = TinyHead()
    for weight in other.tensors().values():
        nn.init.zeros_(weight)
    torch.manual_seed(99)
    again = trainer(broken, ema=ema, log_every=4, head=other, held_out=TinyBatches(1, 9))
    assert again.place.step == 6
    again.fit()
    rows = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in read_rows(p / "metrics.jsonl")]
        for p in (whole, broken)
    ]
    assert rows[0] == rows[1]
    assert (whole / "head/model.safetensors").read_bytes() == (
        broken / "head/model.safetensors"
    ).read_bytes()


def test_epochs_go_on_where_one_ended(tmp_path):
    seen = []

    class Watched(TinyBatches):
        def make(self, number):
            seen.append(number)
            return super().make(number)

    trainer(tmp_path, batches=Watched(5), accumulate=2, max_steps=6).fit()
    assert seen == list(range(10))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["epoch"] for row in rows] == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]
    seen.clear()
    trainer(tmp_path / "b", batches=Watched(5), accumulate=2, max_steps=None, epochs=2).fit()
    assert seen == list(range(10))


def test_accumulated_batches_weigh_by_their_tokens(tmp_path):
    """Two batches in one step are as good as both side by side, however uneven."""

    class Both(TinyBatches):
        def make(self, number):
            batch = super().make(number)
            wanted = batch.wanted.clone()
            wanted[:, :] = number % 2 == 0
            wanted[0, 4] = True
            object.__setattr__(batch, "wanted", wanted)
            return batch

    run = trainer(tmp_path, batches=Both(), loss=quiet_loss, accumulate=2, max_steps=1, clip=1e9)
    first, second = Both().make(0), Both().make(1)
    expected = quiet_loss(run.head, first).total + quiet_loss(run.head, second).total
    expected = expected / (first.num_wanted + second.num_wanted)
    expected.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in run.weights.parameters.values()))
    run.fit()
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row["loss"] == pytest.approx(expected.item())
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_batch_without_a_wanted_token_is_no_harm(tmp_path):
    class Empty(TinyBatches):
        def make(self, number):
            batch = super().make(number)
            batch.wanted[:] = False
            return batch

    trainer(tmp_path, batches=Empty(), max_steps=2).fit()
    assert losses(tmp_path) == [0.0, 0.0]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_and_is_kept(tmp_path, where):
    def poisoned(head, batch):
        loss = tiny_loss(head, batch)
        if torch.equal(batch.tokens, TinyBatches().make(4).tokens):
            factor = torch.tensor(float("nan"))
            if where == "gradient":
                factor = torch.zeros((), requires_grad=True).sqrt() * 0 + 1
                feature = head.mix.weight.sum() * 0
                object.__setattr__(loss, "total", loss.total + feature.sqrt() * factor)
            else:
                object.__setattr__(loss, "total", loss.total * factor)
        return loss

    with pytest.raises(
        ValueError, match=r"step 5: the .*not finite.*bad-batch\.pt.*step 3 is saved"
    ):
        trainer(tmp_path, loss=poisoned).fit()
    bad = torch.load(tmp_path / "bad-batch.pt", weights_only=True)
    assert bad["step"] == 5
    assert torch.equal(bad["batches"][0]["tokens"], TinyBatches().make(4).tokens)
    assert trainer(tmp_path).place.step == 3
    trainer(tmp_path).fit()
    assert len(losses(tmp_path)) == 10


def test_other_settings_are_refused_by_name(tmp_path):
    trainer(tmp_path, max_steps=3).fit()
    with pytest.raises(ValueError, match=r"lr was 0\.01 and is 0\.02.*--restart"):
        trainer(tmp_path, max_steps=3, lr=0.02)
    assert trainer(tmp_path, max_steps=3, keep=9, threads=1).place.step == 3
    assert trainer(tmp_path, max_steps=3, lr=0.02, restart=True).place.step == 0
    assert not list(tmp_path.glob("step-*"))
    assert not (tmp_path / "head").exists()  # evaluate would take it for the new run's


def test_two_processes_do_not_fit_into_one_directory(tmp_path):
    with alone(tmp_path):
        for restart in (False, True):
            with pytest.raises(ValueError, match="another process writes there"):
                trainer(tmp_path, restart=restart).fit()
    trainer(tmp_path, max_steps=1).fit()


def test_held_out_batches_are_looked_at_and_never_learnt_from(tmp_path):
    for name, held_out in (("with", TinyBatches(2, seed=7)), ("without", None)):
        trainer(tmp_path / name, held_out=held_out, validate_every=4).fit()
    rows = read_rows(tmp_path / "with" / "metrics.jsonl")
    assert [row["step"] for row in rows if "held_out" in row] == [4, 8, 10]
    assert len(rows[3]["held_out"]["agreed"]) == 2
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_bf16_products_stay_near(tmp_path):
    trainer(tmp_path / "f32", loss=quiet_loss).fit()
    trainer(tmp_path / "bf16", loss=quiet_loss, autocast="bf16").fit()
    exact, near = losses(tmp_path / "f32"), losses(tmp_path / "bf16")
    assert exact != near
    assert near == pytest.approx(exact, rel=0.02)


def test_the_running_mean_lags_and_is_what_is_written(tmp_path):
    run = trainer(tmp_path, ema=0.5)
    run.fit()
    written = load_file(tmp_path / "head" / "model.safetensors")
    for name, mean in run.weights.mean.items():
        assert torch.equal(written[name], mean)
        assert not torch.equal(mean, run.weights.parameters[name])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("lr", 0.0), ("warmup", 1.0), ("clip", 0.0), ("epochs", -1), ("max_steps", 0), ("ema", 1.0),
     ("accumulate", 0), ("threads", 0), ("method", "other"), ("autocast", "fp8"),
     ("beta2", 1.5), ("weight_decay", -1.0)],
)  # fmt: skip
def test_bad_settings_say_so_in_a_line(setting, value):
    with pytest.raises(ValueError, match=f"^{setting}=.*: ") as caught:
        FitConfig(**{setting: value})
    assert "\n" not in str(caught.value)


def test_tensorboard_gets_every_number_where_it_is_installed(tmp_path, monkeypatch):
    written = {}

    class SummaryWriter:
        def __init__(self, directory, purge_step):
            written["at"] = (directory, purge_step)

        def add_scalar(self, name, value, step):
            written[name, step] = value

        def close(self):
            written["closed"] = True

    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setattr("foretell.train.metrics.find_spec", lambda name: name == "tensorboard")
    trainer(tmp_path, max_steps=2, held_out=TinyBatches(1, 5)).fit()
    assert written["at"] == (str(tmp_path / "tensorboard"), 1)
    assert written["closed"]
    first, last = read_rows(tmp_path / "metrics.jsonl")
    assert written["loss", 1] == first["loss"]
    assert written["agreed/2", 2] == last["agreed"][1]
    assert written["held_out/loss", 2] == last["held_out"]["loss"]
    assert written["parts/ce", 1] == first["parts"]["ce"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_saves(tmp_path, number):
    count = 0

    def interrupted(head, batch):
        nonlocal count
        count += 1
        if count == 5:
            os.kill(os.getpid(), number)
        return tiny_loss(head, batch)

    before = signal.getsignal(number)
    run = trainer(tmp_path, loss=interrupted)
    assert run.fit() is None
    assert run.checkpoints.steps() == [3, 5]
    assert signal.getsignal(number) is before
    trainer(tmp_path).fit()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, 11))
