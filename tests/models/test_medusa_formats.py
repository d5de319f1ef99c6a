"""Medusa heads in each form that they are published in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.models.hub import resolve
from foretell.models.medusa_formats import load_medusa
from tests import heads
from tests.models.reading import target, x


def medusa(tensors: heads.Tensors, path: Path, **options: Any):
    return load_medusa(heads.write(tensors, None, path), target(), "f32", **options)


def test_medusa_state_dicts(tmp_path: Path) -> None:
    tensors, _ = heads.medusa(2, 2)
    plain, vocab = medusa(tensors, tmp_path)
    assert len(plain) == 2
    assert [len(head.blocks) for head in plain] == [2, 2]
    assert vocab.ids is None
    merged, _ = medusa({f"medusa_head.{n}": t for n, t in tensors.items()}, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    state, _ = load_medusa(tmp_path, target(), "f32")
    for i in range(2):
        assert torch.equal(plain[i](x(3, 32)), merged[i](x(3, 32)))
        assert torch.equal(plain[i](x(3, 32)), state[i](x(3, 32)))


def test_vllms_medusa_form(tmp_path: Path) -> None:
    tensors, _ = heads.medusa(2, 1)
    vllm = {f"blocks.{i}.layers.0.weight": tensors[f"{i}.0.linear.weight"] for i in range(2)}
    shared, _ = medusa(vllm, tmp_path)
    assert all(head.lm_head is target().model.lm_head for head in shared)
    vllm |= {f"lm_heads.{i}.weight": tensors[f"{i}.1.weight"][:40] for i in range(2)}
    vllm["token_map"] = torch.arange(40) + 20
    loaded, vocab = medusa(vllm, tmp_path)
    assert vocab.ids is not None
    assert vocab.ids.tolist() == list(range(20, 60))
    assert loaded[0](x(3, 32)).shape == (3, 40)


def test_medusa_names_what_is_missing_and_left_over(tmp_path: Path) -> None:
    tensors, _ = heads.medusa(2)
    for name in ("0.0.linear.bias", "1.1.weight"):
        with pytest.raises(ValueError, match=f"{name} is missing"):
            medusa({n: t for n, t in tensors.items() if n != name}, tmp_path)
    with pytest.raises(ValueError, match=r"no place for tensor 5\.0\.linear\.weight"):
        medusa(tensors | {"5.0.linear.weight": torch.ones(32, 32)}, tmp_path)
    with pytest.raises(ValueError, match="no Medusa head here"):
        medusa({"colour": torch.ones(1)}, tmp_path)


def test_the_hub_may_hold_a_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return "/somewhere"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    resolve("org/head", head=True)
    resolve("org/model")
    assert ["pytorch_model.bin" in patterns for patterns in asked] == [True, False]
