"""All schemes of an engine behind one door: who may draft how much, who does, what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from foretell.engine.cache import PageCache
from foretell.engine.scheduler import Item
from foretell.engine.watch import Watch
from foretell.sequence import Sequence
from foretell.spec.acceptance import Outcome
from foretell.spec.budget import Controller, FixedBudget
from foretell.spec.costs import Costs
from foretell.spec.drafter import Ask, Commit, Drafter, KVGroup, Needs
from foretell.spec.seats import Grant, Limit, Seat, limit
from foretell.spec.tree import TokenTree, cut, depths, from_lists, roots
from foretell.spec.verify import Outcome as Verified

Failed = Callable[[str, Exception], None]


def _granted(item: Item, m: int, drafted: bool) -> Grant:
    """What a scheme may draft for an item: where it comes second, if the first had nothing."""
    if item.scheme == m:
        return Grant(item.budget, item.depth, m, least=item.least)
    if item.instead and item.instead.scheme == m and not drafted and not item.forced:
        return item.instead
    return Grant()


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


def merge_needs(drafters: SequenceOf[Drafter]) -> Needs:
    """What several schemes together want from the engine.

    Raises:
        ValueError: two of them keep KV of their own.
    """
    with_kv = [drafter for drafter in drafters if drafter.needs.kv]
    if len(with_kv) > 1:
        names = " and ".join(drafter.config.method for drafter in with_kv)
        raise ValueError(f"{names} both keep KV of their own: load one of them")
    kv: KVGroup | None = with_kv[0].needs.kv if with_kv else None
    layers = {layer: None for drafter in drafters for layer in drafter.needs.features}
    return Needs(
        features=tuple(layers),
        kv=kv,
        lookahead=max(drafter.needs.lookahead for drafter in drafters),
        prediction=any(drafter.needs.prediction for drafter in drafters),
    )


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
        assert drafters
        self.drafters = list(drafters)
        self.adaptive, self.sampled = adaptive, sampled
        self.max_model_len, self.vocab_size, self.failed = max_model_len, vocab_size, failed
        self.most = [drafter.needs.nodes or drafter.config.k for drafter in drafters]
        """[M] draft tokens at most."""
        self.k = max(self.most)
        taps = merge_needs(drafters).features
        self.watches = [Watch(drafter, cache, lazy=adaptive, taps=taps) for drafter in drafters]
        self.seconds = 0.0
        """Spent on drafts and on showing what became final, in the step that is under way."""
        self._asked: list[list[Grant]] = []
        """[B] who was asked for drafts in this step, in order; only the last may have had any."""
        self.learning = True
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
        for most, drafter in zip(self.most, self.drafters, strict=True):
            if not sequence.speculate:
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
        self.seconds = 0.0
        self._asked = [[] for _ in items]
        out, lists = plain, list(plain.lists())
        chances: list[list[float]] = [[] for _ in items]
        for m in range(len(self.drafters)):
            grants = [_granted(item, m, len(lists[b][0]) > 1) for b, item in enumerate(items)]
            if not any(grant.nodes for grant in grants):
                continue
            first = out is plain
            if (tree := self._propose(m, items, grants)) is None:
                continue
            out = tree if first else None
            for b, grant in enumerate(grants):
                if grant.nodes:
                    self._asked[b].append(grant)
                    lists[b] = tree.lists()[b]
                    chances[b] = tree.chances[b] if tree.chances else []
        if out is not None:
            return out
        out = from_lists([tokens for tokens, _ in lists], [parents for _, parents in lists])
        return replace(out, chances=chances)

    def _propose(self, m: int, items: list[Item], grants: list[Grant]) -> TokenTree | None:
        """One scheme's trees for all items, of only a root where it has no nodes."""
        asked = [item for item, grant in zip(items, grants, strict=True) if grant.nodes]
        self._catch_up(m, [item.sequence for item in asked])
        ask = Ask(
            [item.sequence for item in items],
            [grant.nodes for grant in grants],
            sample=self.sampled,
            depths=[grant.depth for grant in grants],
            least=[grant.least for grant in grants],
        )
        start = time.perf_counter()
        try:
            tree = self.drafters[m].propose(ask)
            tree.check(self.vocab_size)
            assert [tokens[0] for tokens, _ in tree.lists()] == ask.roots, "node 0 is the root"
            within = [n <= most for n, most in zip(tree.num_drafted, ask.budgets, strict=True)]
            assert all(within), "more nodes than the budget"
            tree = cut(tree, ask.depths)
        except Exception as error:
            self.failed("propose", error)
            return None
        took = time.perf_counter() - start
        self.seconds += took
        if self.controller and self.learning:
            nodes = sum(tree.num_drafted)
            levels = max((max(depths(parents)) for _, parents in tree.lists()), default=0)
            keys = sum(len(item.sequence.tokens) for item in asked)
            self.controller.costs.learn_propose(m, max(1, levels), nodes, keys, took)
        return tree

    def learn(
        self,
        items: list[Item],
        tree: TokenTree,
        verified: list[Verified | None],
        rows: int,
        seconds: float,
    ) -> None:
        """Takes in how a step went.

        Args:
            tree: one tree for each item.
            rows: of the target's pass.
            seconds: that the step took.
        """
        controller, asked, self._asked = self.controller, self._asked, []
        if controller is None or not self.learning or not all(item.num_run == 1 for item in items):
            return
        outcomes: list[list[Outcome]] = [[] for _ in self.drafters]
        keys = more = 0
        for b, (item, (_, parents), outcome) in enumerate(
            zip(items, tree.lists(), verified, strict=True)
        ):
            length, nodes = len(item.sequence.tokens), len(parents) - 1
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
                said = claims(parents, tree.chances[b], outcome.path)
                controller.schemes[last.scheme].learn_claims(said)
        controller.costs.learn_target(rows, keys, more, seconds - self.seconds)
        for m, each in enumerate(outcomes):
            if each:
                controller.learn(m, each)
        controller.passed(seconds)

    def observe(self, commit: Commit) -> None:
        """Takes in what became final."""
        for m, watch in enumerate(self.watches):
            try:
                urgent = watch.note(commit)
            except Exception as error:
                self._out_of_step(commit.sequences, error)
                continue
            if urgent:
                self._catch_up(m, urgent)

    def shareable(self, sequence: Sequence) -> int:
        """Position up to which a sequence's pages may enter the prefix cache."""
        return min(watch.shareable(sequence) for watch in self.watches)

    def forget(self, slots: list[int]) -> None:
        """Sequences left these slots."""
        for watch in self.watches:
            watch.forget(slots)
        if self.controller:
            self.controller.forget(slots)

    def _catch_up(self, m: int, sequences: list[Sequence]) -> None:
        start = time.perf_counter()
        try:
            tokens = self.watches[m].catch_up(sequences)
        except Exception as error:
            self._out_of_step(sequences, error)
            return
        took = time.perf_counter() - start
        self.seconds += took
        if tokens and self.controller and self.learning:
            self.controller.costs.learn_observe(m, tokens, took)

    def _out_of_step(self, sequences: SequenceOf[Sequence], error: Exception) -> None:
        self.failed("observe", error)
        for sequence in sequences:  # out of step for good: go on without drafts
            sequence.speculate = False
