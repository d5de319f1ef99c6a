"""The loop that fits a head: one for every scheme, since a scheme is its loss.

It goes step by step: batches, losses, one exchange among ranks, a check that all is finite, an
AdamW update. Everything that the next step depends on is in a checkpoint, so that a run that was
cut off goes on as if it had not been.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foretell.files import alone, replacing
from foretell.progress import progress_bar
from foretell.spec.training import Loss, Rule, TrainingBatch
from foretell.train.batches import Batches
from foretell.train.checkpoints import Checkpoints
from foretell.train.fit_config import FitConfig
from foretell.train.metrics import Row, Tally, brief, metrics_file
from foretell.train.parallel import LossOf, Ranks, exchange, settle, spread
from foretell.train.weights import Weights, rng_state, set_rng_state


@dataclass
class Place:
    """How far a run has come."""

    step: int = 0  # optimiser steps done
    epoch: int = 0
    taken: int = 0  # batches of this epoch that all ranks together have had
    tokens: int = 0  # wanted tokens learnt from
    seconds: float = 0.0


class Trainer:
    """Fits a head.

    Args:
        head: a `foretell.models.trainable` head; what requires gradients is fitted.
        loss: sums over a batch's wanted tokens; ``drafters.find(method).loss`` with its rule.
        directory: RUN/fit; checkpoints, metrics and the finished head go there.
        held_out: batches that are never learnt from.
        data: what tells this data from other data, for checkpoints to compare.

    Raises:
        ValueError: the directory holds checkpoints of another run.
    """

    def __init__(
        self,
        head: nn.Module,
        loss: Callable[[nn.Module, TrainingBatch], Loss],
        batches: Batches,
        config: FitConfig,
        rule: Rule,
        directory: Path,
        *,
        held_out: Batches | None = None,
        ranks: Ranks | None = None,
        data: dict[str, Any] | None = None,
        restart: bool = False,
    ) -> None:
        self.config, self.batches, self.held_out = config, batches, held_out
        self.directory, self.ranks = directory, ranks or Ranks()
        torch.manual_seed(config.seed + self.ranks.rank)
        self.head = head.to(self.ranks.device)
        self.module = spread(LossOf(self.head, loss), self.ranks, fsdp=config.fsdp)
        self.weights = Weights(self.head, config)
        self.bf16 = multiplies_bf16(self.ranks.device, config.autocast)
        self.per_epoch = batches.num_batches(self.ranks.rank, self.ranks.world)
        self.total = config.num_steps(self.per_epoch)
        self.place, self.window = Place(), Tally()
        self.settings = config.shaping(rule) | {
            "steps": self.total,
            "batches_a_step": config.accumulate * self.ranks.world,
            "autocast": "bf16" if self.bf16 else "off",
            **(data or {}),
        }
        self.checkpoints = Checkpoints(directory, config.keep)
        self._asked = self._stop = False  # by a signal to this process; by any, agreed upon
        if restart and self.ranks.first:
            with alone(directory):
                self.checkpoints.clear()
        self.ranks.wait()
        if steps := self.checkpoints.steps():
            self._restore(self.checkpoints.load(steps[-1], self.settings))

    # ---- the loop

    def fit(self) -> Path | None:
        """Runs to the end, from the last checkpoint if there is one.

        Returns:
            The directory of the finished head, or None: it was interrupted, and saved first.

        Raises:
            ValueError: a loss or a gradient is not finite, and the batch is in bad-batch.pt; or
                another process is at work in that directory.
        """
        with alone(self.directory) if self.ranks.first else nullcontext():
            self._run()
            return self._finish() if self.place.step == self.total else None

    def _run(self) -> None:
        place, config, total = self.place, self.config, self.total
        first = self.ranks.first
        metrics = metrics_file(self.directory, place.step) if first else nullcontext(lambda _: None)
        bar = progress_bar("fit", total, done=place.step, shown=first, lines=True)
        with metrics as write, bar as advance, _interruptible(self):
            feed = self._feed()
            while place.step < total and not self._stop:
                norm = self._step(next(feed))
                row = self.window.means()
                advance(1, brief(row))
                last = place.step == total
                look = self.held_out and (place.step % config.validate_every == 0 or last)
                if look or place.step % config.log_every == 0 or last:
                    held_out = self._validate() if look else None
                    if held_out and first:
                        print(f"step {place.step}: held out: {brief(held_out)}", file=sys.stderr)
                    write(self._row(row, norm, held_out))
                    self.window = Tally()
                if place.step % config.save_every == 0 or last or self._stop:
                    self._save()

    def _feed(self) -> Iterator[list[TrainingBatch]]:
        """The batches of one optimiser step after the other, from where the run stands."""
        place, ranks = self.place, self.ranks
        while True:
            batches = self.batches.epoch(
                place.epoch, start=place.taken // ranks.world, rank=ranks.rank, world=ranks.world
            )
            left = self.per_epoch - place.taken // ranks.world
            while left > 0:
                taken = list(islice(batches, min(left, self.config.accumulate)))
                assert taken, "the store gives fewer batches than it says"
                left -= len(taken)
                place.taken += len(taken) * ranks.world
                if left == 0:  # a checkpoint of this step goes on with the next epoch
                    place.epoch, place.taken = place.epoch + 1, 0
                yield taken

    def _step(self, batches: list[TrainingBatch]) -> float:
        """One update from these batches and the other ranks'. Returns the gradient's norm."""
        began = time.monotonic()
        place, config = self.place, self.config
        self.weights.optimizer.zero_grad()
        tally, losses = Tally(), []
        for i, batch in enumerate(batches):
            batch = batch.to(self.ranks.device)
            if config.whole_texts:
                batch = batch.with_prompts()
            with exchange(self.module, wanted=i == len(batches) - 1):
                with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.bf16):
                    loss = self.module(batch)
                loss.total.backward()
            losses.append(tally.add(batch, loss))
        tally.sums["stop"] = [float(self._asked)]
        tally = tally.over(self.ranks)
        self._stop = tally.sums.pop("stop")[0] > 0  # all ranks stop behind the same step
        # DDP and FSDP average over ranks; the mean wanted is that over tokens.
        norm = self.weights.scale(self.ranks.world / max(1, tally.tokens), config.clip)
        if not (math.isfinite(norm) and math.isfinite(tally.loss)):
            self._refuse(batches, losses, norm)
        self.weights.update(config.learning_rate(place.step, self.total), place.step + 1)
        place.step += 1
        place.tokens += tally.tokens
        self.window.merge(tally)
        place.seconds += time.monotonic() - began
        return norm

    def _refuse(self, batches: list[TrainingBatch], losses: list[float], norm: float) -> None:
        """Writes the batches at fault, of this rank, and stops the run."""
        bad = [b for b, loss in zip(batches, losses, strict=True) if not math.isfinite(loss)]
        everywhere = self.ranks.gather(len(bad))
        files = {
            rank: self.directory / (f"bad-batch-{rank}.pt" if rank else "bad-batch.pt")
            for rank, count in enumerate(everywhere)
            if count or not any(everywhere)  # finite losses, but their gradients are not
        }
        if self.ranks.rank in files:
            self.directory.mkdir(parents=True, exist_ok=True)
            content = [dict(vars(batch)) for batch in bad or batches]
            torch.save({"step": self.place.step + 1, "batches": content}, files[self.ranks.rank])
        self.ranks.wait()
        what = "the loss" if any(everywhere) else f"the gradient (norm {norm})"
        steps = self.checkpoints.steps()
        raise ValueError(
            f"step {self.place.step + 1}: {what} is not finite; the batch is in "
            f"{', '.join(map(str, files.values()))}. Lower --lr, or drop that text; "
            + (f"step {steps[-1]} is saved" if steps else "nothing was saved before")
        )

    # ---- looking

    def _row(self, row: Row, norm: float, held_out: Row | None) -> Row:
        place = self.place
        rate = self.config.learning_rate(place.step - 1, self.total)
        epoch = round(place.epoch + place.taken / (self.per_epoch * self.ranks.world), 4)
        row = {"step": place.step, "epoch": epoch, **row, "lr": rate, "grad_norm": norm}
        row |= {"tokens": place.tokens, "seconds": round(place.seconds, 3)}
        return row if held_out is None else row | {"held_out": held_out}

    @torch.no_grad()
    def _validate(self) -> Row:
        assert self.held_out is not None
        tally, ranks = Tally(), self.ranks
        devices = [ranks.device] if ranks.device.type == "cuda" else []
        with self.weights.averaged(), torch.random.fork_rng(devices):
            for batch in self.held_out.epoch(0, rank=ranks.rank, world=ranks.world):
                batch = batch.to(ranks.device)
                with torch.autocast(ranks.device.type, torch.bfloat16, enabled=self.bf16):
                    tally.add(batch, self.module(batch))
            settle(self.module)
        return tally.over(ranks).means()

    # ---- what stays

    def _save(self) -> None:
        state: dict[str, Any] = self.weights.state()
        rng = self.ranks.gather(rng_state(self.ranks.device))
        if self.ranks.first:
            rest = {"rng": rng, "place": asdict(self.place), "window": self.window.sums}
            self.checkpoints.save(
                self.place.step,
                state | rest,
                self.settings,
                lambda path: self.weights.write(path / "head", state),
            )
        self.ranks.wait()

    def _restore(self, state: dict[str, Any]) -> None:
        self.place, self.window = Place(**state["place"]), Tally(state["window"])
        self.weights.restore(state)
        if self.ranks.rank < len(state["rng"]):
            set_rng_state(state["rng"][self.ranks.rank], self.ranks.device)

    def _finish(self) -> Path:
        """Writes the finished head to fit/head, which replaces a former one."""
        final = self.directory / "head"
        state = self.weights.state()
        if self.ranks.first:
            with replacing(final) as part:
                self.weights.write(part, state)
        self.ranks.wait()
        return final


def multiplies_bf16(device: torch.device, wish: str = "auto") -> bool:
    """Whether products are to be in bf16: on request, or where the device has instructions."""
    if wish != "auto":
        return wish == "bf16"
    if device.type != "cpu":
        return True
    has = (
        getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")
    )
    return any(check is not None and check() for check in has)


@contextmanager
def _interruptible(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and SIGTERM let the step end and save; a second one ends at once."""

    def stop(number: int, frame: Any) -> None:
        if trainer._asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        trainer._asked = True

    try:
        old = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread
        old = {}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
