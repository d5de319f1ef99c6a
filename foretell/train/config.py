"""What the stages of training are told, and what their flags are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from foretell.config import SpeculationConfig, check_range, parse_memory

Format = Literal["foretell", "eagle", "speculators", "medusa"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""Layouts of a head: our own, that of EAGLE's and EAGLE-3's authors, and vLLM's two."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """How conversations become token ids."""

    model: str = "smollm2"
    """Whose tokenizer and chat template: a short name, a hub name, a directory or a .gguf file."""
    max_len: int = 2048
    """Longest text in tokens: a longer one is cut, a prompt that leaves no room is dropped."""
    limit: int | None = None
    """Stop after so many kept texts."""

    def __post_init__(self) -> None:
        check_range(self, 2, None, "max_len")
        check_range(self, 1, None, "limit")


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """How the target answers."""

    max_tokens: int = 512
    """Longest answer in tokens."""
    temperature: str = "0"
    """One temperature, or several with commas between them that rows take turns at (0,0.7,1)."""
    seed: int = 0
    """With a row's place it decides what is drawn, whatever was interrupted."""

    def __post_init__(self) -> None:
        check_range(self, 1, None, "max_tokens")
        _ = self.temperatures

    @property
    def temperatures(self) -> tuple[float, ...]:
        """
        Raises:
            ValueError: not numbers from 0 up.
        """
        try:
            values = tuple(float(part) for part in self.temperature.split(","))
        except ValueError:
            values = ()
        if not values or not all(0 <= value < float("inf") for value in values):
            raise ValueError(
                f"temperature={self.temperature!r}: must be numbers from 0 up, such as 0,0.7,1"
            )
        return values


@dataclass(frozen=True, kw_only=True)
class FeaturesConfig:
    """What is kept of the target's passes over the texts."""

    taps: str = "-1"
    """Layers whose output is kept, with commas between them; -1 is the final norm's output."""
    topk: int = 0
    """Keep the target's largest so many logits too; for stores without -1."""
    max_len: int = 1024
    """Longest text in tokens; what is longer is cut."""
    shard_size: str = "256MiB"
    """Size of one file; a run that is killed makes at most one of them again."""
    max_disk: str | None = None
    """Take only as many texts as fit into this, such as 20GB."""
    online: bool = False
    """Store nothing: fit computes features as it needs them, again in every epoch."""

    def __post_init__(self) -> None:
        _ = self.layers
        check_range(self, 0, None, "topk")
        check_range(self, 2, None, "max_len")
        _bytes("shard_size", self.shard_size)
        if self.max_disk is not None:
            _bytes("max_disk", self.max_disk)

    @property
    def layers(self) -> tuple[int, ...]:
        """
        Raises:
            ValueError: not layer numbers, each once.
        """
        return layers_of(self.taps)

    @property
    def shard_bytes(self) -> int:
        return _bytes("shard_size", self.shard_size)

    @property
    def disk_bytes(self) -> int | None:
        return None if self.max_disk is None else _bytes("max_disk", self.max_disk)


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """How the head drafts while it is measured.

    Raises:
        ValueError: a value is out of range.
    """

    k: int = 4
    """Draft tokens of the chain."""
    depth: int = 5
    """Levels of the tree."""
    topk: int = 6
    """Children of a tree's node, and nodes of a level that grow on."""
    nodes: int = 20
    """Draft tokens of the tree."""

    def __post_init__(self) -> None:
        check_range(self, 1, 63, "k", "depth", "topk", "nodes")
        if self.topk < 2:
            raise ValueError("topk=1 is a chain, which k measures: give the tree 2 or more")

    def schemes(self, method: str, head: Path) -> dict[str, SpeculationConfig]:
        """Chain and tree."""
        tree = {"depth": self.depth, "topk": self.topk, "nodes": self.nodes}
        options = {"chain": {"depth": self.k}, "tree": tree}
        return {
            name: SpeculationConfig(
                method=method,
                adaptive=False,
                options={"model": str(head)} | {key: str(value) for key, value in own.items()},
            )
            for name, own in options.items()
        }


def _bytes(name: str, text: str) -> int:
    size = parse_memory(text, name)
    if isinstance(size, float):
        raise ValueError(f"{name}={text!r}: must be a size such as 256MiB or 20GB")
    return size


def layers_of(text: str) -> tuple[int, ...]:
    """Layers of a target that are listed with commas between them.

    Raises:
        ValueError: not layer numbers, each once.
    """
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not layers or min(layers) < -1 or len(set(layers)) < len(layers):
        raise ValueError(
            f"taps={text!r}: must be layers from 0, each once, and -1 for the final norm's "
            "output, such as 2,15,26,-1"
        )
    return layers
