"""Packing: every token once in an epoch, each text by itself, the same for the same seed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.train.batches import PackedBatches, Text, pack

HIDDEN = 3


class Made:
    """Texts that say in every number whose they are."""

    taps = (4, -1)
    hidden_size = HIDDEN
    target = "toy"

    def __init__(self, sizes, topk=2):
        self.texts = []
        for i, size in enumerate(sizes):
            tokens = torch.arange(size) + 1000 * i
            features = tokens[:, None] % 256 + torch.arange(2 * HIDDEN)
            top = tokens[:, None] + torch.arange(topk)
            self.texts.append(
                Text(
                    tokens.int(),
                    torch.arange(size) % 3 == 0,
                    features.bfloat16(),
                    top.int(),
                    (top % 256).bfloat16(),
                )
            )
        self.reads = 0

    def lengths(self, max_len):
        return [min(len(text.tokens), max_len) for text in self.texts]

    def read(self, places, max_len):
        self.reads += len(places)
        return [
            Text(*(part[:max_len] for part in vars(self.texts[place]).values())) for place in places
        ]


def documents(batch):
    """The texts of a batch, by row and in order, with where they lie."""
    for row in range(len(batch.tokens)):
        for number in range(int(batch.documents[row].max()) + 1):
            yield row, batch.documents[row] == number


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(5, 32),
)
def test_every_token_comes_once_and_texts_do_not_mix(sizes, seed, rows, max_len):
    made = Made(sizes)
    batches = PackedBatches(made, max_len=max_len, batch_tokens=rows * max_len, seed=seed)
    assert batches.num_tokens == sum(min(size, max_len) for size in sizes)
    for epoch in (0, 1):
        seen = Counter()
        got = list(batches.epoch(epoch))
        assert len(got) == batches.num_batches()
        for batch in got:
            assert batch.tokens.shape[0] <= rows
            assert batch.tokens.shape[1] <= max_len
            real = batch.documents >= 0
            assert not batch.wanted[~real].any()
            assert not batch.features[~real].any()
            for row, mine in documents(batch):
                tokens = batch.tokens[row][mine]
                seen.update(tokens.tolist())
                assert len({token // 1000 for token in tokens.tolist()}) == 1
                at = mine.nonzero().flatten()
                assert at.tolist() == list(range(at[0], at[0] + len(at)))
                assert batch.positions[row][mine].tolist() == list(range(len(at)))
                text = made.texts[int(tokens[0]) // 1000]
                assert (tokens == text.tokens[: len(at)]).all()
                assert (batch.wanted[row][mine] == text.wanted[: len(at)]).all()
                assert (batch.features[row][mine] == text.features[: len(at)].float()).all()
                hidden = text.features[: len(at), HIDDEN:]
                assert (batch.hidden[row][mine] == hidden.float()).all()
                assert (batch.top_ids[row][mine] == text.top_ids[: len(at)]).all()
                assert (batch.top_logits[row][mine] == text.top_logits[: len(at)].float()).all()
        assert set(seen.values()) == {1}
        assert seen.total() == batches.num_tokens


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=300), st.integers(0, 3))
def test_rows_are_full(lengths, seed):
    rows = pack(lengths, 30, seed)
    assert sorted(text for row in rows for text in row) == [i for i, n in enumerate(lengths) if n]
    filled = [sum(lengths[text] for text in row) for row in rows]
    assert all(size <= 30 for size in filled)
    assert all(a + b > 30 for a, b in itertools.pairwise(filled))  # first fit


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_order_depends_on_seed_and_epoch_alone():
    sizes = [5 + i % 11 for i in range(50)]
    one, two = (PackedBatches(Made(sizes), max_len=16, batch_tokens=32, seed=3) for _ in range(2))
    first = list(one.epoch(0))
    assert all(same(a, b) for a, b in zip(first, two.epoch(0), strict=True))
    for other in (
        one.epoch(1),
        PackedBatches(Made(sizes), max_len=16, batch_tokens=32, seed=4).epoch(0),
    ):
        assert not torch.equal(next(other).tokens, first[0].tokens)


def test_start_reads_nothing_of_what_it_skips():
    made = Made([8] * 40)
    batches = PackedBatches(made, max_len=8, batch_tokens=16)
    all_of_them = list(batches.epoch(2))
    made.reads = 0
    rest = list(batches.epoch(2, start=15))
    assert made.reads == 2 * len(rest) == 10
    assert all(same(a, b) for a, b in zip(all_of_them[15:], rest, strict=True))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_what_one_process_sees(world):
    batches = PackedBatches(Made([8] * 23), max_len=8, batch_tokens=16)
    alone = list(batches.epoch(1))
    each = [list(batches.epoch(1, rank=rank, world=world)) for rank in range(world)]
    assert {len(part) for part in each} == {batches.num_batches(0, world)} == {12 // world}
    for rank, part in enumerate(each):
        assert all(same(a, alone[i * world + rank]) for i, a in enumerate(part))


def test_a_head_gets_the_taps_it_reads():
    made = Made([6, 9])
    for taps, columns in (((4,), slice(0, 3)), ((-1,), slice(3, 6)), ((-1, 4), None)):
        batch = next(PackedBatches(made, taps=taps, max_len=16).epoch(0))
        whole = next(PackedBatches(made, max_len=16).epoch(0))
        both = torch.cat([whole.features[..., 3:], whole.features[..., :3]], dim=-1)
        assert torch.equal(
            batch.features, both if columns is None else whole.features[..., columns]
        )
        assert torch.equal(batch.hidden, whole.features[..., 3:])
    with pytest.raises(ValueError, match=r"head reads layer 7: make them again with --taps 4,-1,7"):
        PackedBatches(made, taps=(7,), max_len=16)


def test_nothing_to_learn_from():
    with pytest.raises(ValueError, match="no text has an answer"):
        PackedBatches(Made([]), max_len=16)
