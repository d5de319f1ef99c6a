"""A head's compiled pass says what its specification says, in every format and architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foretell.spec.drafter import Rows
from tests import heads, tiny


def passes(kind: str, weights: str, compiled: bool) -> list[tuple[Tensor, Tensor]]:
    """What every pass of a head said while it drafted for a few prompts."""
    llm = tiny.llm(f"{heads.scheme(kind)},k=4", weights=weights, max_num_seqs=2)
    head = llm.engine.drafter.head  # type: ignore[attr-defined]
    assert head.whole_pass is not None
    if not compiled:
        head.whole_pass = None
    out: list[tuple[Tensor, Tensor]] = []
    inner = llm.engine.runtime.forward_head

    def forward_head(head: Any, rows: Rows, features: Tensor) -> tuple[Tensor, Tensor]:
        said = inner(head, rows, features)
        out.append((said[0].clone(), said[1].clone()))
        return said

    llm.engine.runtime.forward_head = forward_head
    llm.engine.runtime.draft_chains = lambda *_: None  # level by level
    llm.generate(tiny.prompts(3, seed=5), tiny.greedy(max_tokens=12))
    return out


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("kind", heads.LAYERED)
def test_the_compiled_pass_equals_the_specification(kind: str, weights: str) -> None:
    mine, theirs = passes(kind, weights, True), passes(kind, weights, False)
    assert len(mine) == len(theirs) > 10
    for (logits, following), (own_logits, own_following) in zip(mine, theirs, strict=True):
        torch.testing.assert_close(logits, own_logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(following, own_following, atol=1e-4, rtol=1e-4)
