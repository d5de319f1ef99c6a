"""Who runs in the next step, how many rows, and how large a tree.

There is no prefill and no decode phase, only tokens that are known and not computed: a step gives
every running sequence one row and hands the rest of the row budget to prompt chunks, first come
first served. Trees are budgeted only in steps without prompt chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from foretell.config import EngineConfig
from foretell.engine.cache import PageCache
from foretell.sequence import Sequence
from foretell.spec.budget import Controller, FixedBudget
from foretell.spec.seats import ANYTHING, Grant, Least, Seat


@dataclass
class Item:
    """One sequence's part of a step."""

    sequence: Sequence
    num_run: int
    """Known tokens to compute, from num_computed on."""
    budget: int = 0
    """Draft nodes at most, the root not counted."""
    depth: int = 0
    """Draft nodes on one path at most."""
    scheme: int = 0
    """Which of the engine's schemes drafts."""
    least: Least = ANYTHING
    """How likely nodes must be."""
    instead: Grant | None = None
    """What another scheme may draft where that one has nothing."""
    forced: tuple[int, ...] = ()
    """Draft tokens that the answer's grammar forces."""

    @property
    def reaches_end(self) -> bool:
        return self.sequence.num_computed + self.num_run == len(self.sequence.tokens)


class Scheduler:
    """Fair FIFO over a fixed number of slots.

    Args:
        config: limits.
        cache: pages.
        on_leave: called with the slots of sequences that were preempted.
        seat: the largest trees that a sequence may use now.
        budget: who decides about their sizes.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: PageCache,
        on_leave: Callable[[list[int]], None],
        seat: Callable[[Sequence], Seat],
        budget: FixedBudget | Controller | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        self.on_leave = on_leave
        self.seat = seat
        self.budget, self.drafts = budget or FixedBudget(), budget is not None
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of arrival: the last is the youngest."""
        self._free_slots = list(range(config.max_num_seqs))[::-1]
        self._expected: list[Item] | None = None
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes out a finished or aborted sequence and gives its pages and slot back."""
        if sequence.slot >= 0:
            self.running.remove(sequence)
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Item]:
        """Picks runs and node budgets and reserves their cells, preempting the youngest if short.

        Every item's pages cover its run, its tree and one cell more: the place of the token that
        the pass will add.
        """
        expected, self._expected = self._expected, None
        if expected is not None and self._holds(expected):
            if self.drafts:
                self._give_budgets(expected)
            return expected
        rows = self.config.max_num_batched_tokens
        # A row for everybody first, so that no prompt can starve an answer in progress.
        spare = rows - len(self.running)
        preempted = self.num_preemptions
        items: list[Item] = []
        for sequence in list(self.running):
            if sequence.slot < 0:  # preempted for an older one in this very loop
                continue
            run = min(len(sequence.tokens) - sequence.num_computed, 1 + spare)
            if self._reserve(sequence, sequence.num_computed + run + 1):
                spare -= run - 1
                items.append(Item(sequence, run))
        items = [item for item in items if item.sequence.slot >= 0]
        spare = rows - sum(item.num_run for item in items)
        if self.num_preemptions != preempted:
            spare = 0  # pages are short: let the older ones get on
        while spare > 0 and (item := self._admit(spare)):
            items.append(item)
            spare -= item.num_run
        if items and all(item.num_run == 1 and item.reaches_end for item in items):
            self._give_budgets(items)
        return items

    def admit_early(self, items: list[Item]) -> None:
        """Admits what waits while a step is computed, so that `schedule` need not.

        Args:
            items: of that step. Where there is a prompt among them nothing is admitted: its pages
                are to be shared first.
        """
        if all(item.num_run == 1 for item in items):
            spare = self.config.max_num_batched_tokens - len(self.running)
            while spare > 0 and (item := self._admit(spare)):
                spare -= item.num_run

    def expect(self, items: list[Item], goes_on: Callable[[Sequence], bool]) -> list[Item] | None:
        """Takes pages for a step that only decodes, behind one that is computed and does too. It is
        a guess, which `schedule` looks at.

        Args:
            items: of the step that is computed, without trees.
            goes_on: whether a sequence may go on behind one token more.

        Returns:
            What is expected; None where that cannot be said.
        """
        if len(self.running) > len(items) or not all(item.reaches_end for item in items):
            return None
        next_items = [Item(item.sequence, 1) for item in items if goes_on(item.sequence)]
        for item in next_items:
            if not self.cache.reserve(item.sequence, len(item.sequence.tokens) + 2):
                return None
        self._expected = next_items
        return next_items

    def _holds(self, expected: list[Item]) -> bool:
        """Is this what a new look would give?"""
        if len(self.running) != len(expected) or (self.waiting and self._free_slots):
            return False
        return all(
            item.sequence is sequence
            and item.reaches_end
            and self.cache.reserve(sequence, len(sequence.tokens) + 1)
            for item, sequence in zip(expected, self.running, strict=True)
        )

    def _give_budgets(self, items: list[Item]) -> None:
        forced = any(item.sequence.grammar for item in items)
        if not forced and self.budget.silent([item.sequence.slot for item in items]):
            return
        seats = [self.seat(item.sequence) for item in items]
        grants = self.budget.choose(seats, self.config.max_num_batched_tokens - len(items))
        for item, seat, grant in zip(items, seats, grants, strict=True):
            # A draft is never worth a preemption: it takes what pages are left.
            taken = len(item.sequence.tokens) + 1
            nodes = min(max(grant.most, grant.forced), self.cache.num_cells(item.sequence) - taken)
            item.budget = min(nodes, grant.nodes)
            item.depth, item.scheme = min(grant.depth, item.budget), grant.scheme
            item.least = grant.least
            if grant.instead and grant.instead.nodes <= nodes:
                item.instead = grant.instead
            item.forced = seat.forced[: min(nodes, grant.forced)]
            self.cache.reserve(item.sequence, taken + nodes)

    def _admit(self, spare: int) -> Item | None:
        if not self.waiting or not self._free_slots:
            return None
        sequence = self.waiting[0]
        if sequence.params.prompt_logprobs is None:  # those need every row's logits
            sequence.num_computed = self.cache.match(sequence)
        # Pages for all that is known, so that an admitted prompt is not preempted half-way.
        if not self.cache.reserve(sequence, len(sequence.tokens) + 1):
            self.cache.release(sequence)
            sequence.num_computed = 0
            return None
        self.waiting.popleft()
        sequence.slot = self._free_slots.pop()
        if not sequence.stats.num_preemptions:
            sequence.stats.num_cached_tokens = sequence.num_computed
        self.running.append(sequence)
        return Item(sequence, min(len(sequence.tokens) - sequence.num_computed, spare))

    def _reserve(self, sequence: Sequence, num_cells: int) -> bool:
        while not self.cache.reserve(sequence, num_cells):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its tokens are kept and computed again."""
        assert len(self.running) > 1, "a request that cannot run alone was admitted"
        self.running.remove(sequence)
        self._leave(sequence)
        sequence.num_computed = 0
        sequence.stats.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.on_leave([sequence.slot])
        self.cache.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def check(self) -> None:
        """Asserts the scheduler's invariants."""
        slots = sorted([*self._free_slots, *(s.slot for s in self.running)])
        assert slots == list(range(self.config.max_num_seqs))
        assert all(s.slot == -1 and not s.pages for s in self.waiting)
        for sequence in self.running:
            sequence.check()
        self.cache.check(self.running)
