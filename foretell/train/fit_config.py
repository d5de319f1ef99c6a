"""How a head is fitted and what is reckoned beforehand: every setting with its default, and which
of them shape the result."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from foretell.config import MAX_THREADS, check_choice, check_range
from foretell.spec.training import Divergence, Rule
from foretell.train.config import layers_of

Device = Literal["cpu", "a100", "h100", "h200", "b200"]
Autocast = Literal["auto", "bf16", "off"]
Method = Literal["eagle", "eagle3", "mtp", "medusa"]
_RULE = tuple(field.name for field in dataclasses.fields(Rule))
_FREE = ("save_every", "keep", "log_every", "validate_every", "threads", "fsdp", "timeout")


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Settings of `foretell train fit`.

    Raises:
        ValueError: a value is out of range; the message says what is legal.
    """

    method: Method = "mtp"
    """The scheme that will draft with the head."""
    init: str | None = None
    """Directory of a head to go on from (fine-tuning); a new head if not given."""
    norms: bool = True
    """eagle: norms before and behind the layer, which the original leaves out."""
    layers: int = 1
    """Decoder layers of the head."""
    heads: int = 4
    """medusa: how many heads, each guessing one place further."""
    taps: str | None = None
    """eagle, eagle3: layers of the target that a new head reads, as in features; with --init an
    eagle head learns to read them too. eagle: -1 comes last."""
    draft_vocab: str | None = None
    """File of the target's token ids that the head may guess; all of them if not given."""
    steps: int | None = None
    """Draft tokens to unroll over the head's own output (training-time test); the scheme's own
    number if not given, as with the next three."""
    decay: float | None = None
    """Weight of each further draft token, as a part of the one before."""
    divergence: Divergence | None = None
    """kl: to the target's law. ce: to the text. lk: kl, then acceptance itself as that grows."""
    regression: float | None = None
    """Weight of the distance between the head's feature and the target's."""
    whole_texts: bool = False
    """Learn from the prompts' tokens too, not from answers alone: more text for nothing."""
    max_len: int = 1024
    """Tokens of a row of packed texts; longer texts are cut."""
    batch_tokens: int = 8192
    """Tokens of a batch, padding included; at least one row."""
    held_out: float = 0.02
    """Part of the rows that is not learnt from, to look at; at least a batch. 0: none."""
    lr: float = 1e-3
    """Peak learning rate: 1e-3 for heads of some million weights, 1e-4 for large ones."""
    beta1: float = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: float = 0.95
    """AdamW's decay of the mean of squared gradients."""
    weight_decay: float = 0.01
    """AdamW's pull towards zero; on matrices, not on norms and biases."""
    warmup: float = 0.03
    """Part of the steps in which the learning rate rises; after it a cosine falls to a tenth."""
    clip: float = 0.5
    """Largest norm of the gradient; larger ones are scaled down."""
    epochs: float = 2.0
    """Passes over the texts."""
    max_steps: int | None = None
    """Optimiser steps, in place of --epochs."""
    accumulate: int = 1
    """Batches of each rank that make one optimiser step."""
    autocast: Autocast = "auto"
    """Products in bf16 with float32 weights. auto: on GPUs, and on CPUs that multiply bf16."""
    ema: float = 0.0
    """Decay of a running mean of the weights, which then is the head; 0: none."""
    seed: int = 0
    """Of new weights, the order of texts and noise."""
    save_every: int = 500
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints that are kept, the newest."""
    log_every: int = 10
    """Steps between rows of fit/metrics.jsonl."""
    validate_every: int = 250
    """Steps between looks at the texts that are held out."""
    threads: int | None = None
    """CPU threads of each process; all cores, shared among the processes, if not given."""
    fsdp: bool = False
    """Share gradients and optimiser state out among ranks (FSDP2) in place of DDP."""
    timeout: int = 600
    """Seconds after which a rank that waits for a dead one gives up."""

    def __post_init__(self) -> None:
        check_range(self, 1, None, *("layers", "heads", "accumulate", "save_every", "keep"))
        check_range(self, 1, None, *("log_every", "validate_every", "timeout", "batch_tokens"))
        check_range(self, 1, None, "max_steps")
        check_range(self, 1, MAX_THREADS, "threads")
        check_range(self, 4, None, "max_len")
        check_range(self, 0, None, "weight_decay")
        check_range(self, 0, 0.5, "held_out")
        check_choice(self, "method", Method)
        check_choice(self, "autocast", Autocast)
        for name in ("beta1", "beta2", "ema", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be from 0 to below 1")
        for name in ("lr", "epochs"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)}: must be above 0")
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip}: must be above 0; inf never clips")
        self.rule(Rule())
        _ = self.read

    @property
    def read(self) -> tuple[int, ...] | None:
        """The target's layers that are asked for.

        Raises:
            ValueError: not layer numbers, each once.
        """
        return None if self.taps is None else layers_of(self.taps)

    def num_steps(self, batches: int) -> int:
        """Optimiser steps of the whole run, with so many batches of each rank in an epoch."""
        return self.max_steps or max(1, round(self.epochs * math.ceil(batches / self.accumulate)))

    def rule(self, own: Rule) -> Rule:
        """The scheme's ``own`` rule, changed where a setting says so."""
        given = {name: getattr(self, name) for name in _RULE}
        return dataclasses.replace(own, **{k: v for k, v in given.items() if v is not None})

    def shaping(self, rule: Rule) -> dict[str, Any]:
        """The settings that two runs must have in common for their weights to be the same."""
        own = {k: v for k, v in dataclasses.asdict(self).items() if k not in _FREE + _RULE}
        for name in ("accumulate", "epochs", "max_steps", "autocast"):  # by what they come to
            del own[name]
        return own | {f"rule.{k}": v for k, v in dataclasses.asdict(rule).items()}

    def learning_rate(self, step: int, total: int) -> float:
        """Of step 0, 1, ... of so many: up to `lr` in a straight line, then a cosine to lr / 10."""
        rising = round(self.warmup * total)
        if step < rising:
            return self.lr * (step + 1) / rising
        done = (step - rising) / max(1, total - rising)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What `--dry-run` reckons with."""

    tokens: float | None = None
    """--dry-run: tokens of all texts, such as 5e8; those of the features if not given."""
    world: int = 1
    """--dry-run: processes, each with a device."""
    device: Device = "cpu"
    """--dry-run: which device; cpu measures this one."""
    flops: float | None = None
    """--dry-run: its operations a second, in place of the device's."""
    bandwidth: float | None = None
    """--dry-run: its memory's bytes a second, in place of the device's."""
    utilisation: float = 0.35
    """--dry-run: part of those operations that a training step reaches."""

    def __post_init__(self) -> None:
        check_choice(self, "device", Device)
        check_range(self, 1, None, "world")
        for name in ("tokens", "flops", "bandwidth", "utilisation"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: must be above 0")
        check_range(self, 0, 1, "utilisation")
