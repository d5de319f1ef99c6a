"""The one interface that every scheme speaks, and the little it may ask of the engine.

A drafter guesses; it can be wrong, slow or broken, and never changes the text. It sees committed
tokens only: never a rejected one, never a page table, never an index into logits.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from foretell.sequence import Sequence
from foretell.spec.draft_vocab import DraftVocab
from foretell.spec.options import read_options
from foretell.spec.seats import ANYTHING, Least
from foretell.spec.training import Loss, Rule, TrainingBatch
from foretell.spec.tree import TokenTree

if TYPE_CHECKING:
    from foretell.config import SpeculationConfig


@dataclass(frozen=True, kw_only=True)
class KVGroup:
    """A model's layers in the shared page space."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    values: bool = True
    """False where the keys are the values too, and kept once (latent attention)."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a scheme wants from the engine, declared as data."""

    features: tuple[int, ...] = ()
    """Target layers whose output hidden states `observe` gets; -1 is the final norm's output."""
    kv: KVGroup | None = None
    """Own layers over the shared pages."""
    lookahead: int = 0
    """1 where the KV entry at position t depends on token t + 1 (feature drafters)."""
    max_nodes: int = 63
    """Most draft tokens a sequence and step, the root not counted."""
    nodes: int | None = None
    """Draft tokens for each step, where the scheme's own options decide about that; else k."""
    depth: int | None = None
    """Longest path of its trees; None where that is as long as they have nodes (a chain)."""
    prediction: bool = False
    """Does it draft from `Sequence.prediction`?"""
    max_positions: int | None = None
    """The drafter's own context limit, where it is shorter than the target's."""


@dataclass(frozen=True)
class Rows:
    """Tokens to run through a model, flat over the sequences of a step. All on the host.

    A row sees the first ``prefix`` positions of its sequence unmasked, and of the scratch cells
    behind ``base`` those that ``ancestors`` has a bit for (bit j: the cell ``base + j``).
    """

    slots: list[int]  # [R] which sequence
    tokens: list[int]  # [R]
    positions: list[int]  # [R] place in the text: what RoPE turns by
    cells: list[int]  # [R] place in the page table where K and V are written
    prefix: list[int]  # [R] keys seen unmasked: positions 0 .. prefix - 1
    ancestors: list[int]  # [R] 64-bit word; 0 for rows of a causal run
    base: list[int]  # [R] cell of bit 0, the root
    outputs: list[int] = field(default_factory=list[int])  # [O] rows whose logits are wanted
    late: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]])
    """Rows [L] int64 whose tokens [L] only the device knows."""

    def __len__(self) -> int:
        return len(self.tokens)


def run_rows(
    slots: SequenceOf[int], starts: SequenceOf[int], tokens: SequenceOf[SequenceOf[int]]
) -> Rows:
    """Causal runs: for each sequence, ``tokens[b]`` at positions ``starts[b]`` onwards; the last
    row of each run is an output."""
    rows = Rows([], [], [], [], [], [], [])
    for slot, start, run in zip(slots, starts, tokens, strict=True):
        span = range(start, start + len(run))
        rows.slots.extend([slot] * len(run))
        rows.tokens.extend(run)
        rows.positions.extend(span)
        rows.cells.extend(span)
        rows.prefix.extend(position + 1 for position in span)
        rows.ancestors.extend([0] * len(run))
        rows.base.extend([0] * len(run))
        if run:
            rows.outputs.append(len(rows.tokens) - 1)
    return rows


class DraftRuntime(Protocol):
    """The way from a drafter to the device. Implemented by the engine's runtime."""

    vocab_size: int
    max_num_seqs: int
    max_model_len: int
    device: torch.device
    target: Any
    """The target model, for schemes that share its embedding, lm_head or weights."""

    def forward(self, model: Any, rows: Rows) -> Tensor:
        """Runs a drafter's model over its own KV layers.

        Returns:
            Logits [O, V] float32 of ``rows.outputs``, in that order.
        """
        ...

    def forward_head(self, head: Any, rows: Rows, features: Tensor) -> tuple[Tensor, Tensor]:
        """Runs a head that reads hidden states over its own KV layers.

        Args:
            features: [R, H] float32, one for each row.

        Returns:
            Logits [O, Vd] float32 of ``rows.outputs`` and the features [O, H] that follow them.
        """
        ...

    def draft_chains(
        self, head: Any, ask: Ask, lengths: SequenceOf[int], logits: Tensor, features: Tensor,
        vocab: DraftVocab,
    ) -> TokenTree | None:  # fmt: skip
        """Grows chains from a head in one go, where that can be had; else None.

        Args:
            lengths: [B] tokens at most, the drafter's own limits included.
            logits: [slots, Vd] float32, what the head says after each root.
            features: [slots, H] float32, what follows each root.
            vocab: which tokens the columns of logits mean.

        Returns:
            What `grow_tree` would make of `forward_head`, level by level.
        """
        ...

    def follow_target(
        self, head: Any, tokens: Tensor, features: Tensor, outputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Runs a head on the rows of the target's last pass: the same cells, positions and plan.

        Args:
            tokens: [R] int64, for each row the token behind it.
            features: [R, H] float32.
            outputs: [O] int64, rows whose logits and features are wanted.

        Returns:
            As `forward_head`.
        """
        ...

    def sampler_noise(
        self, seeds: SequenceOf[int], positions: SequenceOf[int], tokens: Tensor | None = None
    ) -> Tensor:
        """[R, V] float32 Gumbel noise, the same that the target's draw uses at that position; of
        these tokens [Vd] int64 only if given."""
        ...


@dataclass(frozen=True)
class Commit:
    """Rows that became final in one step, in order, grouped by sequence."""

    sequences: list[Sequence]  # [B]
    starts: list[int]  # [B] position of each sequence's first row here
    tokens: list[list[int]]  # [B][T + 1] the T final tokens and the one after them (the new root)
    features: Tensor | None = None  # [sum T, len(needs.features) * H], as declared in Needs

    @property
    def slots(self) -> list[int]:
        return [sequence.slot for sequence in self.sequences]

    def before(self, limit: int) -> Commit:
        """Its rows at positions below ``limit``, sequences without any left out."""
        counts = [len(tokens) - 1 for tokens in self.tokens]
        kept = [min(n, limit - at) for n, at in zip(counts, self.starts, strict=True)]
        if kept == counts:
            return self
        places = [b for b, count in enumerate(kept) if count > 0]
        rows: list[int] = []
        for first, count in zip(accumulate(counts, initial=0), kept, strict=False):
            rows.extend(range(first, first + count))
        return Commit(
            [self.sequences[b] for b in places],
            [self.starts[b] for b in places],
            [self.tokens[b][: kept[b] + 1] for b in places],
            None if self.features is None else self.features[rows],
        )


@dataclass(frozen=True)
class Ask:
    """A request for drafts: one tree for each sequence. Near an answer's end trees are limited in
    depth rather than in nodes; whoever does not look at ``depths`` only wastes work, for the engine
    cuts off what is deeper."""

    sequences: list[Sequence]  # [B] the root is tokens[-1], at position len(tokens) - 1
    budgets: list[int]  # [B] draft tokens at most, 0 means only the root
    sample: bool = False
    """Whether drafts may be sampled (`rejection`, `block`) and their `probs` are wanted."""
    depths: list[int] = field(default_factory=list[int])
    """[B] longest useful path, the root not counted; as deep as ``budgets`` if not given."""
    least: list[Least] = field(default_factory=list[Least])
    """[B] how likely its nodes should be, by the draft's own lights; anything will do if not given.
    For drafts that are a function of the text: what is drawn is not dropped for what it is."""

    def __post_init__(self) -> None:
        if not self.depths:
            object.__setattr__(self, "depths", list(self.budgets))
        if not self.least:
            object.__setattr__(self, "least", [ANYTHING] * len(self.budgets))

    @property
    def lengths(self) -> list[int]:
        """[B] longest useful chain."""
        return [min(pair) for pair in zip(self.budgets, self.depths, strict=True)]

    @property
    def roots(self) -> list[int]:
        return [sequence.tokens[-1] for sequence in self.sequences]


class Drafter:
    """A scheme. A new one is one file in `foretell.drafters` with one subclass of this.

    Args:
        config: the scheme's name, k and its options.
        runtime: the way to the device.

    Raises:
        ValueError: an option that `Options` lacks, or a value it does not take.
    """

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """The scheme's own options with their defaults; a subclass declares its own."""

    needs: Needs = Needs()
    options: Any
    rule: Rule = Rule()
    """How its heads are trained where nothing else is said."""

    def __init__(self, config: SpeculationConfig, runtime: DraftRuntime) -> None:
        self.config = config
        self.options = read_options(self.Options, config.options, config.method)
        self.runtime = runtime

    def warm(self) -> None:
        """Compiles what the target's pass has not: slot 0 has a page."""

    def observe(self, commit: Commit) -> None:
        """Takes in every row that became final, each once and in order: after the target's pass, or
        later with others, but always before drafts are wanted for its sequence."""

    def propose(self, ask: Ask) -> TokenTree:
        """Guesses how each sequence goes on. The only mandatory method.

        Returns:
            Trees whose node 0 is the root, with at most ``ask.budgets[b]`` nodes besides it.
        """
        raise NotImplementedError

    one_token: bool = False
    """Can it draft single tokens without the host, by the next three methods?"""

    def first(self, sequences: list[Sequence]) -> Tensor:
        """`propose` for one token each, left on the device: [B] int64, -1 for none."""
        raise NotImplementedError

    def follow(
        self, sequences: list[Sequence], tokens: Tensor, features: Tensor, outputs: Tensor
    ) -> None:
        """`observe`, on the rows of the target's pass and before the host knows what it accepted:
        rows behind ``outputs`` are of no worth, and written over in the next step.

        Args:
            tokens: [R] int64, what the target drew behind each row; -1 where there is nothing.
            features: [R, F] of all rows, as declared in `needs`.
            outputs: [B] int64, each sequence's last accepted row.
        """
        raise NotImplementedError

    def followed(self, commit: Commit) -> None:
        """What `follow` ran of worth; its features are left out."""
        raise NotImplementedError

    def forget(self, slots: list[int]) -> None:
        """Sequences left these slots (finished, aborted, preempted): drop what is kept of them."""

    @staticmethod
    def loss(head: Any, batch: TrainingBatch, rule: Rule) -> Loss:
        """How far off a trainable head is over a batch: for schemes that have heads to train.

        Args:
            head: a `models.trainable` head of this scheme.
        """
        raise NotImplementedError


def merge_needs(drafters: SequenceOf[Drafter]) -> Needs:
    """What several schemes together want from the engine.

    Raises:
        ValueError: two of them keep KV of their own.
    """
    with_kv = [drafter for drafter in drafters if drafter.needs.kv]
    if len(with_kv) > 1:
        names = " and ".join(drafter.config.method for drafter in with_kv)
        raise ValueError(f"{names} both keep KV of their own: load one of them")
    kv: KVGroup | None = with_kv[0].needs.kv if with_kv else None
    layers = {layer: None for drafter in drafters for layer in drafter.needs.features}
    return Needs(
        features=tuple(layers),
        kv=kv,
        lookahead=max(drafter.needs.lookahead for drafter in drafters),
        prediction=any(drafter.needs.prediction for drafter in drafters),
    )
