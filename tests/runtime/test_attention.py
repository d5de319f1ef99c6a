"""The compiled attention against the plain one, and its promise: a row's bits are its own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretell.attention.base import Attention, Layout
from foretell.attention.blocked import BlockedAttention
from foretell.attention.cpu import CpuAttention
from foretell.spec.tree import ancestors, depths
from tests.reference import ReferenceAttention


def i32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


class Step:
    """Rows under construction: (sequence, position, logical cell, prefix, ancestors, base)."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.rows: list[tuple[int, int, int, int, int, int]] = []

    def run(self, seq: int, start: int, num: int) -> None:
        for p in range(start, start + num):
            self.rows.append((seq, p, p, p + 1, 0, 0))

    def tree(self, seq: int, root: int, parents: list[int]) -> None:
        """A tree whose root is the token at position ``root``."""
        words, deep = ancestors(parents), depths(parents)
        for node in range(len(parents)):
            word = signed(words[node])
            self.rows.append((seq, root + deep[node], root + node, root + 1, word, root))

    def layout(self, rng: random.Random) -> tuple[Layout, int]:
        """The layout over shuffled pages, some of them nobody's, and the number of pages."""
        num_seqs = max(row[0] for row in self.rows) + 1
        lengths = [0] * num_seqs
        for seq, _, cell, *_ in self.rows:
            lengths[seq] = max(lengths[seq], cell + 1)
        pages = [-(-length // self.page_size) for length in lengths]
        free = list(range(sum(pages) + 3))
        rng.shuffle(free)
        table = torch.full((num_seqs, max(pages) + 1), -1, dtype=torch.int32)
        for seq, num in enumerate(pages):
            table[seq, :num] = i32([free.pop() for _ in range(num)])
        size = self.page_size
        cells = [
            int(table[seq, cell // size]) * size + cell % size for seq, _, cell, *_ in self.rows
        ]
        seqs, positions, _, prefix, words, base = (list(column) for column in zip(*self.rows))  # noqa: B905
        layout = Layout(
            positions=i32(positions),
            cells=i32(cells),
            row_seq=i32(seqs),
            prefix=i32(prefix),
            ancestors=torch.tensor(words, dtype=torch.int64),
            base=i32(base),
            page_table=table,
            page_size=size,
        )
        return layout, sum(pages) + 3


def random_parents(rng: random.Random, num: int) -> list[int]:
    return [-1] + [rng.randrange(i) if rng.random() < 0.5 else i - 1 for i in range(1, num)]


def random_step(rng: random.Random, page_size: int) -> Step:
    step = Step(page_size)
    for seq in range(rng.randint(1, 4)):
        start = rng.choice([0, 1, rng.randrange(100), rng.randrange(40), 200 + rng.randrange(600)])
        num = rng.choice([1, 1, rng.randint(1, 70)])
        step.run(seq, start, num)
        if rng.random() < 0.6:
            nodes = random_parents(rng, rng.choice([2, 5, rng.randint(2, 64), 64]))
            step.rows.pop()  # the run's last row is the root
            step.tree(seq, start + num - 1, nodes)
    return step


def caches(num_pages: int, heads: int, size: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(num_pages, heads, size, dim).to(dtype) for _ in range(2)]


def compute(
    layout: Layout, q: Tensor, k: Tensor, v: Tensor, window: int | None = None, make=CpuAttention
) -> Tensor:
    attention = make()
    attention.plan(layout)
    return attention.run(q, k, v, scale=0.3, window=window)


def one_row(layout: Layout, row: int) -> Layout:
    parts = ("positions", "cells", "row_seq", "prefix", "ancestors", "base")
    return replace(layout, **{name: getattr(layout, name)[row : row + 1] for name in parts})


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.sampled_from([1, 4, 16]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([8, 20, 33, 64, 80, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, None, 1, 7, 32, 50]),
)
def test_equals_reference(
    seed: int,
    page_size: int,
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    window: int | None,
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layout, num_pages = random_step(rng, page_size).layout(rng)
    k_cache, v_cache = caches(num_pages, kv_heads, page_size, dim, dtype)
    fused = torch.randn(layout.num_rows, (group + 2) * kv_heads, dim)
    q, k, v = fused.split([group * kv_heads, kv_heads, kv_heads], dim=1)
    if dtype == torch.bfloat16:  # queries are rounded to the cache's numbers, as are weights
        q.copy_(q.to(dtype))
    found = []
    for attention in (ReferenceAttention(), CpuAttention(), BlockedAttention()):
        attention.plan(layout)
        copies = k_cache.clone(), v_cache.clone()
        attention.write(k, v, *copies)
        found.append((*copies, attention.run(q, *copies, scale=0.25, window=window)))
    near = {"rtol": 1e-4, "atol": 3e-5} if dtype == torch.float32 else {"rtol": 0, "atol": 0.02}
    k_want, v_want, out_want = found[0]
    for k_got, v_got, out_got in found[1:]:
        assert torch.equal(k_want, k_got)
        assert torch.equal(v_want, v_got)
        torch.testing.assert_close(out_got, out_want, **near)


def test_reference_is_dense_causal_attention() -> None:
    torch.manual_seed(0)
    step = Step(4)
    step.run(0, 0, 21)
    layout, num_pages = step.layout(random.Random(0))
    q, k, v = (torch.randn(21, 2, 8, dtype=torch.float64) for _ in range(3))
    k_cache, v_cache = (torch.full((num_pages, 2, 4, 8), torch.nan).double() for _ in range(2))
    attention = ReferenceAttention()
    attention.plan(layout)
    attention.write(k, v, k_cache, v_cache)
    q_, k_, v_ = (x.transpose(0, 1) for x in (q, k, v))
    place = torch.arange(21)
    for window in (None, 5):
        mask = place <= place[:, None]
        if window:
            mask &= place > place[:, None] - window
        want = torch.nn.functional.scaled_dot_product_attention(q_, k_, v_, mask, scale=0.3)
        got = attention.run(q, k_cache, v_cache, scale=0.3, window=window)
        torch.testing.assert_close(got, want.transpose(0, 1))


@pytest.mark.parametrize("make", [CpuAttention, BlockedAttention])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "dim"), [(3, 64), (1, 20), (2, 96), (7, 33)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    group: int, dim: int, dtype: torch.dtype, window: int | None, make: type[Attention]
) -> None:
    torch.manual_seed(1)
    rng = random.Random(1)
    step = Step(16)
    step.run(0, 0, 90)
    step.run(1, 300, 1)
    step.tree(2, 77, random_parents(rng, 64))
    step.run(3, 13, 20)
    layout, num_pages = step.layout(rng)
    k, v = caches(num_pages, 3, 16, dim, dtype)
    q = torch.randn(layout.num_rows, 3 * group, dim)
    together = compute(layout, q, k, v, window, make)
    for row in range(layout.num_rows):
        alone = compute(one_row(layout, row), q[row : row + 1], k, v, window, make)
        assert torch.equal(alone[0], together[row]), row


@pytest.mark.parametrize("make", [CpuAttention, BlockedAttention])
@pytest.mark.parametrize("window", [None, 40, 290])
@pytest.mark.parametrize(("length", "root"), [(150, 120), (280, 250), (540, 508)])
def test_a_tree_node_has_the_bits_of_the_plain_row(
    length: int, root: int, window: int | None, make: type[Attention]
) -> None:
    """A chain of tree nodes, a chunk and single rows over the same text in other pages; the later
    ones over the border of two parts."""
    torch.manual_seed(2)
    rng = random.Random(2)
    k_text, v_text, q = (torch.randn(length, heads, 64) for heads in (3, 3, 9))
    results = []
    for shape in ("chunk", "chain", "bushy", "single"):
        step = Step(rng.choice([4, 16]))
        if shape == "chunk":
            step.run(0, 0, length)
        elif shape == "single":
            step.run(0, 0, root)
            for p in range(root, length):
                step.run(0, p, 1)
        else:
            step.run(0, 0, root)
            nodes = list(range(-1, length - root - 1))
            if shape == "bushy":  # each true node has a wrong sibling before it
                nodes = [-1] + [max(0, 2 * (i // 2)) for i in range(2 * (length - root - 1))]
            step.tree(0, root, nodes)
        layout, num_pages = step.layout(rng)
        k, v = caches(num_pages, 3, step.page_size, 64, torch.bfloat16)
        true = list(range(length))
        if shape == "bushy":
            true = [*range(root + 1), *range(root + 2, layout.num_rows, 2)]
        attention = make()
        rows = torch.randn(3, layout.num_rows, 9, 64)
        rows[0][true], rows[1][true, :3], rows[2][true, :3] = q, k_text, v_text
        attention.plan(layout)
        attention.write(rows[1][:, :3], rows[2][:, :3], k, v)
        results.append(attention.run(rows[0], k, v, scale=0.3, window=window)[true])
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_threads_do_not_change_bits() -> None:
    torch.manual_seed(3)
    step = Step(16)
    step.run(0, 0, 400)
    step.run(1, 100, 30)
    layout, num_pages = step.layout(random.Random(3))
    k, v = caches(num_pages, 3, 16, 64, torch.float32)
    q = torch.randn(layout.num_rows, 9, 64)
    outs = []
    for threads in (1, 2, 3):
        attention = CpuAttention(threads)
        attention.plan(layout)
        outs.append(attention.run(q, k, v, scale=0.3))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("make", [CpuAttention, ReferenceAttention, BlockedAttention])
def test_nan_stays_in_its_row(make: type[Attention]) -> None:
    torch.manual_seed(4)
    step = Step(4)
    step.run(0, 0, 30)
    step.tree(0, 30, [-1, 0, 0, 1, 2])
    layout, num_pages = step.layout(random.Random(4))
    k, v = caches(num_pages, 2, 4, 16, torch.float32)
    q = torch.randn(layout.num_rows, 4, 16)
    attention = make()
    attention.plan(layout)
    clean = attention.run(q, k, v, scale=0.3)
    q[7] = torch.nan
    for cache in (k, v):  # node 1 is broken: only node 3 hangs from it
        cell = int(layout.cells[31])
        cache[cell // 4, :, cell % 4] = torch.nan
    out = attention.run(q, k, v, scale=0.3)
    bad = {7, 31, 33}
    for row in range(layout.num_rows):
        if row in bad:
            assert out[row].isnan().all()
        else:
            assert torch.equal(out[row], clean[row])


@pytest.mark.parametrize("make", [CpuAttention, ReferenceAttention, BlockedAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "broken"), [(None, 3), (None, 4), (4, 3), (4, 4)])
def test_nan_does_not_reach_rows_that_do_not_see_its_key(
    make: type[Attention],
    dtype: torch.dtype,
    window: int | None,
    broken: int,
) -> None:
    """Rows of one prompt chunk share a copied block, and two bfloat16 keys a word."""
    torch.manual_seed(7)
    step = Step(4)
    step.run(0, 0, 14)
    layout, num_pages = step.layout(random.Random(7))
    k, v = caches(num_pages, 2, 4, 32, dtype)
    q = torch.randn(14, 4, 32)
    attention = make()
    attention.plan(layout)
    clean = attention.run(q, k, v, scale=0.3, window=window)
    cell = int(layout.cells[broken])
    for cache in (k, v):
        cache[cell // 4, :, cell % 4] = torch.nan
    out = attention.run(q, k, v, scale=0.3, window=window)
    for row in range(14):
        if row >= broken and (window is None or row - broken < window):
            assert out[row].isnan().all()
        else:
            assert torch.equal(out[row], clean[row]), row


@pytest.mark.parametrize("make", [CpuAttention, ReferenceAttention, BlockedAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_touches_only_its_cells(make: type[Attention], dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    step = Step(4)
    step.run(0, 3, 6)
    layout, num_pages = step.layout(random.Random(5))
    layout.cells[2] = -1  # a padding row
    k_cache, v_cache = caches(num_pages, 2, 4, 8, dtype)
    before = k_cache.clone(), v_cache.clone()
    k, v = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    k[0, 0, :4] = torch.tensor([torch.nan, torch.inf, 1.00390625, 3e38])
    attention = make()
    attention.plan(layout)
    attention.write(k, v, k_cache, v_cache)
    written = [int(cell) for cell in layout.cells if cell >= 0]
    for cache, old, new in ((k_cache, before[0], k), (v_cache, before[1], v)):
        for cell in range(num_pages * 4):
            got = cache[cell // 4, :, cell % 4]
            if cell in written:
                row = layout.cells.tolist().index(cell)
                torch.testing.assert_close(got, new[row].to(dtype), rtol=0, atol=0, equal_nan=True)
            else:
                assert torch.equal(got, old[cell // 4, :, cell % 4])


def test_a_row_without_keys_gives_zeros() -> None:
    step = Step(4)
    step.run(0, 0, 3)
    layout, num_pages = step.layout(random.Random(6))
    layout.prefix[1] = 0
    k, v = caches(num_pages, 1, 4, 8, torch.float32)
    q = torch.randn(3, 2, 8)
    for attention in (CpuAttention(), ReferenceAttention()):
        attention.plan(layout)
        out = attention.run(q, k, v, scale=0.3)
        assert (out[1] == 0).all()
        assert (out[0] != 0).all()


def test_a_tree_may_lie_apart_from_its_prefix() -> None:
    torch.manual_seed(9)
    step = Step(4)
    step.tree(0, 40, [-1, 0, 1, 2, 2, 4])
    layout, num_pages = step.layout(random.Random(9))
    layout.prefix[:] = 30
    k, v = caches(num_pages, 1, 4, 32, torch.float32)
    q = torch.randn(6, 2, 32)
    reference = ReferenceAttention()
    reference.plan(layout)
    want = reference.run(q, k, v, scale=0.3)
    torch.testing.assert_close(compute(layout, q, k, v), want, rtol=1e-4, atol=3e-5)


def test_long_texts_and_large_scores() -> None:
    torch.manual_seed(7)
    step = Step(16)
    step.run(0, 5000, 2)
    layout, num_pages = step.layout(random.Random(7))
    k, v = caches(num_pages, 1, 16, 64, torch.float32)
    q = 40 * torch.randn(2, 2, 64)
    reference = ReferenceAttention()
    reference.plan(layout)
    want = reference.run(q.double(), k, v, scale=0.3)
    torch.testing.assert_close(compute(layout, q, k, v).double(), want, rtol=1e-3, atol=1e-4)


def test_half_caches_are_refused() -> None:
    step = Step(4)
    step.run(0, 0, 1)
    layout, num_pages = step.layout(random.Random(8))
    k, v = caches(num_pages, 1, 4, 8, torch.float16)
    with pytest.raises(ValueError, match="bfloat16"):
        compute(layout, torch.randn(1, 1, 8), k, v)
