"""How many draft tokens each sequence may have."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass


def limit(k: int, max_nodes: int, room: int, tokens_left: int) -> int:
    """The longest useful draft of one sequence.

    Args:
        k: what the user asked for.
        max_nodes: what the scheme can do.
        room: positions left before the context limit (the target's or the drafter's).
        tokens_left: tokens the answer may still have; the target adds one of them itself.
    """
    return max(0, min(k, max_nodes, room, tokens_left - 1))


@dataclass(frozen=True)
class FixedBudget:
    """Everybody gets all of its limit while the rows of a pass suffice, else a fair share."""

    def share(self, limits: SequenceOf[int], rows: int, prefills: bool) -> list[int]:
        """Divides the rows of one pass that are left for draft tokens.

        Args:
            limits: [B] see `limit`; 0 for a sequence that does not speculate.
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
