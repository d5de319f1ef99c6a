"""EAGLE: a decoder layer reads the target's hidden states and guesses the tokens behind them.

Li et al., *EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty* (2401.15077);
EAGLE-2 (2406.16858) grows another tree with the same weights.

A head's slot i pairs the feature of position i with token i + 1, so its tokens run one step ahead
of its features. `observe` runs every pair that became final with the target's own features, the
root's pair last, and keeps the logits and the feature that come out of it. From these `propose`
starts: the first draft token costs nothing, each further one a pass over the head's own feature,
in scratch cells that `observe` writes over. Its features drift from the target's: that is why all
that was accepted is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from foretell.config import SpeculationConfig, weight_format
from foretell.models.head_formats import LoadedHead, load_eagle
from foretell.models.hub import packaged_head, resolve
from foretell.models.loader import LoadedModel
from foretell.models.trainable import TrainableHead
from foretell.placed import put
from foretell.sequence import SamplingParams, Sequence
from foretell.spec.drafter import Ask, Commit, Drafter, DraftRuntime, Needs, run_rows
from foretell.spec.grow_tree import Frontier, first_tokens, frontier_rows, grow_tree
from foretell.spec.losses import judge
from foretell.spec.training import Loss, Rule, TrainingBatch
from foretell.spec.tree import TokenTree, roots
from foretell.spec.tree_shape import TreeOptions

_FILES = ("safetensors", "bin", "pt", "json")


@dataclass(frozen=True, kw_only=True)
class HeadOptions(TreeOptions):
    """Options of every scheme that loads a head."""

    model: str = ""
    """Directory or hub name of the head; by default the one that comes with foretell."""
    weights: str = ""
    """int8, bf16, f32 or int4; by default as the target."""
    draft_vocab: str = ""
    """File with a list of token ids, the only ones to propose; or how many of the head's own
    token_ranking.json. Empty is all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights:
            weight_format(self.weights)

    def find(self, method: str, target: Path, sizes: dict[str, int]) -> Path:
        """Where the head is: where an option says, else in this package.

        Args:
            target: where that is.
            sizes: of the target, see `ModelConfig.sizes`.

        Raises:
            ValueError: there is none.
        """
        if self.model:
            return resolve(self.model, head=True)
        own = packaged_head(method, sizes)
        if own is None:
            raise ValueError(
                f"{method} needs a head, and none comes with foretell for this model: "
                f"{method}:model=PATH or a hub name; foretell train makes one"
            )
        return own

    def files(self, method: str, target: Path, sizes: dict[str, int]) -> list[Path]:
        """What of it is read.

        Raises:
            ValueError: as `find`.
        """
        found, tokens = self.find(method, target, sizes), Path(self.draft_vocab)
        files = [file for kind in _FILES for file in sorted(found.glob(f"*.{kind}"))]
        return [*files, tokens] if tokens.is_file() else files

    def is_spread(self, k: int) -> bool:
        """Is the head spread over ranks, where there are some, as the target is? One that drafts
        single tokens runs once for each pass of the target. More would wait for all ranks once a
        token, and lies on rank 0 alone."""
        return self.shape(k).num_nodes == 1


@dataclass(eq=False)
class _Slot:
    """How far the head's KV reaches for the sequence in one slot."""

    sequence: Sequence
    filled: int  # pairs (feature i, token i + 1) that were run: 0 .. filled - 1


class Eagle(Drafter):
    """Chains and trees from a head over the target's last hidden states."""

    Options = HeadOptions
    options: HeadOptions
    rule = Rule(steps=3, decay=0.8, regression=0.1)
    one_token = True
    read: Callable[..., LoadedHead] = staticmethod(load_eagle)

    def __init__(self, config: SpeculationConfig, runtime: DraftRuntime) -> None:
        super().__init__(config, runtime)
        loaded = self.load(config, self.options, runtime.target)
        self.head, self.vocab, sizes = loaded.head, loaded.vocab, loaded.head.config
        self.shape = self.options.shape(config.k)
        self.needs = Needs(
            features=loaded.taps,
            kv=sizes.kv_group(loaded.kv_dtype),
            lookahead=1,
            nodes=self.shape.num_nodes,
            depth=self.shape.depth,
            max_positions=sizes.max_position_embeddings,
        )
        self._noise = partial(runtime.sampler_noise, tokens=self.vocab.ids)
        self._limit = sizes.max_position_embeddings
        self._slots: dict[int, _Slot] = {}
        size, device = runtime.max_num_seqs, runtime.device
        width = runtime.vocab_size if self.vocab.ids is None else len(self.vocab.ids)
        self._logits = torch.zeros(size, width, device=device)  # [slots, Vd]
        self._features = torch.zeros(size, sizes.hidden_size, device=device)  # [slots, H]

    @classmethod
    def load(
        cls, config: SpeculationConfig, options: HeadOptions, target: LoadedModel
    ) -> LoadedHead:
        """The head, or this rank's part of it."""
        path = options.find(config.method, target.path, target.config.sizes)
        ranks = target.model.ranks if options.is_spread(config.k) else None
        weights = weight_format(options.weights or target.weights)
        return cls.read(path, target, weights, options.draft_vocab, ranks)

    def warm(self) -> None:
        if self.options.is_chain:
            nobody = Sequence("warm", [0, 0], SamplingParams(temperature=0), seed=0, slot=0)
            self._chains(Ask([nobody], [1]), [1])

    def observe(self, commit: Commit) -> None:
        """Runs every pair that became final, all sequences at once; none past the head's limit."""
        commit = commit.before(self._limit)
        if not commit.sequences:
            return
        assert commit.features is not None
        ready: list[int] = []
        for sequence, start, tokens in zip(
            commit.sequences, commit.starts, commit.tokens, strict=True
        ):
            slot = self._slots.get(sequence.slot)
            if slot is None or slot.sequence is not sequence or slot.filled != start:
                # What comes before are shared pages, whose pairs were written with them.
                slot = self._slots[sequence.slot] = _Slot(sequence, start)
            slot.filled += len(tokens) - 1
            # Nobody drafts behind an answer's end: its pairs are for those who share its pages.
            ready.append(slot.filled == len(sequence.tokens) - 1 and not sequence.finished)
        rows = run_rows(commit.slots, commit.starts, [tokens[1:] for tokens in commit.tokens])
        rows.outputs[:] = [r for r, wanted in zip(rows.outputs, ready, strict=True) if wanted]
        features = self.head.feature(commit.features)  # [sum T, H]
        logits, following = self.runtime.forward_head(self.head, rows, features)
        if carried := [rows.slots[r] for r in rows.outputs]:
            self._logits[carried], self._features[carried] = logits, following

    def propose(self, ask: Ask) -> TokenTree:
        lengths = [len(sequence.tokens) for sequence in ask.sequences]
        budgets = [
            budget if self._ready(sequence) else 0
            for sequence, budget in zip(ask.sequences, ask.budgets, strict=True)
        ]
        if not any(budgets):
            return roots(ask.roots)
        if self.options.is_chain and (drafted := self._chains(ask, budgets)):
            return drafted
        carried = [max(sequence.slot, 0) for sequence in ask.sequences]
        slots = [sequence.slot for sequence in ask.sequences]
        # A token pairs with the feature of the place before it, so the root's cell is one less.
        base = [length - 2 for length in lengths]
        features = self._features[carried]  # [B, H], then those of the last frontier

        def step(frontier: Frontier) -> Tensor:
            nonlocal features
            rows, above = frontier_rows(slots, base, frontier), features[frontier.parents]
            logits, features = self.runtime.forward_head(self.head, rows, above)
            return logits

        first = self._logits[carried]  # [B, Vd]
        return grow_tree(ask, budgets, first, step, self.shape, self._noise, self.vocab)

    def first(self, sequences: list[Sequence]) -> Tensor:
        """As `propose` with one node."""
        device = self._logits.device
        carried = self._logits[put([sequence.slot for sequence in sequences], device)]  # [B, Vd]
        tokens = first_tokens(sequences, carried, self._noise, self.vocab)
        unready = [not self._ready(sequence) for sequence in sequences]
        return tokens.masked_fill(put(unready, device), -1)

    def follow(
        self, sequences: list[Sequence], tokens: Tensor, features: Tensor, outputs: Tensor
    ) -> None:
        """A row's token is what the target drew there, accepted draft or correction alike: the
        target's rows, shifted by one."""
        self.head.rope.reserve(self.runtime.max_model_len + 1, whole=True)
        given = self.head.feature(features)  # [R, H]
        logits, following = self.runtime.follow_target(self.head, tokens, given, outputs)
        carried = put([sequence.slot for sequence in sequences], tokens.device)
        self._logits[carried], self._features[carried] = logits, following

    def followed(self, commit: Commit) -> None:
        for sequence, start, tokens in zip(
            commit.sequences, commit.starts, commit.tokens, strict=True
        ):
            slot = self._slots.get(sequence.slot)
            if slot is None or slot.sequence is not sequence:
                # Its prompt's pages were shared but for the root: nobody had to show it before.
                slot = self._slots[sequence.slot] = _Slot(sequence, start)
            if slot.filled == start:
                slot.filled += len(tokens) - 1

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    @staticmethod
    def loss(head: TrainableHead, batch: TrainingBatch, rule: Rule) -> Loss:
        """The target's law and its next feature, at every step of a draft: the paper's loss, and
        unrolled as HASS (2408.15766) does, since the head drafts on its own features."""
        return judge(head.unroll(batch, rule.steps), rule, rule.steps)

    def _chains(self, ask: Ask, budgets: list[int]) -> TokenTree | None:
        """All levels in one go, where the runtime can."""
        most = self.shape.depth
        lengths = [min(pair[0], pair[1], most) for pair in zip(budgets, ask.depths, strict=True)]
        if not any(lengths):
            return roots(ask.roots)
        return self.runtime.draft_chains(
            self.head, ask, lengths, self._logits, self._features, self.vocab
        )

    def _ready(self, sequence: Sequence) -> bool:
        """Is what was carried over behind this sequence's root?"""
        slot = self._slots.get(sequence.slot)
        return (
            slot is not None
            and slot.sequence is sequence
            and slot.filled == len(sequence.tokens) - 1
        )
