"""Tree shapes: how many children each draft node gets, which nodes grow on, which are kept.

A *fixed* shape is a list of paths, known before any token is: a chain, the published trees of
Medusa and EAGLE, or any JSON file. A *dynamic* shape (EAGLE-2) looks at the draft's own
probabilities.

Only drafts that are a function of the text may use a dynamic shape. Where children are drawn at
random, keeping a node for its probability would drop drawn tokens for what they are, and change the
text's distribution (non-anticipation, schemes.md 2.1): there a dynamic shape hands over `fixed`,
which is settled before the draw.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

from foretell.config import SpeculationConfig
from foretell.spec.drafter import Drafter
from foretell.spec.tree import MAX_NODES

TreePath = tuple[int, ...]
"""A node by the ranks of the children on the way to it: (0, 2) is the third likeliest child of the
likeliest child of the root."""

PUBLISHED = {
    # Medusa, Cai et al. 2401.10774, "mc_sim_7b_63": measured on Vicuna-7B.
    "medusa": "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 "
    "020 12 003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 "
    "15 101 021 90 060 0001 16 070",
    # EAGLE, Li et al. 2401.15077, the static tree of the released code.
    "eagle": "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 "
    "00001",
}


@dataclass
class Sprouts:
    """A tree while it grows, in the order of birth. Node 0 is the root."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    ranks: list[int] = field(default_factory=lambda: [0])  # place among its siblings
    depths: list[int] = field(default_factory=lambda: [0])
    values: list[float] = field(default_factory=lambda: [0.0])
    """Joint log-probability that the draft gives the path; never above the parent's."""

    def add(self, parent: int, rank: int, token: int, logp: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.ranks.append(rank)
        self.depths.append(self.depths[parent] + 1)
        self.values.append(self.values[parent] + min(logp, 0.0))
        return len(self.tokens) - 1


class Plan(Protocol):
    """A shape applied to one sequence. The growing loop asks level by level."""

    def width(self, sprouts: Sprouts, node: int) -> int:
        """How many children a frontier node wants, asked before they are chosen."""
        ...

    def expand(self, sprouts: Sprouts, born: list[int]) -> list[int]:
        """Which of the nodes just born the draft is run on: the next frontier."""
        ...

    def kept(self, sprouts: Sprouts) -> list[int]:
        """The nodes of the finished tree besides the root, every parent among them."""
        ...


class TreeShape(Protocol):
    """What a scheme's options say about its trees."""

    @property
    def num_nodes(self) -> int:
        """Nodes besides the root, at most 63."""
        ...

    @property
    def depth(self) -> int:
        """Nodes on the longest path, the root not counted."""
        ...

    @property
    def trust(self) -> float:
        """What the scores of tokens are multiplied by before they become probabilities by which
        nodes are chosen."""
        ...

    def plan(self, budget: int, depth: int) -> Plan:
        """For at most ``budget`` nodes and ``depth`` levels. The draft is run on at most ``budget``
        nodes, so their K and V fit into the cells that the engine reserves for the tree."""
        ...

    def within(self, depth: int) -> TreeShape:
        """The same for a scheme that cannot guess deeper."""
        ...

    def fixed(self) -> FixedShape:
        """The shape for drafts that are drawn at random: known before any token is."""
        ...


class FixedShape:
    """A tree known beforehand, whatever the probabilities.

    Args:
        paths: every node's path, in any order.

    Raises:
        ValueError: not a tree that can be drafted; the message names the path.
    """

    trust = 1.0

    def __init__(self, paths: SequenceOf[SequenceOf[int]]) -> None:
        known: set[TreePath] = {tuple(path) for path in paths}
        if not 1 <= len(paths) < MAX_NODES:
            raise ValueError(f"a tree has from 1 to {MAX_NODES - 1} paths, not {len(paths)}")
        if len(known) < len(paths):
            twice = next(p for p in known if sum(tuple(q) == p for q in paths) > 1)
            raise ValueError(f"path {list(twice)} is there twice")
        for path in known:
            if not path or min(path) < 0:
                raise ValueError(f"path {list(path)}: must be one or more ranks from 0 up")
            *above, rank = path
            if above and tuple(above) not in known:
                raise ValueError(f"path {list(path)} needs its parent {above}")
            # Without a sibling in between the others would not be draws without replacement.
            if rank and (*above, rank - 1) not in known:
                raise ValueError(f"path {list(path)} needs its sibling {[*above, rank - 1]}")
        self.paths: list[TreePath] = sorted(known, key=lambda path: (-_guess(path), path))
        """The likeliest first: any beginning of the list is a tree."""
        self.num_nodes = len(known)
        self.depth = max(len(path) for path in known)

    def plan(self, budget: int, depth: int) -> Plan:
        within = [path for path in self.paths if len(path) <= depth]
        return _FixedPlan(within[: max(0, budget)])

    def fixed(self) -> FixedShape:
        return self

    def within(self, depth: int) -> FixedShape:
        """Its nodes of at most that depth."""
        return FixedShape([path for path in self.paths if len(path) <= depth])


@dataclass(frozen=True)
class DynamicShape:
    """EAGLE-2 (Li et al. 2406.16858): expand the likeliest nodes, then keep the likeliest.

    A node's value is the joint probability of its path. On each level the ``topk`` best nodes get
    ``topk`` children each; of all nodes the best ``num_nodes`` are kept, the shallower of equals,
    so that parents stay with their children.
    """

    depth: int
    topk: int
    num_nodes: int
    trust: float = 1.0

    def plan(self, budget: int, depth: int) -> Plan:
        nodes = min(budget, self.num_nodes)
        return _DynamicPlan(min(depth, self.depth, nodes), self.topk, nodes)

    def within(self, depth: int) -> DynamicShape:
        return replace(self, depth=min(depth, self.depth))

    def fixed(self) -> FixedShape:
        """The likeliest nodes of the whole tree of this depth and width, by rank alone."""
        return _by_rank(self.depth, self.topk, self.num_nodes)


@cache
def _by_rank(depth: int, topk: int, num_nodes: int) -> FixedShape:
    grown: list[TreePath] = []
    edge: list[TreePath] = [()]
    for _ in range(depth):
        edge = [(*path, rank) for path in edge for rank in range(topk)]
        edge = sorted(edge, key=lambda path: (-_guess(path), path))[:num_nodes]
        grown += edge
    grown.sort(key=lambda path: (-_guess(path), path))
    return FixedShape(grown[:num_nodes])


def chain(length: int) -> FixedShape:
    """One child a node."""
    return FixedShape([(0,) * n for n in range(1, length + 1)])


def read_shape(name: str) -> FixedShape:
    """A published shape by name (`PUBLISHED`), or a JSON file with a list of paths, as in
    ``[[0], [1], [0, 0]]``.

    Raises:
        ValueError: no such file or name, or not a tree; the message says what is wrong.
    """
    if name in PUBLISHED:
        return FixedShape([[int(rank) for rank in path] for path in PUBLISHED[name].split()])
    known = ", ".join(PUBLISHED)
    try:
        data = json.loads(Path(name).read_text())
    except OSError:
        raise ValueError(f"tree={name!r}: no such file, nor one of {known}") from None
    except ValueError as error:
        raise ValueError(f"tree={name!r}: not JSON ({error})") from None
    if not isinstance(data, list) or not all(_is_path(path) for path in cast(list[Any], data)):
        raise ValueError(f"tree={name!r}: must be a list of paths such as [[0], [1], [0, 0]]")
    try:
        return FixedShape(cast(list[list[int]], data))
    except ValueError as error:
        raise ValueError(f"tree={name!r}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class TreeOptions(Drafter.Options):
    """Options of every scheme that grows trees: a chain of ``k`` unless they say otherwise."""

    depth: int = 0
    """Levels of the tree; 0 is k."""
    topk: int = 1
    """Children of a node, and nodes of a level that grow on (EAGLE-2); 1 is a chain."""
    nodes: int = 0
    """Most nodes, chosen by the draft's own probabilities; 0 is four for each level."""
    trust: float = 1.0
    """How sure the draft is taken to be when nodes are chosen: 1 takes its probabilities as they
    are, as in EAGLE-2; the closer it is to the target, the more it deserves."""
    tree: str = ""
    """A fixed tree instead: medusa, eagle, or a JSON file with a list of paths."""

    def __post_init__(self) -> None:
        if self.tree and (self.depth or self.nodes or self.topk != 1):
            raise ValueError(f"tree={self.tree!r}: a fixed tree has its own depth, topk and nodes")
        for name, value, least in (("depth", self.depth, 0), ("topk", self.topk, 1)):
            if not least <= value < MAX_NODES:
                raise ValueError(f"{name}={value}: must be from 1 to {MAX_NODES - 1}")
        if not 0 <= self.nodes < MAX_NODES:
            raise ValueError(f"nodes={self.nodes}: must be from 1 to {MAX_NODES - 1}")
        if not 0 < self.trust <= 100:
            raise ValueError(f"trust={self.trust}: must be above 0 and at most 100")
        if self.nodes and self.topk == 1:
            raise ValueError(f"nodes={self.nodes}: topk=1 is a chain; say topk too, or depth alone")

    @property
    def is_chain(self) -> bool:
        return not self.tree and self.topk == 1

    def shape(self, k: int) -> TreeShape:
        """
        Raises:
            ValueError: ``tree`` is neither known nor a file that holds a tree, or ``k`` was chosen
                where other options decide.
        """
        decides = "tree" if self.tree else "depth" if self.depth else ""
        if decides and k != SpeculationConfig.k:
            raise ValueError(
                f"k={k} has no effect beside {decides}={getattr(self, decides)}: leave it out"
            )
        if self.tree:
            return read_shape(self.tree)
        depth = self.depth or k
        if self.is_chain:
            return chain(depth)
        nodes = self.nodes or min(4 * depth, MAX_NODES - 1)
        return DynamicShape(depth, self.topk, nodes, self.trust)


class _FixedPlan:
    def __init__(self, paths: SequenceOf[TreePath]) -> None:
        self.num_children: dict[TreePath, int] = dict.fromkeys([(), *paths], 0)
        for path in paths:
            self.num_children[path[:-1]] += 1
        self.at: list[TreePath] = [()]  # where each sprout stands

    def width(self, sprouts: Sprouts, node: int) -> int:
        return self.num_children[self.at[node]]

    def expand(self, sprouts: Sprouts, born: list[int]) -> list[int]:
        self.at += [(*self.at[sprouts.parents[node]], sprouts.ranks[node]) for node in born]
        return [node for node in born if self.num_children[self.at[node]]]

    def kept(self, sprouts: Sprouts) -> list[int]:
        return list(range(1, len(sprouts.tokens)))


class _DynamicPlan:
    def __init__(self, depth: int, topk: int, num_nodes: int) -> None:
        self.depth, self.topk, self.num_nodes = depth, topk, num_nodes
        # The draft is run on nodes of all levels but the last.
        self.beam = max(1, min(topk, num_nodes // max(1, depth - 1)))

    def width(self, sprouts: Sprouts, node: int) -> int:
        return min(self.topk, self.num_nodes)

    def expand(self, sprouts: Sprouts, born: list[int]) -> list[int]:
        if not born or sprouts.depths[born[0]] >= self.depth:
            return []
        # What is not among the best now never will be, and neither will what hangs below it.
        hopeful = set(self.kept(sprouts)) & set(born)
        return sorted(sorted(hopeful, key=lambda n: (-sprouts.values[n], n))[: self.beam])

    def kept(self, sprouts: Sprouts) -> list[int]:
        nodes = range(1, len(sprouts.tokens))  # in order of birth: the shallower first
        return sorted(sorted(nodes, key=lambda n: (-sprouts.values[n], n))[: self.num_nodes])


def _guess(path: TreePath) -> float:
    """How likely a node is to be accepted, by ranks alone: 0.7 for a likeliest child, and 0.24
    shared by its siblings, of whom the first gets half."""
    odds = 1.0
    for rank in path:
        odds *= 0.7 if rank == 0 else 0.24 / (rank * (rank + 1))
    return odds


def _is_path(path: Any) -> bool:
    ranks = cast(list[Any], path) if isinstance(path, list) else [None]
    return all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks)
