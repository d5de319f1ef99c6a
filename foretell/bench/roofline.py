"""What a pass takes on hardware that is not at hand: bytes over bandwidth, or operations over rate.

Williams et al., *Roofline* (CACM 2009). Dense decoder, bf16 weights and KV, tensor parallel. Good
for the shape of a curve, not for its second digit; `Roofline.assumptions` says what was assumed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

GPUS = {  # memory bytes/s, dense bf16 operations/s, from the makers' data sheets
    "A100": (2.0e12, 312e12),
    "H100": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
    "B200": (8.0e12, 2250e12),
}
_OF_BANDWIDTH, _OF_RATE = 0.75, 0.6
"""Shares of the data sheets' figures that good kernels reach."""
_ALL_REDUCE = 12e-6
"""Seconds of an all-reduce of a few rows; two a layer, none on one GPU."""
_STEP = 4e-4
"""Seconds of host work and sampling a step."""


@dataclass(frozen=True)
class Roofline:
    """A target on some GPUs.

    Raises:
        ValueError: an unknown GPU, or sizes that cannot be.
    """

    gpu: str
    parameters: float
    tp: int = 1

    def __post_init__(self) -> None:
        if self.gpu not in GPUS:
            raise ValueError(f"gpu={self.gpu!r}: choose one of {', '.join(GPUS)}")
        if self.parameters <= 0 or self.tp < 1:
            raise ValueError("target and tp: must be above 0, such as target=70B,tp=8")

    @property
    def layers(self) -> int:
        """As usual for the size: a hidden size of about 100 a layer, 12 squares of it each."""
        return max(1, round((self.parameters / (12 * 102**2)) ** (1 / 3)))

    def seconds(self, rows: int, context: int, sequences: int) -> float:
        """A pass of so many rows in all over sequences of so many tokens each."""
        bandwidth, rate = GPUS[self.gpu]
        read = 2 * self.parameters + sequences * context * self.kv_bytes
        memory = read / (self.tp * bandwidth * _OF_BANDWIDTH)
        compute = 2 * self.parameters * rows / (self.tp * rate * _OF_RATE)
        reduce = 2 * self.layers * _ALL_REDUCE if self.tp > 1 else 0.0
        return max(memory, compute) + reduce + _STEP

    def draft_seconds(self, scheme: str, depth: int, rows: int) -> float:
        """A draft of so many levels for so many sequences."""
        if scheme.startswith("prompt-lookup"):
            return 0.0
        bandwidth, rate = GPUS[self.gpu]
        # A head is one layer and an output projection; the target's own weights in 4 bits are 1/4.
        share = 0.25 if scheme.startswith("draft-model") else 2 / self.layers
        memory = 2 * self.parameters * share / (self.tp * bandwidth * _OF_BANDWIDTH)
        compute = 2 * self.parameters * min(1.0, 4 * share) * rows / (self.tp * rate * _OF_RATE)
        return depth * (max(memory, compute) + 1e-4)

    @property
    def kv_bytes(self) -> float:
        """Of one token: K and V of all layers, one KV head for eight heads."""
        return 2 * self.layers * (102 * self.layers / 8) * 2

    def speedup(
        self, scheme: str, acceptance: Sequence[float], batch: int, context: int, share: float = 1.0
    ) -> tuple[float, int]:
        """The best depth's speed-up, and that depth; 1 and 0 where none pays.

        Args:
            acceptance: [K] chance of each depth, given the one before was right.
            share: part of the steps in which the scheme has a draft at all; the others cost what
                plain decoding's do.
        """
        plain = self.seconds(batch, context, batch)
        best, chosen, reached, tokens = 1.0, 0, 1.0, 1.0
        for depth, chance in enumerate(acceptance, 1):
            reached *= chance
            tokens += reached
            took = self.seconds(batch * (1 + depth), context, batch)
            took += self.draft_seconds(scheme, depth, batch)
            gain = (1 + share * (tokens - 1)) * plain / (plain + share * (took - plain))
            if gain > best:
                best, chosen = gain, depth
        return best, chosen

    @property
    def assumptions(self) -> str:
        """One line of them."""
        bandwidth, rate = GPUS[self.gpu]
        return (
            f"{self.gpu} x {self.tp}: {bandwidth / 1e12:.2f} TB/s at {_OF_BANDWIDTH:.0%}, "
            f"{rate / 1e12:.0f} TFLOP/s at {_OF_RATE:.0%}, {self.parameters / 1e9:.0f}B parameters "
            f"in bf16, {self.layers} layers, {2 if self.tp > 1 else 0} all-reduces a layer of "
            f"{_ALL_REDUCE * 1e6:.0f} us, {_STEP * 1e3:.1f} ms of host work a step, a head of one "
            "layer, and the same acceptance as measured here: a larger target may differ"
        )


def parse_hardware(text: str) -> Roofline:
    """Reads ``gpu=H100,target=70B,tp=8``.

    Raises:
        ValueError: not of that form.
    """
    parts = [part.partition("=") for part in text.split(",")]
    given = {name: value for name, _, value in parts}
    size = re.fullmatch(r"([\d.]+)([BbMm])", given.pop("target", ""))
    gpu, tp = given.pop("gpu", "").upper(), given.pop("tp", "1")
    if given or not size or not tp.isdigit():
        raise ValueError(f"predict={text!r}: write for example gpu=H100,target=70B,tp=8")
    unit = 1e9 if size[2] in "Bb" else 1e6
    return Roofline(gpu, float(size[1]) * unit, int(tp))
