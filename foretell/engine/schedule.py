"""In which order device and host work on a step: draft, target, draws, and what the host does.

`Ordinary` is the draft model's: the host sees each draft before the target checks it, and each
outcome before the drafter catches up. `engine.one_token` has the other one.
"""

from __future__ import annotations

from collections.abc import Callable

from foretell.config import Verification
from foretell.engine.ahead import Ahead
from foretell.engine.choose import Choice, Draws, choose
from foretell.engine.device import Device
from foretell.engine.rows import Span
from foretell.engine.scheduler import Item
from foretell.runtime.runner import Output
from foretell.runtime.stream import Work
from foretell.spec.drafter import Rows
from foretell.spec.forced import with_forced
from foretell.spec.tree import TokenTree


class Schedule:
    """One step's way over the device; its methods are called once, in this order."""

    followed: int | None = None
    """The scheme that takes in what was accepted before the host knows of it."""

    def __init__(self, device: Device, items: list[Item]) -> None:
        self.device, self.items = device, items

    def set_pages(self) -> None:
        """Tells the runtime which pages sequences have."""
        for item in self.items:
            self.device.runtime.set_pages(item.sequence.slot, item.sequence.pages)

    def draft(self) -> TokenTree:
        """Trees for all items."""
        raise NotImplementedError

    def target(self, rows: Rows, spans: list[Span]) -> Work[Output]:
        """The target's pass, under way."""
        raise NotImplementedError

    def draw(self, draws: Draws, target: Work[Output]) -> None:
        """Sends what comes behind it."""
        raise NotImplementedError

    def choice(self, target: Output) -> Choice:
        """What the target said about the trees."""
        raise NotImplementedError


class Ordinary(Schedule):
    """
    Args:
        propose: makes trees.
        rule: how they are verified.
        threshold: of the lossy rules.
    """

    def __init__(
        self,
        device: Device,
        items: list[Item],
        ahead: Ahead,
        propose: Callable[[list[Item]], TokenTree],
        rule: Verification,
        threshold: float,
    ) -> None:
        super().__init__(device, items)
        self.ahead, self.propose = ahead, propose
        self.rule: Verification = rule
        self.threshold = threshold

    def draft(self) -> TokenTree:
        """While the draft runs, the target's rows are laid out."""
        self.device.settle()
        self.set_pages()
        forced = [item.forced for item in self.items]
        drafting = self.device.submit(
            "draft", lambda: with_forced(self.propose(self.items), forced)
        )
        self.ahead.while_drafting(self.items)
        return self.device.wait(drafting)

    def target(self, rows: Rows, spans: list[Span]) -> Work[Output]:
        forward = self.device.runtime.forward_target
        return self.device.submit("target", lambda: forward(rows))

    def draw(self, draws: Draws, target: Work[Output]) -> None:
        self._drawing = self.device.submit(
            "sample", lambda: choose(self.rule, draws, target.value().logits, self.threshold)
        )

    def choice(self, target: Output) -> Choice:
        return self.device.wait(self._drawing)
