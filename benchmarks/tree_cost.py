"""What a tree costs the target against a chain of as many nodes.

    python benchmarks/tree_cost.py --nodes 32 --contexts 1024 4096 16384

One sequence whose keys and values are random, so that any context can be had without a prefill.
Root and nodes run as one pass; chain and tree take turns, so that a machine that slows down does so
for both. Medians in milliseconds, and the median of the tree's time over that of the chain's beside
it: for attention alone (all layers), and for the whole verification pass, logits included. The goal
is at most 1.05.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from foretell.attention.cpu import CpuAttention
from foretell.bench.environment import environment
from foretell.models.loader import LoadedModel, load
from foretell.runtime.batch import pack, view
from foretell.runtime.runner import Runtime
from foretell.spec.drafter import Rows
from foretell.spec.tree import ancestors, depths
from foretell.spec.tree_shape import DynamicShape, FixedShape, chain

PAGE = 16


def parents_of(shape: FixedShape) -> list[int]:
    """Parents in depth-first order, as trees are grown."""
    paths = [(), *sorted(shape.paths)]
    place = {path: at for at, path in enumerate(paths)}
    return [-1, *(place[path[:-1]] for path in paths[1:])]


def verification(parents: list[int], context: int) -> Rows:
    """The rows of a root at position ``context`` and its nodes."""
    size = len(parents)
    masks = ancestors(parents)
    return Rows(
        slots=[0] * size,
        tokens=[7 + node for node in range(size)],
        positions=[context + depth for depth in depths(parents)],
        cells=[context + node for node in range(size)],
        prefix=[context + 1] * size,
        ancestors=[0, *(mask & ~1 for mask in masks[1:])],
        base=[context] * size,
        outputs=list(range(size)),
    )


def prepare(target: LoadedModel, longest: int) -> Runtime:
    runtime = Runtime(target, CpuAttention(), max_num_seqs=1, max_model_len=longest, page_size=PAGE)
    num_pages = runtime.page_table.shape[1]
    runtime.allocate(num_pages, None)
    runtime.set_pages(0, torch.randperm(num_pages).tolist())
    assert runtime.kv is not None
    for keys, values in runtime.kv.layers["target"]:
        keys.normal_()
        values.normal_()
    return runtime


def attention_alone(runtime: Runtime, rows: Rows) -> Callable[[], None]:
    """Plan once, run once a layer, as a pass does."""
    assert runtime.kv is not None
    config, layers = runtime.target.config, runtime.kv.layers["target"]
    batch = view(pack(rows, runtime.page_table, PAGE), PAGE, runtime.device)
    q = torch.randn(len(rows), config.num_heads, config.head_dim)
    attention = CpuAttention()

    def run() -> None:
        attention.plan(batch.layout)
        for keys, values in layers:
            attention.run(q, keys, values, scale=config.head_dim**-0.5)

    return run


def in_turn(
    first: Callable[[], object], second: Callable[[], object], seconds: float
) -> tuple[float, float, float]:
    """Medians of both in milliseconds, and the median ratio of neighbours, second to first."""
    times: tuple[list[float], list[float]] = ([], [])
    for function in (first, second, first, second):
        function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for function, taken in zip((first, second), times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(1000 * (time.perf_counter() - start))
    ratios = [b / a for a, b in zip(*times, strict=True)]
    return statistics.median(times[0]), statistics.median(times[1]), statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each pair of columns")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    longest = max(args.contexts) + args.nodes + 1
    target = load(args.model, args.weights)
    runtime = prepare(target, longest)
    shapes = chain(args.nodes), DynamicShape(6, 4, args.nodes).fixed()
    parents = [parents_of(shape) for shape in shapes]
    assert len(parents[0]) == len(parents[1])

    table = Table(
        title=f"{args.model} {args.weights}, {args.nodes} nodes, ms ({args.threads} threads)"
    )
    for name in (
        "context",
        "attention: chain",
        "tree",
        "ratio",
        "whole pass: chain",
        "tree",
        "ratio",
    ):
        table.add_column(name, justify="right")
    for context in args.contexts:
        rows = [verification(p, context) for p in parents]
        one, other = (attention_alone(runtime, r) for r in rows)
        alone = in_turn(one, other, args.seconds)
        whole = in_turn(
            lambda r=rows[0]: runtime.forward_target(r),
            lambda r=rows[1]: runtime.forward_target(r),
            args.seconds,
        )
        table.add_row(
            str(context),
            *(f"{value:.2f}" for value in (*alone, *whole)),
        )
    console = Console()
    console.print(table)
    made_on = environment()
    console.print(f"{made_on['cpu']}, commit {made_on['commit']}", style="dim")


if __name__ == "__main__":
    main()
