"""The small steps between matrix products: RMSNorm, SiLU gate, rotary embedding, cache write.

Float32 tensors on the CPU without gradients run compiled kernels in which a row's bits depend on
that row alone; everything else runs plain torch, which is also the kernels' specification.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foretell.attention.compiler import have_compiler


@cache
def _kernels() -> ModuleType:
    from foretell.attention import row_kernels

    return row_kernels


def _compiled(x: Tensor, weight: Tensor | None = None) -> bool:
    return (
        x.dtype == torch.float32
        and have_compiler()
        and x.is_cpu
        and not x.requires_grad
        and (weight is None or (weight.dtype == torch.float32 and not weight.requires_grad))
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x**2) + eps) over the last dimension (Zhang and Sennrich 2019).

    Args:
        x: [R, H] float32; other floats give their own dtype and compute in float32.
        weight: [H].

    Returns:
        [R, H], a new tensor.
    """
    if _compiled(x, weight):
        x = x.contiguous()
        out = torch.empty_like(x)
        _kernels().rms_norm(x.numpy(), weight.numpy(), eps, out.numpy())
        return out
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * wide).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x to residual in place and returns the sum's RMSNorm. x, residual: [R, H]."""
    if _compiled(x, weight) and _compiled(residual) and residual.is_contiguous():
        out = torch.empty_like(residual)
        _kernels().add_rms_norm(
            x.contiguous().numpy(), residual.numpy(), weight.numpy(), eps, out.numpy()
        )
        return out
    residual += x
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, SwiGLU) of a fused [R, 2 I] product: [R, I]."""
    width = gate_up.shape[1] // 2
    if _compiled(gate_up):
        gate_up = gate_up.contiguous()
        out = torch.empty(gate_up.shape[0], width)
        _kernels().silu_mul(gate_up.numpy(), out.numpy())
        return out
    return torch.nn.functional.silu(gate_up[:, :width]) * gate_up[:, width:]


def rope_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_cache: Tensor | None = None,
    v_cache: Tensor | None = None,
    cells: Tensor | None = None,
) -> None:
    """Rotates the q and k heads of a fused product in place (Su et al. 2021; pairs are (d, d +
    half), as in transformers), after an RMSNorm of each head where weights are given (Qwen3), and
    stores k and v in a cache where one is given.

    Args:
        qkv: [R, (heads + 2 * kv_heads) * D] float32, contiguous.
        cos: [P, D / 2] float32, and sin likewise; narrower where only the first dimensions turn.
        positions: [R] int32, rows of cos and sin.
        q_norm: [D] float32, and k_norm likewise, or None.
        k_cache: [pages, kv_heads, page_size, D] float32 or bfloat16, and v_cache likewise.
        cells: [R] int32 physical cells, needed with a cache; negative ones write nothing.
    """
    assert qkv.is_contiguous()
    assert (k_cache is None) == (v_cache is None) == (cells is None)
    if not _compiled(qkv, q_norm):
        _rope_and_write(
            qkv, cos, sin, positions, heads, kv_heads, q_norm, k_norm, eps, k_cache, v_cache, cells
        )
        return
    if k_cache is None or v_cache is None or cells is None:
        keys = values = _empty_cache()
        places, size = positions.numpy(), 0
    else:
        keys, values = cache_bits(k_cache), cache_bits(v_cache)
        places, size = cells.numpy(), k_cache.shape[2]
    _kernels().rope_and_write(keys.itemsize)(
        qkv.numpy(), cos.numpy(), sin.numpy(), positions.numpy(),
        _empty_weight() if q_norm is None else q_norm.numpy(),
        _empty_weight() if k_norm is None else k_norm.numpy(),
        eps, heads, kv_heads, keys, values, places, size, qkv.shape[1] // (heads + 2 * kv_heads),
    )  # fmt: skip


def cache_bits(x: Tensor) -> Any:
    """A KV cache [pages, Hkv, page_size, D] as numpy bits [pages, Hkv, page_size * D], no copy.

    Raises:
        ValueError: neither float32 nor bfloat16.
    """
    bits = getattr(x, "_foretell_bits", None)  # kept with the tensor: this costs 2 us, a layer 50
    if bits is None:
        if x.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"KV cache of {x.dtype}: use float32 or bfloat16 on a CPU")
        assert x.is_contiguous()
        wide = torch.uint32 if x.dtype == torch.float32 else torch.uint16
        bits = x.detach().view(wide).flatten(2).numpy()
        x._foretell_bits = bits  # type: ignore[attr-defined]
    return bits


@cache
def _empty_cache() -> Any:
    return torch.empty(0, 0, 0, dtype=torch.uint16).numpy()


@cache
def _empty_weight() -> Any:
    return torch.empty(0).numpy()


def _rope_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    cells: Tensor | None,
) -> None:
    x = qkv.view(len(qkv), heads + 2 * kv_heads, -1)  # [R, H + 2 Hkv, D]
    q, k, v = x.split([heads, kv_heads, kv_heads], dim=1)
    half = cos.shape[1]
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]  # [R, 1, half]
    for part, weight in ((q, q_norm), (k, k_norm)):
        turned = part if weight is None else rms_norm(part, weight, eps)
        low, high, rest = turned[..., :half], turned[..., half : 2 * half], turned[..., 2 * half :]
        part.copy_(torch.cat([low * c - high * s, high * c + low * s, rest], dim=-1))
    if k_cache is None or v_cache is None or cells is None:
        return
    store(k, v, k_cache, v_cache, cells)


def store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cells: Tensor) -> None:
    """Writes k and v [R, Hkv, D] to physical cells [R] of caches [pages, Hkv, page_size, D]. On a
    CPU those with negative cells are left out; elsewhere they go to the cache's last page, which
    is of no use: how many there are the host would have to ask."""
    if cells.is_cpu:
        rows = (cells >= 0).nonzero()[:, 0]
        k, v, cells = k[rows], v[rows], cells[rows]
    page, offset = cells.long() // k_cache.shape[2], cells.long() % k_cache.shape[2]
    k_cache[page, :, offset] = k.to(k_cache.dtype)
    v_cache[page, :, offset] = v.to(v_cache.dtype)
