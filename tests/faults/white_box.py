"""Looking inside an engine: KV bytes, steps one by one, and which cells a step may write."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from foretell.llm import LLM
from foretell.sequence import SamplingParams, Sequence
from tests import tiny


def start(llm: LLM, prompts: list[list[int]], params: SamplingParams, **options) -> list[Sequence]:
    """Queues prompts without running them."""
    sequences = [s for prompt in prompts for s in llm.sequences(prompt, params, True, **options)]
    for sequence in sequences:
        llm.engine.add(sequence)
    return sequences


def steps(llm: LLM, sequences: list[Sequence]) -> Iterator[int]:
    """Steps until all have ended; gives the number of the step just made."""
    count = 0
    while not all(sequence.finished for sequence in sequences):
        llm._step()
        llm.engine.check()
        count += 1
        assert count < 10_000, "no progress"
        yield count


def cells(llm: LLM, group: str, pages: list[int], count: int) -> Tensor:
    """The first ``count`` cells of these pages: [2 * layers, count, Hkv, D], K and V in turn."""
    kv = llm.engine.runtime.kv
    assert kv is not None
    caches = [cache[pages] for layer in kv.layers[group] for cache in layer]
    return torch.stack([cache.transpose(1, 2).flatten(0, 1)[:count] for cache in caches])


class Clean:
    """KV of a text computed at one go in an engine of its own."""

    def __init__(self, speculation: str | None, weights: str = "f32", **options) -> None:
        alone = {"max_num_seqs": 1, "prefix_caching": False, "kv_memory": "1MiB"}
        self.llm = tiny.llm(speculation, weights, **(options | alone))

    def prefill(self, ids: list[int]) -> Sequence:
        """A sequence whose tokens are ``ids`` and one more; it has its pages until `leave`."""
        self.leave()
        (sequence,) = start(self.llm, [ids], tiny.greedy(max_tokens=20))
        while not sequence.num_output:
            self.llm._step()
        return sequence

    def leave(self) -> None:
        for sequence in self.llm.engine.scheduler.running:
            self.llm.abort(sequence.request_id)
        self.llm.engine.drain()

    def cells(self, group: str, ids: list[int]) -> Tensor:
        return cells(self.llm, group, self.prefill(ids).pages, len(ids))


class Witness:
    """Sees writes to cells that no step had a right to.

    Before each step it copies all KV memory; after it only cells may differ that lie in pages of
    sequences that took part, from their first uncomputed position on.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, runtime = llm, llm.engine.runtime
        self.legal: set[int] = set()
        self.seen = 0
        self.size = runtime.page_size
        inner, inner_step = runtime.set_pages, llm.engine.step

        def set_pages(slot: int, pages: list[int]) -> None:
            inner(slot, pages)
            first = next(s for s in llm.engine.scheduler.running if s.slot == slot).num_computed
            span = range(first, len(pages) * self.size)
            self.legal |= {pages[cell // self.size] * self.size + cell % self.size for cell in span}

        def step() -> list[Sequence]:
            before = self.copy()
            self.legal.clear()
            news = inner_step()
            self.compare(before)
            return news

        runtime.set_pages, llm.engine.step = set_pages, step  # type: ignore[method-assign]

    def copy(self) -> dict[str, Tensor]:
        kv = self.llm.engine.runtime.kv
        assert kv is not None
        everything = list(range(kv.num_pages))
        count = kv.num_pages * self.size
        return {group: cells(self.llm, group, everything, count) for group in kv.layers}

    def compare(self, before: dict[str, Tensor]) -> None:
        for group, now in self.copy().items():
            changed = (now != before[group]).flatten(2).any(2).any(0)  # [cells]
            written = set(changed.nonzero()[:, 0].tolist())
            assert written <= self.legal, f"{group}: cells of others were written"
            self.seen += len(written)
