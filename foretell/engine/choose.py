"""From logits to outcomes: shape each node's row, draw the target's token there, verify."""

# pyright: reportUnknownMemberType=false
# (torch's tolist is untyped)

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from foretell.config import Verification
from foretell.engine.rows import Span
from foretell.engine.scheduler import Item
from foretell.runtime.sampling import (
    History,
    Shape,
    ShapeRow,
    draw,
    law,
    log_probs,
    reason,
    shape_logits,
    tree_rows,
)
from foretell.sequence import Logprob, Sequence
from foretell.spec.noise import uniform
from foretell.spec.tree import TokenTree, depths
from foretell.spec.verify import Outcome, verify

COINS = 1
"""Noise stream of the coins that decide about drafts; stream 0 is the draw of tokens itself."""


@dataclass(frozen=True)
class Choice:
    """What the target said about a step's trees."""

    outcomes: list[Outcome | None]  # one an item, None where the run does not reach the end
    errors: dict[int, str]  # by item, where no token can be drawn
    logits: Tensor  # [O, V] float32, as the model gave them
    spans: list[Span]
    trees: list[tuple[list[int], list[int]] | None]  # tokens and parents, one an item

    def logprob(self, i: int, step: int, token: int, top: int) -> Logprob:
        """Of the token that item i got at its ``step``-th place: the row of the node before it."""
        outcome = self.outcomes[i]
        assert outcome is not None
        row = self.spans[i].output + [0, *outcome.path][step]
        return log_probs(self.logits[row : row + 1], [token], [top])[0]


@dataclass
class Draws:
    """What can be said of a step's draws before its logits are there."""

    items: list[Item]
    spans: list[Span]
    tree: TokenTree  # one for each item that reaches its end
    reached: list[int]  # those items
    rows: list[ShapeRow]  # of their nodes, one after another
    picked: list[int]  # the nodes' outputs
    starts: list[int]  # each item's first place among them
    greedy: list[bool]
    seeds: list[int]
    positions: list[int]


def prepare(
    items: list[Item], spans: list[Span], tree: TokenTree, end_ids: frozenset[int]
) -> Draws:
    """Settings, histories and grammar masks of each node, while the pass is under way.

    Args:
        tree: one tree for each item.
        end_ids: the model's own end-of-text ids.
    """
    reached = [i for i, item in enumerate(items) if item.reaches_end]
    if len(reached) < len(items):
        probs = None if tree.probs is None else tree.probs[reached]
        tree = TokenTree([tree.lists[i] for i in reached], probs)
    draws = Draws(items, spans, tree, reached, [], [], [], [], [], [])
    for i, (tokens, parents) in zip(reached, tree.lists, strict=True):
        sequence, size = items[i].sequence, spans[i].num_nodes
        draws.starts.append(len(draws.rows))
        draws.rows.extend(tree_rows(shape_of(sequence, end_ids), tokens, parents))
        draws.picked.extend(range(spans[i].output, spans[i].output + size))
        draws.greedy.extend([sequence.params.greedy] * size)
        draws.seeds.extend([sequence.seed] * size)
        draws.positions.extend(len(sequence.tokens) + depth for depth in depths(parents))
    return draws


def draw_nodes(draws: Draws, logits: Tensor) -> Tensor:
    """The target's own draw at each node [R] int64, on the device; -1 where there is none.

    Args:
        logits: [O, V] float32, rows as the spans say.
    """
    return draw(_shaped(draws, logits), draws.greedy, draws.seeds, draws.positions)


def _shaped(draws: Draws, logits: Tensor) -> Tensor:
    picked = draws.picked
    return shape_logits(logits if len(picked) == len(logits) else logits[picked], draws.rows)


def choose(
    rule: Verification,
    draws: Draws,
    logits: Tensor,
    threshold: float,
    drawn: Tensor | None = None,
) -> Choice:
    """Draws and verifies.

    Args:
        logits: [O, V] float32, rows as the spans say.
        threshold: of the lossy rules.
        drawn: what `draw_nodes` gave, where it was called before.
    """
    items, spans, tree, reached = draws.items, draws.spans, draws.tree, draws.reached
    outcomes: list[Outcome | None] = [None] * len(items)
    errors: dict[int, str] = {}
    trees: list[tuple[list[int], list[int]] | None] = [None] * len(items)
    for i, each in zip(reached, tree.lists, strict=True):
        trees[i] = each
    if not reached:
        return Choice(outcomes, errors, logits, spans, trees)
    shaped = _shaped(draws, logits) if drawn is None else None  # [R, V]
    span = [slice(at, at + spans[i].num_nodes) for at, i in zip(draws.starts, reached, strict=True)]
    choices = p = coins = None
    if shaped is not None and rule in ("coupled", "typical", "threshold"):
        drawn = draw(shaped, draws.greedy, draws.seeds, draws.positions)
    if drawn is not None:
        listed = cast(list[int], drawn.tolist())
        choices = [listed[part] for part in span]
    if shaped is not None and rule != "coupled":
        laws = law(shaped, draws.rows)  # [R, V]
        p = [laws[part] for part in span]
    if rule in ("rejection", "block"):
        width = tree.width
        roots = [len(items[i].sequence.tokens) - 1 for i in reached]
        keys = [items[i].sequence.seed for i in reached]
        coins = uniform(keys, roots, COINS, width)  # one verification a root position
    found = verify(rule, tree, choices=choices, p=p, coins=coins, threshold=threshold)

    for at, i, outcome in zip(draws.starts, reached, found, strict=True):
        outcomes[i] = outcome
        if outcome.failed:
            grammar = items[i].sequence.grammar
            row = at + (outcome.path[-1] if outcome.path else 0)
            shaped = _shaped(draws, logits) if shaped is None else shaped
            errors[i] = (grammar and grammar.problem) or reason(shaped[row])
    return Choice(outcomes, errors, logits, spans, trees)


def shape_of(sequence: Sequence, end_ids: frozenset[int]) -> Shape:
    """A sequence's shape, made at its first draw."""
    if sequence.shape is None:
        ends = frozenset[int]() if sequence.params.ignore_eos else end_ids
        sequence.shape = Shape(
            sequence.params,
            History(sequence.tokens[: sequence.num_prompt], sequence.output),
            tuple(ends | frozenset(sequence.params.stop_token_ids)),
            sequence.grammar,
        )
    return sequence.shape


def prompt_logprobs(item: Item, span: Span, logits: Tensor) -> None:
    """Adds the log-probabilities of the prompt tokens that this step's rows speak about."""
    sequence, top = item.sequence, item.sequence.params.prompt_logprobs
    if top is None:
        return
    if not sequence.prompt_logprobs:
        sequence.prompt_logprobs.append(None)  # nothing comes before the first token
    if span.prompt_outputs:
        rows = torch.tensor([output for output, _ in span.prompt_outputs])
        tokens = [sequence.tokens[position + 1] for _, position in span.prompt_outputs]
        sequence.prompt_logprobs.extend(log_probs(logits[rows], tokens, [top] * len(tokens)))
