"""Is speculation ever slower than none? Plain, fixed and adaptive decoding over batches and tasks.

    python benchmarks/never_slower.py                        # everything: hours
    python benchmarks/never_slower.py --batches 1 8 --tasks chat --schemes lookup --json out.json
    python benchmarks/never_slower.py --schemes head --head eagle:model=PATH

All of them answer the same prompts in one process and take turns of a fifth of a second, so that
what else the machine does slows all alike; each answer has the same number of tokens (end of text
is ignored). As many run at once as the batch says: who ends makes room for the next, as in a
server under load. A ratio is the median over rounds. There are two plain engines, the same in
everything: `plain` is the mean of both, and `twin` how they compare, which is what this can tell
apart. The best fixed setting is looked for among all; those that a round shows to be more than a
tenth behind drop out. The first round of each is not counted otherwise, as in the first answers
after a start a controller has still to learn what a scheme is worth; `cold` is its ratio to plain.
Prompts are few and come from the prefix cache from then on, so that decoding is what is compared.

`--clock cpu` counts the seconds that this process computes, not those in which others have its
core: for one thread on a machine that is not quiet.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from foretell.bench.environment import environment
from foretell.bench.workloads import by_category, default_workload
from foretell.llm import LLM
from foretell.sequence import SamplingParams, Sequence

sys.path.insert(0, str(Path(__file__).parent))  # for the useless draft

BATCHES = (1, 2, 4, 8, 16, 32)
TASKS = {  # category of the workload, temperature
    "chat": ("chat", 0.0),
    "edit": ("code_edit", 0.0),
    "summary": ("summarization", 0.0),
    "writing": ("chat", 1.0),
}
FIXED = {
    "lookup": ["prompt-lookup:k={k}", (2, 4, 8)],
    "self": ["draft-model:weights=int4,k={k}", (1, 2, 4)],
    "useless": ["useless:Useless,ms=1,k={k}", (1, 4)],
    "head": ["{head}k={k}", (1, 2, 4)],
}
PLAIN, TWIN, ADAPTIVE = "plain", "plain again", "adaptive"
SPARE = 8
"""Answers that come after the first ``batch``, if that is larger."""
SLICE = 0.2
"""Seconds that one has before the next one's turn."""
COLUMNS = ("scheme", "task", "batch", "plain tok/s", "twin", "x plain", "best", "x best", "cold")
BEHIND = 0.9
"""A fixed setting that is slower than this many times the best one drops out."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def prompts(llm: LLM, task: str, count: int, round_: int) -> list[list[int]]:
    """So many, going round the category."""
    own = by_category(default_workload())[TASKS[task][0]]
    picked = [own[(round_ * count + i) % len(own)] for i in range(count)]
    return [llm.chat_prompt([{"role": "user", "content": c.turns[0]}]) for c in picked]


def timed(
    llm: LLM, sequences: list[Sequence], batch: int, clock: Callable[[], float]
) -> Iterator[float]:
    """Tokens a second while ``batch`` answers run: who ends makes room for the next, as under load.
    It counts from the first token of all that begin until no other waits.

    Yields:
        0 at the end of each slice of time, then what it found.
    """
    engine, waiting = llm.engine, deque(sequences[batch:])
    running = sequences[:batch]
    for sequence in running:
        engine.add(sequence)
    while not all(sequence.num_output for sequence in running):
        llm._step()  # one step of whatever is in flight
    yield 0.0
    before, seconds = sum(sequence.num_output for sequence in running), 0.0
    start, busy = clock(), True
    while busy:
        llm._step()
        ended = [sequence for sequence in running if sequence.finished]
        busy = len(ended) <= len(waiting)
        for sequence in ended if busy else ():
            running.remove(sequence)
            running.append(waiting.popleft())
            engine.add(running[-1])
        if not busy or clock() - start > SLICE:
            seconds += clock() - start
            yield 0.0
            start = clock()
    for sequence in running:
        engine.abort(sequence.request_id)
    engine.drain()
    yield (sum(sequence.num_output for sequence in sequences) - before) / seconds


def race(runs: dict[str, Iterator[float]]) -> dict[str, float]:
    """Tokens a second of each, taking turns slice by slice; who begins goes round."""
    found: dict[str, float] = {}
    order = deque(runs)
    while left := [name for name in order if name not in found]:
        for name in left:
            if rate := next(runs[name]):
                found[name] = rate
        order.rotate()
    return found


def cell(
    llms: dict[str, LLM], task: str, batch: int, rounds: int, tokens: int, clock: str
) -> dict[str, list[float]]:
    """Tokens a second of each arm, round by round, as long as it is in the race."""
    found: dict[str, list[float]] = {name: [] for name in llms}
    adaptive, racing = llms[ADAPTIVE], dict(llms)
    if adaptive.engine.drafting and adaptive.engine.drafting.controller:
        controller = adaptive.engine.drafting.controller
        adaptive.engine.drafting.use(controller.costs)  # nothing of the other tasks
        adaptive.engine.scheduler.budget = adaptive.engine.drafting.budget
    for round_ in range(rounds + 1):
        count = batch + min(batch, SPARE)
        asked = prompts(adaptive, task, count, round_)
        params = [
            SamplingParams(
                temperature=TASKS[task][1], max_tokens=tokens, seed=97 * round_ + i, ignore_eos=True
            )
            for i in range(count)
        ]
        runs: dict[str, Iterator[float]] = {}
        for name, llm in racing.items():
            sequences = [
                llm.sequences(ids, own, True)[0] for ids, own in zip(asked, params, strict=True)
            ]
            runs[name] = timed(llm, sequences, batch, CLOCKS[clock])
        rates = race(runs)
        for name, rate in rates.items():
            found[name].append(rate)
        best = max(rate for name, rate in rates.items() if name != ADAPTIVE)
        for name in set(rates) - {PLAIN, TWIN, ADAPTIVE}:
            if rates[name] < BEHIND * best:
                del racing[name]
    return found


def ratios(found: dict[str, list[float]]) -> dict[str, Any]:
    """Medians over rounds, the first one left out."""
    plains = [(a + b) / 2 for a, b in zip(found[PLAIN], found[TWIN], strict=True)]
    own = found[ADAPTIVE]
    fixed = {name: rates for name, rates in found.items() if name not in (TWIN, ADAPTIVE)}
    against = {
        name: _median_ratio(own, rates)
        for name, rates in (fixed | {PLAIN: plains}).items()
        if len(rates) == len(own)
    }
    best = min(against, key=lambda name: against[name])
    return {
        "plain": statistics.median(plains[1:]),
        "twin": _median_ratio(found[TWIN], found[PLAIN]),
        "adaptive/plain": against[PLAIN],
        "best": best,
        "adaptive/best": against[best],
        "cold": own[0] / plains[0],
        "rounds": found,
    }


def _median_ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in list(zip(one, other, strict=True))[1:])


def open_arms(scheme: str, given: argparse.Namespace) -> dict[str, LLM]:
    """An engine for each way to decode, over one target."""
    pattern, sizes = FIXED[scheme]
    most = max(BATCHES)
    options = {"weights": given.weights, "max_num_seqs": most, "max_num_batched_tokens": 512}
    options |= {"kv_memory": "0.1", "max_model_len": 1024}
    if given.threads:
        options["threads"] = given.threads
    text = pattern.format(k=max(sizes), head=given.head)
    adaptive = LLM(given.model, speculation=text, **options)
    arms = {PLAIN: LLM(adaptive.target, **options), ADAPTIVE: adaptive}
    arms[TWIN] = LLM(adaptive.target, **options)
    for k in sizes:
        text = pattern.format(k=k, head=given.head) + ",adaptive=false"
        arms[f"k={k}"] = LLM(adaptive.target, speculation=text, **options)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--head", default="eagle", help="as --speculation names it")
    parser.add_argument("--schemes", nargs="+", choices=list(FIXED))
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--rounds", type=int, default=5, help="that count, for each cell")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--json", type=Path, help="adds the cells to what the file has already")
    given = parser.parse_args()
    schemes = given.schemes or ["head", "lookup", "useless"]
    given.head += "," if ":" in given.head else ":"
    console = Console()
    cells: dict[str, Any] = {}
    if given.json and given.json.exists():
        cells = json.loads(given.json.read_text())["cells"]
    table = Table(title="adaptive decoding against plain and the best fixed setting")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("scheme", "task", "best") else "right")
    for scheme in schemes:
        llms = open_arms(scheme, given)
        for task in given.tasks:
            for batch in given.batches:
                rates = cell(llms, task, batch, given.rounds, given.tokens, given.clock)
                found = ratios(rates)
                cells[f"{scheme} {task} {batch}"] = found
                numbers = [f"{found['plain']:.0f}", f"{found['twin']:.3f}"]
                numbers += [f"{found['adaptive/plain']:.3f}"]
                numbers += [found["best"], f"{found['adaptive/best']:.3f}", f"{found['cold']:.3f}"]
                table.add_row(scheme, task, str(batch), *numbers)
                print(scheme, task, batch, *numbers, flush=True)
                if given.json:
                    facts = {"environment": environment(), "cells": cells}
                    given.json.write_text(json.dumps(facts, indent=1))
    console.print(table)
    worst = min(found["adaptive/plain"] for found in cells.values())
    behind = min(found["adaptive/best"] for found in cells.values())
    console.print(f"worst against plain {worst:.3f}, worst against the best fixed {behind:.3f}")


if __name__ == "__main__":
    main()
