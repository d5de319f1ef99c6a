"""All schemes of an engine behind one door: who may draft how much, who does, what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from foretell.engine.cache import PageCache
from foretell.engine.choose import Choice
from foretell.engine.kept import Kept
from foretell.engine.scheduler import Item
from foretell.engine.watch import Watch
from foretell.sequence import Sequence
from foretell.spec.acceptance import Outcome, claims
from foretell.spec.budget import Controller, FixedBudget
from foretell.spec.costs import Costs
from foretell.spec.drafter import Ask, Commit, Drafter, merge_needs
from foretell.spec.seats import Grant, Limit, Seat, limit
from foretell.spec.tree import TokenTree, cut, depths, roots

Failed = Callable[[str, Exception], None]

LONG_QUIET, TOLD_EVERY = 8, 4
"""Steps without drafts; behind so many, of so many one shows the controller what they cost."""


def _granted(item: Item, m: int, drafted: bool) -> Grant:
    """What a scheme may draft for an item: where it comes second, if the first had nothing."""
    if item.scheme == m:
        return Grant(item.budget, item.depth, m, least=item.least)
    if item.instead and item.instead.scheme == m and not drafted and not item.forced:
        return item.instead
    return Grant()


class Drafting:
    """
    Args:
        drafters: the schemes; with more than one a controller chooses among them.
        adaptive: choose sizes and schemes by what pays; else always the first and all it may have.
        sampled: whether drafts may be sampled: then only one scheme drafts in a step.
        cache: the pages.
        max_model_len: the engine's context limit.
        vocab_size: of the target.
        failed: told where a drafter failed and how.
    """

    def __init__(
        self,
        drafters: SequenceOf[Drafter],
        *,
        adaptive: bool,
        sampled: bool,
        cache: PageCache,
        max_model_len: int,
        vocab_size: int,
        failed: Failed,
    ) -> None:
        self.drafters = list(drafters)
        self.adaptive, self.sampled = adaptive, sampled
        self.max_model_len, self.vocab_size, self.failed = max_model_len, vocab_size, failed
        self.most = [drafter.needs.nodes or drafter.config.k for drafter in drafters]
        """[M] draft tokens at most."""
        self.k = max(self.most)
        taps = merge_needs(drafters).features
        self.watches = [Watch(drafter, cache, lazy=adaptive, taps=taps) for drafter in drafters]
        self._left: deque[int] = deque()
        """Slots that the drafters are still to be told of."""
        self._asked: list[list[Grant]] = []
        """[B] who was asked for drafts in this step, in order; only the last may have had any."""
        self._networks = {m for m, d in enumerate(drafters) if d.needs.kv or d.needs.features}
        self._busy: set[int] = set()
        """Those of them that drafted in the step before."""
        self.learning = True
        self.kept: Kept | None = None
        self._quiet, self._untold = 0, list[float]()
        """Steps since something was drafted; seconds of those that the controller is to be told."""
        self.controller: Controller | None = None
        if adaptive:
            costs = Costs([bool(d.needs.kv or d.needs.features) for d in drafters])
            self.use(costs)

    @property
    def budget(self) -> Controller | FixedBudget:
        """Who decides about sizes."""
        return self.controller or FixedBudget()

    def use(self, costs: Costs) -> Controller:
        """A new controller that knows these costs and nothing else."""
        sizes = [
            Limit(min(most, d.needs.max_nodes), d.needs.depth or most)
            for most, d in zip(self.most, self.drafters, strict=True)
        ]
        self.controller = Controller(sizes, costs, mixed=not self.sampled)
        return self.controller

    # ---- a step, in order

    def seat(self, sequence: Sequence, tokens_left: int, forced: tuple[int, ...] = ()) -> Seat:
        """What may be asked for now; every path of it could still be emitted."""
        length, limits = len(sequence.tokens), list[Limit]()
        for m, (most, drafter) in enumerate(zip(self.most, self.drafters, strict=True)):
            if not sequence.speculate or sequence.scheme not in (None, m):
                limits.append(Limit(0, 0))
                continue
            room, needs = self.max_model_len - length, drafter.needs
            if needs.max_positions is not None:
                room = min(room, needs.max_positions - length)
            k = min(most, self.k if sequence.k is None else sequence.k)
            limits.append(limit(min(k, self.k), needs.max_nodes, room, tokens_left))
        behind = [watch.behind(sequence) for watch in self.watches]
        return Seat(sequence.slot, length, limits, behind, forced)

    def propose(self, items: list[Item]) -> TokenTree:
        """Trees for all items. A drafter's mistake costs its drafts, never the text."""
        plain = roots([item.sequence.tokens[-1] for item in items])
        self._asked = []
        if not any(item.budget or item.instead for item in items):
            return plain
        self._tell_left()
        self._asked = [[] for _ in items]
        lists = list(plain.lists)
        chances: list[list[float]] = [[] for _ in items]
        probs: Tensor | None = None
        start = time.perf_counter()
        for m in range(len(self.drafters)):
            grants = [_granted(item, m, len(lists[b][0]) > 1) for b, item in enumerate(items)]
            asked = [b for b, grant in enumerate(grants) if grant.nodes]
            if not asked:
                continue
            ask = Ask(
                [items[b].sequence for b in asked],
                [grants[b].nodes for b in asked],
                sample=self.sampled,
                depths=[grants[b].depth for b in asked],
                least=[grants[b].least for b in asked],
            )
            start += self._catch_up(m, ask.sequences)
            if (tree := self._propose(m, ask)) is None:
                continue
            if tree.probs is not None:  # then no other scheme drafts
                probs = tree.probs.new_zeros(len(items), *tree.probs.shape[1:])
                probs[asked] = tree.probs
            for place, b in enumerate(asked):
                self._asked[b].append(grants[b])
                lists[b] = tree.lists[place]
                chances[b] = tree.chances[place] if tree.chances else []
            start = self._took(m, ask, tree, start)
        if all(len(tokens) == 1 for tokens, _ in lists):
            return plain
        out = TokenTree(lists, chances=chances)
        return out if probs is None else replace(out, probs=probs[:, : out.width])

    def first(self, m: int, sequences: list[Sequence], budgets: list[int]) -> Tensor:
        """One token for each sequence, on the device: see `Drafter.first`."""
        self._tell_left()
        self._asked = [[Grant(n, n, m)] if n else [] for n in budgets]
        self._catch_up(m, sequences)
        try:
            return self.drafters[m].first(sequences)
        except Exception as error:
            self.failed("propose", error)
            return torch.full((len(sequences),), -1, device=self.drafters[m].runtime.device)

    def follow(
        self,
        m: int,
        sequences: list[Sequence],
        tokens: Tensor,
        features: Tensor,
        outputs: Tensor,
    ) -> None:
        """See `Drafter.follow`."""
        try:
            own = self.watches[m].own_features(features)
            assert own is not None
            self.drafters[m].follow(sequences, tokens, own, outputs)
        except Exception as error:
            self._out_of_step(sequences, error)

    def _propose(self, m: int, ask: Ask) -> TokenTree | None:
        """One scheme's trees, None where it failed."""
        try:
            tree = self.drafters[m].propose(ask)
            assert [tokens[0] for tokens, _ in tree.lists] == ask.roots, "node 0 is the root"
            if tree.width > 1:
                tree.check(self.vocab_size)
                within = [n <= most for n, most in zip(tree.num_drafted, ask.budgets, strict=True)]
                assert all(within), "more nodes than the budget"
                tree = cut(tree, ask.depths)
        except Exception as error:
            self.failed("propose", error)
            return None
        return tree

    def _took(self, m: int, ask: Ask, tree: TokenTree, start: float) -> float:
        """Learns what a draft took, with all that was done for it; the time now."""
        now = time.perf_counter()
        if self.controller and self.learning:
            levels = max((max(depths(parents)) for _, parents in tree.lists), default=0)
            nodes, keys = sum(tree.num_drafted), sum(len(s.tokens) for s in ask.sequences)
            self.controller.costs.learn_propose(m, max(1, levels), nodes, keys, now - start)
        return now

    def learn(
        self,
        items: list[Item],
        tree: TokenTree,
        choice: Choice,
        rows: int,
        seconds: float,
        drafting: float,
    ) -> None:
        """Takes in how a step went.

        Args:
            tree: what was proposed for them.
            choice: what became of it.
            rows: of the target's pass.
            seconds: that the step took but for its drafts.
            drafting: that these took.
        """
        controller, asked, self._asked = self.controller, self._asked, []
        if controller is None or not self.learning or not all(item.num_run == 1 for item in items):
            return
        self._quiet = 0 if asked or self._busy or tree.width > 1 else self._quiet + 1
        self._untold.append(seconds + drafting)
        if self._quiet > LONG_QUIET and len(self._untold) < TOLD_EVERY:
            return
        outcomes: list[list[Outcome]] = [[] for _ in self.drafters]
        keys = more = 0
        for b, (item, own, outcome) in enumerate(
            zip(items, choice.trees, choice.outcomes, strict=True)
        ):
            assert own is not None
            length, nodes = len(item.sequence.tokens), len(own[0]) - 1
            keys += length
            more += length * nodes
            if outcome is None or not asked or not asked[b]:
                continue
            *in_vain, last = asked[b]
            slot, right = item.sequence.slot, len(outcome.path)
            for grant in in_vain:
                outcomes[grant.scheme].append(Outcome(slot, 0, grant.depth, 0, grant.nodes))
            outcomes[last.scheme].append(Outcome(slot, nodes, last.depth, right, last.nodes))
            if tree.chances and not item.forced:
                said = claims(own[1], tree.chances[b], outcome.path)
                controller.schemes[last.scheme].learn_claims(said)
        busy = {each[-1].scheme for each in asked if each} & self._networks
        if before := busy | self._busy:
            controller.costs.learn_beside(min(before), rows, keys, more, seconds)
        else:
            controller.costs.learn_target(rows, keys, more, seconds)
        self._busy = busy
        for m, each in enumerate(outcomes):
            if each:
                controller.learn(m, each)
        controller.passed(sum(self._untold), len(self._untold))
        self._untold = []

    def observe(
        self, commit: Commit, soon: SequenceOf[Sequence] = (), followed: int | None = None
    ) -> Callable[[], None] | None:
        """Takes in what became final.

        Args:
            soon: sequences that will probably get drafts in the next step.
            followed: a scheme that has run it already (`Drafter.follow`).

        Returns:
            Device work that is to be done before anything else is asked of a drafter.
        """
        shows: list[tuple[int, Commit]] = []
        for m, watch in enumerate(self.watches):
            try:
                if m == followed:
                    watch.skip(commit)
                    self.drafters[m].followed(commit)
                elif (part := watch.note(commit, soon)) is not None:
                    shows.append((m, part))
            except Exception as error:
                self._out_of_step(commit.sequences, error)
        return partial(self._show, shows) if shows else None

    def shareable(self, sequence: Sequence) -> int:
        """Position up to which a sequence's pages may enter the prefix cache."""
        return min(watch.shareable(sequence) for watch in self.watches)

    def forget(self, slots: list[int], *, busy: bool = False) -> None:
        """Sequences left these slots.

        Args:
            busy: a drafter is at work: it is told later.
        """
        for watch in self.watches:
            watch.forget(slots)
        if self.controller:
            self.controller.forget(slots)
        self._left.extend(slots)
        if not busy:
            self._tell_left()

    def _tell_left(self) -> None:
        left = [self._left.popleft() for _ in range(len(self._left))]
        for drafter in self.drafters if left else ():
            drafter.forget(left)

    def _catch_up(self, m: int, sequences: list[Sequence]) -> float:
        """Shows a scheme what it lacks; the seconds that took."""
        start = time.perf_counter()
        if (commit := self.watches[m].missing(sequences)) is not None:
            self._show([(m, commit)])
        return time.perf_counter() - start

    def _show(self, shows: list[tuple[int, Commit]]) -> None:
        self._tell_left()
        for m, commit in shows:
            start = time.perf_counter()
            try:
                self.drafters[m].observe(commit)
            except Exception as error:
                self.watches[m].failed(commit)
                self._out_of_step(commit.sequences, error)
                continue
            took = time.perf_counter() - start
            if self.controller and self.learning:
                tokens = sum(len(tokens) - 1 for tokens in commit.tokens)
                self.controller.costs.learn_observe(m, tokens, took)

    def _out_of_step(self, sequences: SequenceOf[Sequence], error: Exception) -> None:
        self.failed("observe", error)
        for sequence in sequences:  # out of step for good: go on without drafts
            sequence.speculate = False
