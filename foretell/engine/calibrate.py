"""What steps cost on this machine, measured once by taking some.

The engine steps a few answers of no meaning with budgets given beforehand, and its controller
learns from their times as it does from all others. What it learnt is kept in the cache directory,
for each model, weight format, scheme, number of threads and processor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import random
import time
from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch

import foretell
from foretell.attention.pool import num_threads
from foretell.config import home
from foretell.engine.drafting import Drafting
from foretell.engine.engine import Engine
from foretell.engine.metrics import Metrics
from foretell.models.loader import LoadedModel
from foretell.sequence import SamplingParams, Sequence
from foretell.spec.costs import Costs
from foretell.spec.seats import Grant, Seat

MOST_SECONDS = 2.0
"""After that no larger batch is tried."""
_REPEATS = 4
_PROMPT = 24


@dataclass
class _Given:
    """Budgets decided beforehand."""

    grants: list[Grant]

    def choose(self, seats: SequenceOf[Seat], rows: int) -> list[Grant]:
        """The same for each sequence, as far as it may."""
        grant = self.grants[-1]
        out: list[Grant] = []
        for seat in seats:
            limit = seat.limits[grant.scheme]
            nodes = min(grant.nodes, limit.nodes, rows // len(seats))
            out.append(Grant(nodes, min(grant.depth, limit.depth, nodes), grant.scheme))
        return out


def calibrate(engine: Engine, target: LoadedModel) -> None:
    """Gives an engine's controller its costs, from the cache directory or by measuring.

    Args:
        target: whose path and format name the costs.
    """
    drafting = engine.drafting
    if drafting is None or drafting.controller is None:
        return
    path = home() / "costs" / f"{_name(engine, target)}.json"
    costs = drafting.controller.costs
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        costs.restore(json.loads(path.read_text()))
        return
    with torch.inference_mode():
        _measure(engine, drafting)
    drafting.use(costs)  # what it learnt of acceptance means nothing
    engine.scheduler.budget = drafting.budget
    with contextlib.suppress(OSError):
        _write(path, costs)


def processor() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _name(engine: Engine, target: LoadedModel) -> str:
    assert engine.drafting
    schemes = [drafter.config for drafter in engine.drafting.drafters]
    facts = (foretell.__version__, str(target.path), target.weights, num_threads(), processor())
    return hashlib.sha256(repr((facts, schemes, engine.rule)).encode()).hexdigest()[:24]


def _measure(engine: Engine, drafting: Drafting) -> None:
    scheduler, given = engine.scheduler, _Given([Grant()])
    scheduler.budget = given  # type: ignore[assignment]
    began = time.perf_counter()
    slots = engine.config.max_num_seqs
    try:
        for batch in sorted({1, min(4, slots), min(8, slots)}):
            if time.perf_counter() - began > MOST_SECONDS / 2:
                break
            with _running(engine, drafting, batch):
                for _ in range(_REPEATS):
                    for grant in _sizes(drafting, few=batch > 1):
                        given.grants = [grant]
                        engine.step()
                        drafting.learning = True
                        if time.perf_counter() - began > MOST_SECONDS:
                            return
                drafting.learning = False  # the first steps of a batch are those of its prompts
    finally:
        drafting.learning = True
        engine.cache.clear()
        engine.metrics = Metrics()


def _sizes(drafting: Drafting, *, few: bool) -> list[Grant]:
    out = [Grant()]
    assert drafting.controller
    for m, scheme in enumerate(drafting.controller.schemes):
        rungs = list(zip(scheme.ladder.nodes, scheme.ladder.depth, strict=True))
        picked = {0, len(rungs) - 1} if few else {0, len(rungs) // 2, len(rungs) - 1}
        out += [Grant(*rungs[rung], m) for rung in sorted(picked)]
    return out


@contextlib.contextmanager
def _running(engine: Engine, drafting: Drafting, batch: int) -> Generator[None]:
    """So many answers at once, behind their prompts; they are gone afterwards."""
    rng = random.Random(batch)
    length = max(1, min(_PROMPT, engine.runtime.max_model_len // 4))
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for number in range(batch):
        words = [rng.randrange(engine.runtime.vocab_size) for _ in range(1 + length // 2)]
        tokens = (words * 2)[:length]  # repeats itself, so that prompt lookup finds something
        engine.add(Sequence(f"calibration-{number}", tokens, params, seed=number))
    drafting.learning = False
    for _ in range(3):
        engine.step()
    try:
        yield
    finally:
        for number in range(batch):
            engine.abort(f"calibration-{number}")
        engine.drain()


def _write(path: Path, costs: Costs) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w") as file:
            json.dump(costs.state(), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
