"""Where a plain decode step goes, against what it cannot do without.

    python benchmarks/profile_step.py --weights int8 --weights bf16

Steps and the two floors alternate in blocks, so that a machine that slows down does so for all.
All numbers are medians in milliseconds. The floors: the matrix products of one row alone, with as
many threads; and reading as many bytes as the weights have, once, by the same threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from foretell.attention.jit import jit
from foretell.attention.pool import num_threads, together
from foretell.attention.together import LINE, fetch_add, meet
from foretell.bench.environment import environment
from foretell.bench.workloads import default_workload
from foretell.llm import LLM
from foretell.models.compiled import PHASES
from foretell.models.products import compile_format, multiply, row_bytes
from foretell.sequence import SamplingParams

# Host work of the engine itself; everything else is the model's or the sampler's.
BOOKKEEPING = ("schedule", "propose", "pack", "commit", "observe", "other")
_PIECE = 1 << 16


@jit()
def _products(table: Any, row: int, out: int, sync: int, share: int, shares: int) -> None:
    for i in range(len(table)):
        run, weights, padded, panel, panels, scale, bias, stride = table[i]
        counter = sync + (2 + i) * LINE
        multiply(run, row, stride, 1, weights, padded, panel, panels, scale, bias, out, 0, counter)
        meet(sync, shares)


@jit(fastmath=True)
def _read(words: Any, sums: Any, sync: int, share: int, shares: int) -> None:
    while True:
        first = fetch_add(sync + 2 * LINE, _PIECE)
        if first >= len(words):
            break
        total = np.uint64(0)
        for word in words[first : first + _PIECE]:
            total ^= word
        sums[share] ^= total
    meet(sync, shares)


def floors(model: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """A pass over all products for one row, and one over as many bytes."""
    linears = [x for n in model.layers for x in (n.qkv, n.o, n.gate_up, n.down)]
    linears.append(model.lm_head)
    table = np.array([
        (
            compile_format(x.kind).multiply, x.packed.weights.data_ptr(), x.padded,
            x.packed.weights.shape[1], x.panels, x.packed.scale.data_ptr(), x.bias.data_ptr(),
            row_bytes(x.kind, x.padded),
        )
        for x in linears
    ])  # fmt: skip
    row = np.zeros(int(table[:, 7].max()) + 64, np.uint8)
    out = np.zeros(32 * int(table[:, 4].max()), np.float32)
    words = np.ones(sum(x.packed.weights.numel() for x in linears) // 8, np.uint64)
    sums = np.zeros(64, np.uint64)

    def products() -> None:
        sync = np.zeros((3 + len(table)) * LINE, np.uint8)
        arguments = (table, row.ctypes.data, out.ctypes.data, sync.ctypes.data)
        together(_products, arguments, num_threads(), sync, row, out)

    def read() -> None:
        sync = np.zeros(4 * LINE, np.uint8)
        together(_read, (words, sums, sync.ctypes.data), num_threads(), sync)

    return products, read


def profile(
    llm: LLM, context: int, steps: int
) -> tuple[list[dict[str, float]], list[float], list[float]]:
    """Per step seconds by part, and the floors' seconds by pass."""
    engine, model = llm.engine, llm.target.model
    whole = model.whole_pass
    assert whole is not None, "numba cannot be had here: there is no compiled pass to look into"
    bare = floors(model)
    text = "\n\n".join(turn for c in default_workload() for turn in c.turns)
    ids = (llm.tokenizer.encode(text) * (1 + context // 1000))[: max(1, context - steps // 2)]
    assert len(ids) == max(1, context - steps // 2)

    found: list[dict[str, float]] = []
    passes: tuple[list[float], list[float]] = ([], [])
    before, ticks = dict(engine.metrics.phase_seconds), whole.spent.copy()
    params = SamplingParams(temperature=0, max_tokens=steps + 9, ignore_eos=True)
    start = time.perf_counter()
    for number, _ in enumerate(llm.stream(ids, params, speculate=False)):
        step = time.perf_counter() - start
        now = dict(engine.metrics.phase_seconds)
        phases = {name: now[name] - before[name] for name in now}
        parts = (whole.spent - ticks) / max(1, (whole.spent - ticks).sum())
        if number >= 8:  # the prompt's step and the first few warm up
            found.append(_split(step, phases, parts))
        if number % 10 == 0:
            for floor, times in zip(bare, passes, strict=True):
                for _ in range(6):
                    start = time.perf_counter()
                    floor()
                    times.append(time.perf_counter() - start)
        before, ticks = dict(engine.metrics.phase_seconds), whole.spent.copy()
        start = time.perf_counter()
    return found, passes[0][6:] or passes[0], passes[1][6:] or passes[1]


def _split(step: float, phases: dict[str, float], parts: np.ndarray) -> dict[str, float]:
    """A step's parts; the compiled pass takes all of the forward phase but for its packing."""
    forward = dict(zip((f"forward: {name}" for name in PHASES), parts.tolist(), strict=True))
    named = {name: phases[name] for name in ("schedule", "propose", "pack")}
    named |= {name: share * phases["forward"] for name, share in forward.items()}
    named["sample"] = phases["sample"] + phases.get("verify", 0.0)
    named |= {name: phases[name] for name in ("commit", "observe")}
    return named | {"other": step - sum(named.values()), "step": step}


def show(console: Console, weights: str, context: int, result: tuple[Any, ...]) -> None:
    steps, products, read = result
    median = {name: 1e3 * statistics.median(step[name] for step in steps) for name in steps[0]}
    whole = median.pop("step")
    table = Table(
        title=f"{weights}: plain decode step at {context} tokens, median of {len(steps)}",
        title_justify="left",
    )
    table.add_column("part")
    table.add_column("ms", justify="right")
    table.add_column("% of step", justify="right")
    for name, value in median.items():
        table.add_row(name, f"{value:.3f}", f"{100 * value / whole:.1f}")
    table.add_section()
    own = sum(median[name] for name in BOOKKEEPING)
    bare, memory = (1e3 * statistics.median(times) for times in (products, read))
    for name, value in (
        ("whole step", whole),
        ("engine's bookkeeping", own),
        ("floor: products alone", bare),
        ("floor: reading the weights", memory),
    ):
        table.add_row(name, f"{value:.3f}", f"{100 * value / whole:.1f}", style="bold")
    console.print(table)
    console.print(
        f"step / products {whole / bare:.2f}, step / reading {whole / memory:.2f}, "
        f"bookkeeping {own / whole:.1%}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for foretell generate")
    parser.add_argument("--weights", action="append", help="int8 and bf16 if not given")
    parser.add_argument("--context", type=int, default=500, help="tokens at the middle step")
    parser.add_argument("--steps", type=int, default=200, help="decode steps measured")
    parser.add_argument("--threads", type=int, help="CPU threads, all cores if not given")
    given = parser.parse_args()
    if given.steps < 20 or given.context < 1:
        parser.error("--steps must be at least 20 and --context at least 1")
    console = Console()
    for weights in given.weights or ("int8", "bf16"):
        llm = LLM(given.model, weights=weights, threads=given.threads, max_num_seqs=1)
        show(console, weights, given.context, profile(llm, given.context, given.steps))
    facts = environment()
    console.print(
        f"{facts['cpu']}, {facts['threads']} threads, {facts['packages']}", highlight=False
    )


if __name__ == "__main__":
    main()
