"""A step's items and trees, laid out as rows: causal runs with trees hanging off their ends."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from foretell.engine.scheduler import Item
from foretell.sequence import FinishReason, Sequence
from foretell.spec.drafter import Commit, Rows
from foretell.spec.tree import TokenTree, ancestors, depths
from foretell.spec.verify import Outcome


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


def wants_prompt(sequence: Sequence) -> int | None:
    """First position whose row must give prompt log-probabilities, None for no such row."""
    if sequence.params.prompt_logprobs is None:
        return None
    return max(len(sequence.prompt_logprobs) - 1, 0)


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
    for item, (tokens, parents) in zip(items, tree.lists, strict=True):
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


def final(
    items: list[Item],
    spans: list[Span],
    starts: list[int],
    outcomes: SequenceOf[Outcome | None],
    features: Tensor | None,
) -> Commit | None:
    """Rows that became final, for drafters: those of finished sequences included, as their pages
    may serve others. None where there are none.

    Args:
        starts: each sequence's `num_computed` before the step.
        features: [R, F] of all rows.
    """
    seen = [
        i
        for i, item in enumerate(items)
        if item.sequence.speculate and item.sequence.finish_reason != FinishReason.ERROR
    ]
    if not seen:
        return None
    count = sum(items[i].sequence.num_computed - starts[i] for i in seen)
    if features is not None and count < len(features):  # ascending: else they are all
        rows: list[int] = []
        for i in seen:
            accepted = items[i].sequence.num_computed - starts[i] - items[i].num_run
            rows.extend(range(spans[i].row, spans[i].row + items[i].num_run))
            if accepted:
                root, outcome = spans[i].row + items[i].num_run - 1, outcomes[i]
                assert outcome is not None
                rows.extend(root + node for node in outcome.path[:accepted])
        features = features[rows]
    return Commit(
        [items[i].sequence for i in seen],
        [starts[i] for i in seen],
        [items[i].sequence.tokens[starts[i] : items[i].sequence.num_computed + 1] for i in seen],
        features,  # [sum T, F]
    )
