"""Fourth stage: from features on disk to a head."""

from __future__ import annotations

import copy
import hashlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.drafters import find
from foretell.models.frozen import FrozenTarget
from foretell.models.head_reader import draft_ids
from foretell.models.trainable_files import Trainable, open_head
from foretell.models.trainable_new import new_head, widen
from foretell.train.batches import PackedBatches
from foretell.train.estimate import describe, estimate, sizes_of
from foretell.train.features import open_batches
from foretell.train.fit_config import FitConfig, Machine
from foretell.train.parallel import Ranks, join
from foretell.train.store import Index
from foretell.train.trainer import Trainer, multiplies_bf16


def fit_head(
    config: FitConfig, run: Path, *, target: str | None = None, restart: bool = False
) -> Path | None:
    """Fits a head, in this process or as one of several that torchrun started.

    Returns:
        The finished head's directory; None: interrupted, and saved.

    Raises:
        ValueError: no features, settings that do not fit them or an earlier part of the run, or
            a loss that is not finite.
    """
    with join(config.timeout) as ranks:
        index = Index.read(run / "features")
        target = target or index.target
        frozen = FrozenTarget.open(target)
        ids = draft_ids(config.draft_vocab or "", run, frozen.config.vocab_size)
        head = make_head(config, frozen, ids)
        batches = open_batches(
            run, target=target, taps=head.taps, max_len=config.max_len,
            batch_tokens=config.batch_tokens, seed=config.seed,
        )  # fmt: skip
        train, held_out = split(batches, config.held_out, ranks.world)
        torch.set_num_threads(config.threads or _cores())
        scheme: Any = find(config.method)
        rule = config.rule(scheme.rule)
        trainer = Trainer(
            head,
            lambda head, batch: scheme.loss(head, batch, rule),
            train,
            config,
            rule,
            run / "fit",
            held_out=held_out,
            ranks=ranks,
            data={
                "target": index.target_digest,
                "texts": index.texts_digest,
                "batches": batches.num_batches(),
                "draft_vocab": None if ids is None else _digest(ids),
                "init": config.init,
            },
            restart=restart,
        )
        if ranks.first:
            print(_begins(trainer, batches, ranks), file=sys.stderr)
        return trainer.fit()


def plan(config: FitConfig, machine: Machine, run: Path, target: str | None = None) -> str:
    """What `--dry-run` prints: for the features of a run, or for a target and a number of tokens.

    Raises:
        ValueError: neither is there.
    """
    tokens = machine.tokens
    if target is None or tokens is None:
        if not (run / "features" / "index.json").exists():
            raise ValueError(
                f"{run} has no features yet: give --target and --tokens, or make them first"
            )
        index = Index.read(run / "features")
        target, tokens = target or index.target, tokens or float(index.num_tokens)
    sizes = sizes_of(target)
    ids = draft_ids(config.draft_vocab or "", run, sizes.config.vocab_size)
    scheme: Any = find(config.method)
    bf16 = machine.device != "cpu" or multiplies_bf16(torch.device("cpu"), config.autocast)
    reckoned = estimate(
        sizes, config, config.rule(scheme.rule), machine, tokens=tokens,
        bf16=bf16 and config.autocast != "off", draft_size=None if ids is None else len(ids),
    )  # fmt: skip
    return describe(reckoned, config, machine, tokens)


def make_head(config: FitConfig, target: FrozenTarget, ids: Tensor | None) -> Trainable:
    """A new head, or the one to go on from."""
    if config.init is not None:
        head = open_head(config.method, Path(config.init), target)
        if config.read in (None, head.taps):
            return head
        return widen(head, target, config.read, config.seed)
    return new_head(
        config.method, target, norms=config.norms, draft_ids=ids, taps=config.read,
        num_layers=config.layers, num_heads=config.heads, seed=config.seed,
    )  # fmt: skip


def split(
    batches: PackedBatches, share: float, world: int
) -> tuple[PackedBatches, PackedBatches | None]:
    """The first rows to learn from and the last ones to look at: whole batches, one for each rank
    at least. Which texts share a row depends on the seed alone, so they are the same in each epoch.

    Raises:
        ValueError: too few texts to hold some out.
    """
    total = batches.num_batches()
    count = max(math.ceil(share * total), 1)
    count = -(-count // world) * world if share else 0
    if total - count < world:
        raise ValueError(
            f"{batches.num_tokens:,} tokens make {total} of the {world + count} batches that "
            f"{world} process(es) and the part that is held out need: prepare more texts, lower "
            "--batch-tokens and --max-len, or learn from all of them with --held-out 0"
        )
    if not count:
        return batches, None
    rows = len(batches.rows) * (total - count) // total
    train, held_out = copy.copy(batches), copy.copy(batches)
    train.rows, held_out.rows = batches.rows[:rows], batches.rows[rows:]
    return train, held_out


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _digest(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16]


def _begins(trainer: Trainer, batches: PackedBatches, ranks: Ranks) -> str:
    words = [
        f"{trainer.config.method}: {trainer.weights.count:,} weights",
        f"{batches.num_tokens:,} tokens",
        f"{trainer.total:,} steps of {trainer.config.accumulate * ranks.world} x "
        f"{trainer.config.batch_tokens:,} tokens",
        f"{'bf16' if trainer.bf16 else 'float32'} on {ranks.device.type}",
    ]
    if ranks.world > 1:
        words.append(f"{ranks.world} ranks ({'FSDP' if trainer.config.fsdp else 'DDP'})")
    if trainer.place.step:
        words.append(f"goes on behind step {trainer.place.step:,}")
    return ", ".join(words)
