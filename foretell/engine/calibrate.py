"""What steps cost on this machine, measured once by taking some.

The engine steps a few answers of no meaning with budgets given beforehand, and its controller
learns from their times as it does from all others. What it learnt is kept (`foretell.engine.kept`)
for each model, weight format, scheme, number of threads, processor and state of the code; what
drafts are worth for each of the first three.
"""

from __future__ import annotations

import contextlib
import platform
import random
import time
from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from foretell.attention.pool import num_threads
from foretell.engine.drafting import Drafting
from foretell.engine.engine import Engine
from foretell.engine.kept import Kept
from foretell.engine.metrics import Metrics
from foretell.engine.scheduler import Item
from foretell.models.loader import LoadedModel
from foretell.runtime.identity import code_digest
from foretell.sequence import SamplingParams, Sequence
from foretell.spec.costs import KNOTS, Costs
from foretell.spec.seats import Grant, Seat
from foretell.spec.tree import MAX_NODES, TokenTree, chains

MOST_SECONDS = 3.0
"""After that nothing more is tried."""
_REPEATS = 8
_OFTEN = 16
"""Larger steps are taken once: drafts are seldom so long, and they take the time of many."""
_PROMPT = 24
_NODES = [knot - 1 for knot in KNOTS if knot <= MAX_NODES]


class _Quickest(Costs):
    """Keeps the quickest of like measurements: what else goes on only ever makes steps slower."""

    def __init__(self, with_model: SequenceOf[bool]) -> None:
        super().__init__(with_model)
        self.best: dict[tuple[Any, ...], tuple[float, tuple[Any, ...]]] = {}

    def learn_target(self, rows: int, keys: int, more_keys: int, seconds: float) -> None:
        self._keep(("target", rows), seconds, (rows, keys, more_keys))

    def learn_beside(
        self, scheme: int, rows: int, keys: int, more_keys: int, seconds: float
    ) -> None:
        self._keep(("beside", scheme, rows), seconds, (scheme, rows, keys, more_keys))

    def learn_propose(
        self, scheme: int, levels: int, nodes: int, keys: int, seconds: float
    ) -> None:
        self._keep(("propose", scheme, levels, nodes), seconds, (scheme, levels, nodes, keys))

    def learn_observe(self, scheme: int, tokens: int, seconds: float) -> None:
        self._keep(("observe", scheme, tokens), seconds, (scheme, tokens))

    def _keep(self, what: tuple[Any, ...], seconds: float, counts: tuple[Any, ...]) -> None:
        if what not in self.best or seconds < self.best[what][0]:
            self.best[what] = (seconds, counts)

    def teach(self, costs: Costs) -> None:
        """Lets others learn what was kept."""
        beside: dict[int, list[tuple[float, int, int, int, float]]] = {}
        for _ in range(_REPEATS):
            for (kind, *_), (seconds, counts) in sorted(self.best.items(), key=lambda b: str(b[0])):
                if kind != "beside":
                    getattr(costs, f"learn_{kind}")(*counts, seconds)
        for (kind, *_), (seconds, counts) in self.best.items():
            if kind == "beside":
                scheme, rows, keys, more_keys = counts
                more = seconds / costs.pace - costs.base(rows) - costs.keys((keys, more_keys))
                beside.setdefault(scheme, []).append((more, rows, keys, more_keys, seconds))
        for scheme, measured in beside.items():  # much the same for all, and noise only adds to it
            costs.learn_beside(scheme, *min(measured)[1:])


@dataclass
class _Given:
    """Budgets decided beforehand."""

    grant: Grant
    room: int
    """Positions that a sequence may have."""

    def silent(self, slots: SequenceOf[int]) -> bool:
        """As `Controller.silent`."""
        return False

    def choose(self, seats: SequenceOf[Seat], rows: int) -> list[Grant]:
        """The same for each sequence, as far as it may."""
        out: list[Grant] = []
        for seat in seats:
            nodes = max(0, min(self.grant.nodes, rows // len(seats), self.room - seat.keys - 1))
            out.append(Grant(nodes, min(self.grant.depth, nodes), self.grant.scheme))
        return out


def calibrate(engine: Engine, target: LoadedModel) -> None:
    """Gives an engine's controller its costs, from the cache directory or by measuring, and what
    was learnt of acceptance before.

    Args:
        target: whose path and format name the files.
    """
    drafting = engine.drafting
    if drafting is None or drafting.controller is None:
        return
    schemes = [drafter.config for drafter in drafting.drafters]
    what = (str(target.path), target.weights, engine.config.tensor_parallel, schemes, engine.rule)
    machine = _machine(engine.runtime.device)
    kept, costs = Kept("costs", what, machine), drafting.controller.costs
    if not kept.load(costs.restore):
        with torch.inference_mode():
            whole = _measure(engine, drafting, costs)
        costs.restore(costs.state())  # known as well as they will be after the next start
        drafting.use(costs)  # what it learnt of acceptance means nothing
        engine.scheduler.budget = drafting.budget
        if whole:
            kept.save(costs.state())
    drafting.kept = Kept("acceptance", what)
    drafting.kept.load(drafting.controller.restore)


def remember(engine: Engine) -> None:
    """Keeps what was learnt of acceptance: the next start goes on from there."""
    drafting = engine.drafting
    if drafting and drafting.controller and drafting.kept:
        drafting.kept.save(drafting.controller.state())


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _machine(device: torch.device) -> tuple[str, int, str]:
    """What costs depend on besides: kernels, threads, processor."""
    name = processor() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return code_digest(), num_threads(), name


def _measure(engine: Engine, drafting: Drafting, costs: Costs) -> bool:
    """Returns whether there was time for every size of step."""
    assert drafting.controller
    quickest = _Quickest([True] * len(drafting.drafters))
    given = _Given(Grant(), engine.runtime.max_model_len - 1)
    drafting.controller.costs, engine.scheduler.budget = quickest, given  # type: ignore[assignment]
    drafts, stand_in = drafting.propose, partial(_chains, engine.runtime.vocab_size)
    whole = False
    try:
        with _running(engine, drafting, given):
            sizes = _sizes(drafting)
            often = [size for size in sizes if size[0].nodes < _OFTEN] * (_REPEATS - 1)
            began, left = time.perf_counter(), [*sizes, *often]
            while left and engine.has_work and time.perf_counter() - began < MOST_SECONDS:
                given.grant, own = left.pop(0)
                # The target's rows must be there whether a scheme finds anything or not.
                drafting.propose = drafts if own else stand_in
                engine.step()
            whole = len(left) <= len(often)
    finally:
        drafting.learning, drafting.propose = True, drafts
        quickest.teach(costs)
        engine.cache.clear()
        engine.metrics = Metrics()
    return whole


def _sizes(drafting: Drafting) -> list[tuple[Grant, bool]]:
    """Budgets, and whether the scheme itself is to draft."""
    assert drafting.controller
    out = [(Grant(nodes, nodes), False) for nodes in _NODES]
    for m, scheme in enumerate(drafting.controller.schemes):
        rungs = list(zip(scheme.ladder.nodes, scheme.ladder.depth, strict=True))
        picked = sorted({0, len(rungs) // 2, len(rungs) - 1})
        out += [(Grant(*rungs[rung], m), True) for rung in picked]
    return out


def _chains(vocab_size: int, items: list[Item]) -> TokenTree:
    """Drafts of no meaning."""
    rng = random.Random(len(items[0].sequence.tokens))
    drafts = [[rng.randrange(vocab_size) for _ in range(item.budget)] for item in items]
    return chains([item.sequence.tokens[-1] for item in items], drafts)


@contextlib.contextmanager
def _running(engine: Engine, drafting: Drafting, given: _Given) -> Generator[None]:
    """An answer in progress, for which everything has run once; it is gone afterwards."""
    rng = random.Random(0)
    length = max(1, min(_PROMPT, engine.runtime.max_model_len // 4))
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    words = [rng.randrange(engine.runtime.vocab_size) for _ in range(1 + length // 2)]
    tokens = (words * 2)[:length]  # repeats itself, so that prompt lookup finds something
    engine.add(Sequence("calibration", tokens, params, seed=0))
    drafting.learning = False
    try:
        # The prompt's step, and the first of each kind: they may compile.
        for grant in (Grant(), Grant(), *(grant for grant, own in _sizes(drafting) if own)):
            given.grant = grant
            engine.step()
        drafting.learning = True
        yield
    finally:
        engine.abort("calibration")
        engine.drain()
