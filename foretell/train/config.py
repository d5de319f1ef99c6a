"""What the stages of training are told, and what their flags are made of."""

from __future__ import annotations

from dataclasses import dataclass

from foretell.config import parse_memory


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
        if self.max_len < 2:
            raise ValueError(f"max_len={self.max_len}: must be at least 2")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit}: must be at least 1, or left out")


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
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")
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
        if self.topk < 0:
            raise ValueError(f"topk={self.topk}: must be 0 or more")
        if self.max_len < 2:
            raise ValueError(f"max_len={self.max_len}: must be at least 2")
        _bytes("shard_size", self.shard_size)
        if self.max_disk is not None:
            _bytes("max_disk", self.max_disk)

    @property
    def layers(self) -> tuple[int, ...]:
        """
        Raises:
            ValueError: not layer numbers, each once.
        """
        try:
            layers = tuple(int(part) for part in self.taps.split(","))
        except ValueError:
            layers = ()
        if not layers or min(layers) < -1 or len(set(layers)) < len(layers):
            raise ValueError(
                f"taps={self.taps!r}: must be layers from 0, each once, and -1 for the final "
                "norm's output, such as 2,15,26,-1"
            )
        return layers

    @property
    def shard_bytes(self) -> int:
        return _bytes("shard_size", self.shard_size)

    @property
    def disk_bytes(self) -> int | None:
        return None if self.max_disk is None else _bytes("max_disk", self.max_disk)


def _bytes(name: str, text: str) -> int:
    size = parse_memory(text, name)
    if isinstance(size, float):
        raise ValueError(f"{name}={text!r}: must be a size such as 256MiB or 20GB")
    return size
