"""Every weight format: a row's bits are its own, and the product is what it should be."""

from __future__ import annotations

import pytest
import torch

from foretell.models import linear as linears
from foretell.models.linear import PackedEmbedding, make_linear
from foretell.models.quant import (
    PANEL,
    Packed,
    fit,
    pack,
    quantize_int4,
    quantize_int8,
    select,
    turn,
    unpack,
)
from tests.models.tiny import every_thread

FORMATS = ["int8", "bf16", "f32", "int4"]
SHAPES = [(576, 64), (1536, 48), (8960, 32), (96, 40), (50, 33), (7, 5)]


@pytest.fixture(params=["compiled", "portable"])
def path(request, monkeypatch):
    if request.param == "portable":
        monkeypatch.setattr(linears, "products", lambda: None)
    return request.param


def operands(inputs: int, outputs: int, rows: int = 70):
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    x = torch.randn(rows, inputs, generator=generator)
    return (
        weight,
        torch.randn(outputs, generator=generator),
        x * torch.logspace(-2, 2, rows)[:, None],
    )


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_do_not_know_of_each_other(weights, inputs, outputs, path):
    weight, bias, x = operands(inputs, outputs)
    linear = make_linear(weights, weight, bias)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in range(71):
        assert torch.equal(linear(x[:rows]), alone[:rows])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    assert torch.equal(linear(x[order]), alone[order])
    assert torch.equal(linear(x[5:50]), alone[5:50])  # a view that starts elsewhere


@pytest.mark.parametrize("weights", FORMATS)
def test_threads_change_no_bits(weights, monkeypatch):
    weight, bias, x = operands(576, 640)
    linear = make_linear(weights, weight, bias)
    alone = linear(x)
    monkeypatch.setattr(linears, "_WORTH_A_THREAD", 0)
    for threads in (1, 2, 3):
        with every_thread(monkeypatch, threads) as used:
            assert torch.equal(linear(x), alone)
        assert used == [threads]


@pytest.mark.parametrize("weights", FORMATS)
def test_rows_that_are_not_finite_or_zero_stay_by_themselves(weights, path):
    weight, bias, x = operands(96, 40, rows=40)
    linear = make_linear(weights, weight, bias)
    clean = linear(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        for rows in (40, 9):
            broken = x[:rows].clone()
            broken[3, 17] = value
            out = linear(broken)
            keep = torch.arange(rows) != 3
            assert torch.equal(out[keep], clean[:rows][keep])
            assert not out[3].isfinite().any()
    x[3] = 0
    assert torch.allclose(linear(x)[3], bias, atol=1e-2 if weights == "int4" else 1e-6)


@pytest.mark.parametrize(
    ("weights", "limit"), [("int8", 0.015), ("bf16", 0.005), ("f32", 1e-6), ("int4", 0.1)]
)
def test_products_are_close(weights, limit, path):
    weight, bias, x = operands(576, 64)
    exact = x.double() @ weight.double().T + bias
    assert (make_linear(weights, weight, bias)(x) - exact).norm() / exact.norm() < limit


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_compiled_products_are_the_portable_ones(weights, inputs, outputs, monkeypatch):
    weight, bias, x = operands(inputs, outputs)
    linear = make_linear(weights, weight, bias)
    compiled = linear(x)
    monkeypatch.setattr(linears, "products", lambda: None)
    portable = linear(x)
    # A number between two levels may go either way.
    assert (compiled - portable).norm() < 1e-3 * portable.norm()


def test_an_outlier_does_not_cost_the_other_inputs_their_precision():
    weight, _, x = operands(576, 64)
    x[:, 11] = 50 * x.abs().amax(1)
    weight[:, 11] = 0  # nothing of the outlier itself is in the result
    exact = x.double() @ weight.double().T
    assert (make_linear("int8", weight)(x) - exact).norm() / exact.norm() < 0.3


def test_turning_is_a_rotation():
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(turn(turn(x)) / 16, x, atol=1e-5)
    spike = torch.zeros(1, 32)
    spike[0, 3] = 1
    assert torch.equal(turn(spike).abs(), torch.tensor([[1.0] * 16 + [0.0] * 16]))


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_unpacking_gives_back_what_was_packed(weights, inputs, outputs):
    weight, _, _ = operands(inputs, outputs)
    dense = unpack(weights, pack(weights, weight), outputs, inputs)
    if weights == "int8":
        dense = turn(dense)[:, :inputs]
    limit = {"f32": 0.0, "bf16": 0.004, "int8": 0.01, "int4": 0.1}[weights]
    assert (dense - weight).norm() <= limit * weight.norm()


@pytest.mark.parametrize("weights", FORMATS)
def test_selected_rows_are_the_matrix_rows(weights):
    weight, _, x = operands(96, 75)
    whole = make_linear(weights, weight)
    ids = torch.tensor([74, 0, 31, 32, 31, 5, *range(40, 73)])
    part = select(weights, whole.packed, ids)
    assert len(part.weights) == -(-len(ids) // PANEL)
    few = linears.PackedLinear(weights, Packed(*part), (len(ids), 96))
    assert torch.equal(few(x), whole(x)[:, ids])


def test_int4_keeps_what_is_on_a_grid_of_16_levels():
    levels = torch.randint(0, 16, (32, 64), generator=torch.Generator().manual_seed(0))
    levels[:, 0::32], levels[:, 1::32] = 0, 15
    weight = levels * 0.25 - 1.5
    found, scale, least = quantize_int4(weight)
    back = found.view(32, 2, 32) * scale[..., None] + least[..., None]
    assert torch.equal(back.view(32, 64), weight)
    assert torch.equal(unpack("int4", pack("int4", weight), 32, 64), weight)


def test_int8_levels_are_the_nearest():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    levels, scale = quantize_int8(weight)
    assert ((levels * scale[:, None] - weight).abs() <= scale[:, None] * 0.5001).all()
    assert torch.equal(fit("f32", weight), weight)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("width", [96, 50])
def test_embedding_rows(weights, width):
    table = torch.randn(100, width, generator=torch.Generator().manual_seed(0))
    head = make_linear(weights, table)
    embedding = PackedEmbedding(head)
    tokens = torch.tensor([5, 0, 99, 5], dtype=torch.int32)
    rows = embedding(tokens)
    assert rows.dtype == torch.float32
    assert (rows - table[tokens]).norm() / rows.norm() < (0.1 if weights == "int4" else 0.01)
    assert torch.equal(embedding(tokens[1:]), rows[1:])
    assert head(rows).shape == (4, 100)


def test_a_narrow_product_has_no_threads_that_only_wait(monkeypatch):
    """Which the pool would take for a machine that is busy with something else: it would use
    fewer threads for all that comes next."""
    if linears.products() is None:
        pytest.skip("no compiler")
    asked: dict[int, int] = {}

    def together(kernel, arguments, shares, sync, *kept):
        asked[out] = shares
        kernel(*arguments, 0, 1)

    monkeypatch.setattr(linears, "together", together)
    monkeypatch.setattr(linears, "num_threads", lambda: 4)
    for out in (32, 128, 288, 576):
        x, weight = torch.randn(64, 2304), torch.randn(out, 2304)
        found = make_linear("f32", weight)(x)
        torch.testing.assert_close(found, x @ weight.T, atol=1e-2, rtol=1e-3)
    assert asked == {32: 0, 128: 1, 288: 2, 576: 4}


@pytest.mark.parametrize(("rows", "pieces", "size"), [(1, 9, 2), (8, 18, 1), (512, 18 * 16, 1)])
def test_what_takes_long_is_handed_out_in_small_pieces(rows, pieces, size, monkeypatch):
    """So that many threads share a matrix of few outputs: 18 panels of 32."""
    if (compiled := linears.products()) is None:
        pytest.skip("no compiler")
    counted = []

    def together(kernel, arguments, shares, sync, *kept):
        kernel(*arguments, 0, 1)
        counted.append(int(sync[2 * compiled.LINE :].view("int64")[0]))

    monkeypatch.setattr(linears, "together", together)
    make_linear("int8", torch.randn(576, 64))(torch.randn(rows, 64))
    assert counted == [size * (pieces + 1)]  # one more is asked for than there are
