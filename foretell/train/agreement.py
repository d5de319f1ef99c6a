"""Does the engine compute what was trained? Logits of a head's first guess, from both, on the
engine's own hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foretell.drafters.medusa import Medusa
from foretell.llm import LLM
from foretell.models.frozen import FrozenTarget
from foretell.models.head import Head
from foretell.models.trainable_files import open_head
from foretell.sequence import SamplingParams
from foretell.spec.drafter import Commit, Rows
from foretell.spec.training import TrainingBatch


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far the engine's logits are from the trainer's."""

    weights: str
    """The engine's format; only f32 can be exact."""
    positions: int = 0
    difference: float = 0.0
    """Largest, absolute."""
    typical: float = 0.0
    """Root of the mean square."""
    spread: float = 0.0
    """Standard deviation of the trainer's logits, for comparison."""
    same_guess: float = 0.0
    """Share of positions whose likeliest token is the same."""
    not_compared: str = ""
    """Why there is nothing to compare."""

    def __str__(self) -> str:
        if self.not_compared:
            return f"Trainer and engine were not compared: {self.not_compared}"
        return (
            f"Trainer and engine ({self.weights}) on the same hidden states, {self.positions} "
            f"positions: logits differ by {self.typical:.2g}, at most {self.difference:.2g} "
            f"(their spread is {self.spread:.2g}); same first guess {self.same_guess:.1%}"
        )


@torch.no_grad()
def agreement(llm: LLM, path: Path, text: list[int]) -> Agreement:
    """Runs a text through the engine and what its drafter saw through the trainer's head.

    Args:
        llm: an idle engine whose drafter has loaded the head at ``path``; without a prefix cache.
        text: at least 3 token ids.

    Raises:
        ValueError: the engine cannot take the text.
    """
    assert llm.config.speculation is not None
    weights = llm.config.speculation.options.get("weights") or llm.target.weights
    seen = Seen()
    with seen.watching(llm):
        llm.generate([text], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    if llm.engine.metrics.drafter_errors:
        reason = f"the drafter failed ({llm.engine.metrics.last_drafter_error})"
        return Agreement(weights=weights, not_compared=reason)
    try:
        target = FrozenTarget.open(str(llm.target.path))
        head = open_head(llm.config.speculation.method, path, target)
    except ValueError as error:
        return Agreement(weights=weights, not_compared=str(error))
    batch = seen.batch(llm.target.config.hidden_size)
    differences, guesses, spreads = [], [], []
    for engine, step in zip(seen.logits(), head.unroll(batch, 1), strict=False):
        own = step.logits  # [M, Vd] of the pairs 0 .. M - 1: what they guess is in the text
        engine = engine[: len(own), : own.shape[1]]
        differences.append((engine - own).flatten())
        guesses.append(engine.argmax(-1) == own.argmax(-1))
        spreads.append(own.std())
    far, same = torch.cat(differences), torch.cat(guesses).float()
    return Agreement(
        weights=weights,
        positions=len(same),
        difference=float(far.abs().max()),
        typical=float(far.square().mean().sqrt()),
        spread=float(torch.stack(spreads).mean()),
        same_guess=float(same.mean()),
    )


class Seen:
    """What the drafter of an engine was shown of one text, and what it made of it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []  # T, and the one behind them
        self._features: list[Tensor] = []  # [T, taps * H] in parts
        self._logits: list[Tensor] = []  # [T, Vd] in parts, of a head with layers
        self._medusa: list[list[Tensor]] = []  # by head, in parts

    @contextmanager
    def watching(self, llm: LLM) -> Iterator[None]:
        """Listens to the engine's drafter; for one sequence at a time."""
        drafter, runtime = llm.engine.drafter, llm.engine.runtime
        assert drafter is not None
        observe, forward_head = drafter.observe, runtime.forward_head

        def every_row(head: Head, rows: Rows, features: Tensor) -> tuple[Tensor, Tensor]:
            wanted = list(rows.outputs)
            rows.outputs[:] = range(len(rows))
            logits, following = forward_head(head, rows, features)
            rows.outputs[:] = wanted
            self._logits.append(logits.clone())
            return logits[wanted], following[wanted]

        def watch(commit: Commit) -> None:
            assert commit.features is not None
            (tokens,) = commit.tokens
            self.tokens[-1:] = tokens
            self._features.append(commit.features.clone())
            if isinstance(drafter, Medusa):
                self._medusa.append([head(commit.features) for head in drafter.heads])
            runtime.forward_head = every_row
            try:
                observe(commit)
            finally:
                runtime.forward_head = forward_head

        drafter.observe = watch
        try:
            yield
        finally:
            drafter.observe = observe

    def logits(self) -> list[Tensor]:
        """[T, Vd] for each head of Medusa, else of the one head."""
        if self._medusa:
            return [torch.cat(list(parts)) for parts in zip(*self._medusa, strict=True)]
        return [torch.cat(self._logits)]

    def batch(self, hidden_size: int) -> TrainingBatch:
        """The same text as the trainer has it, [1, T + 1]: nobody reads the last features."""
        features = torch.cat(self._features)
        features = torch.cat([features, torch.zeros_like(features[:1])])[None]
        size = len(self.tokens)
        assert features.shape[1] == size
        return TrainingBatch(
            tokens=torch.tensor([self.tokens]),
            documents=torch.zeros(1, size, dtype=torch.int64),
            positions=torch.arange(size)[None],
            wanted=torch.ones(1, size, dtype=torch.bool),
            features=features,
            hidden=torch.zeros(1, size, hidden_size),
        )
