"""Host work while the device is busy: rows while a draft runs, the next step while a pass does.

Rows, cells and positions depend on sizes alone; tokens are filled in last. What is expected is a
guess that is compared with what comes, so a wrong one costs its own time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.engine.rows import Span, lay_out, wants_prompt
from foretell.engine.scheduler import Item, Scheduler
from foretell.runtime.runner import Runtime
from foretell.sequence import Sequence
from foretell.spec.drafter import Rows, run_rows
from foretell.spec.tree import TokenTree, chains


@dataclass(frozen=True)
class _Place:
    """One item, as it was expected."""

    sequence: Sequence
    start: int
    num_run: int
    parents: list[int]
    pages: list[int]
    """That its rows write into, and those before."""

    def fits(self, item: Item, parents: list[int]) -> bool:
        sequence = item.sequence
        return (
            sequence is self.sequence
            and (sequence.num_computed, item.num_run) == (self.start, self.num_run)
            and parents == self.parents
            and sequence.pages[: len(self.pages)] == self.pages
        )


class Ahead:
    """What was laid out last, and for whom.

    Args:
        runtime: where rows are packed; where its stream does not overlap, nothing is done here.
    """

    def __init__(self, runtime: Runtime, scheduler: Scheduler) -> None:
        self.runtime, self.scheduler = runtime, scheduler
        self._places: list[_Place] = []
        self._made: tuple[Rows, list[Span]] | None = None
        self.taken = 0
        """How often a guess was right."""

    def while_drafting(self, items: list[Item]) -> None:
        """Lays out rows for chains as long as the budgets."""
        if not self.runtime.stream.overlaps or not any(item.budget for item in items):
            return
        chain = chains([0] * len(items), [[0] * item.budget for item in items])
        self._made = rows, _ = lay_out(items, chain, wants_prompt)
        self.runtime.prepare(rows)
        self._places = [
            self._place(item, item.sequence.num_computed, parents)
            for item, (_, parents) in zip(items, chain.lists, strict=True)
        ]

    def while_computing(self, items: list[Item], goes_on: Callable[[Sequence], bool]) -> None:
        """Works on the step behind this one: admissions and, behind a step without drafts, its
        items, pages and rows, as if it had none either. The runtime knows the pages of those: each
        step has a cell more than it fills.

        Args:
            goes_on: whether a sequence may go on behind one token more.
        """
        if not self.runtime.stream.overlaps:
            return
        self.scheduler.admit_early(items)
        if any(item.budget or item.sequence.grammar for item in items):
            return
        if following := self.scheduler.expect(items, goes_on):
            slots = [item.sequence.slot for item in following]
            lengths = [len(item.sequence.tokens) for item in following]
            rows = run_rows(slots, lengths, [[0]] * len(following))
            self.runtime.prepare(rows)
            self._made = rows, [Span(i, i, 1, []) for i in range(len(following))]
            self._places = [
                self._place(item, length, [-1])
                for item, length in zip(following, lengths, strict=True)
            ]

    def _place(self, item: Item, start: int, parents: list[int]) -> _Place:
        cells = start + item.num_run + len(parents) - 1
        pages = item.sequence.pages[: -(-cells // self.runtime.page_size)]
        return _Place(item.sequence, start, item.num_run, parents, pages)

    def take(self, items: list[Item], tree: TokenTree) -> tuple[Rows, list[Span]] | None:
        """What was laid out, with these tokens, if it was for these items and trees."""
        made, self._made = self._made, None
        lists = tree.lists
        if made is None or len(items) != len(self._places):
            return None
        for place, item, (_, parents) in zip(self._places, items, lists, strict=True):
            if not place.fits(item, parents):
                return None
        tokens: list[int] = []
        for item, (nodes, _) in zip(items, lists, strict=True):
            start = item.sequence.num_computed
            tokens.extend(item.sequence.tokens[start : start + item.num_run])
            tokens.extend(nodes[1:])
        made[0].tokens[:] = tokens
        self.taken += 1
        return made
