"""Third stage: the target's hidden states over the texts, computed by the inference engine."""

from __future__ import annotations

import hashlib
import shutil
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from foretell.config import EngineConfig
from foretell.files import alone
from foretell.llm import LLM
from foretell.progress import progress_bar
from foretell.train.batches import PackedBatches, Text
from foretell.train.config import FeaturesConfig
from foretell.train.files import target_digest
from foretell.train.recorder import Recorded, open_recorder, record
from foretell.train.regenerate import check_target
from foretell.train.samples import Sample, read_samples, texts_of
from foretell.train.store import Index, StoredTexts, write_shard

_DIRECTORY = "features"


@dataclass
class Plan:
    """What there is to do."""

    index: Index
    texts: list[Sample]
    """All that the store is to hold; the first of them are there already."""
    skipped: int
    """Texts without an answer."""
    left_out: int
    """Texts that do not fit into max_disk."""

    @property
    def num_left(self) -> int:
        """Tokens to compute."""
        return sum(len(text.tokens) for text in self.texts[self.index.num_texts :])

    @property
    def bytes_left(self) -> int:
        return self.num_left * self.index.bytes_a_token


class EngineTexts:
    """`Texts` whose features are computed when they are read.

    Args:
        run: the run's directory.
        options: fields of `EngineConfig` besides the model and its weights.
    """

    def __init__(self, run: Path, index: Index, **options: Any) -> None:
        self.taps, self.hidden_size = tuple(index.taps), index.hidden_size
        self.target = index.target
        self._source = run / index.source
        self._llm, _ = open_recorder(
            index.target,
            taps=self.taps,
            topk=index.topk,
            max_len=index.max_len,
            weights=index.weights,
            **options,
        )
        self._samples, _ = _usable(self._source, self._llm, index.max_len)

    def lengths(self, max_len: int) -> list[int]:
        cut = [sample.cut(max_len) for sample in self._samples]
        return [len(sample.tokens) if sample.num_wanted else 0 for sample in cut]

    def read(self, places: Sequence[int], max_len: int) -> list[Text]:
        samples = {str(place): self._samples[place].cut(max_len) for place in places}
        tokens = {name: sample.tokens for name, sample in samples.items()}
        done = dict(record(self._llm.engine, tokens))
        return [_text(samples[str(place)], done[str(place)]) for place in places]


def open_batches(
    run: Path, *, target: str | None = None, options: dict[str, Any] | None = None, **packing: Any
) -> PackedBatches:
    """What the features stage left in a run, stored or to be computed on the way.

    Args:
        target: refuse features of another one.
        options: of the engine, where features are computed on the way.
        packing: arguments of `PackedBatches`.

    Raises:
        ValueError: there are none, they are damaged, or they are not what is asked for.
    """
    directory = run / _DIRECTORY
    index = Index.read(directory)
    if target is not None:
        index.check_target(directory, target)
    texts = EngineTexts(run, index, **(options or {})) if index.online else StoredTexts(directory)
    return PackedBatches(texts, **packing)


def plan_features(
    engine_config: EngineConfig, config: FeaturesConfig, run: Path
) -> tuple[Plan, LLM]:
    """Looks at what is there and what it takes.

    Raises:
        ValueError: no texts, features of another kind in the way, or too little disk.
    """
    check_target(run, engine_config.model)
    directory, source = run / _DIRECTORY, texts_of(run)
    llm, max_len = open_recorder(
        engine_config.model,
        taps=config.layers,
        topk=config.topk,
        max_len=config.max_len,
        **engine_config.options("model", "speculation", "prefix_caching", "max_model_len"),
    )
    index = Index(
        target=engine_config.model,
        target_digest=target_digest(engine_config.model),
        weights=engine_config.weights,
        taps=list(config.layers),
        hidden_size=llm.target.config.hidden_size,
        topk=config.topk,
        max_len=max_len,
        source=source.name,
        online=config.online,
    )
    texts, skipped = _usable(source, llm, max_len)
    if not texts:
        raise ValueError(f"{source}: no text has an answer to learn from; run regenerate first")
    if (directory / "index.json").exists():
        index = _resumed(directory, index, texts)
    room = config.disk_bytes
    fitting = len(texts) if room is None else _fitting(texts, room // index.bytes_a_token)
    plan = Plan(index, texts[: max(fitting, index.num_texts)], skipped, len(texts) - fitting)
    if not config.online:
        _check_disk(directory, plan)
    return plan, llm


def compute_features(plan: Plan, llm: LLM, shard_bytes: int, run: Path) -> None:
    """Writes the shards that are missing, one after the other, each counted by the index at once.

    Raises:
        OSError: the disk is full, by the file's name; running it again goes on from there.
        ValueError: another process writes in this run.
    """
    with alone(run):
        _compute(plan, llm, shard_bytes, run / _DIRECTORY)


def _compute(plan: Plan, llm: LLM, shard_bytes: int, directory: Path) -> None:
    index = plan.index
    index.write(directory)
    if index.online:
        return
    digest = _digest(plan.texts[: index.num_texts])
    there = index.num_tokens
    with progress_bar("tokens", there + plan.num_left, done=there, lines=True) as advance:
        for part in _parts(plan.texts[index.num_texts :], shard_bytes // index.bytes_a_token):
            done: dict[str, Recorded] = {}
            first = index.num_texts
            named = {f"{index.source} text {i}": sample for i, sample in enumerate(part, first)}
            tokens = {name: sample.tokens for name, sample in named.items()}
            for name, recorded in record(llm.engine, tokens):
                done[name] = recorded
                advance(len(recorded.features))
            for sample in part:
                _add(digest, sample)
            texts = [_text(sample, done[name]) for name, sample in named.items()]
            write_shard(directory, index, texts, digest.hexdigest())


# ---- inside


def _usable(source: Path, llm: LLM, max_len: int) -> tuple[list[Sample], int]:
    """Texts, cut, that have an answer; and how many have none."""
    cut = [text.cut(max_len) for text in read_samples(source, llm.engine.runtime.vocab_size)]
    kept = [text for text in cut if text.num_wanted]
    return kept, len(cut) - len(kept)


def _text(sample: Sample, recorded: Recorded) -> Text:
    tokens, wanted = torch.from_numpy(sample.tokens), torch.from_numpy(sample.wanted)
    return Text(tokens, wanted, *recorded.parts)  # type: ignore[arg-type]


def _resumed(directory: Path, index: Index, texts: list[Sample]) -> Index:
    """What is there, if it is the beginning of what is asked for.

    Raises:
        ValueError: it is not.
    """
    before = Index.read(directory)
    remedy = f"give the same, or remove {directory} to begin anew"
    before.check_target(directory, index.target)
    for name in ("weights", "taps", "topk", "max_len", "source", "online"):
        ours, theirs = getattr(index, name), getattr(before, name)
        if ours != theirs:
            raise ValueError(f"{directory} was made with {name}={theirs}, not {ours}: {remedy}")
    begun = texts[: before.num_texts]
    if len(begun) < before.num_texts or (
        begun and _digest(begun).hexdigest() != before.texts_digest
    ):
        raise ValueError(f"{directory} holds other texts than {index.source} begins with: {remedy}")
    return before


def _digest(texts: Sequence[Sample]) -> Any:
    digest = hashlib.sha256()
    for text in texts:
        _add(digest, text)
    return digest


def _add(digest: Any, text: Sample) -> None:
    digest.update(text.tokens.tobytes() + repr(text.spans).encode())


def _fitting(texts: list[Sample], tokens: int) -> int:
    """How many of the first texts have no more tokens than that."""
    return bisect(list(accumulate(len(text.tokens) for text in texts)), tokens)


def _check_disk(directory: Path, plan: Plan) -> None:
    place = directory.parent
    free = shutil.disk_usage(place).free
    if plan.bytes_left > free:
        raise ValueError(
            f"{directory}: features of {plan.num_left:,} tokens take {plan.bytes_left / 1e9:.2f} "
            f"GB and the disk has {free / 1e9:.2f} GB free: --max-disk {free * 9 // 10**7}MB "
            "takes fewer texts, --online stores nothing"
        )


def _parts(texts: list[Sample], tokens: int) -> Iterator[list[Sample]]:
    """Texts in order, each part with about so many tokens."""
    part: list[Sample] = []
    size = 0
    for text in texts:
        if part and size + len(text.tokens) > tokens:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text.tokens)
    if part:
        yield part
