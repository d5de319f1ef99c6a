"""A draft that is never right and costs something, to see what a controller makes of it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from foretell.spec.drafter import Ask, Drafter
from foretell.spec.tree import TokenTree, chains


class Useless(Drafter):
    """Random tokens, each level of which takes its time."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Drafter.Options):
        ms: float = 1.0
        """Milliseconds for each level of a draft."""

    options: Options

    def propose(self, ask: Ask) -> TokenTree:
        until = time.perf_counter() + 1e-3 * self.options.ms * max(ask.lengths)
        drafts = [
            [random.randrange(self.runtime.vocab_size) for _ in range(n)] for n in ask.lengths
        ]
        while time.perf_counter() < until:
            pass
        return chains(ask.roots, drafts)
