"""Kind C for heads: with every shape of tree and every rule, the target's own law."""

from __future__ import annotations

import pytest

from tests import heads
from tests.faults.test_C_engine import VOCAB, check_law, first, llm, params, sample

KINDS = ["eagle-norms", "eagle3", "mtp-mimo", "medusa"]
SHAPES = ["k=2", "depth=2,topk=3,nodes=5", "tree=eagle"]
RULES = ["coupled", "rejection", "block"]


def check(kind: str, shape: str, rule: str, count: int) -> None:
    asked = params()
    engine = llm(f"{heads.scheme(kind, VOCAB)},{shape},verification={rule}")
    check_law(first(sample(engine, asked, count)), asked)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_C1_C5_law_of_the_target_with_heads(kind, shape, rule):
    check(kind, shape, rule, 512)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_C1_C5_twenty_thousand_samples_with_heads(kind, shape, rule):
    check(kind, shape, rule, 20_480)
