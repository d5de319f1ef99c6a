"""The schedule of single drafted tokens: the host is not asked between a pass and the head's next.

The draft token, what the target drew behind root and draft, and whether the two agree stay on the
device; the head runs on the target's own rows while the host reads what was accepted, commits and
schedules. A rejected draft's row costs a row, and its cells are written over in the next step.

Requests that need the host in between take the ordinary way, and so does the whole step: another
rule than `coupled`, longer drafts, tokens forced by a grammar, prompts in the batch, and whatever
looks at the draft token itself or at the number of tokens that pass a filter (penalties, bans and
bias, grammars, minimum length, top-k, top-p). What may end an answer (stop strings, end-of-text)
does not: the head then ran for nothing.
"""

# pyright: reportUnknownMemberType=false
# (torch's tolist is untyped)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from foretell.engine.choose import Choice, Draws, choose, draw_nodes, shape_of
from foretell.engine.device import Device
from foretell.engine.drafting import Drafting
from foretell.engine.rows import Span
from foretell.engine.schedule import Schedule
from foretell.engine.scheduler import Item
from foretell.placed import put, told
from foretell.runtime.runner import Output
from foretell.runtime.stream import Work
from foretell.sequence import Sequence
from foretell.spec.drafter import Rows
from foretell.spec.tree import TokenTree, chains


def scheme_for(
    drafting: Drafting, items: list[Item], goes_on: Callable[[Sequence], bool], ends: frozenset[int]
) -> int | None:
    """Which scheme may draft these items' single tokens in this way; None for the ordinary way.
    Where there are budgets there are no prompts. Who has none, and goes on, is to be shown what
    becomes final by the host; who ends is never asked about again.

    Args:
        goes_on: whether a sequence may go on behind one token more.
        ends: the model's own end-of-text ids.
    """
    schemes = {item.scheme for item in items if item.budget}
    if len(schemes) != 1 or drafting.sampled:
        return None
    [m] = schemes
    for item in items:
        sequence, params = item.sequence, item.sequence.params
        if (
            (item.budget != 1 and goes_on(sequence))
            or item.budget > 1
            or item.forced
            or item.instead
            or params.top_k
            or params.top_p < 1
            or shape_of(sequence, ends).has_edits
        ):
            return None
    return m if drafting.drafters[m].one_token else None


class OneToken(Schedule):
    """One step in this way.

    Args:
        m: the scheme that drafts.
    """

    def __init__(self, device: Device, items: list[Item], drafting: Drafting, m: int) -> None:
        super().__init__(device, items)
        self.drafting, self.m, self.followed = drafting, m, m
        self.sequences = [item.sequence for item in items]

    def draft(self) -> TokenTree:
        """Trees whose draft tokens only the device knows."""
        if any(work.name != "head" for work in self.device.pending):
            self.device.settle()  # it reads the page tables
        self.set_pages()
        budgets = [item.budget for item in self.items]
        self.drafted = self.device.submit(
            "draft", lambda: self.drafting.first(self.m, self.sequences, budgets)
        )
        return self._tree([0] * len(self.items))

    def _tree(self, tokens: list[int]) -> TokenTree:
        drafts = [
            [token] if item.budget and token >= 0 else []
            for item, token in zip(self.items, tokens, strict=True)
        ]
        return chains([sequence.tokens[-1] for sequence in self.sequences], drafts)

    def target(self, rows: Rows, spans: list[Span]) -> Work[Output]:
        """The target's pass over roots and drafts."""
        runtime, where = self.device.runtime, self.device.runtime.device
        self._row = put([span.row for span in spans], where)  # [B]
        self._has = put([item.budget > 0 for item in self.items], where)  # [B]
        # As numbers: how many a mask picks the host would have to ask the device.
        which = [i for i, item in enumerate(self.items) if item.budget]
        drafted = put(which, where, torch.int64)
        runtime.prepare(rows)

        def run() -> Output:
            rows.late.append((self._row[drafted] + 1, self.drafted.value()[drafted]))
            return runtime.forward_target(rows)

        return self.device.submit("target", run)

    def draw(self, draws: Draws, target: Work[Output]) -> None:
        """The target's own tokens behind all rows [R], and then the head's pass."""

        def sample() -> tuple[Tensor, Tensor, Tensor]:
            drawn = draw_nodes(draws, target.value().logits)  # [R]
            return drawn, told(drawn), told(self.drafted.value())

        drawing = self.device.submit("sample", sample)

        def follow() -> None:
            features = target.value().features
            assert features is not None
            drawn = drawing.value()[0]
            accepted = (drawn[self._row] == self.drafted.value()) & self._has  # [B]
            self.drafting.follow(self.m, self.sequences, drawn, features, self._row + accepted)

        self._draws, self._drawing = draws, drawing
        self.device.pending.append(self.device.submit("head", follow))

    def choice(self, target: Output) -> Choice:
        """What the host learns, while the head runs; draft tokens are known now."""
        _, drawn, drafted = self.device.wait(self._drawing)
        tokens = cast(list[int], drafted.tolist())
        draws = replace(self._draws, tree=self._tree(tokens))
        return choose("coupled", draws, target.logits, 1.0, drawn)
