"""Draft model: a smaller model with the target's vocabulary guesses ahead, token by token.

Leviathan et al., *Fast Inference from Transformers via Speculative Decoding* (2211.17192); Chen et
al. (2302.01318). Without ``model`` it is the target itself with coarser weights.

Its KV layers lie in the target's pages. `observe` runs what was committed, the new root included,
and keeps the logits behind it: the first draft token comes from them, so k tokens cost k draft
passes in all. Positions past the committed ones are scratch that the next round writes over:
nothing is ever rolled back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretell.config import SpeculationConfig, weight_format
from foretell.models.hub import resolve
from foretell.models.loader import LoadedModel, load
from foretell.models.tokenizer import check_same_vocabulary
from foretell.sequence import Sequence
from foretell.spec.draft_vocab import DraftVocab
from foretell.spec.drafter import Ask, Commit, Drafter, DraftRuntime, Needs, Rows, run_rows
from foretell.spec.grow_tree import Frontier, frontier_rows, grow_tree
from foretell.spec.tree import TokenTree, roots
from foretell.spec.tree_shape import TreeOptions


@dataclass(eq=False)
class _Slot:
    """How far the draft's KV reaches for the sequence in one slot."""

    sequence: Sequence
    filled: int  # positions with KV of committed tokens: 0 .. filled - 1
    scratch: list[int] = field(default_factory=list[int])  # tokens run as drafts from `filled` on
    ready: bool = False  # the carried logits follow token filled - 1, the root


class DraftModel(Drafter):
    """Chains and trees from any model with the same vocabulary."""

    @dataclass(frozen=True, kw_only=True)
    class Options(TreeOptions):
        model: str = ""
        """Short name, hub name, directory or .gguf file; empty is the target's own weights."""
        weights: str = ""
        """int8, bf16, f32 or int4; target shares the target's weights as they are. By default int4
        for the target's own model, int8 for another."""

        trust: float = 3.0
        """As in TreeOptions; a model of its own is nearer to the target than a head."""

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.weights not in ("", "target"):
                weight_format(self.weights)
            if self.weights == "target" and self.model:
                raise ValueError("weights='target': leave model out, or choose a weight format")
            if self.model:
                resolve(self.model)  # a misspelt name need not wait for the target

    options: Options

    def __init__(self, config: SpeculationConfig, runtime: DraftRuntime) -> None:
        super().__init__(config, runtime)
        self.draft = self._load()
        shape = self.draft.config
        self.shape = self.options.shape(config.k)
        self.vocab_size = min(shape.vocab_size, runtime.vocab_size)
        self.limit = min(shape.max_position_embeddings, runtime.max_model_len)
        self.needs = Needs(
            kv=shape.kv_group(self.draft.kv_dtype),
            nodes=self.shape.num_nodes,
            depth=self.shape.depth,
            max_positions=shape.max_position_embeddings,
        )
        self._slots: dict[int, _Slot] = {}
        self._carry = torch.zeros(
            runtime.max_num_seqs, self.vocab_size, dtype=torch.float32, device=runtime.device
        )  # [slots, V]

    def warm(self) -> None:
        self.runtime.forward(self.draft.model, run_rows([0], [0], [[0]]))

    def observe(self, commit: Commit) -> None:
        """Runs every committed token that the draft has not run yet, all sequences at once."""
        runs: list[tuple[_Slot, int, list[int]]] = []  # state, first position, tokens
        for sequence, start, tokens in zip(
            commit.sequences, commit.starts, commit.tokens, strict=True
        ):
            end = start + len(tokens)
            last = end >= len(sequence.tokens)  # else more of the prompt is to come
            slot = self._slot(sequence, start)
            run = tokens[slot.filled - start : None if last else -1]
            run = run[: max(0, self.limit - slot.filled)]
            # A chain's accepted tokens were run as drafts in the same cells, behind the same
            # tokens: the same bits. The last row is always run, for its logits.
            same = 0
            while same < min(len(slot.scratch), len(run) - 1) and run[same] == slot.scratch[same]:
                same += 1
            runs.append((slot, slot.filled + same, run[same:]))
            slot.filled += len(run)
            slot.scratch = []
            slot.ready = slot.filled == end
        runs = [run for run in runs if run[2]]
        if not runs:
            return
        logits = self._run(runs, [slot.ready for slot, _, _ in runs])
        carried = [slot.sequence.slot for slot, _, _ in runs if slot.ready]
        self._carry[carried] = logits  # [O, V]

    def propose(self, ask: Ask) -> TokenTree:
        slots = [self._slots.get(sequence.slot) for sequence in ask.sequences]
        lengths = [len(sequence.tokens) for sequence in ask.sequences]
        budgets = [0] * len(slots)
        for b, (slot, sequence) in enumerate(zip(slots, ask.sequences, strict=True)):
            if slot and slot.ready and slot.sequence is sequence and slot.filled == lengths[b]:
                budgets[b] = max(0, min(ask.budgets[b], self.limit - slot.filled))
                slot.scratch = []
        if not any(budgets):
            return roots(ask.roots)
        first = self._carry[[max(sequence.slot, 0) for sequence in ask.sequences]]  # [B, V]
        places, last = [s.slot for s in ask.sequences], [length - 1 for length in lengths]

        def step(frontier: Frontier) -> Tensor:
            if self.options.is_chain:
                for b, token in zip(frontier.sequences, frontier.tokens, strict=True):
                    if slot := slots[b]:
                        slot.scratch.append(token)
            return self._forward(frontier_rows(places, last, frontier))

        vocab = DraftVocab(self.runtime.vocab_size)
        noise = self.runtime.sampler_noise
        return grow_tree(ask, budgets, first, step, self.shape, noise, vocab)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)

    def _load(self) -> LoadedModel:
        runtime, target = self.runtime, self.runtime.target
        same = self.options.weights == "target"
        if same and target.is_whole:
            return target
        own = not self.options.model
        weights = self.options.weights or ("int4" if own else "int8")
        weights = target.weights if same else weights
        spec = str(target.path) if own else self.options.model
        draft = load(spec, weights, max_model_len=runtime.max_model_len, device=runtime.device)
        if own:
            return draft
        check_same_vocabulary(target.tokenizer, draft.tokenizer)
        return draft

    def _slot(self, sequence: Sequence, start: int) -> _Slot:
        """State of a sequence whose next commit begins at ``start``. A new one begins there: what
        comes before are shared pages, whose draft KV was written with them."""
        slot = self._slots.get(sequence.slot)
        if slot is not None and slot.sequence is sequence:
            beyond = start > slot.filled == self.limit
            if start in (slot.filled - 1, slot.filled) or beyond:
                return slot
        slot = self._slots[sequence.slot] = _Slot(sequence, start)
        return slot

    def _run(self, runs: list[tuple[_Slot, int, list[int]]], wanted: list[bool]) -> Tensor:
        """One forward pass: logits [O, V] behind the last token of each run that is wanted."""
        rows = run_rows(
            [slot.sequence.slot for slot, _, _ in runs],
            [start for _, start, _ in runs],
            [tokens for _, _, tokens in runs],
        )
        rows.outputs[:] = [r for r, want in zip(rows.outputs, wanted, strict=True) if want]
        return self._forward(rows)

    def _forward(self, rows: Rows) -> Tensor:
        # The target may know padding ids that the draft has no embedding for.
        vocab = self.draft.config.vocab_size
        rows.tokens[:] = [token if token < vocab else 0 for token in rows.tokens]
        return self.runtime.forward(self.draft.model, rows)[:, : self.vocab_size]
