"""What comes out of sampling and verification together has the target's exact distribution.

Chi-square against enumeration of all texts. A family of tests finds no fault under Holm's
correction exactly if its smallest p-value is above ALPHA divided by the size of the family, so
each case is held to that alone. Seeds are fixed: a case that passes once passes always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from scipy.stats import chi2

from foretell.config import Verification
from foretell.sequence import SamplingParams
from foretell.spec.tree_shape import DynamicShape, FixedShape, TreeShape, chain
from tests.spec.toy import (
    CHAIN,
    LENGTH,
    TREE,
    VOCAB,
    Text,
    draft_logits,
    paths,
    reference_law,
    simulate,
    text_law,
)

ALPHA = 0.01
SETTINGS = {
    "temperature": SamplingParams(temperature=1.4),
    "top_k": SamplingParams(top_k=2),
    "top_p": SamplingParams(top_p=0.6),
    "min_p": SamplingParams(min_p=0.2, temperature=1.5),
    "penalties": SamplingParams(
        presence_penalty=0.7, frequency_penalty=0.9, repetition_penalty=1.5
    ),
    "together": SamplingParams(
        temperature=1.3,
        top_k=4,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=-0.8,
        repetition_penalty=1.3,
        logit_bias={3: 1.0, 0: -1.0},
        bad_token_ids=(5,),
    ),
}
LINE = chain(2)
BUSHY = FixedShape([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]])
DYNAMIC = DynamicShape(depth=3, topk=3, num_nodes=7)
RULES: list[tuple[Verification, str, tuple[int, ...] | TreeShape]] = [
    ("coupled", "argmax", CHAIN),
    ("coupled", "argmax", TREE),
    ("coupled", "coupled", CHAIN),
    ("coupled", "coupled", TREE),
    ("rejection", "argmax", CHAIN),
    ("rejection", "argmax", TREE),
    ("rejection", "sampled", CHAIN),
    ("rejection", "sampled", TREE),
    ("block", "sampled", CHAIN),
    ("block", "sampled", TREE),
    ("coupled", "grown", LINE),
    ("coupled", "grown", BUSHY),
    ("coupled", "grown", DYNAMIC),
    ("rejection", "sampled", LINE),
    ("rejection", "sampled", BUSHY),
    ("rejection", "sampled", DYNAMIC),
    ("block", "sampled", LINE),
    ("block", "sampled", DYNAMIC),
]
LOSSY: list[tuple[Verification, tuple[int, ...]]] = [
    ("typical", CHAIN),
    ("typical", TREE),
    ("threshold", CHAIN),
    ("threshold", TREE),
]
FAMILY = len(SETTINGS) * (len(RULES) + len(LOSSY))


def p_value(seen: Counter[Text], law: Mapping[Text, float]) -> float:
    """Chi-square, texts expected less than 5 times pooled; 0 if an impossible text was seen."""
    total = sum(seen.values())
    if any(law[text] == 0 for text in seen):
        return 0.0
    cells: list[tuple[float, float]] = []
    rare = [0.0, 0.0]
    for text, chance in law.items():
        if chance * total >= 5:
            cells.append((seen[text], chance * total))
        else:
            rare[0] += seen[text]
            rare[1] += chance * total
    if rare[1] >= 1:
        cells.append((rare[0], rare[1]))
    observed, expected = np.array(cells).T
    if len(cells) == 1:
        return 1.0  # one possible text, and it was the one
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, len(cells) - 1))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("rule", "kind", "parents"), RULES)
def test_same_distribution(
    rule: Verification, kind: str, parents: tuple[int, ...] | TreeShape, setting: str
) -> None:
    params = SETTINGS[setting]
    assert p_value(simulate(rule, kind, parents, params, 1200), text_law(params)) > ALPHA / FAMILY


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("rule", "kind", "parents"), RULES)
def test_same_distribution_many(
    rule: Verification, kind: str, parents: tuple[int, ...] | TreeShape, setting: str
) -> None:
    params = SETTINGS[setting]
    assert p_value(simulate(rule, kind, parents, params, 20_000), text_law(params)) > ALPHA / FAMILY


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("rule", "parents"), LOSSY)
def test_lossy_rules_have_the_distribution_that_they_promise(
    rule: Verification, parents: tuple[int, ...], setting: str
) -> None:
    params = SETTINGS[setting]
    promised = lossy_law(rule, parents, params, 0.3)
    assert sum(promised.values()) == pytest.approx(1.0)
    seen = simulate(rule, "argmax", parents, params, 1200, threshold=0.3)
    assert p_value(seen, promised) > ALPHA / FAMILY


def test_lossy_rules_are_lossy():
    params = SETTINGS["temperature"]
    seen = simulate("threshold", "argmax", CHAIN, params, 1200, threshold=0.3)
    assert p_value(seen, text_law(params)) < 1e-6


@pytest.mark.parametrize("wrong", ["temperature", "penalties", "top_k"])
def test_the_test_sees_a_wrong_target(wrong: str):
    """Samples of plain settings against the law of others."""
    seen = simulate("coupled", "argmax", CHAIN, SamplingParams(), 1200)
    assert p_value(seen, text_law(SETTINGS[wrong])) < ALPHA / FAMILY


@pytest.mark.parametrize("parents", [CHAIN, TREE, LINE, BUSHY, DYNAMIC])
@pytest.mark.parametrize("kind", ["argmax", "coupled"])
def test_coupled_gives_the_plain_text_of_each_seed(kind: str, parents: tuple[int, ...] | TreeShape):
    """Not only the distribution: the very texts."""
    for params in SETTINGS.values():
        plain = simulate("coupled", "argmax", (-1,), params, 200)
        assert simulate("coupled", kind, parents, params, 200) == plain


def lossy_law(
    rule: str, parents: tuple[int, ...], params: SamplingParams, threshold: float
) -> dict[Text, float]:
    """Enumerates a lossy rule over deterministic drafts (the draft's likeliest, in order)."""
    laws: dict[Text, float] = {text: 0.0 for text in text_law(params)}

    def order(text: Text) -> list[int]:
        return list(np.argsort(-np.array(draft_logits(text)), kind="stable"))

    def walk(text: Text, weight: float) -> None:
        if len(text) >= LENGTH:
            laws[text[:LENGTH]] += weight
            return
        tokens, reached = [0], {0: 0.0}
        for i in range(1, len(parents)):
            base = text + tuple(paths(tokens, parents[:i])[parents[i]])
            place = sum(parents[j] == parents[i] for j in range(1, i))
            tokens.append(int(order(base)[place]))
            p = reference_law(base, params)
            if rule == "threshold":
                fine = p[tokens[i]] >= threshold
            else:
                entropy = -sum(x * np.log(x) for x in p if x > 0)
                fine = p[tokens[i]] > min(threshold, threshold**0.5 * np.exp(-entropy))
            if fine and parents[i] in reached:
                reached[i] = reached[parents[i]] + np.log(p[tokens[i]])
        found = paths(tokens, parents)
        best = max(reached, key=lambda node: (len(found[node]), reached[node], -node))
        head = text + tuple(found[best])
        p = reference_law(head, params)
        for token in range(VOCAB):
            if p[token]:
                walk((*head, token), weight * p[token])

    walk((), 1.0)
    return laws
