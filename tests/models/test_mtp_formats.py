"""MTP modules of checkpoints in each layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from foretell.models.loader import load
from foretell.models.mtp_formats import load_mtp
from tests import heads, tiny
from tests.models.reading import read, some, target, x


def test_mimo_projects_the_feature_first(tmp_path: Path) -> None:
    head = heads.mtp("mimo")
    mix = read("mtp", head, tmp_path).head.mix
    assert mix is not None
    weight = head[0]["model.mtp_layers.0.input_proj.weight"]
    e, f = x(2, 64).chunk(2, 1)
    expected = torch.cat([f, e], 1) @ weight.T
    torch.testing.assert_close(mix(torch.cat([e, f], 1)), expected, atol=1e-5, rtol=1e-5)


def test_qwen_norms_are_centred_at_zero(tmp_path: Path) -> None:
    head = heads.mtp("qwen")
    loaded = read("mtp", head, tmp_path).head
    assert torch.equal(some(loaded.norm_out), head[0]["mtp.norm.weight"] + 1)
    assert torch.equal(
        some(loaded.layers[0].q_norm), head[0]["mtp.layers.0.self_attn.q_norm.weight"] + 1
    )


@pytest.mark.parametrize("normed", [True, False])
def test_what_an_mtp_module_feeds_on_is_an_option(normed: bool) -> None:
    drafter: Any = tiny.llm(f"{heads.scheme('mtp-mimo')},recycle_normed={normed}").engine.drafter
    assert drafter.head.recycle_normed == normed


@pytest.mark.parametrize("layout", heads.LAYOUTS)
def test_modules_inside_the_targets_checkpoint(layout: str, tmp_path: Path) -> None:
    """The model loads without them, the scheme finds them; copies of embedding and head go."""
    path = tiny.write_model(tmp_path)
    whole = load_file(path / "model.safetensors")
    tensors, _ = heads.mtp(layout)
    heads.write(whole | tensors, None, path)
    loaded = load(str(path), "f32", progress=False)
    head = load_mtp(path, loaded, "f32").head
    assert head.embedding is loaded.model.embedding
    assert head.lm_head is loaded.model.lm_head
    (apart := tmp_path / "apart").mkdir()
    other = load_mtp(heads.write(tensors, None, apart), loaded, "f32").head
    assert torch.equal(head.layers[0].qkv(x(2, 32)), other.layers[0].qkv(x(2, 32)))


def test_a_layer_too_many_is_still_an_error(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path)
    whole = load_file(path / "model.safetensors")
    extra = {
        n.replace("layers.1.", "layers.2."): t + 0 for n, t in whole.items() if "layers.1." in n
    }
    heads.write(whole | extra, None, path)
    with pytest.raises(ValueError, match=r"no place for tensor model\.layers\.2\."):
        load(str(path), "f32", progress=False)


def test_a_checkpoint_without_mtp_says_so() -> None:
    with pytest.raises(ValueError, match="no MTP module here"):
        load_mtp(target().path, target(), "f32")
    with pytest.raises(ValueError, match="no MTP module here"):
        tiny.llm("mtp:k=1")


LAYER = {"deepseek": "model.layers.2.", "qwen": "mtp.layers.0.", "mimo": "model.mtp_layers.0."}


@pytest.mark.parametrize("layout", heads.LAYOUTS)
@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("self_attn.kv_a_proj_with_mqa.weight", (12, 32), "multi-head latent attention"),
        ("mlp.gate.weight", (4, 32), "a mixture of experts"),
        ("self_attn.q_proj.weight", (64, 32), "gated attention"),
    ],
)
def test_layers_that_cannot_be_computed_are_named(
    layout: str, name: str, shape: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    tensors, config = heads.mtp(layout)
    full = LAYER[layout] + name
    message = rf"this MTP module has {says} \({re.escape(full)}.*supported is a dense layer"
    with pytest.raises(ValueError, match=message):
        read("mtp", (tensors | {full: torch.ones(shape)}, config), tmp_path)


def test_all_that_is_foreign_is_named_at_once(tmp_path: Path) -> None:
    """As DeepSeek-V3's own module is: no dense layer's tensor is there to be missed first."""
    tensors, config = heads.mtp()
    kept = {n: t for n, t in tensors.items() if "self_attn" not in n and "mlp" not in n}
    prefix = "model.layers.2."
    kept |= {
        f"{prefix}self_attn.kv_a_proj_with_mqa.weight": torch.ones(12, 32),
        f"{prefix}mlp.gate.weight": torch.ones(4, 32),
        f"{prefix}mlp.experts.0.gate_proj.weight": torch.ones(8, 32),
    }
    with pytest.raises(ValueError, match=r"latent attention .* and a mixture of experts"):
        read("mtp", (kept, config), tmp_path)
    with pytest.raises(ValueError, match=r"DeepSeek-V4's, with hyper-connections"):
        read("mtp", ({"mtp.0.e_proj.weight": torch.ones(32, 32)}, config), tmp_path)
