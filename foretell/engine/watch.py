"""What a drafter has yet to be shown.

A drafter that is not asked need not be shown anything either: what became final is kept, and shown
in one go when drafts are wanted. So a scheme that does not pay costs nothing, and one with KV of
its own catches up at the price of a prompt. Features cannot be had again: they are kept, but not
many of them.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.engine.cache import PageCache
from foretell.sequence import Sequence
from foretell.spec.drafter import Commit, Drafter

MOST_ROWS = 512
"""Tokens that a drafter is shown at once, so that a long prompt does not stall a step."""
MOST_FEATURES = 128
"""Rows of features that are kept of a sequence."""


@dataclass(eq=False)
class _Late:
    """Of one sequence."""

    sequence: Sequence
    seen: int
    """Positions that the drafter was shown: 0 .. seen - 1."""
    features: list[Tensor] = field(default_factory=list[Tensor])  # [T, F] each, from ``seen`` on


class Watch:
    """One drafter's view of the text.

    Args:
        lazy: show nothing before it is wanted.
        taps: the layers whose features the target gives, this drafter's among them.
    """

    def __init__(
        self, drafter: Drafter, cache: PageCache, *, lazy: bool, taps: tuple[int, ...]
    ) -> None:
        self.drafter, self.cache, self.lazy, self.num_taps = drafter, cache, lazy, len(taps)
        own = drafter.needs.features
        self.columns = None if own in ((), taps) else [taps.index(layer) for layer in own]
        """Which of the tapped layers are its own; None: all, as they are."""
        self.with_features = bool(drafter.needs.features)
        self.refills = lazy and drafter.needs.kv is not None and not self.with_features
        """Can it fill in KV for tokens alone, so that pages may be shared without?"""
        self._late: dict[int, _Late] = {}  # by slot
        self._alike: list[Sequence] = []
        self._spare = 0
        """Whom the last step that was looked at was about; steps of one token each that need not be
        looked at while it is they."""
        self._unsorted: list[Tensor] = []  # [B, F] each: theirs

    def note(self, commit: Commit, soon: SequenceOf[Sequence] = ()) -> Commit | None:
        """Takes in what became final.

        Args:
            soon: sequences that will probably get drafts in the next step.

        Returns:
            What the drafter must be shown now, before anything else; it counts as shown.
        """
        own = self.own_features(commit.features)
        if not self.lazy:
            return Commit(commit.sequences, commit.starts, commit.tokens, own)
        if commit.sequences == self._alike and not soon:
            if own is None:
                return None
            ended = any(sequence.finished for sequence in self._alike)
            if self._spare > 0 and len(own) == len(self._alike) and not ended:
                self._spare -= 1
                self._unsorted.append(own)
                return None
        self._sort()
        urgent: list[Sequence] = []
        sizes = [len(tokens) - 1 for tokens in commit.tokens]
        parts: SequenceOf[Tensor | None]
        parts = [None] * len(sizes) if own is None else torch.split_with_sizes(own, sizes)
        for sequence, start, part in zip(commit.sequences, commit.starts, parts, strict=True):
            late = self._late.get(sequence.slot)
            if late is None or late.sequence is not sequence:
                if self.refills:  # pages of the prefix cache may lack the drafter's KV
                    start = min(start, self.cache.num_observed(sequence))
                late = self._late[sequence.slot] = _Late(sequence, start)
            if part is not None:
                late.features.append(part)
                many = sequence.num_computed - late.seen >= MOST_FEATURES
                if many or (sequence.finished and self.drafter.needs.kv):
                    urgent.append(sequence)
        soon = [s for s in soon if not s.finished and s not in urgent]
        shown = self.missing([*urgent, *soon])
        self._alike = commit.sequences
        self._spare = MOST_FEATURES - 1 - max(map(self.behind, self._alike))
        return shown

    def _sort(self) -> None:
        """Gives sequences the features of steps that were not looked at."""
        if self._unsorted:
            for sequence, part in zip(self._alike, torch.stack(self._unsorted, 1), strict=True):
                self._late[sequence.slot].features.append(part)
            self._unsorted = []

    def skip(self, commit: Commit) -> None:
        """What became final was shown already; the drafter had not been behind."""
        self._sort()
        for sequence in commit.sequences:
            late = self._late.get(sequence.slot)
            if late is not None and late.sequence is sequence:
                late.seen, late.features = sequence.num_computed, []

    def behind(self, sequence: Sequence) -> int:
        """Tokens that are final and were not shown."""
        late = self._late.get(sequence.slot)
        return sequence.num_computed - late.seen if late and late.sequence is sequence else 0

    def shareable(self, sequence: Sequence) -> int:
        """Position up to which a sequence's pages may be shared."""
        if self.drafter.needs.kv is None or self.refills:
            return sequence.num_computed
        if not sequence.speculate:
            return 0
        return sequence.num_computed - self.behind(sequence)

    def missing(self, sequences: list[Sequence]) -> Commit | None:
        """What the drafter has yet to be shown of these, `MOST_ROWS` tokens at most, the shortest
        first; None for nothing. From now on it counts as shown.
        """
        self._sort()
        room, shown = MOST_ROWS, list[tuple[_Late, int]]()
        for sequence in sorted(sequences, key=self.behind):
            late, count = self._late.get(sequence.slot), min(room, self.behind(sequence))
            if late and count > 0:
                if late.features:  # those cannot be cut into pieces
                    count = self.behind(sequence)
                shown.append((late, late.seen + count))
                room -= count
        if not shown:
            return None
        parts = [part for late, _ in shown for part in late.features]
        commit = Commit(
            [late.sequence for late, _ in shown],
            [late.seen for late, _ in shown],
            [late.sequence.tokens[late.seen : end + 1] for late, end in shown],
            torch.cat(parts) if parts else None,
        )
        for late, end in shown:
            if self.refills:
                self.cache.set_observed(late.sequence, late.seen, end)
            late.seen, late.features = end, []
        return commit

    def failed(self, commit: Commit) -> None:
        """The drafter did not take in what it was shown."""
        for sequence, start in zip(commit.sequences, commit.starts, strict=True):
            if self.refills:
                self.cache.unset_observed(sequence, start)

    def forget(self, slots: list[int]) -> None:
        """Sequences left these slots; the drafter itself is told by others."""
        self._sort()
        self._alike = []
        for slot in slots:
            self._late.pop(slot, None)

    def own_features(self, features: Tensor | None) -> Tensor | None:
        """This drafter's part [R, F] of what was tapped."""
        if features is None or not self.with_features:
            return None
        if self.columns is None:
            return features
        return features.view(len(features), self.num_taps, -1)[:, self.columns].flatten(1)
