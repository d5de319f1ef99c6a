"""Numbers between the host and a device, without either waiting for what the other does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def put(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A list, or a tensor of the host's, on a device. On a GPU it goes there by way of memory that
    stays in its place, in the order of the stream that is current."""
    x = torch.as_tensor(values, dtype=dtype)
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


def told(x: Tensor) -> Tensor:
    """The same for the host. From a GPU it is there once what was issued so far is over."""
    if x.is_cpu:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
