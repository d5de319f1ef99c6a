"""Attention's arithmetic as vector code: a block of `BLOCK` keys against a few (row, head) pairs.

Legend: a pair is one query head of one row, and has a query [D], a sum of values o [D] and a
(maximum, sum) of its softmax; D is a multiple of `CHUNK`. kt holds a block's keys transposed, v its
values, in words of one float32 or two bfloat16; arrays are passed flat.

What is computed for a pair does not depend on the pairs beside it: `step(1)` to `step(4)` give
the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from foretell.attention.code import (
    FLOATS,
    HALVES,
    I32,
    I64,
    LANES,
    WIDE,
    WORDS,
    Code,
    dot_halves,
    floats,
    integer,
    to_halves,
    unpack,
    words,
)
from foretell.attention.jit import intrinsic

BLOCK = 32
"""Keys reduced together. Changing it changes the last bits of every result."""
CHUNK = 32
"""Dimensions whose sums of values stay in registers together."""
PAIRS = 4 if WIDE else 2
"""Most pairs of one step: 8 registers of sums hide the latency of a multiply-add."""


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
    """The keys [D] at places [BLOCK] int64 of a cache, D a multiple of `CHUNK`, as words: float32
    kt [D, BLOCK], or pairs of bfloat16 kt [D / 2, BLOCK]."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(b)
        per_word = 32 // signature.args[0].dtype.bitwidth
        source, places, dim, target = unpack(context, b, signature, arguments)

        def tile(d: Any, _: list[Any]) -> list[Any]:
            for first in range(0, BLOCK, LANES):
                rows: list[Any] = []
                for j in range(LANES):
                    start = b.load(code.at(places, first + j), typ=I64)
                    rows.append(code.load(code.at(source, start, d), WORDS))
                row = b.udiv(b.mul(d, integer(BLOCK)), integer(per_word))
                for i, column in enumerate(_transposed(b, rows)):
                    code.store(column, code.at(target, row, first + i * BLOCK))
            return []

        code.loop(integer(0), dim, per_word * LANES, [], tile)
        return context.get_dummy_value()

    return types.void(cache, places, types.intp, kt), generate


def _gather(typing: Any, cache: Any, places: Any, dim: Any, v: Any) -> Any:
    """The values [D] at places [BLOCK] int64 of a cache, D a multiple of `CHUNK`, as words: float32
    v [BLOCK, D], or bfloat16 of two neighbouring keys v [BLOCK / 2, D]."""

    def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        code = Code(b)
        per_word = 32 // signature.args[0].dtype.bitwidth
        source, places, dim, target = unpack(context, b, signature, arguments)

        def row(j: Any, _: list[Any]) -> list[Any]:
            keys = b.mul(j, integer(per_word))
            starts = [b.load(code.at(places, keys, i), typ=I64) for i in range(per_word)]
            place = code.at(target, b.mul(j, dim))

            def part(d: Any, _: list[Any]) -> list[Any]:
                if per_word == 1:
                    word = code.load(code.at(source, starts[0], d), WORDS)
                else:
                    low, high = (
                        b.zext(code.load(code.at(source, start, d), HALVES), WORDS)
                        for start in starts
                    )
                    word = b.or_(low, b.shl(high, words(16)))
                code.store(word, code.at(place, d))
                return []

            return code.loop(integer(0), dim, LANES, [], part)

        code.loop(integer(0), integer(BLOCK // per_word), 1, [], row)
        return context.get_dummy_value()

    return types.void(cache, places, types.intp, v), generate


transpose: Any = intrinsic(_transpose)
gather: Any = intrinsic(_gather)


@functools.cache
def step(pairs: int) -> Any:
    """The function that takes keys first .. end - 1 of a block into `pairs` pairs from `pair` on.

    Its arguments: an array of the cache's type; queries q [pairs * D] in float32 or, with a cache
    of bfloat16, bfloat16; kt, v; D; o [pairs * D], state [pairs * 2] (maximum and sum, from -inf
    and 0), scratch s [PAIRS * BLOCK], pair, first, end; first < end. Online softmax: Milakov and
    Gimelshein 2018. With bfloat16 the weights of the values are rounded to it too.
    """

    @intrinsic
    def function(
        typing: Any, cache: Any, q: Any, kt: Any, v: Any, dim: Any, o: Any, state: Any, s: Any,
        pair: Any, first: Any, end: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(
            cache, q, kt, v, types.intp, o, state, s, types.intp, types.intp, types.intp
        )
        per_word = 32 // cache.dtype.bitwidth

        def generate(context: Any, b: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            _, q, kt, v, dim, o, state, s, pair, first, end = unpack(
                context, b, signature, arguments
            )
            code = Code(b)
            width = b.udiv(dim, integer(per_word))  # words of a query
            q = code.at(b.bitcast(q, I32.as_pointer()), b.mul(pair, width))
            o = code.at(o, b.mul(pair, dim))
            state = code.at(state, b.mul(pair, integer(2)))
            scores = _scores(code, pairs, per_word, q, kt, width, first, end)
            shrink = [
                _softmax(code, scores[2 * p : 2 * p + 2], per_word, code.at(state, 2 * p), s, p)
                for p in range(pairs)
            ]
            _values(code, shrink, per_word, s, v, dim, o, first, end)
            return context.get_dummy_value()

        return signature, generate

    return function


def _multiply_add(code: Code, per_word: int, x: Any, y: Any, total: Any) -> Any:
    """total + x * y for words of one float32 or two bfloat16."""
    if per_word == 2:
        return dot_halves(code, total, x, y)
    return code.fma(code.b.bitcast(x, FLOATS), code.b.bitcast(y, FLOATS), total)


def _word(code: Code, pointer: Any) -> Any:
    """A word in all lanes."""
    place = code.b.bitcast(pointer, I32.as_pointer())
    return code.spread(code.b.load(place, align=4, typ=I32))


def _scores(
    code: Code, pairs: int, per_word: int, q: Any, kt: Any, width: Any, first: Any, end: Any
) -> Any:
    """Two vectors a pair: q . k of every key, -inf outside first .. end - 1."""
    b = code.b

    def product(d: Any, sums: list[Any]) -> list[Any]:
        column = code.at(kt, b.mul(d, integer(BLOCK)))
        keys = code.load(column, WORDS), code.load(code.at(column, LANES), WORDS)
        results: list[Any] = []
        for p in range(pairs):
            x = _word(code, code.at(q, b.mul(width, integer(p)), d))
            results += [_multiply_add(code, per_word, keys[i], x, sums[2 * p + i]) for i in (0, 1)]
        return results

    scores = code.loop(integer(0), width, 1, [floats(0.0)] * (2 * pairs), product)
    low, high = (code.spread(b.trunc(x, I32)) for x in (first, end))
    for i in range(2):
        lanes = words(range(i * LANES, (i + 1) * LANES))
        inside = b.and_(b.icmp_signed(">=", lanes, low), b.icmp_signed("<", lanes, high))
        for p in range(pairs):
            scores[2 * p + i] = b.select(inside, scores[2 * p + i], floats(-np.inf))
    return scores


def _softmax(code: Code, scores: list[Any], per_word: int, state: Any, s: Any, p: int) -> Any:
    """Writes the weights to s, updates the state; gives what the old sums shrink by."""
    b = code.b
    old = code.spread(code.scalar(state))
    top = code.larger(code.fold(code.larger(*scores), code.larger), old)
    weights = [code.exp(b.fsub(x, top)) for x in scores]
    for i, x in enumerate(weights):
        place = code.at(s, p * BLOCK + i * LANES // per_word)
        if per_word == 2:
            halves = to_halves(code, x)
            code.store(halves, place)
            weights[i] = b.bitcast(b.shl(b.zext(halves, WORDS), words(16)), FLOATS)
        else:
            code.store(x, place)
    total = code.fold(b.fadd(*weights), b.fadd)
    shrink = code.exp(b.fsub(old, top))
    total = code.fma(code.spread(code.scalar(code.at(state, 1))), shrink, total)
    for i, x in enumerate((top, total)):
        code.store(b.extract_element(x, ir.Constant(I32, 0)), code.at(state, i))
    return shrink


def _values(
    code: Code, shrink: list[Any], per_word: int, s: Any, v: Any, dim: Any, o: Any, first: Any,
    end: Any,
) -> None:  # fmt: skip
    """o = o * shrink + weights @ v, keys in order; what is outside is not multiplied with, so
    that a NaN there stays where it is."""
    b = code.b
    pairs = len(shrink)
    if per_word == 2:
        begin, after = b.udiv(first, integer(2)), b.udiv(b.add(end, integer(1)), integer(2))
    else:
        begin, after = first, end

    def chunk(c: Any, _: list[Any]) -> list[Any]:
        places = [
            code.at(o, b.mul(dim, integer(p)), c, i * LANES) for p in range(pairs) for i in (0, 1)
        ]
        sums = [b.fmul(code.load(x), shrink[n // 2]) for n, x in enumerate(places)]

        def key(j: Any, sums: list[Any]) -> list[Any]:
            row = code.at(v, b.mul(j, dim), c)
            values = [code.load(row, WORDS), code.load(code.at(row, LANES), WORDS)]
            if per_word == 2:  # two keys, of which the first or the last may be outside
                even = b.mul(j, integer(2))
                low = b.select(b.icmp_signed(">=", even, first), _half(0xFFFF), _half(0))
                last = b.icmp_signed("<", b.add(even, integer(1)), end)
                mask = code.spread(b.or_(low, b.select(last, _half(-65536), _half(0))))
                values = [b.and_(x, mask) for x in values]
            results: list[Any] = []
            for p in range(pairs):
                weight = _word(code, code.at(s, p * BLOCK, j))
                results += [
                    _multiply_add(code, per_word, values[i], weight, sums[2 * p + i])
                    for i in (0, 1)
                ]
            return results

        for x, place in zip(code.loop(begin, after, 1, sums, key), places, strict=True):
            code.store(x, place)
        return []

    code.loop(integer(0), dim, CHUNK, [], chunk)


def _half(value: int) -> ir.Constant:
    return ir.Constant(I32, value)
