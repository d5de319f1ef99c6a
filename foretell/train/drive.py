"""Many sequences through an engine, as many at once as it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from foretell.engine.engine import Engine
from foretell.sequence import Sequence


def drive(engine: Engine, more: Callable[[], Sequence | None]) -> Iterator[Sequence]:
    """Yields sequences as they end, and takes new ones as places get free.

    Args:
        more: the next sequence, or None where there is none now; asked again after each that
            ended, so that a conversation can go on.
    """
    live = 0
    while True:
        # Some wait behind those that run, so that a place is never empty.
        while live < 2 * engine.config.max_num_seqs and (new := more()) is not None:
            engine.add(new)
            live += 1
        if not live:
            return
        with torch.inference_mode():
            news = engine.step()
        for sequence in news:
            if sequence.finished:
                live -= 1
                yield sequence
