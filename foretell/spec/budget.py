"""How many draft tokens each sequence may have in a step, and of which scheme.

`Controller` maximises expected tokens for each second: tokens from what was accepted lately
(`foretell.spec.acceptance`), seconds from what steps took lately (`foretell.spec.costs`). Sizes are
raised one rung at a time, always where a row of the target's pass is expected to give most, and the
best prefix of that order wins: TurboSpec (2406.14066) with the order of DSpark (2607.05147).

Nothing here depends on a draft that is being decided about, only on steps that are over: sampled
drafts stay exact (non-anticipation, schemes.md 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from foretell.spec.acceptance import Acceptance, Outcome
from foretell.spec.costs import Costs

KEPT = 8
"""Most steps that a choice serves, if it was the same as before and the same sequences run."""
PROBES = 0.01
"""Share of the time that may go into drafts of schemes that do not pay, to see whether they would
now; two thirds for each in vain, down to a third."""
FREE_PROBES, MOST_FREE_PROBES = 4, 16
"""Tries that a scheme has before it must pay, and those that it can win by being right."""
PAID_AT_ONCE = 4
"""Tokens that a drafter is behind and catches up with in an ordinary step; what is more is an
investment that pays over `PAID_BACK` steps."""
PAID_BACK = 32


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


class Grant(NamedTuple):
    """What a sequence may have."""

    nodes: int = 0
    depth: int = 0
    scheme: int = 0


@dataclass(frozen=True)
class FixedBudget:
    """Everybody gets all of its limit while the rows of a pass suffice, else a fair share."""

    def choose(self, seats: SequenceOf[Seat], rows: int) -> list[Grant]:
        """As `Controller.choose`, always the first scheme."""
        shares = self.share([seat.limits[0].nodes for seat in seats], rows, False)
        return [
            Grant(nodes, min(nodes, seat.limits[0].depth))
            for seat, nodes in zip(seats, shares, strict=True)
        ]

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


class Controller:
    """Chooses budgets and schemes step by step.

    Args:
        sizes: [M] the largest tree of each scheme.
        costs: of the same schemes.
        mixed: whether different schemes may draft in one step.
    """

    def __init__(self, sizes: SequenceOf[Limit], costs: Costs, *, mixed: bool = True) -> None:
        self.costs = costs
        self.mixed = mixed
        self.schemes = [Acceptance(size.nodes, size.depth) for size in sizes]
        self.probes = [Probes() for _ in sizes]
        self.rate = 0.0
        """Tokens a second that the last choice promises."""
        self._kept: tuple[list[int], list[Grant]] = ([], [])
        self._age, self._patience, self._turn = 0, 1, 0

    def forget(self, slots: SequenceOf[int]) -> None:
        """Sequences left these slots."""
        for scheme in self.schemes:
            scheme.forget(slots)

    # ---- choosing

    def choose(self, seats: SequenceOf[Seat], rows: int) -> list[Grant]:
        """
        Args:
            seats: [B] sequences that could draft in this step.
            rows: most draft tokens in all.

        Returns:
            [B], each within its limit, their nodes at most ``rows`` in all.
        """
        slots, before = [seat.slot for seat in seats], self._kept
        if slots == before[0] and self._age < self._patience:
            grants = [_within(grant, seat) for grant, seat in zip(before[1], seats, strict=True)]
            if sum(grant.nodes for grant in grants) <= rows:
                self._age += 1
                return self._probe(seats, grants, rows)
        self.rate, grants = Choice(self.schemes, self.costs, seats, rows).best(self.mixed)
        settled = slots == before[0] and _alike(grants, before[1])
        self._patience = min(2 * self._patience, KEPT) if settled else 1 + len(seats) // 8
        self._kept, self._age = (slots, grants), 1
        return self._probe(seats, list(grants), rows)

    def _probe(self, seats: SequenceOf[Seat], grants: list[Grant], rows: int) -> list[Grant]:
        """Lets a scheme that is off draft for one sequence, if that can be afforded."""
        self._turn += 1
        m = self._turn % len(self.schemes)
        probes = self.probes[m]
        if any(grant.nodes and grant.scheme == m for grant in grants):
            probes.in_vain = 0
            return self._stretch(m, seats, grants, rows)
        if not probes.free and probes.credit <= probes.price:
            return grants
        able = [b for b, seat in enumerate(seats) if seat.limits[m].nodes]
        if not able:
            return grants
        b = min(able, key=lambda b: (seats[b].behind[m] // 8, (seats[b].slot - self._turn) % 64))
        ladder, seat = self.schemes[m].ladder, seats[b]
        rung = min(2, len(ladder.nodes) - 1)
        probe = _within(Grant(ladder.nodes[rung], ladder.depth[rung], m), seat)
        others = [grant if i != b and self.mixed else Grant() for i, grant in enumerate(grants)]
        used = sum(grant.nodes for grant in others)
        lost = sum(grant.nodes for grant in grants) - used
        price = self._price(probe, seat, used + len(seats)) + lost / max(self.rate, 1e-9)
        if probe.nodes <= rows - used and probes.pay(price):
            others[b] = probe
            return others
        return grants

    def _stretch(
        self, m: int, seats: SequenceOf[Seat], grants: list[Grant], rows: int
    ) -> list[Grant]:
        """Lets one sequence draft further than pays by what is known: it may be known no more."""
        probes, ladder = self.probes[m], self.schemes[m].ladder
        if probes.credit <= probes.price or self._turn % 8 >= len(self.schemes):
            return grants
        b = (self._turn // 8) % len(seats)
        if not (grants[b].nodes and grants[b].scheme == m and grants[b].nodes in ladder.nodes):
            return grants
        rung = min(ladder.nodes.index(grants[b].nodes) + 2, len(ladder.nodes) - 1)
        longer = _within(Grant(ladder.nodes[rung], ladder.depth[rung], m), seats[b])
        more = longer.nodes - grants[b].nodes
        used = sum(grant.nodes for grant in grants)
        if more > 0 and used + more <= rows:
            seat = Seat(seats[b].slot, seats[b].keys, seats[b].limits, [0] * len(self.schemes))
            price = self._price(longer, seat, used + len(seats)) - self._price(
                grants[b], seat, used + len(seats)
            )
            if probes.afford(price):
                grants[b] = longer
        return grants

    def _price(self, grant: Grant, seat: Seat, rows: int) -> float:
        """Seconds that one more draft takes."""
        costs, m = self.costs, grant.scheme
        counts = (1, grant.depth * costs.reach(seat.keys), grant.nodes)
        drafting = costs.propose[m](counts) + costs.observe[m]((1, seat.behind[m]))
        likely = grant.nodes * self.schemes[m].expected(seat.slot, 1.0)[1]
        return drafting + costs.base(rows + likely) - costs.base(rows)

    # ---- learning

    def learn(self, scheme: int, outcomes: SequenceOf[Outcome]) -> None:
        """What became of a step's drafts, for each sequence that ``scheme`` was asked about."""
        self.schemes[scheme].learn(outcomes)
        probes = self.probes[scheme]
        if probes.in_vain and self.rate:
            accepted = sum(outcome.accepted for outcome in outcomes)
            probes.found(accepted, accepted / self.rate)

    def passed(self, seconds: float) -> None:
        """A step is over."""
        for scheme, probes in zip(self.schemes, self.probes, strict=True):
            scheme.passed()
            probes.earn(seconds / len(self.schemes))


class Probes:
    """What trying a scheme that is off may cost."""

    def __init__(self) -> None:
        self.credit = 0.0
        """Seconds."""
        self.free = FREE_PROBES
        self.trials = MOST_FREE_PROBES
        self.in_vain = 0
        self.price = 0.0
        """What the last one that could not be paid would have cost, or nearly."""

    def earn(self, seconds: float) -> None:
        """A step took so long."""
        self.credit = min(
            self.credit + PROBES * max(1 / 3, (2 / 3) ** self.in_vain) * seconds, 8 * seconds
        )

    def found(self, accepted: int, seconds: float) -> None:
        """What a probe found pays for more of them; a new scheme that promises something is looked
        at until enough is known."""
        self.credit += seconds
        if accepted and self.trials:
            self.trials -= 1
            self.free += 1

    def pay(self, price: float) -> bool:
        """Takes the price of a probe of a scheme that is off, if there is enough."""
        if self.free:
            self.free -= 1
        elif not self.afford(price):
            return False
        self.in_vain += 1
        return True

    def afford(self, price: float) -> bool:
        """Takes a price out of the credit, if there is enough."""
        enough = self.credit >= price
        self.price = 0.0 if enough else 0.8 * price
        if enough:
            self.credit -= price
        return enough


def _alike(one: list[Grant], other: list[Grant]) -> bool:
    """Do budgets differ by less than a fifth of the rows of the pass?"""
    change = sum(abs(a.nodes - b.nodes) for a, b in zip(one, other, strict=True))
    return 5 * change < len(one) + sum(grant.nodes for grant in one)


def _within(grant: Grant, seat: Seat) -> Grant:
    limit = seat.limits[grant.scheme]
    if grant.nodes <= limit.nodes and grant.depth <= limit.depth:
        return grant
    depth = min(grant.depth, limit.depth)
    chain = grant.nodes == grant.depth
    nodes = min(grant.nodes, limit.nodes, depth if chain else grant.nodes) if depth else 0
    return Grant(nodes, min(depth, nodes), grant.scheme)


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
        self.costs, self.seats, self.room = costs, seats, rows
        self.attention = costs.keys((sum(seat.keys for seat in seats), 0))
        self.plain = costs.base(len(seats)) + self.attention
        # Whatever is chosen, a second is worth at least as much as in plain decoding.
        self.slope = costs.slope(len(seats))
        self.reach = costs.reach(sum(seat.keys for seat in seats))
        least = len(seats) / self.plain * self.slope
        self.rungs = [
            [_rungs(scheme, m, seat, least) for seat in seats] for m, scheme in enumerate(schemes)
        ]

    def best(self, mixed: bool) -> tuple[float, list[Grant]]:
        """Expected tokens a second, and the budgets [B]."""
        batch, schemes = len(self.seats), range(len(self.rungs))
        rate, counts, assigned = batch / self.plain, [0] * batch, [0] * batch
        options = [[m] * batch for m in schemes]
        for option in options:
            if (found := self.fill(option))[0] > rate:
                (rate, counts), assigned = found, option
        if mixed and len(options) > 1 < batch:
            option = self.each_best(rate)
            if option not in options and (found := self.fill(option))[0] > rate:
                (rate, counts), assigned = found, option
        grants: list[Grant] = []
        for b, (m, count) in enumerate(zip(assigned, counts, strict=True)):
            rungs = self.rungs[m][b][:count]
            nodes = sum(rung.nodes for rung in rungs)
            depth = min(rungs[-1].depth, self.seats[b].limits[m].depth) if rungs else 0
            grants.append(Grant(nodes, depth, m))
        return rate, grants

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
                    drafting += call + observe[m][0]
                drafting += level * self.reach * (rung.depth - levels[m])
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
                net = -rate * ((call + once) / batch + late * _late(seat.behind[m]))
                for rung in of_all[b]:
                    net += rung.tokens - rate * ((row + node) * rung.rows)
                    if net - rate * level * self.reach * rung.depth / batch > best:
                        best, chosen = net - rate * level * self.reach * rung.depth / batch, m
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
        worth = min(worth, (total - tokens) / more)
        if worth <= least:
            break
        out.append(_Rung(worth, found * (total - tokens), found * more, more, depth))
        tokens, nodes = total, size
    return out


def _late(behind: int) -> float:
    """Tokens to catch up with, as far as this step is to pay for them."""
    return behind if behind <= PAID_AT_ONCE else PAID_AT_ONCE + (behind - PAID_AT_ONCE) / PAID_BACK
