"""Ranks: one process, or several that torchrun starts, each with its own part of the batches.

Losses are sums over tokens and are divided by the tokens of all ranks at the end, so ranks with
few tokens weigh no more than their tokens do, and two ranks compute what one process does with
both ranks' batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from foretell.spec.training import Loss, TrainingBatch


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and talks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Of all ranks, elementwise; ``values`` may lie anywhere and is left alone."""
        if self.world == 1:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, on every rank."""
        if self.world == 1:
            return [value]
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, value)
        return out

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextmanager
def join(timeout: int) -> Iterator[Ranks]:
    """Joins the processes that torchrun started; alone where it started none.

    Args:
        timeout: seconds after which an exchange fails because a rank does not take part.
    """
    cuda = torch.cuda.is_available()
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        yield Ranks(device=torch.device("cuda" if cuda else "cpu"))
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    dist.destroy_process_group()  # not after an error: it would wait for the others


class LossOf(nn.Module):
    """A head and its loss as one module, whose forward pass is what DDP and FSDP wrap."""

    def __init__(self, head: nn.Module, loss: Callable[[nn.Module, TrainingBatch], Loss]) -> None:
        super().__init__()
        self.head = head
        self._loss = loss

    def forward(self, batch: TrainingBatch) -> Loss:
        loss = self._loss(self.head, batch)
        if torch.is_grad_enabled() and not loss.total.requires_grad:  # no token was wanted
            touched = [p.sum() * 0 for p in self.parameters() if p.requires_grad]
            return Loss(
                loss.total + torch.stack(touched).sum(), loss.parts,
                loss.agreed, loss.matched, loss.counted,
            )  # fmt: skip
        return loss


def spread(module: LossOf, ranks: Ranks, *, fsdp: bool) -> nn.Module:
    """Lets the gradients of ``module`` be averages over ranks after a backward pass.

    Args:
        fsdp: keep gradients and optimiser state shared out, a decoder layer at a time. Weights
            stay gathered between passes: a head's few layers run again for each draft token.
    """
    if fsdp:
        if not dist.is_initialized():
            raise ValueError("--fsdp shares a run among processes: start it with torchrun")
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        frozen = {p for p in module.parameters() if not p.requires_grad}
        for layer in getattr(module.head, "layers", ()):
            fully_shard(layer, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
        fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
        return module
    if ranks.world == 1:
        return module
    return DistributedDataParallel(
        module, broadcast_buffers=False, find_unused_parameters=True, gradient_as_bucket_view=True
    )


def exchange(module: nn.Module, wanted: bool) -> AbstractContextManager[None]:
    """Whether the passes inside exchange gradients: only the last of those accumulated need."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(wanted)
    elif isinstance(module, DistributedDataParallel) and not wanted:
        return module.no_sync()  # type: ignore[return-value]
    return nullcontext()


def settle(module: nn.Module) -> None:
    """After passes without a backward pass: gathered weights are let go, for the next update."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be shared out, gathered, on the CPU. All ranks must call it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor) -> None:
    """Copies ``value``, the same on all ranks, into a tensor that may be shared out."""
    if isinstance(tensor, DTensor):
        moved = value.to(tensor.device, tensor.dtype)
        value = distribute_tensor(moved, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)


@contextmanager
def gathered(module: nn.Module, values: dict[str, Tensor]) -> Iterator[None]:
    """Lets ``module`` hold plain parameters with ``values``, by name, to be written out."""
    held = {name: p for name, p in module.named_parameters() if name in values}
    try:
        for name, value in values.items():
            _put(module, name, nn.Parameter(value))
        yield
    finally:
        for name, parameter in held.items():
            _put(module, name, parameter)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    module.get_submodule(owner)._parameters[last] = parameter
