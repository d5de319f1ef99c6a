"""A drafter that knows the answers: it makes drafts be accepted, refused and moved in every way,
however good the user's own draft is."""

from __future__ import annotations

import random

from foretell.llm import LLM
from foretell.sequence import Sequence
from foretell.spec.drafter import Ask, Drafter
from foretell.spec.tree import TokenTree, from_lists

Known = dict[tuple[tuple[int, ...], int | None], list[int]]
METHOD = f"{__name__}:Rehearsed,adaptive=false"


class Rehearsed(Drafter):
    """Trees that hold the right path for a random number of tokens, with wrong siblings around.

    ``answers`` holds plain decoding's tokens by prompt and seed, or by prompt and None for every
    other seed; whoever is not in it gets random tokens only.
    """

    answers: Known = {}  # noqa: RUF012  # each engine gets its own from `rehearse`

    def propose(self, ask: Ask) -> TokenTree:
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for sequence, budget, depth in zip(ask.sequences, ask.budgets, ask.depths, strict=True):
            grown = self._tree(sequence, budget, depth)
            tokens.append(grown[0])
            parents.append(grown[1])
        return from_lists(tokens, parents)

    def _tree(self, sequence: Sequence, budget: int, depth: int) -> tuple[list[int], list[int]]:
        tokens, parents = [sequence.tokens[-1]], [-1]
        rng = random.Random(f"{sequence.seed} {len(sequence.tokens)}")
        prompt = tuple(sequence.tokens[: sequence.num_prompt])
        known = self.answers.get((prompt, sequence.seed)) or self.answers.get((prompt, None), [])
        right = known[sequence.num_output :][: rng.randint(0, depth)]
        node = 0  # the end of the right path so far
        for place in range(budget):
            must = budget - place <= len(right)
            if right and (must or rng.random() < 0.6):
                tokens.append(right.pop(0))
                parents.append(node)
                node = len(tokens) - 1
                continue
            parent = node if rng.random() < 0.7 else rng.randrange(len(tokens))
            siblings = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            wrong = rng.randrange(self.runtime.vocab_size)
            if wrong not in siblings and not (parent == node and right[:1] == [wrong]):
                tokens.append(wrong)
                parents.append(parent)
        return tokens, parents


def rehearse(llm: LLM, answers: Known) -> LLM:
    """Tells the drafter of an engine made with `METHOD` what it knows."""
    drafter = llm.engine.drafter
    assert isinstance(drafter, Rehearsed)
    drafter.answers = answers
    return llm
