"""KV memory: layer groups of target and drafter over one page index space."""

from __future__ import annotations

import os
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from foretell.config import parse_memory
from foretell.spec.drafter import KVGroup


def page_bytes(groups: SequenceOf[KVGroup], page_size: int) -> int:
    """Bytes of one page: the sum over groups, K and V."""
    return sum(
        (1 + g.values) * g.num_layers * g.num_kv_heads * g.head_dim * g.dtype.itemsize * page_size
        for g in groups
    )


def available_bytes(device: torch.device) -> int:
    """Memory that could be used now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def num_pages_for(
    kv_memory: str,
    bytes_per_page: int,
    page_size: int,
    max_num_seqs: int,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Pages that fit into ``kv_memory``; never more than twice what all slots could fill.

    Raises:
        ValueError: not even one sequence of max_model_len fits, with the numbers.
    """
    limit = parse_memory(kv_memory)
    available = available_bytes(device)
    size = int(limit * available) if isinstance(limit, float) else limit
    if size > available:
        raise ValueError(
            f"kv_memory={kv_memory}: {size / 2**20:.0f} MiB asked for, "
            f"{available / 2**20:.0f} MiB free; lower it"
        )
    # One cell more than tokens: the place of the token that a pass adds.
    pages_for_one = -(-(max_model_len + 1) // page_size)
    num_pages = min(size // bytes_per_page, 2 * max_num_seqs * pages_for_one)
    if num_pages < pages_for_one:
        raise ValueError(
            f"kv_memory={kv_memory}: one sequence of max_model_len={max_model_len} needs "
            f"{pages_for_one} pages, {pages_for_one * bytes_per_page / 2**20:.1f} MiB, and "
            f"{size / 2**20:.1f} MiB hold {num_pages}; raise kv_memory or lower max_model_len"
        )
    return int(num_pages)


class KVPool:
    """K and V of every layer of every group.

    Args:
        groups: by name; ``target`` first.
    """

    def __init__(
        self,
        groups: dict[str, KVGroup],
        num_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.layers: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for name, group in groups.items():
            # A GPU need not ask which rows keep nothing: their cells, -1, lie in a page of no use.
            pages = num_pages + (device.type != "cpu")
            shape = (pages, group.num_kv_heads, page_size, group.head_dim)
            keys = [_zeros(shape, group.dtype, device) for _ in range(group.num_layers)]
            values = [_zeros(shape, group.dtype, device) for _ in keys] if group.values else keys
            self.layers[name] = list(zip(keys, values, strict=True))  # pairs of [pages, Hkv, S, D]

    def move(self, group: str, source: list[int], target: list[int]) -> None:
        """Copies physical cells onto others in every layer of a group, all reads before writes."""
        size = self.page_size
        device = self.layers[group][0][0].device
        s = torch.tensor(source, dtype=torch.int64, device=device)
        t = torch.tensor(target, dtype=torch.int64, device=device)
        for k, v in self.layers[group]:
            for cache in (k,) if v is k else (k, v):
                cache[t // size, :, t % size] = cache[s // size, :, s % size]  # [M, Hkv, D]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU memory that is taken page by page when it is first written: torch.zeros would touch
    all of it at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    words = np.zeros(shape, dtype=np.dtype(f"u{dtype.itemsize}"))
    return torch.from_numpy(words).view(dtype)
