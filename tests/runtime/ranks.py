"""Ranks as threads of one process, and a tiny model over two processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from foretell.config import SpeculationConfig
from foretell.drafters import build
from foretell.engine.engine import Engine
from foretell.llm import LLM
from foretell.runtime import parallel
from tests import tiny

parallel._GRACE = 60.0  # a crowded machine takes longer to end a process than users would wait

OPTIONS: dict[str, Any] = {
    "weights": "f32",
    "page_size": 4,
    "kv_memory": "8MiB",
    "max_model_len": 256,
    "threads": 2,
}


class ThreadRanks:
    """`models.sharding.Ranks` for a thread; all of them share ``parts``."""

    halves = False

    def __init__(self, rank: int, world: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world, self._parts, self._barrier = rank, world, parts, barrier

    def _share(self, x):
        self._barrier.wait()
        self._parts[self.rank] = x
        self._barrier.wait()
        return list(self._parts)

    def start_sum(self, x):
        first, *others = self._share(x)
        total = first.clone()
        for part in others:
            total += part
        return lambda: total

    def start_exchange(self, sent, come):
        got = [parts[self.rank] for parts in self._share(sent)]
        assert [len(part) for part in got] == come
        return lambda: got

    def gather(self, x):
        return [] if self._share(x) and self.rank else list(self._parts)

    def share(self, x):
        return self._share(x)[0]


def on_threads(world: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What ``work`` gives on each rank; the first error of any."""
    parts, barrier, found = [None] * world, threading.Barrier(world, timeout=500), [None] * world
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                found[rank] = work(ThreadRanks(rank, world, parts, barrier))
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


@cache
def model() -> Path:
    return tiny.write_model(Path(mkdtemp()) / "model")


def start(**options: Any) -> LLM:
    """The tiny model over two processes."""
    return LLM(str(model()), **(OPTIONS | {"tensor_parallel": 2} | options))


def let_draft(llm: LLM, scheme: str | None) -> Any:
    """Gives an engine another scheme. The other ranks do not notice: they know of no draft."""
    speculation = SpeculationConfig.parse(tiny.fixed(scheme) or "none")
    runtime, config = llm.engine.runtime, llm.config.with_(speculation=speculation)
    drafter = build(speculation, runtime) if speculation else None
    runtime.taps = drafter.needs.features if drafter else ()
    assert runtime.kv is not None
    runtime.allocate(runtime.kv.num_pages, drafter.needs.kv if drafter else None)
    drafters = [drafter] if drafter else []
    llm.engine = Engine(config, runtime, drafters, llm.engine.end_ids)
    return drafter
