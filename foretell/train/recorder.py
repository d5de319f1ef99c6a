"""A drafter that never guesses: it writes down the hidden states that the engine hands to drafters.

So a head learns from the very numbers that it will read when it serves: same kernels, same
weights, same format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foretell.config import SpeculationConfig
from foretell.engine.engine import Engine
from foretell.llm import LLM
from foretell.models.hub import resolve
from foretell.models.loader import open_source
from foretell.sequence import SamplingParams, Sequence
from foretell.spec.drafter import Ask, Commit, Drafter, DraftRuntime, Needs
from foretell.spec.tree import TokenTree, roots
from foretell.train.drive import drive

FINAL = -1
"""The tap that is the final norm's output, which lm_head reads."""


@dataclass(frozen=True)
class Recorded:
    """What the target computed over one text."""

    features: Tensor  # [T, taps * H] bfloat16
    top_ids: Tensor | None = None  # [T, K] int32
    top_logits: Tensor | None = None  # [T, K] bfloat16

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        return self.features, self.top_ids, self.top_logits


class Recorder(Drafter):
    """Keeps the features of texts by request until they are taken."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Drafter.Options):
        """Options of the recorder."""

        taps: str = "-1"
        """Layers with spaces between them."""
        topk: int = 0
        """Largest logits to keep."""

    options: Options

    def __init__(self, config: SpeculationConfig, runtime: DraftRuntime) -> None:
        super().__init__(config, runtime)
        taps = tuple(int(tap) for tap in self.options.taps.split())
        layers = runtime.target.config.num_layers
        if max(taps) >= layers:
            raise ValueError(f"tap {max(taps)}: the target has layers 0 to {layers - 1}")
        self.width = len(taps) * runtime.target.config.hidden_size
        read = (*taps, FINAL) if self.options.topk and FINAL not in taps else taps
        self._final = read.index(FINAL) if FINAL in read else None
        self.needs = Needs(features=read)
        self._parts: dict[str, list[Recorded]] = {}

    def observe(self, commit: Commit) -> None:
        assert commit.features is not None
        at = 0
        for sequence, tokens in zip(commit.sequences, commit.tokens, strict=True):
            rows = commit.features[at : at + len(tokens) - 1]  # [T, F] float32
            at += len(rows)
            self._parts.setdefault(sequence.request_id, []).append(self._record(rows))

    def _record(self, rows: Tensor) -> Recorded:
        features = rows[:, : self.width].bfloat16()
        if not self.options.topk:
            return Recorded(features)
        assert self._final is not None
        width = self.runtime.target.config.hidden_size
        hidden = rows[:, self._final * width : (self._final + 1) * width]
        top = self.runtime.target.model.lm_head(hidden).topk(self.options.topk)  # [T, K] of float32
        return Recorded(features, top.indices.int(), top.values.bfloat16())

    def propose(self, ask: Ask) -> TokenTree:
        return roots(ask.roots)

    def take(self, request_id: str) -> Recorded:
        """All rows of a request that has ended, which is then forgotten."""
        parts = self._parts.pop(request_id, [])
        columns = zip(*(part.parts for part in parts), strict=True)
        joined = [None if column[0] is None else torch.cat(column) for column in columns]  # type: ignore[arg-type]
        return Recorded(*joined)  # type: ignore[arg-type]


def open_recorder(
    model: str, *, taps: tuple[int, ...], topk: int, max_len: int, **options: object
) -> tuple[LLM, int]:
    """An engine that records, and the longest text that it takes.

    Args:
        options: other fields of `EngineConfig`.

    Raises:
        ValueError: no such model, or it has no such layer.
    """
    limit = open_source(resolve(model))[1].max_position_embeddings
    max_len = min(max_len, limit - 1)  # behind a text there must be room for one token
    method = f"{Recorder.__module__}:{Recorder.__name__}"
    own = {"taps": " ".join(map(str, taps)), "topk": str(topk)}
    llm = LLM(
        model,
        speculation=SpeculationConfig(method=method, k=1, adaptive=False, options=own),
        prefix_caching=False,  # what is shared is not computed
        max_model_len=max_len + 1,
        **options,  # type: ignore[arg-type]
    )
    if not 0 <= topk <= llm.engine.runtime.vocab_size:
        raise ValueError(f"topk={topk}: the vocabulary has {llm.engine.runtime.vocab_size} tokens")
    return llm, max_len


def record(engine: Engine, texts: dict[str, np.ndarray]) -> Iterator[tuple[str, Recorded]]:
    """Runs texts through the target, many at once, and yields what it computed as they end.

    Args:
        texts: token ids by name.

    Raises:
        ValueError: the target's numbers are not finite, or the engine failed, by the text's name.
    """
    recorder = engine.drafter
    assert isinstance(recorder, Recorder)
    params = SamplingParams(temperature=0, max_tokens=1)
    left = iter(texts.items())

    def more() -> Sequence | None:
        name, tokens = next(left, (None, None))
        if name is None:
            return None
        return Sequence(request_id=name, tokens=tokens.tolist(), params=params, seed=0)  # type: ignore[union-attr]

    for sequence in drive(engine, more):
        name = sequence.request_id
        recorded = recorder.take(name) if not sequence.error else None
        if recorded is None or len(recorded.features) != len(texts[name]):
            why = sequence.error or engine.metrics.last_drafter_error
            raise ValueError(f"{name}: the target failed on this text ({why})")
        if not recorded.features.isfinite().all():
            raise ValueError(f"{name}: the target's hidden states are not finite on this text")
        yield name, recorded
