"""What is said beforehand against what then lies there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from foretell.drafters import find
from foretell.models.frozen import FrozenTarget
from foretell.spec.training import Rule
from foretell.train.estimate import PRESETS, describe, estimate, size, sizes_of
from foretell.train.features import open_batches
from foretell.train.fit import fit_head, make_head, plan
from foretell.train.fit_config import FitConfig, Machine
from foretell.train.metrics import read_rows
from foretell.train.store import Index
from tests.tiny import write_model
from tests.train.stored import write_features
from tests.train.test_fit import QUICK

MACHINE = Machine(flops=1e12, bandwidth=1e11)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("target"), layers=6, vocab_size=400)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa"])
@pytest.mark.parametrize("draft_size", [None, 30])
def test_weights_and_frozen_parts_are_those_of_the_real_head(target, method, draft_size):
    config = FitConfig(method=method, layers=1 if method == "mtp" else 2)
    frozen = FrozenTarget.open(str(target))
    head = make_head(config, frozen, None if draft_size is None else torch.arange(draft_size))
    e = estimate(
        sizes_of(str(target)), config, Rule(), MACHINE, tokens=1e6, bf16=False,
        draft_size=draft_size,
    )  # fmt: skip
    assert e.weights == sum(p.numel() for p in head.parameters() if p.requires_grad)
    kept = {b.data_ptr(): 4 * b.numel() for b in head.buffers() if b.dtype == torch.float32}
    assert e.frozen_bytes == sum(kept.values())
    assert e.taps == len({*head.taps, -1})


def test_the_targets_own_size(target):
    tensors = load_file(target / "model.safetensors")
    assert sizes_of(str(target)).parameters == sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize("method", ["eagle3", "mtp", "medusa"])
def test_files_and_steps_of_a_run(tmp_path, target, method):
    taps = (1, 2, -1) if method == "eagle3" else (-1,)
    run = write_features(tmp_path / "run", target, taps=taps, texts=60)
    config = FitConfig(method=method, **(QUICK | {"held_out": 0.1, "epochs": 2.0}))
    index = Index.read(run / "features")
    e = estimate(
        sizes_of(str(target)), config, find(method).rule, MACHINE, tokens=index.num_tokens,
        bf16=False,
    )  # fmt: skip
    near = 0.06
    assert e.feature_bytes == pytest.approx(index.shards[0].bytes, rel=near)
    head = fit_head(config, run)
    assert e.head_bytes == pytest.approx((head / "model.safetensors").stat().st_size, rel=near)
    state = sorted(run.glob("fit/step-*"))[-1] / "state.pt"
    assert e.checkpoint_bytes == pytest.approx(state.stat().st_size, rel=0.25)  # names, RNG
    assert e.num_steps == pytest.approx(read_rows(run / "fit/metrics.jsonl")[-1]["step"], rel=0.3)


@pytest.mark.parametrize("method", ["eagle", "mtp", "medusa"])
@pytest.mark.parametrize("vocab", [400, 4000])
def test_activations_are_what_autograd_keeps(tmp_path, method, vocab):
    target = write_model(tmp_path / "target", layers=6, vocab_size=vocab)
    run = write_features(tmp_path / "run", target, texts=60)
    config = FitConfig(method=method, max_len=64, batch_tokens=1024)
    scheme = find(method)
    head = make_head(config, FrozenTarget.open(str(target)), None)
    batch = next(open_batches(run, max_len=64, batch_tokens=1024).epoch(0))
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = scheme.loss(head, batch, scheme.rule)
    frozen = {t.untyped_storage().data_ptr() for t in (*head.parameters(), *head.buffers())}
    measured = sum(count for pointer, count in kept.items() if pointer not in frozen)
    assert loss.total.requires_grad
    # The rest is what passes while one draft token is judged, and prompts and padding.
    e = estimate(
        sizes_of(str(target)), config, scheme.rule, MACHINE, tokens=1e6, bf16=False
    )  # fmt: skip
    assert 0.35 * e.activation_bytes < measured < e.activation_bytes


def test_known_figures_of_large_targets():
    llama = PRESETS["llama-3.1-70b"]
    e = estimate(
        llama, FitConfig(method="eagle3", fsdp=True), Rule(), Machine(world=8, device="h100"),
        tokens=1e8, bf16=True, draft_size=32000,
    )  # fmt: skip
    # one Llama layer whose attention reads 2 H (0.94 B), and the fusion of three layers (0.20 B)
    assert e.weights == pytest.approx(1.14e9, rel=0.01)
    assert e.token_bytes == 2 * 4 * 8192 + 5
    alone = replace(e, fit_seconds=0.0)
    ddp = estimate(
        llama, FitConfig(method="eagle3"), Rule(), Machine(world=8, device="h100"), tokens=1e8,
        bf16=True, draft_size=32000,
    )  # fmt: skip
    assert ddp.state_bytes == 16 * e.weights
    assert e.state_bytes == (8 + 16 / 8) * e.weights
    assert ddp.memory_bytes - ddp.state_bytes == alone.memory_bytes - alone.state_bytes
    lite = PRESETS["deepseek-v2-lite"]
    assert lite.active < lite.parameters
    text = describe(e, FitConfig(method="eagle3", fsdp=True), Machine(world=8), 1e8)
    assert "FSDP" in text
    assert "on disk" in text


def test_twice_the_machines_take_half_the_time():
    one, two = (
        estimate(
            PRESETS["llama-3.2-1b"], FitConfig(), Rule(), replace(MACHINE, world=world),
            tokens=1e9, bf16=True,
        )
        for world in (1, 2)
    )  # fmt: skip
    assert two.fit_seconds == pytest.approx(one.fit_seconds / 2, rel=0.01)
    assert two.feature_seconds == pytest.approx(one.feature_seconds / 2)


def test_dry_run_starts_nothing(tmp_path, target):
    with pytest.raises(ValueError, match="give --target and --tokens"):
        plan(FitConfig(), MACHINE, tmp_path / "run")
    assert "weights to fit" in plan(
        FitConfig(), replace(MACHINE, tokens=1e6), tmp_path / "run", "llama-3.2-1b"
    )
    run = write_features(tmp_path / "run", target)
    assert f"target      {target}" in plan(FitConfig(), MACHINE, run)
    assert not (run / "fit").exists()


def test_sizes_are_said_as_people_do():
    assert [size(n) for n in (12, 3400, 5.5e6, 7e9, 2.46e13)] == [
        "12 bytes", "3.4 kB", "5.5 MB", "7.0 GB", "24.6 TB",
    ]  # fmt: skip
