"""A simulated engine for the controller: known costs, known acceptance, a clock that it owns."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from foretell.spec.acceptance import Outcome
from foretell.spec.budget import Controller, FixedBudget
from foretell.spec.costs import Costs
from foretell.spec.seats import Grant, Limit, Seat

Odds = Callable[[int, int], float]
"""``odds(slot, step)``: chance that one draft token is right after right ones."""


@dataclass
class Draft:
    """A scheme's truth. Seconds."""

    odds: Odds
    k: int = 8
    call: float = 2e-5
    level: float = 0.0
    node: float = 1e-6
    catch_up: float = 2e-5
    token: float = 2e-6
    found: Odds = lambda slot, step: 1.0
    deferrable: bool = True


@dataclass
class World:
    """Steps a batch with whoever chooses."""

    drafts: list[Draft]
    batch: Callable[[int], int]
    row: float = 0.04
    """What each further row adds, in passes of one row."""
    noise: float = 0.1
    seed: int = 0
    keys: int = 200
    pace: float = 1.0
    """How much longer everything takes than when it was calibrated."""
    seconds: float = 0.0
    tokens: int = 0
    history: list[list[Grant]] = field(default_factory=list[list[Grant]])

    def target(self, rows: float) -> float:
        return 0.004 * (1 + self.row * (rows - 1) + 1e-4 * self.keys)

    def calibrate(self, costs: Costs) -> None:
        """What the engine measures at its start."""
        for _ in range(4):
            for rows in (1, 2, 3, 4, 5, 8, 9, 16, 24, 32, 64):
                costs.learn_target(rows, self.keys, self.keys * (rows - 1), self.target(rows))
            for m, draft in enumerate(self.drafts):
                for depth, batch in ((1, 1), (draft.k, 1), (draft.k, 8)):
                    took = draft.call + draft.level * depth + draft.node * depth * batch
                    costs.learn_propose(m, depth, depth * batch, batch * self.keys, took)
                for tokens in (1, 64):
                    costs.learn_observe(m, tokens, draft.catch_up + draft.token * tokens)

    def run(self, steps: int, policy: Controller | FixedBudget | list[Grant], rows: int = 480):
        """Tokens a second of ``steps`` steps."""
        rng = random.Random(self.seed)
        before, start = self.tokens, self.seconds
        behind = [dict[int, int]() for _ in self.drafts]
        previous = 0
        for step in range(steps):
            batch = self.batch(step)
            if batch < previous and isinstance(policy, Controller):
                policy.forget(list(range(batch, previous)))
            previous = batch
            for late in behind:
                for slot in [slot for slot in late if slot >= batch]:
                    del late[slot]
            seats = [
                Seat(
                    slot,
                    self.keys,
                    [Limit(draft.k, draft.k) for draft in self.drafts],
                    [late.setdefault(slot, 30) for late in behind],
                )
                for slot in range(batch)
            ]
            grants = policy * batch if isinstance(policy, list) else policy.choose(seats, rows)
            assert len(grants) == batch
            assert sum(grant.most for grant in grants) <= rows
            self.history.append(list(grants))
            self._step(step, grants, behind, policy, rng)
        return (self.tokens - before) / (self.seconds - start)

    def _step(self, step, grants, behind, policy, rng):
        learns = isinstance(policy, Controller)
        jitter = lambda: self.pace * math.exp(rng.gauss(0, self.noise))  # noqa: E731
        whole, total = 0.0, len(grants)
        outcomes: list[list[Outcome]] = [[] for _ in self.drafts]
        gained, drafted = [1] * len(grants), [False] * len(grants)
        for m, draft in enumerate(self.drafts):
            now = {b: grant for b, grant in enumerate(grants) if grant.scheme == m and grant.nodes}
            for b, grant in enumerate(grants):
                if grant.instead and grant.instead.scheme == m and not drafted[b]:
                    now[b] = grant.instead
            mine = list(now)
            if not mine:
                continue
            late = sum(behind[m][b] for b in mine)
            took = (draft.catch_up + draft.token * late) * jitter()
            whole += took
            if learns:
                policy.costs.learn_observe(m, late, took)
            sizes = {b: self._size(draft, b, step, grant, rng) for b, grant in now.items()}
            depth, nodes = max(1, *sizes.values()), sum(sizes.values())
            took = (draft.call + draft.level * depth + draft.node * nodes) * jitter()
            whole += took
            if learns:
                policy.costs.learn_propose(m, depth, nodes, self.keys * len(mine), took)
            for b in mine:
                behind[m][b] = 0
                size, right = sizes[b], 0
                drafted[b] = size > 0
                while right < size and rng.random() < draft.odds(b, step):
                    right += 1
                outcomes[m].append(Outcome(b, size, now[b].depth, right, now[b].nodes))
                if size:
                    self.history[-1][b] = now[b]
                gained[b] += right
                total += size
        took = self.target(total) * jitter()
        whole += took
        if learns:
            keys = self.keys * len(grants)
            policy.costs.learn_target(total, keys, self.keys * (total - len(grants)), took)
            for m, each in enumerate(outcomes):
                policy.learn(m, each)
            policy.passed(whole)
        for late in behind:
            for b, count in enumerate(gained):
                late[b] = late.get(b, 0) + count
        self.seconds += whole
        self.tokens += sum(gained)

    @staticmethod
    def _size(draft, b, step, grant, rng):
        """Nodes of a draft that knows its own odds and leaves out what is not worth it."""
        odds = draft.odds(b, step)
        if rng.random() >= draft.found(b, step) or odds < grant.least.first:
            return 0
        size = 0
        while size < grant.nodes and odds ** (size + 1) >= grant.least.node:
            size += 1
            if odds**size < grant.least.parent:
                break
        return size


def controller(world: World, *, calibrated: bool = True) -> Controller:
    costs = Costs([draft.level > 0 for draft in world.drafts])
    if calibrated:
        world.calibrate(costs)
    sizes = [Limit(draft.k, draft.k) for draft in world.drafts]
    return Controller(sizes, costs)
