"""Every weight format: a row's bits are its own, and the product is what it should be."""

from __future__ import annotations

import pytest
import torch

from foretell.models.quant import Int8Table, make_embedding, make_linear, quantize_int4
from foretell.models.rows import STEP, fit_rows, rotate, stages, unfit_rows

FORMATS = ["int8", "bf16", "f32", "int4"]
SHAPES = [(576, 64), (1536, 48), (8960, 32), (96, 40), (50, 33), (7, 5)]


def operands(inputs: int, outputs: int, rows: int = 70):
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    x = torch.randn(rows, inputs, generator=generator)
    return (
        weight,
        torch.randn(outputs, generator=generator),
        x * torch.logspace(-2, 2, rows)[:, None],
    )


@pytest.mark.parametrize(
    ("weights", "outliers"), [*((name, False) for name in FORMATS), ("int8", True)]
)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_rows_do_not_know_of_each_other(weights, outliers, inputs, outputs):
    weight, bias, x = operands(inputs, outputs)
    linear = make_linear(weights, weight, bias, outliers=outliers)
    alone = torch.cat([linear(row[None]) for row in x])
    for rows in range(71):
        assert torch.equal(linear(x[:rows]), alone[:rows])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    assert torch.equal(linear(x[order]), alone[order])
    assert torch.equal(linear(x[5:50]), alone[5:50])  # a view that starts elsewhere


@pytest.mark.parametrize("weights", FORMATS)
def test_rows_that_are_not_finite_or_zero_stay_by_themselves(weights):
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
def test_products_are_close(weights, limit):
    weight, bias, x = operands(576, 64)
    exact = x.double() @ weight.double().T + bias
    assert (make_linear(weights, weight, bias)(x) - exact).norm() / exact.norm() < limit


def test_two_rows_of_8_bits_leave_only_the_error_of_the_weights():
    weight, _, x = operands(1536, 64)
    weight = (weight * 40).round().clamp(-127, 127)  # near what 8 bits hold
    exact = x.double() @ weight.double().T
    error = [
        float((make_linear("int8", weight, outliers=fine)(x) - exact).norm() / exact.norm())
        for fine in (False, True)
    ]
    parts = fit_rows(x, fine=True)[0]
    coarse, fine = parts[: len(x), :1536], parts[len(x) :, :1536]
    assert torch.allclose(coarse + fine * STEP / 2, fit_rows(x)[0][:, :1536], atol=1e-6)
    assert error[1] < 0.8 * error[0]


def test_an_outlier_does_not_cost_the_other_inputs_their_precision():
    weight, _, x = operands(576, 64)
    x[:, 11] = 50 * x.abs().amax(1)
    weight[:, 11] = 0  # nothing of the outlier itself is in the result
    exact = x.double() @ weight.double().T
    assert (make_linear("int8", weight)(x) - exact).norm() / exact.norm() < 0.3


@pytest.mark.parametrize("width", [576, 96, 50, 7])
def test_fit_equals_its_specification_in_torch(width):
    _, _, x = operands(width, 4)
    fitted, scale = fit_rows(x)
    turned = rotate(x)
    assert torch.equal(scale, turned.abs().amax(1))
    expected = (turned * (1 / scale)[:, None]).clamp(-1, 1)
    assert torch.equal(fitted[:, :width], expected)
    assert torch.equal(fitted[:, width:], torch.tensor([[-1.0, 1.0]]).expand(70, 2))
    # A rotation: applied twice it gives back the rows.
    assert torch.allclose(rotate(turned) / 2 ** stages(width), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [None, torch.randn(40)])
def test_few_and_many_rows_scale_back_alike(bias):
    y, scale = torch.randn(70, 40), torch.rand(70)
    many = unfit_rows(y.clone(), scale, bias)
    few = torch.cat(
        [unfit_rows(y[i : i + 7].clone(), scale[i : i + 7], bias) for i in range(0, 70, 7)]
    )
    assert torch.equal(many, few)


def test_int4_keeps_what_is_on_a_grid_of_16_levels():
    levels = torch.randint(0, 16, (32, 64), generator=torch.Generator().manual_seed(0))
    levels[:, 0::32], levels[:, 1::32] = 0, 15
    weight = levels * 0.25 - 1.5
    found, scales = quantize_int4(weight)
    back = (found.view(32, 2, 32) - 8) * scales[..., :1].float().transpose(0, 1)
    assert torch.equal((back + scales[..., 1:].float().transpose(0, 1)).view(32, 64), weight)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("width", [96, 50])
def test_embedding_rows(weights, width):
    table = torch.randn(100, width, generator=torch.Generator().manual_seed(0))
    embedding, head = make_embedding(weights, table, None)
    tokens = torch.tensor([5, 0, 99, 5], dtype=torch.int32)
    rows = embedding(tokens)
    assert rows.dtype == torch.float32
    assert (rows - table[tokens]).norm() / rows.norm() < 0.01
    assert head(rows).shape == (4, 100)
    if weights in ("bf16", "f32"):
        embedding, head = make_embedding(weights, table[:96, : width // 16 * 16], None)
        assert head.weight.data_ptr() == embedding.weight.data_ptr()  # one copy
    else:
        assert isinstance(embedding, Int8Table)
