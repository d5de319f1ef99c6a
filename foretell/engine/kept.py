"""What was learnt, kept in the cache directory for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from typing import Any

from foretell.config import home
from foretell.files import write_whole


class Kept:
    """One file.

    Args:
        kind: of what is learnt, the directory.
        facts: what it holds for, whose ``repr`` names the file.
    """

    def __init__(self, kind: str, *facts: Any) -> None:
        name = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
        self.path = home() / kind / f"{name}.json"

    def load(self, restore: Callable[[Any], None]) -> bool:
        """Hands over what was kept. False if there is nothing, or it is damaged."""
        damaged = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
        with contextlib.suppress(OSError, *damaged):
            restore(json.loads(self.path.read_text()))
            return True
        return False

    def save(self, state: Any) -> None:
        """Keeps it, whole or not at all: where that cannot be, it is learnt again."""
        with contextlib.suppress(OSError):
            write_whole(self.path, json.dumps(state).encode())
