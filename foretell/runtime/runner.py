"""Models on a device: runs rows through target or drafter over their own layers of the KV pool."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
from torch import Tensor

from foretell.attention.base import Attention
from foretell.attention.blocked import BlockedAttention
from foretell.attention.compiler import have_compiler
from foretell.attention.cpu import CpuAttention
from foretell.config import EngineConfig
from foretell.models.head import Head
from foretell.models.loader import LoadedModel
from foretell.models.whole_pass import can_run
from foretell.runtime.batch import Batch, fill, pack, view
from foretell.runtime.gpu import stream_on
from foretell.runtime.kv import KVPool, num_pages_for, page_bytes
from foretell.runtime.sampling import draw
from foretell.runtime.stream import Stream, Work
from foretell.spec.draft_vocab import DraftVocab
from foretell.spec.drafter import Ask, KVGroup, Rows, run_rows
from foretell.spec.noise import gumbel
from foretell.spec.shape import has_filters
from foretell.spec.tree import MAX_NODES, TokenTree

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """What a target pass leaves behind."""

    logits: Tensor  # [O, V] float32
    features: Tensor | None  # [R, F] float32, the tapped layers side by side


@dataclass(frozen=True)
class Prepared:
    """A batch that can run at once."""

    words: np.ndarray  # what `pack` made
    batch: Batch
    attention: Attention  # planned for it


class Runtime:
    """The device side of an engine, and the `DraftRuntime` that drafters see.

    Args:
        target: the loaded target.
        attention: backend; its plan is made anew for every pass.

    Attributes:
        stream: what runs device work.
        device: where the target lies, and all that its passes read and write.
    """

    def __init__(
        self,
        target: LoadedModel,
        attention: Attention,
        *,
        max_num_seqs: int,
        max_model_len: int,
        page_size: int,
        stream: Stream | None = None,
    ) -> None:
        self.target = target
        self.attention = attention
        self.device = target.device
        self.stream = stream or stream_on(self.device)
        self.stream.begin()  # memory is taken and filled in its order
        self._ahead = deque(copy.copy(attention) for _ in range(3))
        self._prepared: tuple[Rows, Prepared] | None = None
        self.ran: Prepared | None = None
        """The target's last pass."""
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.vocab_size = target.config.vocab_size
        self.taps: tuple[int, ...] = ()
        self.kv: KVPool | None = None
        # Behind the last root there may be scratch cells of a whole tree, and one more: the place
        # of the token that a pass adds.
        width = -(-(max_model_len + MAX_NODES) // page_size)
        self.page_table = np.full((max_num_seqs, width), -1, dtype=np.int32)

    @classmethod
    def of(cls, config: EngineConfig, target: LoadedModel, **more: Any) -> Self:
        """The runtime that a configuration asks for."""
        compiled = target.device.type == "cpu" and have_compiler()
        return cls(
            target,
            CpuAttention() if compiled else BlockedAttention(),
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len or target.config.max_position_embeddings,
            page_size=config.page_size,
            **more,
        )

    def room(self, config: EngineConfig, groups: SequenceOf[KVGroup]) -> int:
        """Pages of these groups that there is memory for.

        Raises:
            ValueError: as `num_pages_for`.
        """
        each = page_bytes(groups, self.page_size)
        seqs, length = self.max_num_seqs, self.max_model_len
        return num_pages_for(config.kv_memory, each, self.page_size, seqs, length, self.device)

    @property
    def target_group(self) -> KVGroup:
        """The target's layers in the page space."""
        return self.target.model.config.kv_group(self.target.kv_dtype)  # of this rank's part

    def allocate(self, num_pages: int, draft: KVGroup | None) -> None:
        """Takes the memory for KV."""
        self.stream.join()
        groups = {"target": self.target_group} | ({"draft": draft} if draft else {})
        self.kv = KVPool(groups, num_pages, self.page_size, self.device)

    def begin(self, num_pages: int, draft: KVGroup | None) -> None:
        """`allocate` and `warm`."""
        self.allocate(num_pages, draft)
        self.warm()

    def warm(self) -> None:
        """Runs a row for nothing and draws from it, so that all is compiled that a step calls: a
        server that takes requests answers them."""
        self.set_pages(0, [0])
        logits = self.run_target(self._prepare(run_rows([0], [0], [[0]]))).logits
        if logits.numel():  # rank 0 has all of them
            draw(logits, [False], [0], [0])
        self.sampler_noise([0], [0])

    def set_pages(self, slot: int, pages: SequenceOf[int]) -> None:
        """Writes a sequence's page table."""
        self.page_table[slot, : len(pages)] = pages
        self.page_table[slot, len(pages) :] = -1

    def submit(self, name: str, call: Callable[[], T]) -> Work[T]:
        """Gives the stream something to do."""
        work = Work(name, call)
        self.stream.submit(work)
        return work

    def wait(self, work: Work[T]) -> T:
        """What came of submitted work."""
        return self.stream.wait(work)

    def prepare(self, rows: Rows) -> None:
        """Packs and plans rows that the target is to run next, as far as that can be done before
        their tokens are known; if other rows come instead it was for nothing."""
        attention = self._ahead.popleft()  # others may be planned for passes that are under way
        self._ahead.append(attention)
        self._prepared = rows, self._prepare(rows, attention)

    def forward_target(self, rows: Rows) -> Output:
        """Runs the target; logits of ``rows.outputs`` in that order."""
        return self.run_target(self._ready(rows))

    def run_target(self, ready: Prepared) -> Output:
        """The same with rows that are packed."""
        self.ran = ready
        return self._run(self.target.model, "target", ready, self.taps)

    def forward(self, model: Any, rows: Rows) -> Tensor:
        """Runs a drafter's model over the drafter's layers: logits [O, V] float32."""
        return self._run(model, "draft", self._prepare(rows), ()).logits

    def forward_head(self, head: Head, rows: Rows, features: Tensor) -> tuple[Tensor, Tensor]:
        """Runs a head over the drafter's layers: logits [O, Vd] and features [O, H], float32."""
        return self.run_head(head, self._prepare(rows), features)

    def draft_chains(
        self, head: Head, ask: Ask, lengths: SequenceOf[int], logits: Tensor, features: Tensor,
        vocab: DraftVocab,
    ) -> TokenTree | None:  # fmt: skip
        """See `DraftRuntime.draft_chains`: on a CPU, with a compiler, for requests whose draws
        temperature alone acts on."""
        assert self.kv is not None
        kv, params = self.kv.layers["draft"], [sequence.params for sequence in ask.sequences]
        filters = any(has_filters(each) and not each.greedy for each in params)
        if ask.sample or filters or head.whole_pass is None or not can_run(self.attention, kv):
            return None
        from foretell.runtime import chains_cpu  # compiled; slow to import

        return chains_cpu.draft(
            head.whole_pass, kv, self.page_table, self.page_size, ask, lengths, logits, features,
            vocab, normed=head.recycle_normed,
        )  # fmt: skip

    def follow_target(
        self, head: Head, tokens: Tensor, features: Tensor, outputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `DraftRuntime.follow_target`."""
        assert self.ran is not None
        batch = replace(self.ran.batch, tokens=tokens.clamp(min=0).int(), outputs=outputs.int())
        return self.run_head(head, replace(self.ran, batch=batch), features)

    def run_head(self, head: Head, ready: Prepared, features: Tensor) -> tuple[Tensor, Tensor]:
        """`forward_head` with rows that are packed."""
        assert self.kv is not None
        batch, kv = ready.batch, self.kv.layers["draft"]
        return head.run(batch.tokens, features, batch.outputs, ready.attention, batch.layout, kv)

    def sampler_noise(
        self, seeds: SequenceOf[int], positions: SequenceOf[int], tokens: Tensor | None = None
    ) -> Tensor:
        """See `DraftRuntime.sampler_noise`."""
        if self.device.type == "cpu" and have_compiler():
            from foretell.runtime import noise_cpu  # compiled; slow to import

            return noise_cpu.gumbel(seeds, positions, self.vocab_size, tokens)
        noise = gumbel(seeds, positions, self.vocab_size, self.device)
        return noise if tokens is None else noise[:, tokens]

    def move(self, slot: int, source: SequenceOf[int], target: SequenceOf[int]) -> None:
        """Moves the target's K and V between a sequence's logical cells."""
        assert self.kv is not None
        self.kv.move("target", self._physical(slot, source), self._physical(slot, target))

    def _physical(self, slot: int, cells: SequenceOf[int]) -> list[int]:
        size, table = self.page_size, self.page_table[slot]
        return [int(table[cell // size]) * size + cell % size for cell in cells]

    def close(self) -> None:
        """Lets go of what outlives a pass. May be called twice."""
        self.stream.close()

    def _ready(self, rows: Rows) -> Prepared:
        """What `prepare` made of these very rows, with their tokens now; else it is made here."""
        before, self._prepared = self._prepared, None
        if before is not None and before[0] is rows:
            ready = before[1]
            fill(ready.words, ready.batch, rows.tokens)
        else:
            ready = self._prepare(rows)
        for places, tokens in rows.late:
            ready.batch.tokens[places] = tokens.clamp(min=0).int()
        return ready

    def _prepare(self, rows: Rows, attention: Attention | None = None) -> Prepared:
        return self.plan(pack(rows, self.page_table, self.page_size), attention)

    def plan(self, words: np.ndarray, attention: Attention | None = None) -> Prepared:
        """A packed buffer, on the device and planned."""
        batch, attention = view(words, self.page_size, self.device), attention or self.attention
        attention.plan(batch.layout)
        return Prepared(words, batch, attention)

    def _run(self, model: Any, group: str, ready: Prepared, taps: tuple[int, ...]) -> Output:
        assert self.kv is not None
        batch, kv = ready.batch, self.kv.layers[group]
        return Output(
            *model.run(batch.tokens, ready.attention, batch.layout, kv, batch.outputs, taps)
        )
