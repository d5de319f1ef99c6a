"""Ranks that torchrun has started, on one node or several."""

from __future__ import annotations

import os
from dataclasses import dataclass

from foretell.config import EngineConfig
from foretell.runtime.gpu import device_of
from foretell.runtime.ranks import Group


@dataclass(frozen=True)
class Place:
    """This process among those of torchrun."""

    rank: int
    world: int
    neighbours: int
    local: int
    """Its number among those of its node."""
    host: str
    port: int

    def group(self, config: EngineConfig) -> Group:
        """
        Raises:
            ValueError: torchrun has started another number of ranks than is asked for.
        """
        if self.world != config.tensor_parallel:
            raise ValueError(
                f"tensor_parallel={config.tensor_parallel}, but torchrun has started "
                f"{self.world} ranks: make them equal"
            )
        held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Group(
            self.rank, self.world, self.host, self.port, config.rank_timeout,
            neighbours=self.neighbours, held=held, device=device_of(config, self.local),
        )  # fmt: skip


def torchrun() -> Place | None:
    """None where torchrun has not started this process."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return Place(rank, world, neighbours, local, host, port)
