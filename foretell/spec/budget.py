"""How many draft tokens each sequence may have."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple


class Limit(NamedTuple):
    """The largest useful tree of one sequence."""

    nodes: int
    """The root not counted."""
    depth: int
    """Nodes on one path, the root not counted."""
    forced: tuple[int, ...] = ()
    """Draft tokens that an answer's grammar forces: a chain that may be longer than ``nodes``."""

    @property
    def rows(self) -> int:
        return max(self.nodes, len(self.forced))


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


@dataclass(frozen=True)
class FixedBudget:
    """Everybody gets all of its limit while the rows of a pass suffice, else a fair share."""

    def share(self, limits: SequenceOf[int], rows: int, prefills: bool) -> list[int]:
        """Divides the rows of one pass that are left for draft tokens.

        Args:
            limits: [B] nodes, see `limit`; 0 for a sequence that does not speculate.
            rows: rows left once every root and prompt chunk has its own.
            prefills: a prompt chunk is in the pass: then nobody drafts.

        Returns:
            [B] draft tokens, sum at most ``rows``. No sequence that got less than its limit could
            get one more without another falling below it; odd rows go to the later ones.
        """
        given = [0] * len(limits)
        if prefills:
            return given
        waiting = sorted(range(len(limits)), key=lambda b: limits[b])
        for place, b in enumerate(waiting):
            given[b] = min(limits[b], max(0, rows) // (len(waiting) - place))
            rows -= given[b]
        return given
