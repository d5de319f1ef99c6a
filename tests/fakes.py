"""Scripted drafters: right, random, wrong or in between, for tests of everything but drafting.

Those that need the truth read it from the class attribute ``answers``, a dict from a prompt's
tokens (as a tuple) to the answer's; set it with ``monkeypatch.setattr(fakes.Scripted, ...)``.
Usable as ``speculation="tests.fakes:Oracle,k=4"`` or passed as classes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from foretell.config import SpeculationConfig
from foretell.sequence import Sequence
from foretell.spec.draft_vocab import DraftVocab
from foretell.spec.drafter import Ask, Drafter, DraftRuntime, Needs
from foretell.spec.grow_tree import Frontier, grow_tree
from foretell.spec.tree import TokenTree, from_lists
from foretell.spec.tree_shape import TreeOptions


class Scripted(Drafter):
    """One tree a sequence from `grow`, random choices seeded by seed and text."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Drafter.Options):
        seed: int = 0

    options: Options
    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    eos: ClassVar[tuple[int, ...]] = ()
    """Tokens that Hostile likes to propose."""

    def propose(self, ask: Ask) -> TokenTree:
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        for sequence, budget in zip(ask.sequences, ask.budgets, strict=True):
            nodes = Nodes(sequence.tokens[-1], budget)
            if budget:  # the same for the same text, also where the request has no seed
                place = f"{self.options.seed} {sequence.params.seed} {sequence.tokens}"
                self.grow(nodes, sequence, random.Random(place))
            assert len(nodes.tokens) <= budget + 1
            tokens.append(nodes.tokens)
            parents.append(nodes.parents)
        return from_lists(tokens, parents)

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        raise NotImplementedError

    def truth(self, sequence: Sequence, count: int) -> list[int]:
        """The next ``count`` tokens, fewer at the answer's end or for an unknown prompt."""
        answer = self.answers.get(tuple(sequence.tokens[: sequence.num_prompt]), [])
        return list(answer[sequence.num_output : sequence.num_output + count])

    def scatter(self, nodes: Nodes, rng: random.Random, avoid: tuple[int, ...] = ()) -> None:
        """Adds one random node; ``avoid`` are tokens that no child of the root may be."""
        for _ in range(20):
            parent = rng.randrange(len(nodes.tokens))
            token = rng.randrange(self.runtime.vocab_size)
            if (parent or token not in avoid) and nodes.add(parent, token):
                return


class Nodes:
    """A tree in the making."""

    def __init__(self, root: int, budget: int) -> None:
        self.tokens, self.parents, self.budget = [root], [-1], budget

    @property
    def room(self) -> int:
        return self.budget + 1 - len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """The new node, 0 if there is no room or a sibling has that token."""
        taken = (parent, token) in zip(self.parents, self.tokens, strict=True)
        if taken or self.room <= 0:
            return 0
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1


class Oracle(Scripted):
    """Always right."""

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        node = 0
        for token in self.truth(sequence, nodes.budget):
            node = nodes.add(node, token)


class Noise(Scripted):
    """Random trees of random size and shape."""

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        for _ in range(rng.randint(0, nodes.budget)):
            self.scatter(nodes, rng)


class Hostile(Scripted):
    """Always wrong, largest tree; below wrong nodes it goes on with the right text."""

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        right = self.truth(sequence, nodes.budget + 1)
        avoid = tuple(right[:1])
        for token in self.eos:
            if token not in avoid and rng.random() < 0.5:
                nodes.add(0, token)
        vocab = self.runtime.vocab_size
        node = nodes.add(0, (right[0] + 1) % vocab) if right and vocab > 1 else 0
        for token in right[1:]:
            if node and rng.random() < 0.7:
                node = nodes.add(node, token)
        for _ in range(nodes.room):
            self.scatter(nodes, rng, avoid)


class Mixed(Scripted):
    """A chain that is right for j tokens and wrong from then on, j going round from 0 to k; each
    sequence begins at another j."""

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        right = self.truth(sequence, nodes.budget)
        turns: dict[int, int] = self.__dict__.setdefault("turns", {})
        turn = turns.get(sequence.slot, sequence.slot)
        turns[sequence.slot] = turn + 1
        until, node = turn % (nodes.budget + 1), 0
        for i, token in enumerate(right):
            wrong = (token + 1) % self.runtime.vocab_size
            node = nodes.add(node, token if i < until else wrong)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self.__dict__.get("turns", {}).pop(slot, None)


class Bushy(Scripted):
    """The right path, of random length, hidden in a random bushy tree: accepted nodes are seldom
    neighbours and have to be moved."""

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        right = self.truth(sequence, rng.randint(0, nodes.budget))
        node = 0
        for i, token in enumerate(right):
            spare = nodes.room - (len(right) - i)
            for _ in range(rng.randint(0, max(0, min(3, spare)))):
                self.scatter(nodes, rng, tuple(right[:1]))
            child = nodes.add(node, token)
            if not child:  # a distractor got there first, or no room is left
                edges = list(zip(nodes.parents, nodes.tokens, strict=True))
                child = edges.index((node, token)) if (node, token) in edges else 0
            if not child:
                return
            node = child
        for _ in range(rng.randint(0, nodes.room)):
            self.scatter(nodes, rng)


class Grown(Scripted):
    """Trees by the growing loop over a draft sure of the right text, guessing elsewhere."""

    @dataclass(frozen=True, kw_only=True)
    class Options(TreeOptions):
        seed: int = 0

    options: Options  # type: ignore[assignment]

    def __init__(self, config: SpeculationConfig, runtime: DraftRuntime) -> None:
        super().__init__(config, runtime)
        self.shape = self.options.shape(config.k)
        self.needs = Needs(nodes=self.shape.num_nodes)

    def propose(self, ask: Ask) -> TokenTree:
        truths = [self.truth(sequence, 63) for sequence in ask.sequences]
        above: list[list[int]] = [[] for _ in truths]

        def logits(b: int, path: list[int]) -> Tensor:
            place = f"{self.options.seed} {len(ask.sequences[b].tokens)} {path}"
            rng = random.Random(place)
            row = torch.tensor([rng.gauss(0, 1) for _ in range(self.runtime.vocab_size)])
            if path == truths[b][: len(path)] and len(path) < len(truths[b]):
                row[truths[b][len(path)]] = 40.0
            return row

        def step(frontier: Frontier) -> Tensor:
            nonlocal above
            above = [
                [*above[parent], token]
                for parent, token in zip(frontier.parents, frontier.tokens, strict=True)
            ]
            return torch.stack([logits(b, above[f]) for f, b in enumerate(frontier.sequences)])

        first = torch.stack([logits(b, []) for b in range(len(truths))])
        return grow_tree(
            ask,
            ask.budgets,
            first,
            step,
            self.shape,
            self.runtime.sampler_noise,
            DraftVocab(self.runtime.vocab_size),
        )


class Broken(Scripted):
    """Raises at every third proposal; the text must not notice."""

    def propose(self, ask: Ask) -> TokenTree:
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        if self.__dict__["calls"] % 3 == 0:
            raise RuntimeError("scripted failure")
        return super().propose(ask)

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        self.scatter(nodes, rng)
