"""How much of a scheme's drafts the target takes: by depth, and by sequence.

Two levels of evidence. All sequences together say what to expect of a new one; its own steps move
it away from there. Evidence is worth less the older it is, so an estimate that is not fed drifts
back to what is expected of anybody, and a depth that nobody asks for to what the depth above shows:
that is why something that failed once is tried again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

_HOPE = 0.4
"""What is expected of a draft token before any was seen, as much as `_HOPE_WEIGHT` of them."""
_HOPE_WEIGHT = 2.0
_NEIGHBOUR = 4.0
"""What the depth above is worth, in observations, to a depth."""
_EVERYBODY = (8.0, 24.0, 64.0)
"""What all sequences are worth to one, in observations: whichever foretold best lately. Where all
are alike the largest does, where some copy and others do not the smallest."""
_OWN = 1 - 1 / 16
"""Weight that a sequence's record keeps at each new entry."""
_COMMON = 1 - 1 / 192
_FADE = [(1 - 1 / 64) ** steps for steps in range(400)]
"""Weight that a sequence's record has left after steps without an entry."""
_COMMON_FADE = 1 - 1 / 2048
_KEPT = 32.0
"""What is known from the start before is worth, in observations: what is asked may be another."""


class Ladder(NamedTuple):
    """The sizes of tree that are considered, from small to large."""

    nodes: list[int]  # [R] without the root
    depth: list[int]  # [R]
    is_chain: bool


def ladder(nodes: int, depth: int) -> Ladder:
    """Sizes up to ``nodes`` nodes and ``depth`` levels: every length of a chain, steps of a half
    for a tree."""
    if nodes <= depth:
        sizes = [n for n in range(1, nodes + 1) if n <= 8 or n % 4 == 0 or n == nodes]
        return Ladder(sizes, sizes, True)
    sizes = [nodes]
    while sizes[-1] > 2:
        sizes.append(sizes[-1] // 2)
    sizes.reverse()
    return Ladder(sizes, [min(size, depth) for size in sizes], False)


class Outcome(NamedTuple):
    """What became of one draft."""

    slot: int
    nodes: int
    """Of the tree without its root; 0 where there was no draft."""
    depth: int
    """That was asked for: a path that ends before was thought not to be worth it."""
    accepted: int
    asked: int = 0
    """Nodes that were asked for, 0 for as many as there are."""


def claims(parents: list[int], chances: list[float], path: list[int]) -> list[tuple[float, bool]]:
    """For each node whose parent was accepted, or is the root: what the draft gave it once its
    parent is, and whether it was accepted too. None where the draft said nothing."""
    if not chances:
        return []
    right = {0, *path}
    return [
        (chances[node] / max(chances[parent], 1e-9), node in right)
        for node, parent in enumerate(parents)
        if parent in right
    ]


class _Record:
    """Of one sequence."""

    __slots__ = ("asked", "found", "hits", "seen", "tries")

    def __init__(self, levels: int) -> None:
        self.tries, self.hits = [0.0] * levels, [0.0] * levels
        self.asked = self.found = 0.0
        self.seen = 0
        """When the last entry was made."""


class Acceptance:
    """One scheme's record.

    Args:
        nodes: its largest tree.
        depth: its longest path.
    """

    def __init__(self, nodes: int, depth: int) -> None:
        self.ladder = ladder(nodes, depth)
        levels = self.ladder.depth[-1]
        self.tries, self.hits = [0.0] * levels, [0.0] * levels
        """[K] drafts that came that far, and that were right there too, of all sequences."""
        self.asked = self.found = 0.0
        sizes = [size / self.ladder.nodes[-1] for size in self.ladder.nodes]
        self.yields = [1.0 if self.ladder.is_chain else size**0.15 for size in sizes]
        """[R] a tree of this size against the largest; for chains depth says it all."""
        self.errors = [0.05, 0.049, 0.05]
        """Mean square error of each weight in `_EVERYBODY`."""
        self.filled = [1.0] * len(self.ladder.nodes)
        """[R] how many drafts have as many nodes where as many are asked for."""
        self.candid = False
        """Does it say how likely its nodes are?"""
        self.candour = 1.0
        """A node that the draft gives a chance of c is accepted with c ** candour."""
        self._records: dict[int, _Record] = {}
        self._clock = 0
        self._common: list[float] = []

    def forget(self, slots: SequenceOf[int]) -> None:
        """Others come to these slots."""
        for slot in slots:
            self._records.pop(slot, None)

    def passed(self, steps: int = 1) -> None:
        """Steps are over, at most 64, whether there were drafts or not."""
        before, self._clock = self._clock, self._clock + steps
        if before // 64 != self._clock // 64:
            fade = _COMMON_FADE**64
            self.tries = [count * fade for count in self.tries]
            self.hits = [count * fade for count in self.hits]
            self.asked, self.found = self.asked * fade, self.found * fade
            self._common = []

    def expected(self, slot: int, least: float = 0.0) -> tuple[list[float], float]:
        """What a sequence's drafts would give.

        Args:
            least: a level that is reached less often is not looked at.

        Returns:
            Accepted tokens if there is a draft, for the first rungs of the ladder; and how likely
            there is one.
        """
        common = self._common = self._common or self._expected()
        record, factors, everybody = self._records.get(slot), self.yields, self._everybody
        found = (1 + self.found) / (1 + self.asked)
        fade, tries, hits = 0.0, self.tries, self.hits
        if record is not None:
            fade, tries, hits = self._faded(record), record.tries, record.hits
            found = (fade * record.found + everybody * found) / (fade * record.asked + everybody)
        out: list[float] = []
        reached, tokens, level = 1.0, 0.0, 0
        for rung, depth in enumerate(self.ladder.depth):
            while level < depth:
                own = fade * hits[level] + everybody * common[level]
                reached *= own / (fade * tries[level] + everybody)
                tokens += reached
                level += 1
            if reached < least and out:
                break
            out.append(tokens * factors[rung])
        return out, found

    def learn(self, outcomes: SequenceOf[Outcome]) -> None:
        """One step's drafts, at most one a sequence; those asked for in vain included."""
        levels = len(self.tries)
        for slot, nodes, depth, accepted, asked in outcomes:
            if nodes:
                for rung, size in enumerate(self.ladder.nodes):
                    if size <= max(asked, nodes):
                        self.filled[rung] += ((nodes >= size) - self.filled[rung]) / 64
                if not self.ladder.is_chain:
                    self._learn_yield(slot, max(asked, nodes), accepted)
            record = self._records.get(slot)
            if record is None:
                record = self._records[slot] = _Record(levels)
            elif self._clock > record.seen + 1:
                self._fade(record)
            record.seen = self._clock
            if nodes and record.tries[0] > 4:
                self._judge(record, accepted > 0)
            record.asked = record.asked * _OWN + 1
            record.found = record.found * _OWN + (nodes > 0)
            self.asked = self.asked * _COMMON + 1
            self.found = self.found * _COMMON + (nodes > 0)
            for tries, hits, keep in (
                (record.tries, record.hits, _OWN),
                (self.tries, self.hits, _COMMON),
            ):
                for level in range(min(accepted + 1, depth, levels) if nodes else 0):
                    tries[level] = tries[level] * keep + 1
                    hits[level] = hits[level] * keep + (level < accepted)
        self._common = []

    def learn_claims(self, claims: SequenceOf[tuple[float, bool]]) -> None:
        """Chances that the draft gave nodes whose parents were accepted, and whether they were:
        one step each up the likelihood's slope."""
        self.candid = self.candid or bool(claims)
        for chance, accepted in claims:
            log = math.log(min(max(chance, 1e-6), 1 - 1e-6))
            p = min(math.exp(self.candour * log), 1 - 1e-3)
            slope = log * (1.0 if accepted else -p / (1 - p))
            self.candour += min(max(slope, -2.0), 2.0) / 64
            self.candour = min(max(self.candour, 0.2), 4.0)

    def least(self, chance: float) -> float:
        """What the draft must say of a node for it to have such a chance."""
        # Learnt costs may say that a row saves time.
        return min(max(chance, 0.0), 0.95) ** (1 / self.candour)

    # ---- kept between runs

    def state(self) -> dict[str, Any]:
        """What `restore` takes, as JSON's types: what is known of all sequences together."""
        names = ("tries", "hits", "asked", "found", "yields", "errors", "filled", "candour")
        return {name: getattr(self, name) for name in (*names, "candid")}

    def restore(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError, KeyError, TypeError: not what `state` gave for such a scheme.
        """
        levels, rungs = len(self.tries), len(self.yields)
        tries, hits = _numbers(state["tries"], levels), _numbers(state["hits"], levels)
        asked, found = _numbers([state["asked"], state["found"]], 2)
        yields, filled = _numbers(state["yields"], rungs), _numbers(state["filled"], rungs)
        errors, (candour,) = _numbers(state["errors"], 3), _numbers([state["candour"]], 1)
        if found > asked or any(hit > tried for hit, tried in zip(hits, tries, strict=True)):
            raise ValueError("more accepted than drafted")
        part = min(1.0, _KEPT / max(asked, *tries, 1e-9))
        self.tries, self.hits = [part * n for n in tries], [part * n for n in hits]
        self.asked, self.found = part * asked, part * found
        self.yields, self.filled, self.errors = yields, filled, errors
        self.candour, self.candid = min(max(candour, 0.2), 4.0), bool(state["candid"])
        self._common = []

    # ---- inside

    def _judge(self, record: _Record, right: bool) -> None:
        """Which weight of everybody foretells best whether a first token is right?"""
        common = (self._common or self._expected())[0]
        for i, everybody in enumerate(_EVERYBODY):
            p = (record.hits[0] + everybody * common) / (record.tries[0] + everybody)
            self.errors[i] += ((p - right) ** 2 - self.errors[i]) / 256

    @property
    def _everybody(self) -> float:
        return _EVERYBODY[self.errors.index(min(self.errors))]

    def _faded(self, record: _Record) -> float:
        return _FADE[min(self._clock - record.seen, len(_FADE) - 1)]

    def _fade(self, record: _Record) -> None:
        fade = self._faded(record)
        record.tries = [count * fade for count in record.tries]
        record.hits = [count * fade for count in record.hits]
        record.asked, record.found = record.asked * fade, record.found * fade

    def _learn_yield(self, slot: int, nodes: int, accepted: int) -> None:
        hoped = self.expected(slot)[0]
        rung = next((r for r, size in enumerate(self.ladder.nodes) if size >= nodes), -1)
        self.yields[rung] *= 1 + (min(max(accepted / hoped[rung], 0.25), 2.0) - 1) / 128

    def _expected(self) -> list[float]:
        """[K] chance of each depth for a sequence that nothing is known of, given the depth above
        was right."""
        above, weight = _HOPE, _HOPE_WEIGHT
        out: list[float] = []
        for tries, hits in zip(self.tries, self.hits, strict=True):
            above = (hits + weight * above) / (tries + weight)
            weight = _NEIGHBOUR
            out.append(above)
        return out


def _numbers(values: Any, count: int) -> list[float]:
    numbers = [float(value) for value in values]
    if len(numbers) != count or not all(0 <= number < 1e6 for number in numbers):
        raise ValueError("not what was seen of drafts")
    return numbers
