"""What evaluate and export are told. Light: `--help` must not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from foretell.config import SpeculationConfig

Format = Literal["foretell", "eagle", "speculators", "medusa"]
FORMATS: tuple[Format, ...] = get_args(Format)
"""Layouts of a head: our own, that of EAGLE's and EAGLE-3's authors, and vLLM's two."""


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
        for name in ("k", "depth", "topk", "nodes"):
            if not 1 <= getattr(self, name) <= 63:
                raise ValueError(f"{name}={getattr(self, name)}: must be from 1 to 63")
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
