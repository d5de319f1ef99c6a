"""Features on disk: shards of safetensors and an index that says what they were made of.

A shard holds whole texts, one after the other: ``tokens`` [N] int32, ``wanted`` [N] bool,
``lengths`` [S] int32, ``features`` [N, taps * H] bfloat16 and, where asked for, ``top_ids`` [N, K]
int32 and ``top_logits`` [N, K] bfloat16. The index counts a shard once it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from foretell.files import write_whole
from foretell.models.checkpoint import read_json
from foretell.train.batches import Text
from foretell.train.files import target_digest, write_json

VERSION = 1


@dataclass(kw_only=True)
class Shard:
    """One file."""

    file: str
    texts: int
    tokens: int
    bytes: int


@dataclass(kw_only=True)
class Index:
    """What index.json says."""

    version: int = VERSION
    target: str
    target_digest: str
    weights: str
    taps: list[int]
    hidden_size: int
    topk: int
    max_len: int
    source: str
    """The file of texts, in the run's directory."""
    online: bool = False
    texts_digest: str = ""
    """Of the texts that the shards hold."""
    shards: list[Shard] = field(default_factory=list[Shard])

    @property
    def num_texts(self) -> int:
        return sum(shard.texts for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes_a_token(self) -> int:
        return 2 * len(self.taps) * self.hidden_size + 4 + 1 + 6 * self.topk

    def write(self, directory: Path) -> None:
        write_json(directory / "index.json", asdict(self))

    @classmethod
    def read(cls, directory: Path) -> Index:
        """
        Raises:
            ValueError: there is none, or none of this version.
        """
        path = directory / "index.json"
        if not path.exists():
            raise ValueError(f"{path} is missing: run foretell train features first")
        given = read_json(path)
        if given.get("version") != VERSION:
            raise ValueError(
                f"{path}: format {given.get('version')}, this program reads {VERSION}: remove "
                f"{directory} and run features again"
            )
        try:
            shards = [Shard(**shard) for shard in given.pop("shards")]
            return cls(**given, shards=shards)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}): run features again") from None

    def check_target(self, directory: Path, target: str) -> None:
        """
        Raises:
            ValueError: the features are another target's.
        """
        if self.target_digest != target_digest(target):
            raise ValueError(
                f"{directory} holds features of {self.target}, not of {target}: give that target, "
                "or make features of this one in another run"
            )


def write_shard(directory: Path, index: Index, texts: Sequence[Text], texts_digest: str) -> None:
    """Writes texts as the next shard, and then the index that counts it.

    Raises:
        OSError: the disk is full, by the file's name; what was there before stays as it was.
    """
    columns: dict[str, list[Tensor]] = {}
    for text in texts:
        for name, tensor in vars(text).items():
            if tensor is not None:
                columns.setdefault(name, []).append(tensor)
    tensors = {name: torch.cat(parts) for name, parts in columns.items()}
    tensors["tokens"] = tensors["tokens"].int()
    tensors["lengths"] = torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32)
    name = f"shard-{len(index.shards):05}.safetensors"
    data = save(tensors)
    write_whole(directory / name, data)
    shard = Shard(file=name, texts=len(texts), tokens=len(tensors["tokens"]), bytes=len(data))
    index.shards.append(shard)
    index.texts_digest = texts_digest
    index.write(directory)


class StoredTexts:
    """`Texts` out of a directory of shards, mapped into memory.

    Raises:
        ValueError: the index is not there, or a shard is not as it says.
    """

    def __init__(self, directory: Path) -> None:
        index = Index.read(directory)
        self.taps, self.hidden_size = tuple(index.taps), index.hidden_size
        self.target = index.target
        self._shards: list[Any] = []
        self._places: list[tuple[int, int, int]] = []  # shard, first token, tokens
        for number, shard in enumerate(index.shards):
            path = directory / shard.file
            self._shards.append(_open(path, shard))
            lengths: list[int] = self._shards[-1].get_tensor("lengths").tolist()
            ends = list(accumulate(lengths))
            if len(lengths) != shard.texts or (ends or [0])[-1] != shard.tokens:
                raise ValueError(_damaged(path))
            for length, end in zip(lengths, ends, strict=True):
                self._places.append((number, end - length, length))

    def lengths(self, max_len: int) -> list[int]:
        out: list[int] = []
        wanted, loaded = torch.empty(0), -1
        for shard, start, length in self._places:
            if shard != loaded:
                wanted, loaded = self._shards[shard].get_tensor("wanted"), shard
            length = min(length, max_len)
            out.append(length if bool(wanted[start : start + length].any()) else 0)
        return out

    def read(self, places: Sequence[int], max_len: int) -> list[Text]:
        return [self._read(place, max_len) for place in places]

    def _read(self, place: int, max_len: int) -> Text:
        number, start, length = self._places[place]
        shard, end = self._shards[number], start + min(length, max_len)
        names = set(shard.keys())

        def part(name: str) -> Tensor:
            return shard.get_slice(name)[start:end]

        return Text(
            part("tokens"),
            part("wanted"),
            part("features"),
            part("top_ids") if "top_ids" in names else None,
            part("top_logits") if "top_logits" in names else None,
        )


def _open(path: Path, shard: Shard) -> Any:
    try:
        if path.stat().st_size != shard.bytes:
            raise ValueError(_damaged(path))
        return safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError):
        raise ValueError(_damaged(path)) from None


def _damaged(path: Path) -> str:
    return f"{path} is missing or damaged: remove {path.parent} and run features again"
