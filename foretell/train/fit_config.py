"""How a head is fitted: every setting with its default, and which of them shape the result."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from foretell.config import MAX_THREADS
from foretell.spec.training import Divergence, Rule

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
        _at_least(self, 1, "layers", "heads", "accumulate", "save_every", "keep", "log_every")
        _at_least(self, 1, "validate_every", "timeout")
        if self.method not in get_args(Method):
            raise ValueError(f"method={self.method!r}: choose one of {', '.join(get_args(Method))}")
        if self.autocast not in get_args(Autocast):
            raise ValueError(f"autocast={self.autocast!r}: choose one of auto, bf16, off")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr={self.lr}: must be above 0; 1e-3 is common for a small head")
        for name in ("beta1", "beta2", "ema", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be from 0 to below 1")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"weight_decay={self.weight_decay}: must be 0 or more")
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip}: must be above 0; inf never clips")
        if not (math.isfinite(self.epochs) and self.epochs > 0):
            raise ValueError(f"epochs={self.epochs}: must be above 0")
        if self.max_steps is not None:
            _at_least(self, 1, "max_steps")
        _at_least(self, 4, "max_len")
        _at_least(self, 1, "batch_tokens")
        if not 0 <= self.held_out <= 0.5:
            raise ValueError(f"held_out={self.held_out}: must be from 0 to 0.5")
        self.rule(Rule())
        if self.threads is not None and not 1 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads={self.threads}: must be from 1 to {MAX_THREADS}")

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


def _at_least(config: FitConfig, least: int, *names: str) -> None:
    for name in names:
        if getattr(config, name) < least:
            raise ValueError(f"{name}={getattr(config, name)}: must be {least} or more")
