"""Draft models load as tiny random ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from foretell.drafters import draft_model
from tests.drafters.tiny import loaded


@pytest.fixture(autouse=True)
def tiny_loader(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    """`load` finds tiny models by name; without a model it is the target, perturbed."""
    models = {"other": loaded(seed=2)}

    def load(
        spec: str, weights: str, *, max_model_len: int, device: torch.device
    ) -> SimpleNamespace:
        return models.get(spec) or loaded(seed=3)

    def check(a: str, b: str) -> None:
        if a != b:
            raise ValueError("the vocabularies differ")

    monkeypatch.setattr(draft_model, "load", load)
    monkeypatch.setattr(draft_model, "resolve", lambda spec: spec)
    monkeypatch.setattr(draft_model, "check_same_vocabulary", check)
    return models
