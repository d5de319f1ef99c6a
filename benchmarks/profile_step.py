"""Where a plain decode step goes, against the matrix products that it cannot do without.

    python benchmarks/profile_step.py --weights int8 --weights bf16

Steps and product-only passes alternate in blocks, so that a machine that slows down does so for
both. All numbers are medians over steps, in milliseconds. Two floors are shown: the model's linear
layers called one after the other on one row (what they do to make rows independent included), and
the library's bare product of the same weights with one row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import foretell.runtime.runner as runner
from foretell.bench.environment import environment
from foretell.bench.workloads import default_workload
from foretell.llm import LLM
from foretell.sequence import SamplingParams

LINEARS = ("qkv", "o", "gate_up", "down")
# Host work of the engine itself; everything else is the model's or the sampler's.
BOOKKEEPING = ("schedule", "propose", "lay out rows", "pack batch", "commit", "observe", "other")


class Clock:
    """Seconds by name since the last `take`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return call

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class TimedAttention:
    """Forwards everything and times it."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner = inner
        self.plan = clock.timed("attention plan", inner.plan)
        self.run = clock.timed("attention", inner.run)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def floors(model: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two passes over all linear layers for one row: as the model calls them, and bare."""
    config = model.config
    width = {
        "qkv": config.hidden_size,
        "o": config.num_heads * config.head_dim,
        "gate_up": config.hidden_size,
        "down": config.intermediate_size,
    }
    calls: list[tuple[Any, torch.Tensor]] = [
        (getattr(layer, name), torch.randn(1, width[name]))
        for layer in model.layers
        for name in LINEARS
    ]
    calls.append((model.lm_head, torch.randn(1, config.hidden_size)))

    products: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    for linear, x in calls:
        if (packed := getattr(linear, "_packed", None)) is not None and hasattr(packed, "unpack"):
            # The packed weights may hold columns that only the row-wise scaling uses.
            inputs = packed.unpack()[0].shape[1]
            row = F.pad(x, (0, inputs - x.shape[1]))
            products.append((torch.ops.quantized.linear_dynamic, (row, packed, False)))
        elif (weight := getattr(linear, "weight", None)) is not None:
            products.append((F.linear, (x.to(weight.dtype), weight)))
        else:
            products.append((linear, (x,)))

    def as_called() -> None:
        for linear, x in calls:
            linear(x)

    def bare() -> None:
        for function, arguments in products:
            function(*arguments)

    return as_called, bare


def profile(
    llm: LLM, context: int, steps: int
) -> tuple[list[dict[str, float]], list[float], list[float]]:
    """Per step seconds by phase, and the two floors' seconds by pass."""
    engine, clock = llm.engine, Clock()
    model: Any = engine.runtime.target.model
    as_called, bare = floors(model)

    text = "\n\n".join(turn for c in default_workload() for turn in c.turns)
    ids = (llm.tokenizer.encode(text) * (1 + context // 1000))[: max(1, context - steps // 2)]
    assert len(ids) == max(1, context - steps // 2)
    for layer in model.layers:
        for name in LINEARS:
            setattr(layer, name, clock.timed("linear layers", getattr(layer, name)))
    model.lm_head = clock.timed("lm_head", model.lm_head)
    engine.runtime.attention = TimedAttention(engine.runtime.attention, clock)
    original_pack, original_step = runner.pack, engine.step
    runner.pack = clock.timed("pack batch", original_pack)
    engine.step = clock.timed("step", original_step)  # type: ignore[method-assign]

    found: list[dict[str, float]] = []
    passes: tuple[list[float], list[float]] = ([], [])
    before = dict(engine.metrics.phase_seconds)
    params = SamplingParams(temperature=0, max_tokens=steps + 9, ignore_eos=True)
    try:
        for number, _ in enumerate(llm.stream(ids, params, speculate=False)):
            step, now = clock.take(), dict(engine.metrics.phase_seconds)
            phases = {name: now[name] - before[name] for name in now}
            before = now
            if number >= 8:  # the prompt's step and the first few warm up
                found.append(_split(step, phases))
            if number % 10 == 0:
                for floor, times in zip((as_called, bare), passes, strict=True):
                    for _ in range(10):
                        start = time.perf_counter()
                        with torch.inference_mode():
                            floor()
                        times.append(time.perf_counter() - start)
    finally:
        runner.pack = original_pack
    return found, passes[0][10:] or passes[0], passes[1][10:] or passes[1]


def _split(step: dict[str, float], phases: dict[str, float]) -> dict[str, float]:
    inside = ("pack batch", "attention plan", "linear layers", "lm_head", "attention")
    named = {
        "schedule": phases["schedule"],
        "propose": phases["propose"],
        "lay out rows": phases["pack"],
        "pack batch": step["pack batch"],
        "attention plan": step["attention plan"],
        "linear layers": step["linear layers"],
        "lm_head": step["lm_head"],
        "attention": step["attention"],
        "norms, rope, activation": phases["forward"] - sum(step[name] for name in inside),
        "sample": phases["sample"] + phases.get("verify", 0.0),
        "commit": phases["commit"],
        "observe": phases["observe"],
    }
    named["other"] = step["step"] - sum(named.values())
    return named | {"step": step["step"]}


def show(console: Console, weights: str, context: int, result: tuple[Any, ...]) -> None:
    steps, as_called, bare = result
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
    for name, value in (
        ("whole step", whole),
        ("engine's bookkeeping", own),
        ("floor: linear layers alone", 1e3 * statistics.median(as_called)),
        ("floor: bare products alone", 1e3 * statistics.median(bare)),
    ):
        table.add_row(name, f"{value:.3f}", f"{100 * value / whole:.1f}", style="bold")
    console.print(table)
    console.print(
        f"step / linear layers {whole / (1e3 * statistics.median(as_called)):.2f}, "
        f"step / bare products {whole / (1e3 * statistics.median(bare)):.2f}, "
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
