"""Sums over every coin and every draft: the exact law of what a verification rule emits."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from foretell.spec.verify import block_path, rejection_path

Prefix = tuple[int, ...]
Law = dict[Prefix, float]


class Script:
    """Decides comparisons of coins: first as scripted, then 'accept', noting each one's chance."""

    def __init__(self, decisions: list[bool]) -> None:
        self.decisions = decisions
        self.chances: list[float] = []

    def decide(self, chance: float) -> bool:
        if chance <= 0 or chance >= 1:
            return chance >= 1
        place = len(self.chances)
        if place == len(self.decisions):
            self.decisions.append(True)
        accepted = self.decisions[place]
        self.chances.append(chance if accepted else 1 - chance)
        return accepted


class Coin(float):
    """A uniform in [0, 1) that has not landed yet; it may be asked once."""

    script: Script
    scale: float = 1.0
    asked = False

    def __mul__(self, scale: float) -> Coin:
        self.scale = scale
        return self

    def __lt__(self, bound: float) -> bool:
        assert not self.asked, "one coin decided twice"
        self.asked = True
        return self.script.decide(bound / self.scale if self.scale > 0 else float(bound > 0))


def every_coin(run: Callable[[list[Coin]], Any], count: int) -> Iterator[tuple[float, Any]]:
    """All results of ``run`` over ``count`` coins, each with its probability."""
    todo: list[list[bool]] = [[]]
    while todo:
        given = todo.pop()
        script = Script(list(given))
        coins = [Coin(0.0) for _ in range(count)]
        for coin in coins:
            coin.script = script
        result = run(coins)
        yield float(np.prod(script.chances)), result
        todo += [[*script.decisions[:i], False] for i in range(len(given), len(script.decisions))]


class Table:
    """A random law for each prefix; ``sharp`` above 1 makes it peaked."""

    def __init__(self, vocab: int, seed: int, sharp: float = 1.0, zeros: float = 0.0) -> None:
        self.vocab, self.seed, self.sharp, self.zeros = vocab, seed, sharp, zeros
        self.known: dict[Prefix, np.ndarray] = {}

    def __call__(self, prefix: Prefix) -> np.ndarray:
        if prefix not in self.known:
            rng = np.random.default_rng([self.seed, *[t + 1 for t in prefix]])
            law = rng.dirichlet(np.ones(self.vocab)) ** self.sharp
            law[rng.random(self.vocab) < self.zeros] = 0.0
            if law.sum() == 0:
                law[rng.integers(self.vocab)] = 1.0
            self.known[prefix] = law / law.sum()
        return self.known[prefix]


def prefix_of(tokens: list[int], parents: list[int], node: int) -> Prefix:
    out: list[int] = []
    while node > 0:
        out.append(tokens[node])
        node = parents[node]
    return tuple(out[::-1])


def plain_law(target: Table, horizon: int) -> Law:
    law: Law = {}
    for text in itertools.product(range(target.vocab), repeat=horizon):
        law[text] = float(np.prod([target(text[:i])[t] for i, t in enumerate(text)]))
    return law


def every_draft(
    parents: list[int], draft: Table, sampled: bool, choose: Callable[[np.ndarray], list[int]]
) -> Iterator[tuple[float, list[int]]]:
    """All token lists of one tree with their probabilities: drawn without replacement in node
    order, or ``choose(q)`` as each node's children."""

    def fill(tokens: list[int], weight: float) -> Iterator[tuple[float, list[int]]]:
        i = len(tokens)
        if i == len(parents):
            yield weight, tokens
            return
        siblings = [tokens[j] for j in range(1, i) if parents[j] == parents[i]]
        q = draft(prefix_of(tokens, parents, parents[i])).copy()
        if not sampled:
            yield from fill([*tokens, choose(q)[len(siblings)]], weight)
            return
        q[siblings] = 0.0
        for token in np.flatnonzero(q):
            yield from fill([*tokens, int(token)], weight * q[token] / q.sum())

    yield from fill([0], 1.0)


def emitted_law(
    rule: str,
    parents: list[int],
    target: Table,
    draft: Table,
    *,
    sampled: bool,
    claim_law: bool | None = None,
    choose: Callable[[np.ndarray], list[int]] = lambda q: list(np.argsort(-q, kind="stable")),
) -> tuple[Law, float]:
    """Exact law of the first tokens that one step and plain decoding after it emit, and the
    expected number of tokens of the step.

    Args:
        claim_law: whether the rule is told q; as ``sampled`` unless given.
    """
    horizon = 1 + max(len(prefix_of([0] * len(parents), parents, i)) for i in range(len(parents)))
    claim = sampled if claim_law is None else claim_law
    law: Law = defaultdict(float)
    expected = 0.0
    for weight, tokens in every_draft(parents, draft, sampled, choose):
        prefixes = [prefix_of(tokens, parents, i) for i in range(len(tokens))]
        p = torch.tensor(np.array([target(prefix) for prefix in prefixes]))
        q = torch.tensor(np.array([draft(prefix) for prefix in prefixes])) if claim else None

        def run(coins: list[Coin], tokens: Any = tokens, p: Any = p, q: Any = q) -> Any:
            if rule == "block":
                return block_path(tokens, p, q, coins)
            return rejection_path(tokens, parents, p, q, coins)

        for chance, (path, left) in every_coin(run, len(tokens)):
            last = left / left.sum()
            expected += weight * chance * (len(path) + 1)
            for y in torch.nonzero(last).flatten().tolist():
                head = (*(tokens[i] for i in path), y)
                extend(law, head, weight * chance * float(last[y]), target, horizon)
    return law, expected


def extend(law: Law, head: Prefix, weight: float, target: Table, horizon: int) -> None:
    """Adds what plain decoding makes of ``head``."""
    if len(head) == horizon:
        law[head] += weight
        return
    p = target(head)
    for token in range(target.vocab):
        extend(law, (*head, token), weight * p[token], target, horizon)


def distance(a: Law, b: Law) -> float:
    return max(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in {*a, *b})
