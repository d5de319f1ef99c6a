"""Medusa: heads that each guess one place ahead, all from the same hidden state.

Cai et al., *Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads*
(2401.10774). Head i says what stands i + 2 places behind a hidden state, whatever stands between:
no KV, no passes of its own, and every node of a level has the same children. Without options the
tree is the likeliest ``k`` nodes of the authors' own.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from foretell.config import SpeculationConfig, weight_format
from foretell.drafters.eagle import HeadOptions
from foretell.models.medusa_formats import load_medusa
from foretell.models.trainable_medusa import TrainableMedusa
from foretell.sequence import Sequence
from foretell.spec.drafter import Ask, Commit, Drafter, DraftRuntime, Needs
from foretell.spec.grow_tree import Frontier, grow_tree
from foretell.spec.losses import judge
from foretell.spec.training import Loss, Rule, TrainingBatch
from foretell.spec.tree import TokenTree, roots
from foretell.spec.tree_shape import read_shape


class Medusa(Drafter):
    """Trees from independent heads."""

    Options = HeadOptions
    options: HeadOptions
    rule = Rule(decay=0.8)

    def __init__(self, config: SpeculationConfig, runtime: DraftRuntime) -> None:
        super().__init__(config, runtime)
        options, target = self.options, runtime.target
        path = options.find("medusa", target.path, target.config.sizes)
        weights = weight_format(options.weights or target.weights)
        self.heads, self.vocab = load_medusa(path, target, weights, options.draft_vocab)
        own = options.is_chain and not options.depth
        shape = read_shape("medusa") if own else options.shape(config.k)
        self.shape = shape.within(len(self.heads))
        nodes = self.shape.num_nodes
        self.needs = Needs(
            features=(-1,), nodes=min(config.k, nodes) if own else nodes, depth=self.shape.depth
        )
        self._seen: dict[int, tuple[Sequence, int]] = {}  # by slot: whose features, how many
        hidden = target.config.hidden_size
        self._features = torch.zeros(runtime.max_num_seqs, hidden, device=runtime.device)

    def observe(self, commit: Commit) -> None:
        """Keeps the last hidden state of each sequence."""
        assert commit.features is not None
        at = 0
        for sequence, start, tokens in zip(
            commit.sequences, commit.starts, commit.tokens, strict=True
        ):
            at += len(tokens) - 1
            self._features[sequence.slot] = commit.features[at - 1]
            self._seen[sequence.slot] = (sequence, start + len(tokens) - 1)

    def propose(self, ask: Ask) -> TokenTree:
        # The last feature is that of the place before the root.
        budgets = [
            budget if self._ready(sequence) else 0
            for sequence, budget in zip(ask.sequences, ask.budgets, strict=True)
        ]
        if not any(budgets):
            return roots(ask.roots)
        ids = self.vocab.ids
        features = self._features[[max(sequence.slot, 0) for sequence in ask.sequences]]  # [B, H]

        def step(frontier: Frontier) -> Tensor:
            logits = self.heads[frontier.depth](features)  # [B, Vd]
            return logits[frontier.sequences]

        first, noise = self.heads[0](features), partial(self.runtime.sampler_noise, tokens=ids)
        return grow_tree(ask, budgets, first, step, self.shape, noise, self.vocab)

    def forget(self, slots: list[int]) -> None:
        for slot in slots:
            self._seen.pop(slot, None)

    @staticmethod
    def loss(head: TrainableMedusa, batch: TrainingBatch, rule: Rule) -> Loss:
        """Medusa-1: each head against what the target says at its place; ``rule.steps`` is of no
        matter, there are as many as heads."""
        return judge(head.unroll(batch), rule, len(head.heads))

    def _ready(self, sequence: Sequence) -> bool:
        whose, seen = self._seen.get(sequence.slot, (None, 0))
        return whose is sequence and seen == len(sequence.tokens) - 1
