"""What was learnt, kept in the cache directory for the next start."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

from foretell.config import home


class Kept:
    """Files of one model with one choice of schemes.

    Args:
        name: of both.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def load(self, kind: str, restore: Callable[[Any], None]) -> bool:
        """Hands over what was kept of a kind. False if there is nothing, or it is damaged."""
        damaged = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
        with contextlib.suppress(OSError, *damaged):
            restore(json.loads((home() / kind / f"{self.name}.json").read_text()))
            return True
        return False

    def save(self, kind: str, state: Any) -> None:
        """Keeps it, whole or not at all: where that cannot be, it is learnt again."""
        path = home() / kind / f"{self.name}.json"
        part = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with part.open("w") as file:
                    json.dump(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
