"""One step's decision: the budgets that promise most tokens a second.

Sizes are raised one rung at a time, always where a row of the target's pass is expected to give
most, and the best prefix of that order wins: TurboSpec (2406.14066) with the order of DSpark
(2607.05147).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from foretell.spec.acceptance import Acceptance
from foretell.spec.costs import Costs
from foretell.spec.seats import Grant, Least, Seat

PAID_AT_ONCE = 4
"""Tokens that a drafter is behind and catches up with in an ordinary step; what is more is an
investment that pays over `PAID_BACK` steps."""
PAID_BACK = 64
WORTHWHILE = 1.02
"""How many times the speed of plain decoding a network's drafts must promise: what they promise is
not known better."""
HOPE_BEHIND = 0.5
"""How likely a node's best child is taken to be before the draft was run on the node."""


class _Rung(NamedTuple):
    """One more step up a sequence's ladder."""

    worth: float
    """Tokens for each row, never more than the rung below."""
    tokens: float
    rows: float
    """Both times the chance that there is a draft."""
    nodes: int
    depth: int
    """Of the tree with this rung."""


class Choice:
    """One step's decision.

    Args:
        schemes: [M]
        seats: [B]
        rows: most draft tokens in all.
    """

    def __init__(
        self,
        schemes: SequenceOf[Acceptance],
        costs: Costs,
        seats: SequenceOf[Seat],
        rows: int,
    ) -> None:
        self.costs, self.seats, self.room, self.schemes = costs, seats, rows, schemes
        self.attention = costs.keys((sum(seat.keys for seat in seats), 0))
        self.plain = costs.base(len(seats)) + self.attention
        # Whatever is chosen, a second is worth at least as much as in plain decoding.
        self.slope = costs.slope(len(seats))
        self.reach = costs.reach(sum(seat.keys for seat in seats))
        least = len(seats) / self.plain * self.slope
        self.rungs = [
            [_rungs(scheme, m, seat, least) for seat in seats] for m, scheme in enumerate(schemes)
        ]

    def best(self, mixed: bool) -> tuple[float, list[Grant], list[Least]]:
        """Expected tokens a second, the budgets [B], and the chances [M] that each scheme's nodes
        must have."""
        batch, schemes = len(self.seats), range(len(self.rungs))
        plain, counts, assigned = batch / self.plain, [0] * batch, [0] * batch
        rate = plain
        dear = [WORTHWHILE * plain if network else plain for network in self.costs.with_model]
        options = [[m] * batch for m in schemes]
        alone = [self.fill(option) for option in options]
        for option, found in zip(options, alone, strict=True):
            if found[0] > max(rate, dear[option[0]]):
                (rate, counts), assigned = found, option
        if mixed and len(options) > 1 < batch:
            option = self.each_best(rate)
            if option not in options and (found := self.fill(option))[0] > max(rate, *dear):
                (rate, counts), assigned = found, option
        chosen = enumerate(zip(assigned, counts, strict=True))
        grants = [self._grant(m, b, count) for b, (m, count) in chosen]
        least = self.least(rate, grants)
        grants = [grant._replace(least=least[grant.scheme]) for grant in grants]
        if mixed and any(counts):
            paying = [m for m in schemes if alone[m][0] > dear[m]]
            in_turn = [
                self._in_turn(b, grant, [self._grant(m, b, alone[m][1][b]) for m in paying], least)
                for b, grant in enumerate(grants)
            ]
            if sum(grant.most for grant in in_turn) <= self.room:
                grants = in_turn
        return rate if any(counts) else plain, grants, least

    def _grant(self, m: int, b: int, count: int) -> Grant:
        """So many rungs of a scheme for one sequence."""
        rungs = self.rungs[m][b][:count]
        nodes = sum(rung.nodes for rung in rungs)
        depth = min(rungs[-1].depth, self.seats[b].limits[m].depth) if rungs else 0
        return Grant(nodes, depth, m)

    def _in_turn(
        self, b: int, grant: Grant, others: list[Grant], least: SequenceOf[Least]
    ) -> Grant:
        """Two schemes that both pay are asked in the order in which they were given: the first
        drafts where it is surer of its first token than the second is on average."""
        others = [other for other in others if other.nodes and other.scheme != grant.scheme]
        if not grant.nodes or not others:
            return grant
        other = others[0]._replace(least=least[others[0].scheme])
        first, second = sorted((grant, other), key=lambda each: each.scheme)
        (tokens, *_), found = self.schemes[second.scheme].expected(self.seats[b].slot, 1.0)
        surer = self.schemes[first.scheme].least(found * tokens)
        return first._replace(least=first.least._replace(first=surer), instead=second)

    def least(self, rate: float, grants: SequenceOf[Grant]) -> list[Least]:
        """[M] the chances that nodes must have to be worth their time, by what each scheme says."""
        costs, batch, out = self.costs, len(self.seats), list[Least]()
        for m, scheme in enumerate(self.schemes):
            mine = [grant for grant in grants if grant.nodes and grant.scheme == m]
            _, level, node = costs.propose[m].weights
            # What is off is judged as if all used it.
            more, sharing = max(1, sum(grant.nodes for grant in mine)), len(mine)
            if not mine:
                more = sharing = batch
            row = rate * ((costs.base(batch + more) - costs.base(batch)) / more + node)
            run = rate * level * self.reach / sharing
            parent = row + run / HOPE_BEHIND
            out.append(Least(scheme.least(row), scheme.least(parent)))
        return out

    def fill(self, assigned: list[int]) -> tuple[float, list[int]]:
        """The best budgets if each sequence has the scheme [B] that it is given here.

        Returns:
            Expected tokens a second, and how many rungs each sequence gets [B].
        """
        costs, seats, batch = self.costs, self.seats, len(self.seats)
        order = [
            (-rung.worth, b, r)
            for b, m in enumerate(assigned)
            for r, rung in enumerate(self.rungs[m][b])
        ]
        order.sort()
        propose = [terms.weights for terms in costs.propose]
        observe = [terms.weights for terms in costs.observe]
        per_key = costs.keys.weights[1]
        levels = [0] * len(propose)
        tokens, rows, drafting, room = float(batch), float(batch), self.attention, self.room
        best, length = 0.0, 0
        for place, (worth, b, r) in enumerate(order, 1):
            if -worth < best * self.slope:  # nor is anything behind it
                break
            m, seat = assigned[b], seats[b]
            rung = self.rungs[m][b][r]
            room -= rung.nodes
            if room < 0:
                break
            call, level, node = propose[m]
            drafting += (node + per_key * seat.keys) * rung.rows
            if rung.depth > levels[m]:  # all go level by level together
                if not levels[m]:
                    drafting += call + observe[m][0] + costs.beside[m]
                more = rung.depth - max(levels[m], 1)
                drafting += level * self.reach * more * rung.rows / rung.nodes
                levels[m] = rung.depth
            if not r:
                drafting += observe[m][1] * _late(seat.behind[m])
            tokens += rung.tokens
            rows += rung.rows
            rate = tokens / (costs.base(rows) + drafting)
            if rate > best:
                best, length = rate, place
        counts = [0] * batch
        for _, b, _ in order[:length]:
            counts[b] += 1
        return best, counts

    def each_best(self, rate: float) -> list[int]:
        """[B] the scheme that is worth most to each sequence where a second is worth ``rate``."""
        costs, batch = self.costs, len(self.seats)
        row = costs.slope(batch)
        out: list[int] = []
        for b, seat in enumerate(self.seats):
            best, chosen = 0.0, 0
            for m, of_all in enumerate(self.rungs):
                call, level, node = costs.propose[m].weights
                once, late = costs.observe[m].weights
                once += costs.beside[m]
                net = -rate * ((call + once) / batch + late * _late(seat.behind[m]))
                for rung in of_all[b]:
                    net += rung.tokens - rate * ((row + node) * rung.rows)
                    deep = rate * level * self.reach * (rung.depth - 1) / batch
                    if net - deep > best:
                        best, chosen = net - deep, m
            out.append(chosen)
        return out


def _rungs(scheme: Acceptance, m: int, seat: Seat, least: float) -> list[_Rung]:
    limit, ladder = seat.limits[m], scheme.ladder
    if not limit.nodes:
        return []
    expected, found = scheme.expected(seat.slot, least)
    out: list[_Rung] = []
    tokens, nodes, worth = 0.0, 0, 1e9
    for r, total in enumerate(expected):
        size, depth = ladder.nodes[r], ladder.depth[r]
        # A chain is never longer than what may still be emitted; a tree is cut there.
        if size > limit.nodes or (ladder.is_chain and depth > limit.depth):
            break
        more = size - nodes
        filled = max(scheme.filled[r], 0.05)
        worth = min(worth, (total - tokens) / (more * filled))
        if worth <= least:
            break
        rows = found * more * filled
        out.append(_Rung(worth, found * (total - tokens), rows, more, depth))
        tokens, nodes = total, size
    return out


def _late(behind: int) -> float:
    """Tokens to catch up with, as far as this step is to pay for them."""
    return behind if behind <= PAID_AT_ONCE else PAID_AT_ONCE + (behind - PAID_AT_ONCE) / PAID_BACK
