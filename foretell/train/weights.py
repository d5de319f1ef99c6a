"""What an update changes: a head's weights, the optimiser's moments and the running mean."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from foretell.train.fit_config import FitConfig
from foretell.train.parallel import fill, gathered, whole


class Weights:
    """Those parameters of a head that require gradients, and AdamW over them.

    Args:
        head: with the face of `foretell.models.trainable`: ``config`` and ``tensors()`` say how it
            is written. Frozen parts are no part of what is kept.

    Raises:
        ValueError: nothing requires gradients.
    """

    def __init__(self, head: nn.Module, config: FitConfig) -> None:
        self.head, self._ema = head, config.ema
        self.parameters = {n: p for n, p in head.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("this head has nothing to train")
        self.mean = {n: p.detach().clone() for n, p in self.parameters.items()} if self._ema else {}
        matrices = [p for p in self.parameters.values() if p.dim() > 1]
        others = [p for p in self.parameters.values() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay,
            fused=True,
        )  # fmt: skip

    @property
    def count(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    def scale(self, factor: float, clip: float) -> float:
        """Multiplies the gradients, clips their norm and returns what it was before."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return float(whole(nn.utils.clip_grad_norm_(self.parameters.values(), clip)))

    def update(self, rate: float, step: int) -> None:
        """One step of AdamW, the ``step``-th, and of the running mean."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.mean:
            decay = min(self._ema, (1 + step) / (10 + step))  # the first weights soon count little
            with torch.no_grad():
                for name, mean in self.mean.items():
                    mean.lerp_(self.parameters[name], 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The running mean in the weights' place, where there is one."""
        own = {name: self.parameters[name].detach().clone() for name in self.mean}
        with torch.no_grad():
            for name, mean in self.mean.items():
                self.parameters[name].copy_(mean)
            yield
            for name, value in own.items():
                self.parameters[name].copy_(value)

    def state(self) -> dict[str, dict[str, Any]]:
        """All of it by parameter names, gathered on the CPU; for every rank to call."""
        return {
            "module": {n: whole(p) for n, p in self.parameters.items()},
            "ema": {n: whole(p) for n, p in self.mean.items()},
            "optimizer": {
                name: {key: whole(value) for key, value in self.optimizer.state[p].items()}
                for name, p in self.parameters.items()
            },
        }

    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        """Takes what `state` gave, with however many ranks."""
        for name, parameter in self.parameters.items():
            fill(parameter, state["module"][name])
            if self.mean:
                fill(self.mean[name], state["ema"][name])
            moments: dict[str, Tensor] = {}
            for key, value in state["optimizer"][name].items():
                scalar = value.dim() == 0  # how many steps
                empty = torch.zeros_like(value if scalar else parameter)
                moments[key] = empty.to(parameter.device)
                fill(moments[key], value)
            self.optimizer.state[parameter] = moments

    def write(self, path: Path, state: dict[str, dict[str, Any]]) -> None:
        """Writes the head of a gathered `state`, its running mean where there is one."""
        path.mkdir(exist_ok=True)
        head = cast(Any, self.head)
        with gathered(self.head, state["ema"] or state["module"]):
            tensors = {n: t.detach().contiguous() for n, t in head.tensors().items()}
            save_file(tensors, path / "model.safetensors")
            (path / "config.json").write_text(json.dumps(head.config, indent=1) + "\n")


def rng_state(device: torch.device) -> dict[str, Any]:
    """Of the generators that a loss may draw from."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
