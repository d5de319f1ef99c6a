"""The compiled row steps against plain torch, and each row's independence of the others."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from foretell.attention import rows

EPS = 1e-5


def test_rms_norm() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 100) * 3, torch.randn(100)
    out = rows.rms_norm(x, weight, EPS)
    torch.testing.assert_close(out, F.rms_norm(x, (100,), weight, EPS))
    for row in range(7):
        assert torch.equal(rows.rms_norm(x[row : row + 1], weight, EPS)[0], out[row])
    torch.testing.assert_close(rows.rms_norm(x.double(), weight, EPS).float(), out)


def test_add_rms_norm_adds_in_place() -> None:
    torch.manual_seed(1)
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    total = x + residual
    plain = residual.double()
    out = rows.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(out, rows.rms_norm(total, weight, EPS))
    rows.add_rms_norm(x.double(), plain, weight, EPS)
    torch.testing.assert_close(plain.float(), total)


def test_silu_mul() -> None:
    torch.manual_seed(2)
    x = torch.randn(6, 90) * 10
    x[0, :6] = torch.tensor([-1e4, -89.0, 0.0, 89.0, 1e4, torch.nan])
    out = rows.silu_mul(x)
    want = F.silu(x[:, :45]) * x[:, 45:]
    torch.testing.assert_close(out, want, equal_nan=True)
    for row in range(6):
        alone = rows.silu_mul(x[row : row + 1])[0]
        torch.testing.assert_close(alone, out[row], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("norm", "turned"), [(False, 16), (True, 16), (False, 8)])
def test_rope_and_write(dtype: torch.dtype, norm: bool, turned: int) -> None:
    torch.manual_seed(3)
    heads, kv_heads, dim, num = 6, 2, 16, 9
    angles = torch.rand(50, turned // 2) * 6
    positions = torch.randint(0, 50, (num,), dtype=torch.int32)
    cells = torch.randperm(40)[:num].int()
    cells[4] = -1
    qkv = torch.randn(num, (heads + 2 * kv_heads) * dim)
    weights = (torch.randn(dim), torch.randn(dim)) if norm else (None, None)
    cache = torch.randn(2, 10, kv_heads, 4, dim).to(dtype)

    def call(x: torch.Tensor, cache: torch.Tensor, rows_: slice = slice(None)) -> None:
        rows.rope_and_write(
            x, angles.cos(), angles.sin(), positions[rows_], heads=heads, kv_heads=kv_heads,
            q_norm=weights[0], k_norm=weights[1], eps=EPS,
            k_cache=cache[0], v_cache=cache[1], cells=cells[rows_],
        )  # fmt: skip

    got, want, got_cache, want_cache = qkv.clone(), qkv.double(), cache.clone(), cache.clone()
    call(got, got_cache)
    call(want, want_cache)  # float64 goes through plain torch
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(got[:, -kv_heads * dim :], qkv[:, -kv_heads * dim :])
    torch.testing.assert_close(got_cache.float(), want_cache.float(), rtol=1e-2, atol=1e-5)
    k, v = got.view(num, -1, dim)[:, heads:].split(kv_heads, dim=1)
    untouched = torch.ones(10, 4, dtype=torch.bool)
    for row, cell in enumerate(cells.tolist()):
        if cell >= 0:
            untouched[cell // 4, cell % 4] = False
            assert torch.equal(got_cache[0, cell // 4, :, cell % 4], k[row].to(dtype))
            assert torch.equal(got_cache[1, cell // 4, :, cell % 4], v[row].to(dtype))
    flat = untouched[:, None].expand(10, kv_heads, 4)
    assert torch.equal(got_cache[:, flat], cache[:, flat])
    for row in range(num):
        alone = qkv[row : row + 1].clone()
        call(alone, got_cache, slice(row, row + 1))
        assert torch.equal(alone[0], got[row])


def test_rope_turns_as_transformers_does() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(4)
    qkv = torch.randn(5, 4 * 8)  # two q heads, one k, one v
    angles = torch.rand(5, 4) * 6
    x = qkv.view(1, 5, 4, 8).transpose(1, 2)
    both = torch.cat([angles, angles], dim=-1)[None]
    q, k = apply_rotary_pos_emb(x[:, :2], x[:, 2:3], both.cos(), both.sin())
    positions = torch.arange(5, dtype=torch.int32)
    rows.rope_and_write(qkv, angles.cos(), angles.sin(), positions, heads=2, kv_heads=1)
    got = qkv.view(5, 4, 8)
    torch.testing.assert_close(got[:, :2], q[0].transpose(0, 1))
    torch.testing.assert_close(got[:, 2:3], k[0].transpose(0, 1))


def test_gradients_flow_through_plain_torch() -> None:
    weight = torch.ones(8, requires_grad=True)
    x = torch.randn(2, 8, requires_grad=True)
    rows.silu_mul(rows.rms_norm(x, weight, EPS)).sum().backward()
    assert weight.grad is not None
    assert x.grad is not None
