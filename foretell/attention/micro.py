"""Attention's arithmetic as vector code: a block of `BLOCK` keys against a few (row, head) pairs.

Legend: a pair is one query head of one row, and has a query [D], a sum of values o [Dp] and a
(maximum, sum) of its softmax; Dp is D rounded up to `CHUNK`. kt [Dp, BLOCK] holds a block's keys
transposed, v [BLOCK, D] its values; arrays are passed flat. Where D is no multiple of `CHUNK`,
reads go past it, and what they find ends in parts of kt and o that nothing reads: a block's keys
and values need `SLACK` more items.

What is computed for a pair does not depend on the pairs beside it: `step(1)` to `step(4)` give
the same bits. Numba's cache does not see this file: touch kernels.py after a change here.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from foretell.attention.code import (
    FLOATS,
    HALVES,
    I32,
    I64,
    LANES,
    WORDS,
    Code,
    floats,
    integer,
    unpack,
    words,
)

BLOCK = 32
"""Keys reduced together. Changing it changes the last bits of every result."""
CHUNK = 32
"""Dimensions whose sums of values stay in registers together."""
SLACK = 64
PAIRS = 4
"""Most pairs of one step: 8 sums at once hide the latency of a multiply-add."""


def _transposed(b: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """16 vectors of 16, turned: pairs and quadruples within quarters, then whole quarters."""

    def quarters(mask: list[int]) -> ir.Constant:
        return words([4 * (lane // 4) + m for lane in range(0, LANES, 4) for m in mask])

    mix = b.shuffle_vector
    pairs: list[Any] = []
    for i in range(0, LANES, 2):
        for mask in ([0, 16, 1, 17], [2, 18, 3, 19]):
            pairs.append(mix(rows[i], rows[i + 1], quarters(mask)))
    # fours[4 * i + c], quarter q: column 4 * q + c of rows 4 * i to 4 * i + 3
    fours: list[Any] = []
    for i in range(0, LANES, 4):
        for c in range(2):
            for mask in ([0, 1, 16, 17], [2, 3, 18, 19]):
                fours.append(mix(pairs[i + c], pairs[i + c + 2], quarters(mask)))
    even = words([4 * quarter + x for quarter in (0, 2, 4, 6) for x in range(4)])
    odd = words([4 * quarter + x for quarter in (1, 3, 5, 7) for x in range(4)])
    columns: list[Any] = [None] * LANES
    for c in range(4):
        x0, x1, x2, x3 = fours[c::4]
        for first, mask in ((0, even), (1, odd)):
            low, high = mix(x0, x1, mask), mix(x2, x3, mask)
            columns[4 * first + c] = mix(low, high, even)
            columns[4 * (first + 2) + c] = mix(low, high, odd)
    return columns


def _transpose(typing: Any, cache: Any, places: Any, dim: Any, kt: Any) -> Any:
    """The keys [D] at places [BLOCK] int64 of a cache of float32's or bfloat16's bits, as float32
    columns kt [Dp * BLOCK]. Two bfloat16 numbers travel as one word, and are parted at the end."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(b)
        halves = signature.args[0].dtype.bitwidth == 16
        source, places, dim, target = unpack(context, b, signature, arguments)
        per_tile = 2 * LANES if halves else LANES

        def tile(d: Any, _: list[Any]) -> list[Any]:
            for first in range(0, BLOCK, LANES):
                rows: list[Any] = []
                for j in range(LANES):
                    start = b.load(code.at(places, first + j), typ=I64)
                    rows.append(code.load(code.at(source, start, d), WORDS))
                place = code.at(target, b.mul(d, integer(BLOCK)), first)
                for i, column in enumerate(_transposed(b, rows)):
                    if halves:
                        low = b.shl(column, words(16))
                        code.store(b.bitcast(low, FLOATS), code.at(place, 2 * i * BLOCK))
                        high = b.and_(column, words(-65536))
                        code.store(b.bitcast(high, FLOATS), code.at(place, (2 * i + 1) * BLOCK))
                    else:
                        code.store(b.bitcast(column, FLOATS), code.at(place, i * BLOCK))
            return []

        code.loop(integer(0), dim, per_tile, [], tile)
        return context.get_dummy_value()

    return types.void(cache, places, types.intp, kt), generate


def _widen(typing: Any, cache: Any, places: Any, dim: Any, v: Any) -> Any:
    """The values [D] at places [BLOCK] int64 of a cache, as float32 v [BLOCK * D]. A vector that
    runs over into the next key's part is written before that key is."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(b)
        halves = signature.args[0].dtype.bitwidth == 16
        source, places, dim, target = unpack(context, b, signature, arguments)

        def key(j: Any, _: list[Any]) -> list[Any]:
            start = b.load(code.at(places, j), typ=I64)
            place = code.at(target, b.mul(j, dim))

            def part(d: Any, _: list[Any]) -> list[Any]:
                at = code.at(source, start, d)
                if halves:
                    bits = b.zext(code.load(at, HALVES), WORDS)
                    code.store(b.shl(bits, words(16)), code.at(place, d))
                else:
                    code.store(code.load(at, WORDS), code.at(place, d))
                return []

            return code.loop(integer(0), dim, LANES, [], part)

        code.loop(integer(0), integer(BLOCK), 1, [], key)
        return context.get_dummy_value()

    return types.void(cache, places, types.intp, v), generate


transpose: Any = intrinsic(_transpose)
widen: Any = intrinsic(_widen)


@functools.cache
def step(pairs: int) -> Any:
    """The function that takes keys first .. end - 1 of a block into `pairs` pairs from `pair` on.

    Its arguments: queries q [pairs * D], kt, v, D, Dp, o [pairs * Dp], state [pairs * 2] (maximum
    and sum, from -inf and 0), scratch s [PAIRS * BLOCK], pair, first, end; first < end. Online
    softmax: Milakov and Gimelshein 2018.
    """

    @intrinsic
    def function(
        typing: Any, q: Any, kt: Any, v: Any, dim: Any, padded: Any, o: Any, state: Any, s: Any,
        pair: Any, first: Any, end: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(
            q, kt, v, types.intp, types.intp, o, state, s, types.intp, types.intp, types.intp
        )

        def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            q, kt, v, dim, padded, o, state, s, pair, first, end = unpack(
                context, b, signature, arguments
            )
            code = Code(b)
            q, o = code.at(q, b.mul(pair, dim)), code.at(o, b.mul(pair, padded))
            state = code.at(state, b.mul(pair, integer(2)))
            scores = _scores(code, pairs, q, kt, dim, first, end)
            shrink = [
                _softmax(code, scores[2 * p : 2 * p + 2], code.at(state, 2 * p), s, p)
                for p in range(pairs)
            ]
            _values(code, shrink, s, v, dim, padded, o, first, end)
            return context.get_dummy_value()

        return signature, generate

    return function


def _scores(code: Code, pairs: int, q: Any, kt: Any, dim: Any, first: Any, end: Any) -> Any:
    """Two vectors a pair: q . k of every key, -inf outside first .. end - 1."""
    b = code.b

    def product(d: Any, sums: list[Any]) -> list[Any]:
        column = code.at(kt, b.mul(d, integer(BLOCK)))
        keys = code.load(column), code.load(code.at(column, LANES))
        results: list[Any] = []
        for p in range(pairs):
            x = code.spread(code.scalar(code.at(q, b.mul(dim, integer(p)), d)))
            results += [code.fma(x, keys[i], sums[2 * p + i]) for i in range(2)]
        return results

    scores = code.loop(integer(0), dim, 1, [floats(0.0)] * (2 * pairs), product)
    low, high = (code.spread(b.trunc(x, I32)) for x in (first, end))
    for i in range(2):
        lanes = words(range(i * LANES, (i + 1) * LANES))
        inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        for p in range(pairs):
            scores[2 * p + i] = b.select(inside, scores[2 * p + i], floats(-np.inf))
    return scores


def _softmax(code: Code, scores: list[Any], state: Any, s: Any, p: int) -> Any:
    """Writes the weights to s, updates the state; gives what the old sums shrink by."""
    b = code.b
    old = code.spread(code.scalar(state))
    top = code.larger(code.fold(code.larger(*scores), code.larger), old)
    weights = [code.exp(b.fsub(x, top)) for x in scores]
    for i, x in enumerate(weights):
        code.store(x, code.at(s, p * BLOCK + i * LANES))
    total = code.fold(b.fadd(*weights), b.fadd)
    shrink = code.exp(b.fsub(old, top))
    total = code.fma(code.spread(code.scalar(code.at(state, 1))), shrink, total)
    for i, x in enumerate((top, total)):
        code.store(b.extract_element(x, ir.Constant(I32, 0)), code.at(state, i))
    return shrink


def _values(
    code: Code, shrink: list[Any], s: Any, v: Any, dim: Any, padded: Any, o: Any, first: Any,
    end: Any,
) -> None:  # fmt: skip
    """o = o * shrink + weights @ v, keys in order; a key outside is not even read."""
    b = code.b
    pairs = len(shrink)

    def chunk(c: Any, _: list[Any]) -> list[Any]:
        places = [
            code.at(o, b.mul(padded, integer(p)), c, i * LANES)
            for p in range(pairs)
            for i in (0, 1)
        ]
        sums = [b.fmul(code.load(x), shrink[n // 2]) for n, x in enumerate(places)]

        def key(j: Any, sums: list[Any]) -> list[Any]:
            row = code.at(v, b.mul(j, dim), c)
            values = code.load(row), code.load(code.at(row, LANES))
            results: list[Any] = []
            for p in range(pairs):
                weight = code.spread(code.scalar(code.at(s, p * BLOCK, j)))
                results += [code.fma(weight, values[i], sums[2 * p + i]) for i in (0, 1)]
            return results

        for x, place in zip(code.loop(first, end, 1, sums, key), places, strict=True):
            code.store(x, place)
        return []

    code.loop(integer(0), padded, CHUNK, [], chunk)
