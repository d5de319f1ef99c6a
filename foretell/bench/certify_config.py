"""How much `foretell certify` asks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretell.config import check_range


@dataclass(frozen=True, kw_only=True)
class CertifyConfig:
    """How much is asked.

    Raises:
        ValueError: a value is out of range; the message says what is legal.
    """

    max_tokens: int = 48
    """Longest answer in tokens."""
    limit: int = 12
    """Prompts, evenly spaced over the categories of the workload."""
    samples: int = 1500
    """Answers of each distribution test."""
    batch: int = 16
    """Most answers at once; one and a quarter of it are tried too."""
    seed: int = 0
    """Another seed asks for other answers."""
    crossed: bool = True
    """Every prompt under every setting; else each setting once, the prompts in turn."""

    def __post_init__(self) -> None:
        check_range(self, 8, None, "max_tokens")
        check_range(self, 1, None, "limit")
        check_range(self, 100, None, "samples")
        check_range(self, 2, None, "batch")
        check_range(self, 0, 2**32 - 1, "seed")

    def quick(self) -> CertifyConfig:
        """A first look: everything once."""
        return replace(
            self,
            max_tokens=min(24, self.max_tokens),
            limit=min(3, self.limit),
            samples=min(200, self.samples),
            batch=min(4, self.batch),
            crossed=False,
        )
