"""Which part of a model a rank has, and what ranks ask of each other.

Shoeybi et al., *Megatron-LM* (1909.08053). A rank has some heads and some of the inner features:
rows of q, k, v, gate and up, columns of o and down, whose products it sums with the others'. The
vocabulary is cut into ranges of rows, for embedding and output projection alike. Where ranks
exceed KV heads, several keep the same one. Latent attention splits its heads alike, and each rank
keeps all that is cached; experts go to ranks whole. A rank's part is a smaller decoder of its own:
what converts and packs a whole one does so here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.models.checkpoint import Cut, Source
from foretell.models.config import ModelConfig
from foretell.models.linear import Embedding, PackedLinear

T = TypeVar("T")
Exchange = Callable[[], Any]
"""Waits for an exchange that is under way, and gives what came of it."""
Steps = Generator[Exchange, Any, T]
"""Computes up to an exchange, yields it, and goes on when it is sent what came of it."""


class Ranks(Protocol):
    """This process among those that run a model together. All must make the same calls."""

    rank: int
    world: int
    halves: bool
    """Batches of equals are run as two halves (models/spread)."""

    def start_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """x summed over ranks in the order of ranks, element by element: the same bits on all."""
        ...

    def start_exchange(
        self, sent: SequenceOf[Tensor], come: SequenceOf[int]
    ) -> Callable[[], SequenceOf[Tensor]]:
        """All to all.

        Args:
            sent: [N, H] for each rank.
            come: rows that each rank sends here.
        """
        ...

    def gather(self, x: Tensor) -> SequenceOf[Tensor]:
        """Every rank's x, of one shape, on rank 0; nothing on others."""
        ...

    def share(self, x: Tensor) -> Tensor:
        """Rank 0's x, written into that of others."""
        ...


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model.

    Raises:
        ValueError: something does not divide by the number of ranks.
    """

    whole: ModelConfig
    rank: int
    world: int

    def __post_init__(self) -> None:
        whole, world = self.whole, self.world
        for name in ("num_heads", "intermediate_size"):
            if (size := getattr(whole, name)) % world:
                raise ValueError(
                    f"tensor_parallel={world}: the model's {name}={size} does not divide by it; "
                    + _remedy(whole)
                )
        if whole.num_kv_heads % world and world % whole.num_kv_heads:
            raise ValueError(
                f"tensor_parallel={world}: the model's num_kv_heads={whole.num_kv_heads} neither "
                f"divides by it nor divides it; {_remedy(whole)}"
            )
        if whole.moe is not None and whole.moe.num_experts < world:
            raise ValueError(f"tensor_parallel={world}: more than {whole.moe.num_experts} experts")
        if self.vocab[-1] <= 0:
            raise ValueError(f"tensor_parallel={world}: more than {whole.vocab_size} tokens can do")

    @property
    def vocab(self) -> list[int]:
        """Tokens of each rank; the last one has what is left."""
        whole = self.whole.vocab_size
        part = -(-whole // self.world)
        return [min(part, whole - rank * part) for rank in range(self.world)]

    @property
    def first_token(self) -> int:
        return sum(self.vocab[: self.rank])

    @property
    def config(self) -> ModelConfig:
        """Sizes of this rank's decoder; its vocabulary is the rows that it has of both ends."""
        whole, world = self.whole, self.world
        return replace(
            whole,
            num_heads=whole.num_heads // world,
            num_kv_heads=max(1, whole.num_kv_heads // world),
            intermediate_size=whole.intermediate_size // world,
            vocab_size=self.vocab[self.rank],
            moe=whole.moe and replace(whole.moe, part=(self.rank, world)),
        )

    def has(self, name: str) -> bool:
        """Is any of a tensor this rank's?"""
        expert = re.search(r"\.experts\.(\d+)\.", name)
        moe = self.config.moe
        return not expert or moe is None or int(expert[1]) in moe.held

    def cut(self, name: str) -> Cut | None:
        """This rank's part of a tensor by Hugging Face's name; None for all of it."""
        mine, dim = self.config, self.whole.head_dim
        first_kv = self.rank * self.whole.num_kv_heads // self.world
        starts = {
            "embed_tokens": (0, self.first_token, mine.vocab_size),
            "lm_head": (0, self.first_token, mine.vocab_size),
            "q_proj": (0, self.rank * mine.num_heads * dim, mine.num_heads * dim),
            "k_proj": (0, first_kv * dim, mine.num_kv_heads * dim),
            "v_proj": (0, first_kv * dim, mine.num_kv_heads * dim),
            "gate_proj": (0, self.rank * mine.intermediate_size, mine.intermediate_size),
            "up_proj": (0, self.rank * mine.intermediate_size, mine.intermediate_size),
            "o_proj": (1, self.rank * mine.num_heads * dim, mine.num_heads * dim),
            "down_proj": (1, self.rank * mine.intermediate_size, mine.intermediate_size),
        }
        if (mla := self.whole.mla) is not None:
            first, count = self.rank * mine.num_heads, mine.num_heads
            sizes = {
                "q_proj": (0, mla.nope_dim + mla.rope_dim),
                "q_b_proj": (0, mla.nope_dim + mla.rope_dim),
                "kv_b_proj": (0, mla.nope_dim + mla.v_dim),
                "o_proj": (1, mla.v_dim),
            }
            starts |= {n: (axis, first * d, count * d) for n, (axis, d) in sizes.items()}
        *_, block, kind = ("", *name.split("."))
        if "experts." in name:  # shared ones too: every rank has them for its share of the rows
            return None
        if block not in starts or (kind == "bias" and starts[block][0] == 1):
            return None
        axis, start, size = starts[block]
        return Cut(axis, start, start + size)


def _remedy(whole: ModelConfig) -> str:
    """The numbers of ranks that would do."""
    heads, kv = whole.num_heads, whole.num_kv_heads
    fit = [
        str(n)
        for n in range(2, heads + 1)
        if heads % n == 0 and whole.intermediate_size % n == 0 and (kv % n == 0 or n % kv == 0)
    ]
    return f"{', '.join(fit)} would do" if fit else "it runs on one rank only"


class Sliced:
    """Of each tensor of a source a rank's part; nothing else is read."""

    def __init__(self, source: Source, shard: Shard) -> None:
        self.path, self.files = source.path, source.files
        self._source, self._shard = source, shard
        self.shapes = {
            name: self._shape(name, shape)
            for name, shape in source.shapes.items()
            if shard.has(name)
        }

    def _shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Left as it is where it is not what the config says: whoever takes it will complain."""
        cut = self._shard.cut(name)
        if cut is None or cut.axis >= len(shape):
            return shape
        whole = Shard(self._shard.whole, 0, 1).cut(name)
        if whole is None or shape[cut.axis] != whole.stop:
            return shape
        return (*shape[: cut.axis], cut.stop - cut.start, *shape[cut.axis + 1 :])

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        assert cut is None
        tensor = self._source.read(name, self._shard.cut(name))
        if self._shard.rank and name.endswith(("o_proj.bias", "down_proj.bias")):
            return torch.zeros_like(tensor)  # the products are summed: rank 0 adds it
        return tensor


class PartEmbedding:
    """Rows of a table that ranks have ranges of: zeros where another has the token."""

    def __init__(self, part: Embedding, shard: Shard) -> None:
        self.part = part
        self.first, self.count = shard.first_token, shard.config.vocab_size

    def __call__(self, tokens: Tensor) -> Tensor:
        place = tokens - self.first
        mine = (place >= 0) & (place < self.count)
        rows = self.part(place.clamp(0, self.count - 1))  # [R, H]
        return rows * mine[:, None]


class GatheredLinear:
    """An output projection whose outputs [N] lie on ranks one after the other: logits [O, N] on
    rank 0, [O, 0] on others.

    Args:
        counts: outputs of each rank.
    """

    def __init__(self, part: PackedLinear, counts: SequenceOf[int], ranks: Ranks) -> None:
        self.part, self.counts, self.ranks = part, counts, ranks

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.part(x)
        parts = self.ranks.gather(F.pad(logits, (0, max(self.counts) - logits.shape[1])))
        own = [part[:, :n] for part, n in zip(parts, self.counts, strict=False)]
        return torch.cat([*own, logits[:, :0]], dim=1)

    def rows(self, ids: Tensor) -> GatheredLinear:
        """A product with only the outputs ids [N] int64, ascending, each where it is now."""
        edges = [0, *accumulate(self.counts)]
        own = [ids[(ids >= a) & (ids < b)] - a for a, b in pairwise(edges)]
        part = self.part.rows(own[self.ranks.rank])
        return GatheredLinear(part, [len(each) for each in own], self.ranks)
