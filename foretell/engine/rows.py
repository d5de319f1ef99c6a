"""A step's items and trees, laid out as rows: causal runs with trees hanging off their ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretell.engine.scheduler import Item
from foretell.sequence import Sequence
from foretell.spec.drafter import Rows
from foretell.spec.tree import TokenTree, ancestors, depths


@dataclass(frozen=True)
class Span:
    """Where one item's rows and outputs lie."""

    row: int
    """Its first row."""
    output: int
    """Output of the root; node i is at ``output + i``. Only if the run reaches the end."""
    num_nodes: int
    """Root included; 0 if the run does not reach the end."""
    prompt_outputs: list[tuple[int, int]]
    """(output, position) of prompt rows whose log-probabilities are wanted."""


def lay_out(
    items: list[Item], tree: TokenTree, wants_prompt: Callable[[Sequence], int | None]
) -> tuple[Rows, list[Span]]:
    """Rows for the target: first each item's known tokens, then its draft nodes.

    Args:
        tree: one tree for each item.
        wants_prompt: first position whose row must give prompt log-probabilities, or None.
    """
    rows = Rows([], [], [], [], [], [], [])
    spans: list[Span] = []
    for item, (tokens, parents) in zip(items, tree.lists(), strict=True):
        sequence, first = item.sequence, len(rows)
        start, end = sequence.num_computed, sequence.num_computed + item.num_run
        root = end - 1
        rows.tokens.extend(sequence.tokens[start:end])
        rows.positions.extend(range(start, end))
        rows.cells.extend(range(start, end))
        rows.prefix.extend(range(start + 1, end + 1))
        rows.ancestors.extend([0] * item.num_run)

        prompt_outputs: list[tuple[int, int]] = []
        wanted = wants_prompt(sequence)
        if wanted is not None:
            for position in range(max(wanted, start), min(end, sequence.num_prompt - 1)):
                prompt_outputs.append((len(rows.outputs), position))
                rows.outputs.append(first + position - start)

        output, num_nodes = len(rows.outputs), 0
        if item.reaches_end:
            num_nodes = len(tokens)
            rows.outputs.append(len(rows.tokens) - 1)
            if num_nodes > 1:
                rows.outputs.extend(range(len(rows.tokens), len(rows.tokens) + num_nodes - 1))
                rows.tokens.extend(tokens[1:])
                rows.positions.extend(root + depth for depth in depths(parents)[1:])
                rows.cells.extend(range(root + 1, root + num_nodes))
                rows.prefix.extend([root + 1] * (num_nodes - 1))
                rows.ancestors.extend(mask & ~1 for mask in ancestors(parents)[1:])
        added = len(rows.tokens) - first
        rows.slots.extend([sequence.slot] * added)
        rows.base.extend([root] * added)
        spans.append(Span(first, output, num_nodes, prompt_outputs))
    return rows, spans
