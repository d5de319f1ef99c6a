"""A step as those who divide it see it: sequences, what they may have, what they get."""

from __future__ import annotations

import math
from typing import NamedTuple


class Limit(NamedTuple):
    """The largest useful tree of one sequence."""

    nodes: int
    """The root not counted."""
    depth: int
    """Nodes on one path, the root not counted."""


def limit(k: int, max_nodes: int, room: int, tokens_left: int) -> Limit:
    """What an answer's end limits is depth: only one path is ever taken, so a tree may stay wide.

    Args:
        k: what the user asked for.
        max_nodes: what the scheme can do.
        room: positions left before the context limit (the target's or the drafter's).
        tokens_left: tokens the answer may still have; the target adds one of them itself.
    """
    nodes = min(k, max_nodes)
    depth = max(0, min(nodes, room, tokens_left - 1))
    return Limit(nodes if depth else 0, depth)


class Seat(NamedTuple):
    """A sequence in a step."""

    slot: int
    keys: int
    """Tokens that it has."""
    limits: list[Limit]
    """For each scheme."""
    behind: list[int]
    """Tokens that each scheme has not observed yet."""
    forced: tuple[int, ...] = ()
    """Draft tokens that the answer's grammar forces: a chain that costs nothing to draft."""


class Least(NamedTuple):
    """How likely a node of a draft must be to be accepted."""

    node: float = 0.0
    """To be worth its row in the target's pass."""
    parent: float = 0.0
    """To be worth a pass of the draft over it, for what may come behind it."""
    first: float = 0.0
    """For the likeliest first token: else another scheme is asked instead."""

    @property
    def logs(self) -> tuple[float, ...]:
        """The same as logarithms."""
        return tuple(math.log(chance) if chance > 0 else -math.inf for chance in self)


ANYTHING = Least()
"""No node is too unlikely."""


class Grant(NamedTuple):
    """What a sequence may have."""

    nodes: int = 0
    depth: int = 0
    scheme: int = 0
    forced: int = 0
    """Forced tokens, in place of a draft that does not hold them."""
    least: Least = ANYTHING
    instead: Grant | None = None
    """What it may have of a later scheme where this one has no draft."""

    @property
    def most(self) -> int:
        """Nodes, whoever drafts."""
        return max(self.nodes, self.instead.nodes if self.instead else 0)


def within(grant: Grant, seat: Seat) -> Grant:
    """As much of a budget as its sequence may have."""
    if grant.instead:
        grant = grant._replace(instead=within(grant.instead, seat))
    limit = seat.limits[grant.scheme]
    if grant.nodes <= limit.nodes and grant.depth <= limit.depth:
        return grant
    depth = min(grant.depth, limit.depth)
    chain = grant.nodes == grant.depth
    nodes = min(grant.nodes, limit.nodes, depth if chain else grant.nodes) if depth else 0
    return grant._replace(nodes=nodes, depth=min(depth, nodes))
