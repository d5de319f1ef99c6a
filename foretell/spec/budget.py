"""How many draft tokens each sequence may have in a step, and of which scheme.

`Controller` maximises expected tokens for each second: tokens from what was accepted lately
(`foretell.spec.acceptance`), seconds from what steps took lately (`foretell.spec.costs`), and the
best of what these promise (`foretell.spec.choice`).

Nothing here depends on a draft that is being decided about, only on steps that are over: sampled
drafts stay exact (non-anticipation, schemes.md 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from foretell.spec.acceptance import Acceptance, Outcome
from foretell.spec.choice import Choice
from foretell.spec.costs import Costs
from foretell.spec.seats import ANYTHING, Grant, Limit, Seat, within

KEPT, KEPT_SILENT = 8, 32
"""Most steps that a choice serves, if it was the same as before and the same sequences run; and
one that nobody is to draft, about which little is learnt meanwhile."""
PROBES = 0.01
"""Share of the time that may go into drafts of schemes that do not pay, to see whether they would
now; two thirds for each in vain, down to a third."""
PLAIN_EVERY, CLEARLY = 48, 1.4
"""A step in so many is plain, unless drafts promise so many times as much: what plain decoding
costs must be known too."""
FREE_PROBES, MOST_FREE_PROBES = 4, 16
"""Tries that a scheme has before it must pay, and those that it can win by being right."""


@dataclass(frozen=True)
class FixedBudget:
    """Everybody gets all of its limit while the rows of a pass suffice, else a fair share."""

    def choose(self, seats: SequenceOf[Seat], rows: int) -> list[Grant]:
        """As `Controller.choose`, always the first scheme."""
        most = [max(seat.limits[0].nodes, len(seat.forced)) for seat in seats]
        grants: list[Grant] = []
        for seat, share in zip(seats, self.share(most, rows, False), strict=True):
            nodes, depth = seat.limits[0]
            nodes = min(nodes, share)
            grants.append(Grant(nodes, min(nodes, depth), 0, min(share, len(seat.forced))))
        return grants

    def silent(self, slots: SequenceOf[int]) -> bool:
        """As `Controller.silent`."""
        return False

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
        self._least = [ANYTHING] * len(sizes)
        self._kept: tuple[list[int], list[Grant]] = ([], [])
        self._plain, self._speaks = 0.0, True
        self._age, self._patience, self._turn = 0, 1, 0

    def forget(self, slots: SequenceOf[int]) -> None:
        """Sequences left these slots: those that come to them are to be looked at."""
        self._kept = ([], [])
        for scheme in self.schemes:
            scheme.forget(slots)

    # ---- choosing

    def silent(self, slots: SequenceOf[int]) -> bool:
        """Would `choose` let none of the sequences in these slots draft? Then that was it, and it
        need not be called."""
        if self._speaks or slots != self._kept[0] or self._age >= self._patience:
            return False
        if any(probes.free or probes.credit > probes.price for probes in self.probes):
            return False
        self._age, self._turn = self._age + 1, self._turn + 1
        return True

    def choose(self, seats: SequenceOf[Seat], rows: int) -> list[Grant]:
        """
        Args:
            seats: [B] sequences that could draft in this step.
            rows: most draft tokens in all.

        Returns:
            [B], each within its limit, their nodes at most ``rows`` in all.
        """
        if any(seat.forced for seat in seats):
            return self._beside_forced(seats, rows)
        slots, before = [seat.slot for seat in seats], self._kept
        if slots == before[0] and self._age < self._patience:
            grants = [within(grant, seat) for grant, seat in zip(before[1], seats, strict=True)]
            if sum(grant.most for grant in grants) <= rows:
                self._age += 1
                return self._probe(seats, grants, rows)
        choice = Choice(self.schemes, self.costs, seats, rows)
        self.rate, grants, self._least = choice.best(self.mixed)
        self._plain = len(seats) / choice.plain
        settled = slots == before[0] and _alike(grants, before[1])
        self._speaks = any(grant.most for grant in grants)
        most = KEPT if self._speaks else KEPT_SILENT
        self._patience = min(2 * self._patience, most) if settled else 1 + len(seats) // 8
        self._kept, self._age = (slots, grants), 1
        return self._probe(seats, list(grants), rows)

    def _beside_forced(self, seats: SequenceOf[Seat], rows: int) -> list[Grant]:
        """What is forced is certain and costs no draft: it comes before everything else."""
        none = [Limit(0, 0)] * len(self.schemes)
        others = [seat._replace(limits=none, forced=()) if seat.forced else seat for seat in seats]
        shares = FixedBudget().share([len(seat.forced) for seat in seats], rows, False)
        grants = self.choose(others, rows - sum(shares))
        return [grant._replace(forced=n) for grant, n in zip(grants, shares, strict=True)]

    def _probe(self, seats: SequenceOf[Seat], grants: list[Grant], rows: int) -> list[Grant]:
        """Lets a scheme that is off draft for one sequence, if that can be afforded."""
        self._turn += 1
        if self._turn % PLAIN_EVERY == 0 and self.rate < CLEARLY * self._plain:
            return [Grant(0, 0, grant.scheme) for grant in grants]
        m = self._turn % len(self.schemes)
        probes = self.probes[m]
        if any(_drafts(grant, m) for grant in grants):
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
        probe = Grant(ladder.nodes[rung], ladder.depth[rung], m, least=self._least[m])
        probe = within(probe, seat)
        others = [grant if i != b and self.mixed else Grant() for i, grant in enumerate(grants)]
        used = sum(grant.most for grant in others)
        lost = sum(grant.most for grant in grants) - used
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
        longer = grants[b]._replace(nodes=ladder.nodes[rung], depth=ladder.depth[rung])
        longer = within(longer, seats[b])
        more = longer.nodes - grants[b].nodes
        used = sum(grant.most for grant in grants)
        if more > 0 and used + more <= rows:
            seat = seats[b]._replace(behind=[0] * len(self.schemes))
            price = self._price(longer, seat, used + len(seats)) - self._price(
                grants[b], seat, used + len(seats)
            )
            if probes.afford(price):
                grants[b] = longer
        return grants

    def _price(self, grant: Grant, seat: Seat, rows: int) -> float:
        """Seconds that one more draft takes."""
        costs, m = self.costs, grant.scheme
        counts = (1, (grant.depth - 1) * costs.reach(seat.keys), grant.nodes)
        drafting = costs.propose[m](counts) + costs.observe[m]((1, seat.behind[m]))
        drafting += costs.beside[m]
        if self.schemes[m].candid:  # its nodes are worth their rows, or left out
            return drafting
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

    def passed(self, seconds: float, steps: int = 1) -> None:
        """So many steps are over, which took so long together."""
        seconds /= self.costs.pace  # as prices are
        networks = sum(self.costs.with_model)
        for scheme, probes, network in zip(
            self.schemes, self.probes, self.costs.with_model, strict=True
        ):
            scheme.passed(steps)
            probes.earn(seconds / networks if network else seconds, steps)

    # ---- kept between runs

    def state(self) -> list[dict[str, Any]]:
        """What `restore` takes, as JSON's types: what is known of acceptance."""
        return [scheme.state() for scheme in self.schemes]

    def restore(self, state: SequenceOf[dict[str, Any]]) -> None:
        """Goes on where another run of the same schemes ended: what it tried need not be tried.

        Raises:
            ValueError, KeyError, TypeError: not what `state` gave for the same schemes.
        """
        for scheme, probes, own in zip(self.schemes, self.probes, state, strict=True):
            scheme.restore(own)
            known = int(scheme.asked)
            probes.free = max(0, FREE_PROBES - known)
            probes.trials = max(0, MOST_FREE_PROBES - known)


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

    def earn(self, seconds: float, steps: int = 1) -> None:
        """Steps took so long."""
        part = PROBES * max(1 / 3, (2 / 3) ** self.in_vain)
        self.credit = min(self.credit + part * seconds, 8 * seconds / steps)

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


def _drafts(grant: Grant, m: int) -> bool:
    other = grant.instead
    mine = grant.nodes and grant.scheme == m
    return bool(mine or (other and other.nodes and other.scheme == m))


def _alike(one: list[Grant], other: list[Grant]) -> bool:
    """Do budgets differ by less than a fifth of the rows of the pass?"""
    change = sum(abs(a.nodes - b.nodes) for a, b in zip(one, other, strict=True))
    return 5 * change < len(one) + sum(grant.nodes for grant in one)
