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


@pytest.mark.parametrize(("s", "shape"), list(enumerate(SHAPES)))
@pytest.mark.parametrize(("r", "rule"), list(enumerate(RULES)))
def test_C1_C5_law_of_the_target_with_heads(s, shape, r, rule):
    """Either head with every shape and every rule; all of all is for the slow ones."""
    check(("eagle3", "medusa")[(s + r) % 2], shape, rule, 512)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_C1_C5_twenty_thousand_samples_with_heads(kind, shape, rule):
    check(kind, shape, rule, 20_480)
