"""What every scheme owes the engine, checked for all that exist and for the scripted ones."""

from __future__ import annotations

import random
import re

import pytest

from foretell.config import SpeculationConfig
from foretell.drafters import build, find, schemes
from foretell.sequence import Sequence
from foretell.spec.drafter import Ask, Drafter
from tests import fakes, heads
from tests.drafters.tiny import MemoryRuntime, advance, ask, commit, fresh, sequence

FAKES = ["Oracle", "Noise", "Hostile", "Mixed", "Bushy"]
ALL = [
    "prompt-lookup",
    "prompt-lookup:branches=3",
    "draft-model",
    *(f"tests.fakes:{name}" for name in FAKES),
    *(heads.scheme(kind) for kind in heads.KINDS),
    f"{heads.scheme('eagle3')},depth=3,topk=2,nodes=5",
    f"{heads.scheme('mtp-mimo')},tree=eagle",
]


@pytest.fixture(params=ALL, ids=lambda text: re.sub(r"model=.*/", "", text))
def drafter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Drafter:
    monkeypatch.setattr(fakes.Scripted, "answers", {(1, 2, 1, 2): [1, 2, 1, 2] * 30})
    return fresh(request.param)


def grow(text: Sequence, rng: random.Random) -> list[int]:
    """Next tokens of a text that often repeats itself."""
    return [rng.choice(text.tokens[-4:]) for _ in range(rng.randint(1, 4))]


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_legal_within_budget(drafter: Drafter, sample: bool, temperature: float) -> None:
    rng = random.Random(0)
    texts = [sequence([1, 2, 1, 2], slot, slot, temperature) for slot in range(4)]
    commit(drafter, *[(text, 4) for text in texts])
    for _ in range(12):
        budgets = [rng.randint(0, 5) for _ in texts]
        tree = drafter.propose(Ask(texts, budgets, sample))
        tree.check(drafter.runtime.vocab_size)
        assert tree.tokens[:, 0].tolist() == [text.tokens[-1] for text in texts]
        assert all(n <= budget for n, budget in zip(tree.num_drafted, budgets, strict=True))
        if tree.probs is not None:
            assert tree.probs.shape[-1] == drafter.runtime.vocab_size
            for b, size in enumerate(tree.sizes):
                for node in range(1, size):
                    assert tree.probs[b, tree.parents[b, node], tree.tokens[b, node]] > 0
        advance(drafter, [(text, grow(text, rng)) for text in texts])


def test_does_not_touch_sequences(drafter: Drafter) -> None:
    text = sequence([1, 2, 1, 2])
    commit(drafter, (text, 4))
    before = dict(vars(text))
    drafter.propose(ask([text], 5))
    assert vars(text) == before
    assert text.tokens == [1, 2, 1, 2]


def test_a_new_sequence_in_a_slot_gets_what_it_would_get_alone(drafter: Drafter) -> None:
    def drafts(mine: Drafter) -> tuple[list[list[int]], list[list[int]]]:
        text = sequence([1, 2, 1, 2], seed=5)
        commit(mine, (text, 4))
        tree = mine.propose(ask([text], 5))
        return tree.tokens.tolist(), tree.parents.tolist()

    clean = drafts(fresh(drafter.config))
    old = sequence([3, 4, 5, 3, 4, 5, 3, 4])
    commit(drafter, (old, 8))
    for _ in range(5):
        drafter.propose(ask([old], 5))
        advance(drafter, [(old, [9])])
    drafter.forget([0])
    assert drafts(drafter) == clean
    drafter.forget([0, 1, 2])  # forgetting what is not there is allowed


def test_proposals_do_not_depend_on_the_batch(drafter: Drafter) -> None:
    texts = [sequence([1, 2, 1, 2], 0), sequence([4, 4, 4], 1), sequence([7, 3], 2)]
    commit(drafter, *[(text, len(text.tokens)) for text in texts])
    together = drafter.propose(ask(texts, 4))
    for b, text in enumerate(texts):
        alone = fresh(drafter.config)
        text.num_computed = 0
        commit(alone, (text, len(text.tokens)))
        tree = alone.propose(ask([text], 4))
        size = tree.sizes[0]
        assert together.sizes[b] == size
        assert together.tokens[b, :size].tolist() == tree.tokens[0, :size].tolist()


@pytest.mark.parametrize("method", schemes())
def test_unknown_and_bad_options_name_the_legal_ones(method: str) -> None:
    with pytest.raises(ValueError, match=r"no option 'colour': its options are \w+"):
        build(SpeculationConfig(method=method, options={"colour": "red"}), MemoryRuntime())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt-lookup:ngram_min=x", "whole number"),
        ("prompt-lookup:ngram_min=0", "1 <= ngram_min"),
        ("prompt-lookup:ngram_min=5,ngram_max=4", "ngram_min=5, ngram_max=4"),
        ("prompt-lookup:branches=99", "from 1 to 16"),
        ("prompt-lookup:patience=-1", "patience"),
        ("draft-model:weights=int3", "int8, bf16"),
        ("eagle", "eagle needs a head"),
        ("medusa:k=3", "medusa needs a head"),
        ("eagle3:model=/nowhere", "no such file"),
        ("draft-model:weights=target,model=other", "leave model out"),
        ("prompt-lookdown", "draft-model, eagle, .*prompt-lookup"),
        ("no_such_module:Thing", "no module 'no_such_module'"),
        ("tests.fakes:Thing", "'Thing'"),
        ("tests.fakes:Nodes", "no Drafter subclass"),
    ],
)
def test_mistakes_are_explained(text: str, message: str) -> None:
    config = SpeculationConfig.parse(text)
    assert config is not None
    with pytest.raises(ValueError, match=message):
        build(config, MemoryRuntime())


def test_every_scheme_is_checked_here() -> None:
    assert {text.split(":")[0] for text in ALL} >= set(schemes())


def test_schemes_are_found_by_file_name() -> None:
    assert {"prompt-lookup", "draft-model"} <= set(schemes())
    for name in schemes():
        assert find(name) is find(name.replace("-", "_"))
    assert find("tests.fakes:Noise") is fakes.Noise
