"""What a step costs: the target by rows and context, a draft by levels and nodes. In seconds.

Each cost is a sum of a few terms. A measured step corrects the terms in proportion to their share,
by an exponential average of its clipped logarithm, so that a step in which the machine did
something else counts little. What slows everything alike goes into ``pace``, for only ratios
decide.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence as SequenceOf
from typing import Any

KNOTS = (*range(1, 11), 12, 16, 24, 32, 64, 128, 256, 512)
"""Rows between which the cost of a pass is interpolated, and behind which it goes on straight. Few
rows have one each, for products come in blocks of rows: the ninth may cost as much as the next
seven, and plain decoding must not be taken for what it is not."""
_STEADY = 1 / 48
"""Weight of a new measurement once a term is known."""
_STEADY_ROWS = 1 / 192
"""The same for the cost of so many rows: how rows compare hardly changes, and what drafts cost is a
small difference between two of them. The pace takes what does change."""
_TRUST = 96
"""Measurements that a calibration in peace and quiet is worth."""
_PACE = 1 / 12
_KNOWN = 8
"""Measurements from which a term tells what is usual."""
_STEP_TOKENS = 8
"""Most tokens of a step's catching up; with more they are a prompt's or an answer's."""
_SLOPE = 0.03
"""What a further row is thought to cost before any was measured, in passes of one."""
_CLIP = 0.35
"""Largest logarithm by which a known term's step may surprise."""


class Terms:
    """A cost that is a weighted sum of counts.

    Args:
        weights: [N] seconds for one of each count, a first guess.
    """

    def __init__(self, weights: SequenceOf[float]) -> None:
        self.weights = list(weights)
        self.seen = 0

    def __call__(self, counts: SequenceOf[float]) -> float:
        return sum(w * c for w, c in zip(self.weights, counts, strict=True))

    def learn(self, counts: SequenceOf[float], seconds: float) -> None:
        """Takes in one measurement; ``counts`` must not all be 0."""
        parts = [w * c for w, c in zip(self.weights, counts, strict=True)]
        whole = sum(parts)
        surprise = _surprise(seconds, whole, self.seen)
        rate = max(_STEADY, 1 / (self.seen + 1))
        self.seen += 1
        # Shares of one half each must still correct the whole by `rate`.
        squares = sum(part * part for part in parts) / (whole * whole)
        for i, part in enumerate(parts):
            self.weights[i] *= math.exp(rate * surprise * part / whole / squares)


class Costs:
    """Everything a controller must know about time.

    Args:
        with_model: for each scheme whether its drafts cost passes of a network.
    """

    def __init__(self, with_model: SequenceOf[bool]) -> None:
        self.rows = [0.004 * (1 + _SLOPE * (knot - 1)) for knot in KNOTS]
        """[knots] seconds of a step with that many rows and no context."""
        self.seen = [0] * len(KNOTS)
        self.keys = Terms([1.0e-6, 2.0e-7])
        """Attention: for each key of each sequence, and for each key of each further row."""
        self.with_model = list(with_model)
        self.pace = 1.0
        """How much slower the machine is now than when the rest was learnt."""
        self.propose = [
            Terms([5e-4, 1e-3, 1e-5] if net else [3e-5, 1e-6, 1e-6]) for net in with_model
        ]
        """A draft: for itself, each level behind the first, which what was observed last gives
        already, and each node. A level grows with context as a pass of the
        target does (`reach`)."""
        self.observe = [Terms([1e-3, 2e-4] if net else [2e-5, 5e-6]) for net in with_model]
        """Catching up: for itself, and each token."""
        self._beside = [0.0] * len(self.observe)
        self._seen_beside = [0] * len(self.observe)

    # ---- the target

    @property
    def beside(self) -> list[float]:
        """[M] What a step takes more while a scheme drafts, in nobody else's count: a network's
        weights push the target's out of caches, and what the host does waits for them."""
        return [max(0.0, seconds) for seconds in self._beside]

    def base(self, rows: float) -> float:
        """Seconds of a step without context at the machine's usual pace."""
        i, share = _between(rows)
        return self.rows[i] * (1 - share) + self.rows[i + 1] * share

    def slope(self, rows: float) -> float:
        """Seconds that one row more costs at least, with so many or more in the pass."""
        i, _ = _between(rows)
        spans = zip(self.rows[i:], self.rows[i + 1 :], KNOTS[i:], KNOTS[i + 1 :], strict=False)
        return max(0.0, min((high - low) / (to - at) for low, high, at, to in spans))

    def learn_target(self, rows: int, keys: int, more_keys: int, seconds: float) -> None:
        """A step's time but for its drafts.

        Args:
            rows: of the target's pass.
            keys: sum over sequences of the tokens they have.
            more_keys: sum over sequences of the tokens times the rows besides the first.
        """
        if rows < 1 or seconds <= 0:
            return
        i, share = _between(rows)
        base, counts = self.base(rows), (keys, more_keys)
        attention = self.keys(counts)
        seen = self.seen[i] if share < 0.5 else self.seen[i + 1]
        surprise = _surprise(seconds / self.pace, base + attention, seen)
        rate = max(_STEADY_ROWS, 1 / (seen + 1))
        self.pace *= math.exp((1 - rate) * _PACE * surprise)
        part = base / (base + attention)
        for at, weight in ((i, 1 - share), (i + 1, share)):
            if weight > 0.05:
                factor = math.exp(rate * surprise * part * min(1.0, 2 * weight))
                self.rows[at] *= factor
                self.seen[at] += 1
                if self.seen[at] == 1:
                    self._fill()
        if keys and part < 0.9:
            self.keys.learn(counts, max(seconds / self.pace - self.base(rows), 0.1 * attention))
        self._ascend(i + (share >= 0.5))

    def learn_beside(
        self, scheme: int, rows: int, keys: int, more_keys: int, seconds: float
    ) -> None:
        """As `learn_target`, for a step in which a network drafts or has just done so: such steps
        do not show what plain ones cost."""
        expected = self.base(rows) + self.keys((keys, more_keys))
        # Both ways alike, or a noisy machine would seem to be a dear scheme.
        more = min(max(seconds / self.pace - expected, -0.5 * expected), 0.5 * expected)
        rate = max(_STEADY_ROWS, 1 / (self._seen_beside[scheme] + 1))
        self._beside[scheme] += rate * (more - self._beside[scheme])
        self._seen_beside[scheme] += 1

    def _ascend(self, fixed: int) -> None:
        """More rows never cost less: what was measured last is believed."""
        for j in range(fixed + 1, len(self.rows)):
            if self.rows[j] >= self.rows[j - 1]:
                break
            self.rows[j] = self.rows[j - 1]
        for j in range(fixed - 1, -1, -1):
            if self.rows[j] <= self.rows[j + 1]:
                break
            self.rows[j] = self.rows[j + 1]

    def _fill(self) -> None:
        """What nobody has measured yet lies between what was, or goes on as `_SLOPE` says."""
        known = [j for j, count in enumerate(self.seen) if count]
        for j, knot in enumerate(KNOTS):
            if self.seen[j]:
                continue
            below = max((k for k in known if k < j), default=None)
            above = min((k for k in known if k > j), default=None)
            if below is not None and above is not None:
                share = (knot - KNOTS[below]) / (KNOTS[above] - KNOTS[below])
                self.rows[j] = self.rows[below] + share * (self.rows[above] - self.rows[below])
            else:
                near = below if below is not None else above
                assert near is not None
                one = 1 + _SLOPE * (KNOTS[near] - 1)
                self.rows[j] = self.rows[near] * (1 + _SLOPE * (knot - 1)) / one

    # ---- drafts

    def reach(self, keys: float) -> float:
        """How many times as long a pass of one row takes with so much context as with none."""
        return 1 + self.keys.weights[0] * keys / self.rows[0]

    def learn_propose(
        self, scheme: int, levels: int, nodes: int, keys: int, seconds: float
    ) -> None:
        """A call's time.

        Args:
            levels: of the deepest draft that was asked for.
            nodes: asked for, of all sequences.
            keys: sum over its sequences of the tokens they have.
        """
        if seconds > 0:
            counts = (1, max(0, levels - 1) * self.reach(keys), nodes)
            self.propose[scheme].learn(counts, seconds / self.pace)

    def learn_observe(self, scheme: int, tokens: int, seconds: float) -> None:
        """A network's tells of the pace too: while it drafts in each step no plain one does, and
        a machine that slows down meanwhile would seem to be a dear scheme."""
        if not tokens or seconds <= 0:
            return
        terms, counts = self.observe[scheme], (1, tokens)
        if self.with_model[scheme] and tokens <= _STEP_TOKENS and terms.seen >= _KNOWN:
            surprise = _surprise(seconds / self.pace, terms(counts), terms.seen)
            self.pace *= math.exp(_PACE * surprise)
        terms.learn(counts, seconds / self.pace)

    # ---- kept between runs

    def state(self) -> dict[str, Any]:
        """What `restore` takes, as JSON's types."""
        return {
            "rows": [second * self.pace for second in self.rows],
            "seen": self.seen,
            "keys": [weight * self.pace for weight in self.keys.weights],
            "propose": [[w * self.pace for w in terms.weights] for terms in self.propose],
            "observe": [[w * self.pace for w in terms.weights] for terms in self.observe],
            "beside": [seconds * self.pace for seconds in self.beside],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """
        Raises:
            ValueError, KeyError, TypeError, OverflowError: not what `state` gave for the same
                schemes.
        """
        rows, seen = _positive(state["rows"], len(KNOTS)), [int(n) for n in state["seen"]]
        keys = _positive(state["keys"], 2)
        propose = [_positive(each, 3) for each in state["propose"]]
        observe = [_positive(each, 2) for each in state["observe"]]
        beside = _positive([1 + second for second in state["beside"]], len(self.observe))
        if not len(self.propose) == len(propose) == len(observe) or len(seen) != len(KNOTS):
            raise ValueError("costs of other schemes")
        self.rows, self.seen = rows, [_TRUST if n > 0 else 0 for n in seen]
        self._beside = [second - 1 for second in beside]
        self._seen_beside = [_TRUST] * len(beside)
        groups = [(self.keys, keys), *zip(self.propose, propose, strict=True)]
        for terms, weights in [*groups, *zip(self.observe, observe, strict=True)]:
            terms.weights, terms.seen = weights, _KNOWN


def _surprise(seconds: float, expected: float, seen: int) -> float:
    surprise = math.log(seconds / max(expected, 1e-9))
    return max(-_CLIP, min(_CLIP, surprise)) if seen >= 4 else surprise


def _between(rows: float) -> tuple[int, float]:
    """The knot below and how far on the way to the next; more than 1 behind the last."""
    i = min(max(bisect_right(KNOTS, rows) - 1, 0), len(KNOTS) - 2)
    return i, (rows - KNOTS[i]) / (KNOTS[i + 1] - KNOTS[i])


def _positive(values: Any, count: int) -> list[float]:
    numbers = [float(value) for value in values]
    # What costs nothing could never be corrected, and is divided by.
    if len(numbers) != count or not all(1e-15 < number < 1e6 for number in numbers):
        raise ValueError("not costs")
    return numbers
