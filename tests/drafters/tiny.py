"""A draft runtime in memory, a dense two-layer transformer in float64, and a small engine."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from foretell.attention.cpu import CpuAttention
from foretell.config import SpeculationConfig
from foretell.drafters import build
from foretell.runtime.runner import Runtime
from foretell.sequence import SamplingParams, Sequence
from foretell.spec.drafter import Ask, Commit, Drafter, KVGroup, Rows
from foretell.spec.tree import TokenTree, path_to
from tests import tiny

VOCAB = 24


class TinyNet:
    """Two attention layers with learned positions; every row is computed by itself."""

    def __init__(self, seed: int, vocab_size: int = VOCAB, positions: int = 256) -> None:
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
        self.width = 8
        self.embed, self.place = draw(vocab_size, 8), draw(positions, 8)
        self.qkv, self.out = draw(2, 3, 8, 8) / 2, draw(2, 8, 8) / 2
        self.head = draw(vocab_size, 8)

    def forward(self, rows: Rows, kv: Tensor) -> Tensor:
        """kv [slots, 2 layers, cells, 2, 8]; logits [O, V]."""
        hidden = [
            self.embed[t] + self.place[p] for t, p in zip(rows.tokens, rows.positions, strict=True)
        ]
        for layer in range(2):
            for r, h in enumerate(hidden):
                kv[rows.slots[r], layer, rows.cells[r], 0] = self.qkv[layer, 1] @ h
                kv[rows.slots[r], layer, rows.cells[r], 1] = self.qkv[layer, 2] @ h
            for r, h in enumerate(hidden):
                seen = [*range(rows.prefix[r])]
                seen += [rows.base[r] + j for j in range(1, 64) if rows.ancestors[r] >> j & 1]
                keys = kv[rows.slots[r], layer, seen]
                weights = torch.softmax(keys[:, 0] @ (self.qkv[layer, 0] @ h), 0)
                hidden[r] = h + self.out[layer] @ (keys[:, 1] * weights[:, None]).sum(0)
        return torch.stack([self.head @ hidden[r] for r in rows.outputs]).float()


def loaded(
    seed: int = 1, vocab_size: int = VOCAB, positions: int = 256, names: str = "same"
) -> SimpleNamespace:
    """What `foretell.models.loader.load` returns, as far as a drafter sees it."""
    config = SimpleNamespace(
        num_layers=2,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        sizes={"hidden_size": 8, "num_layers": 2, "vocab_size": vocab_size},
        kv_group=lambda dtype: KVGroup(num_layers=2, num_kv_heads=1, head_dim=8, dtype=dtype),
    )
    return SimpleNamespace(
        model=TinyNet(seed, vocab_size, positions),
        config=config,
        tokenizer=names,
        is_whole=True,
        path="tiny",
        kv_dtype=torch.float64,
        weights="f32",
    )


class MemoryRuntime:
    """DraftRuntime over plain tensors; keeps every forward's rows in ``log``."""

    def __init__(self, vocab_size: int = VOCAB, max_num_seqs: int = 4, max_model_len: int = 256):
        self.vocab_size, self.max_num_seqs = vocab_size, max_num_seqs
        self.max_model_len = max_model_len
        self.device = torch.device("cpu")
        self.target = loaded(seed=0, vocab_size=vocab_size)
        self.kv = torch.full((max_num_seqs, 2, 300, 2, 8), torch.nan, dtype=torch.float64)
        self.log: list[Rows] = []
        self.spoil: set[int] = set()  # numbers of the forwards whose logits come out as NaN

    def forward(self, model: TinyNet, rows: Rows) -> Tensor:
        self.log.append(rows)
        assert all(0 <= token < len(model.embed) for token in rows.tokens)
        if not rows.outputs:
            _fill(model, rows, self.kv)
            return torch.zeros(0, len(model.embed))
        logits = model.forward(rows, self.kv)
        return logits * torch.nan if len(self.log) in self.spoil else logits

    def sampler_noise(
        self, seeds: list[int], positions: list[int], tokens: Tensor | None = None
    ) -> Tensor:
        assert tokens is None
        rows: list[Tensor] = []
        for seed, position in zip(seeds, positions, strict=True):
            g = torch.Generator().manual_seed((seed * 10007 + position) % 2**63)
            uniform = torch.rand(self.vocab_size, generator=g, dtype=torch.float64)
            rows.append(-(-uniform.clamp_min(1e-12).log()).log())
        return torch.stack(rows).float()


def _fill(model: TinyNet, rows: Rows, kv: Tensor) -> None:
    rows.outputs.append(len(rows) - 1)
    model.forward(rows, kv)
    rows.outputs.clear()


def runtime_for(method: str) -> MemoryRuntime | Runtime:
    """In memory, or over the tiny model for heads, which share its embedding and lm_head."""
    if method not in ("eagle", "eagle3", "mtp", "medusa"):
        return MemoryRuntime()
    target = tiny.model("f32")
    return Runtime(target, CpuAttention(), max_num_seqs=4, max_model_len=256, page_size=16)


def fresh(config: SpeculationConfig | str) -> Drafter:
    """A new drafter with a runtime of its own."""
    config = SpeculationConfig.parse(config) if isinstance(config, str) else config
    assert config is not None
    drafter = build(config, runtime := runtime_for(config.method))
    if isinstance(runtime, Runtime):
        runtime.allocate(4 * 17, drafter.needs.kv)
        for slot in range(4):
            runtime.set_pages(slot, list(range(17 * slot, 17 * slot + 17)))
    return drafter


@cache
def _tables(width: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(tiny.VOCAB, width, generator=g), torch.randn(300, width, generator=g)


def features_of(tokens: list[int], start: int, end: int, width: int) -> Tensor:
    """Stand-ins for hidden states of positions start .. end - 1: each a function of the text."""
    words, places = _tables(width)
    return words[tokens].cumsum(0)[start:end] * 0.3 + places[start:end]


def sequence(tokens: list[int], slot: int = 0, seed: int = 0, temperature: float = 0.0) -> Sequence:
    params = SamplingParams(temperature=temperature, max_tokens=None)
    return Sequence(f"r{slot}-{seed}-{len(tokens)}", list(tokens), params, seed, slot=slot)


def commit(drafter: Drafter, *rows: tuple[Sequence, int]) -> None:
    """Shows the drafter that all but the last token up to a length are final."""
    starts, features = [s.num_computed for s, _ in rows], None
    if drafter.needs.features:
        width = 32 * len(drafter.needs.features)
        parts = [
            features_of(s.tokens, start, end - 1, width)
            for (s, end), start in zip(rows, starts, strict=True)
        ]
        features = torch.cat(parts)  # [sum T, F]
    drafter.observe(
        Commit(
            [s for s, _ in rows],
            starts,
            [s.tokens[start:end] for (s, end), start in zip(rows, starts, strict=True)],
            features,
        )
    )
    for s, end in rows:
        s.num_computed = end - 1


def advance(drafter: Drafter, grown: list[tuple[Sequence, list[int]]]) -> None:
    """Appends new tokens to sequences and commits them."""
    for s, new in grown:
        s.tokens.extend(new)
    commit(drafter, *[(s, len(s.tokens)) for s, _ in grown])


def ask(sequences: list[Sequence], budget: int, sample: bool = False) -> Ask:
    return Ask(sequences, [budget] * len(sequences), sample)


def chain(tree: TokenTree, b: int = 0) -> list[int]:
    """Draft tokens of one sequence, which must be a chain."""
    size = int(tree.sizes[b])
    assert tree.parents[b, :size].tolist() == list(range(-1, size - 1))
    return tree.tokens[b, 1:size].tolist()


def paths(tree: TokenTree, b: int = 0) -> list[list[int]]:
    """Token lists from the root, left out, to each leaf."""
    size = int(tree.sizes[b])
    parents, tokens = tree.parents[b, :size].tolist(), tree.tokens[b, :size].tolist()
    leaves = [i for i in range(1, size) if i not in parents]
    return [[tokens[i] for i in path_to(parents, leaf)] for leaf in leaves]
