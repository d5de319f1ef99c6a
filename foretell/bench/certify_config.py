"""How much `foretell certify` asks."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class CertifyConfig:
    """How much is asked.

    Raises:
        ValueError: a value is out of range; the message says what is legal.
    """

    max_tokens: int = 64
    """Longest answer in tokens."""
    limit: int = 12
    """Prompts, evenly spaced over the categories of the workload."""
    samples: int = 2000
    """Answers of each distribution test."""
    batch: int = 16
    """Most answers at once; one and a quarter of it are tried too."""
    seed: int = 0
    """Another seed asks for other answers."""

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 8), ("limit", 1), ("samples", 100), ("batch", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: must be from 0 to {2**32 - 1}")

    def quick(self) -> CertifyConfig:
        """A first look: a fifth of the work."""
        return replace(
            self,
            max_tokens=min(32, self.max_tokens),
            limit=min(4, self.limit),
            samples=min(400, self.samples),
        )
