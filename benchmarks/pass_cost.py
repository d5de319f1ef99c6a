"""What a pass of the target costs by the rows in it: the price of checking so many drafts.

    python benchmarks/pass_cost.py --weights int8 --weights bf16 --rows 1 4 8 16 48

One sequence with random keys and values, a root and a chain of drafts behind it. Numbers of rows
take turns, so that a machine that slows down does so for all. Medians in milliseconds; in brackets
what that is of one row's.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from tree_cost import prepare, verification

from foretell.attention.pool import set_num_threads
from foretell.bench.environment import environment
from foretell.models.loader import load


def medians(weights: str, model: str, sizes: list[int], context: int, turns: int) -> list[float]:
    """Milliseconds of a pass of each number of rows."""
    runtime = prepare(load(model, weights), context + max(sizes) + 1)
    passes = [verification(list(range(-1, size - 1)), context) for size in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    for turn in range(turns + 2):
        for rows, taken in zip(passes, times, strict=True):
            start = time.perf_counter()
            runtime.forward_target(rows)
            if turn >= 2:
                taken.append(1000 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", action="append", help="int8 if not given; may be repeated")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 48])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=40)
    args = parser.parse_args()
    set_num_threads(args.threads)
    torch.manual_seed(0)

    table = Table(title=f"{args.model}, context {args.context}, {args.threads} threads: ms a pass")
    table.add_column("weights")
    for size in args.rows:
        table.add_column(f"{size} rows", justify="right")
    for weights in args.weights or ["int8"]:
        taken = medians(weights, args.model, args.rows, args.context, args.turns)
        table.add_row(weights, *(f"{ms:.1f} ({ms / taken[0]:.2f})" for ms in taken))
    made_on, console = environment(), Console()
    console.print(table)
    console.print(f"{made_on['cpu']}, commit {made_on['commit']}", style="dim")


if __name__ == "__main__":
    main()
