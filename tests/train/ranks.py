"""What each process of test_parallel runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from foretell.spec.training import Rule
from foretell.train.fit_config import FitConfig
from foretell.train.parallel import join
from foretell.train.trainer import Trainer
from tests.train.tiny import TinyBatches, TinyHead, quiet_loss

SETTINGS = {
    "autocast": "off", "log_every": 1, "save_every": 4, "max_steps": 8, "lr": 0.01, "ema": 0.9,
    "validate_every": 3, "timeout": 20,
}  # fmt: skip


def poisoned(head, batch):
    loss = quiet_loss(head, batch)
    if torch.equal(batch.tokens, TinyBatches().make(5).tokens):
        object.__setattr__(loss, "total", loss.total * float("nan"))
    return loss


def dying(head, batch):
    if torch.equal(batch.tokens, TinyBatches().make(5).tokens):
        os._exit(9)
    return quiet_loss(head, batch)


def run(path: Path, changes: dict, kind: str = "quiet") -> None:
    torch.set_num_threads(1)
    loss = {"quiet": quiet_loss, "poisoned": poisoned, "dying": dying}[kind]
    config = FitConfig(**(SETTINGS | changes))
    with join(config.timeout) as ranks:
        Trainer(
            TinyHead(), loss, TinyBatches(), config, Rule(), path,
            held_out=TinyBatches(2, seed=3), ranks=ranks,
        ).fit()  # fmt: skip


if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:])
