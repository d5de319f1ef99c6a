"""Heads of every architecture as others publish them, and the traps that all of them share."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from foretell.models.head_formats import load_eagle
from tests import heads, tiny
from tests.models.reading import read, some, target, without, x

SHARED = ("embed_tokens.weight", "head.weight", "t2d")
"""May be missing: the target's are taken."""
TELLING = ("eh_proj.weight", "mtp.fc.weight", "input_proj.weight", "q_norm.weight", "k_norm.weight")
"""Without them it is another layout."""


@pytest.mark.parametrize("kind", heads.LAYERED)
def test_a_missing_tensor_and_one_left_over_are_named(kind: str, tmp_path: Path) -> None:
    head, method = heads.MAKERS[kind](), kind.split("-")[0]
    for name in head[0]:
        if name.endswith((*SHARED, *TELLING)):
            continue
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            read(method, without(head, name), tmp_path)
    prefix = heads.LAYOUTS[kind.split("-")[1]][0] if method == "mtp" else ""
    more = head[0] | {f"{prefix}colour.weight": torch.ones(3)}
    with pytest.raises(ValueError, match=r"no place for tensor .*colour\.weight"):
        read(method, (more, head[1]), tmp_path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"foretell_method": "eagle3"}, "a head for eagle3, not for eagle"),
        ({"foretell_taps": None}, "foretell_taps must say which layers"),
        ({"norm_hidden": "false"}, "norm_hidden='false': must be true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta=0.0"),
    ],
)
def test_configs_that_would_draft_nonsense_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    tensors, config = heads.wide_eagle()
    with pytest.raises(ValueError, match=says):
        read("eagle", (tensors, config | changes), tmp_path)


@pytest.mark.parametrize("shape", [(), (0, 96), (96,)])
def test_what_fuses_layers_has_two_dimensions(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors, config = heads.wide_eagle()
    with pytest.raises(ValueError, match=r"fuse_down\.weight has shape"):
        read("eagle", (tensors | {"fuse_down.weight": torch.zeros(shape)}, config), tmp_path)


def test_a_config_without_bias_means_that_there_is_one(tmp_path: Path) -> None:
    head = heads.eagle()
    mix = read("eagle", head, tmp_path).head.mix
    assert mix is not None
    tensors = head[0]
    expected = x(2, 64) @ tensors["fc.weight"].T + tensors["fc.bias"]
    torch.testing.assert_close(mix(x(2, 64)), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"fc\.bias is missing"):
        read("eagle", without(head, "fc.bias"), tmp_path)
    with pytest.raises(ValueError, match=r"no place for tensor fc\.bias"):
        read("eagle", (head[0], head[1] | {"bias": False}), tmp_path)
    bare = without(head, "fc.bias")
    mix = read("eagle", (bare[0], bare[1] | {"bias": False}), tmp_path).head.mix
    assert mix is not None
    torch.testing.assert_close(mix(x(2, 64)), x(2, 64) @ tensors["fc.weight"].T, atol=1e-5, rtol=0)


def test_qwen2_heads_have_biases_on_q_k_v(tmp_path: Path) -> None:
    tensors, config = heads.eagle()
    sizes = {"q": 32, "k": 16, "v": 16}
    biases = {
        f"layers.0.self_attn.{n}_proj.bias": x(1, size)[0] + i
        for i, (n, size) in enumerate(sizes.items())
    }
    loaded = read("eagle", (tensors | biases, config | {"qkv_bias": True}), tmp_path)
    out = loaded.head.layers[0].qkv(torch.zeros(1, 32))[0]
    torch.testing.assert_close(out, torch.cat(list(biases.values())))
    less = {n: b for n, b in biases.items() if "k_proj" not in n}
    with pytest.raises(ValueError, match=r"k_proj\.bias is missing"):
        read("eagle", (tensors | less, config | {"qkv_bias": True}), tmp_path)


def test_a_state_dict_loads_as_safetensors_do(tmp_path: Path) -> None:
    head = heads.eagle()
    (tmp_path / "safe").mkdir()
    safe = read("eagle", head, tmp_path / "safe").head.mix
    heads.write({}, head[1], tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither \*\.safetensors nor pytorch_model\.bin"):
        load_eagle(tmp_path, target(), "f32")
    torch.save(head[0], tmp_path / "pytorch_model.bin")
    mix = load_eagle(tmp_path, target(), "f32").head.mix
    assert mix is not None
    assert safe is not None
    assert torch.equal(mix(x(2, 64)), safe(x(2, 64)))
    (tmp_path / "pytorch_model.bin").write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="not a complete state dict"):
        load_eagle(tmp_path, target(), "f32")


def test_random_embeddings_of_an_exporter_are_ignored(tmp_path: Path) -> None:
    for method, head in (("eagle", heads.eagle()), ("eagle3", heads.eagle3())):
        noise = {"embed_tokens.weight": torch.randn(tiny.VOCAB, 32) * 9}
        loaded = read(method, (head[0] | noise, head[1]), tmp_path)
        assert loaded.head.embedding is target().model.embedding


def test_speculators_first_format_and_hass(tmp_path: Path) -> None:
    tensors, config = heads.eagle(norms=True)
    names = {
        "fc.weight": "fusion_fc.weight",
        "norm.weight": "pre_lm_head_layernorm.weight",
    }
    plain = {k: v for k, v in config.items() if not k.startswith("norm_")}
    moved = {names.get(n, n).replace("layers.0.", "transformer."): t for n, t in tensors.items()}
    del moved["hidden_states_layernorm.weight"], moved["fc.bias"]
    nested = {"transformer_layer_config": plain, "layernorms": True, "fusion_bias": False}
    head = read("eagle", (moved, nested), tmp_path).head
    assert torch.equal(some(head.norm_embed), tensors["embedding_layernorm.weight"])
    assert torch.equal(some(head.norm_out), tensors["norm.weight"])
    assert torch.equal(some(head.layers[0].input_norm), tensors["layers.0.input_layernorm.weight"])
    assert head.norm_hidden is None
    assert not head.recycle_normed
    hass, sizes = without((tensors, plain), "norm.weight", "layers.0.input_layernorm.weight")
    head = read("eagle", (hass, sizes | {"add_para_norm": True}), tmp_path).head
    assert torch.equal(some(head.norm_embed), tensors["embedding_layernorm.weight"])
    assert torch.equal(some(head.norm_hidden), tensors["hidden_states_layernorm.weight"])
    assert head.norm_out is None
    assert head.layers[0].input_norm is None


def test_extra_layers_have_an_input_norm(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(3)
    tensors, config = heads.eagle()
    more = heads.layer(g, "layers.1.")
    with pytest.raises(ValueError, match=r"layers\.1\.input_layernorm\.weight is missing"):
        read("eagle", (tensors | more, config), tmp_path)
    more["layers.1.input_layernorm.weight"] = torch.ones(32)
    assert len(read("eagle", (tensors | more, config), tmp_path).head.layers) == 2


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_layers_are_counted_whatever_the_config_says(method: str, tmp_path: Path) -> None:
    tensors, config = heads.MAKERS[method]()
    head = read(method, (tensors, config | {"num_hidden_layers": 40}), tmp_path).head
    assert len(head.layers) == head.config.num_layers == 1


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_rope_is_the_heads_own(method: str, tmp_path: Path) -> None:
    tensors, config = heads.MAKERS[method]()
    config = {k: v for k, v in config.items() if k != "rope_theta"}
    assert read(method, (tensors, config), tmp_path).head.config.rope_theta == 10000.0
    own = config | {"rope_theta": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    head = read(method, (tensors, own), tmp_path).head
    assert head.config.rope_theta == 77.0
    assert float(head.rope.sin[1, 0]) == pytest.approx(float(torch.tensor(0.5).sin()))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_another_vocabulary_is_refused(method: str, tmp_path: Path) -> None:
    tensors, config = heads.MAKERS[method]()
    with pytest.raises(ValueError, match="made for a vocabulary of 63, the target's is 64"):
        read(method, (tensors, config | {"vocab_size": 63}), tmp_path)
    less = {k: v for k, v in config.items() if k != "intermediate_size"}
    with pytest.raises(ValueError, match="lacks 'intermediate_size'"):
        read(method, (tensors, less), tmp_path)


def test_a_head_for_another_width_is_refused(tmp_path: Path) -> None:
    tensors, config = heads.eagle()
    with pytest.raises(ValueError, match="made for a target of hidden size 64, this one has 32"):
        read("eagle", (tensors, config | {"hidden_size": 64}), tmp_path)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("eagle_config", "x", "eagle_config must be an object"),
        ("transformer_layer_config", [1], "transformer_layer_config must be an object"),
        ("rope_scaling", "x", "rope_scaling='x': must be an object"),
        ("rope_scaling", {"rope_type": "weird"}, "RoPE scaling 'weird' is not supported"),
        ("hidden_size", "32", "hidden_size='32': a whole number"),
        ("vocab_size", "64", "made for a vocabulary of '64', the target's is 64"),
        ("num_attention_heads", 3, "3 heads cannot share 2 KV heads"),
        ("max_position_embeddings", 0, "max_position_embeddings=0 must be at least 1"),
        ("hidden_act", "gelu", "only silu is"),
    ],
)
def test_odd_configs_are_refused_by_what_is_odd(
    method: str, name: str, value: Any, says: str, tmp_path: Path
) -> None:
    tensors, config = heads.MAKERS[method]()
    with pytest.raises(ValueError, match=says):
        read(method, (tensors, config | {name: value}), tmp_path)


@pytest.mark.parametrize("kind", heads.KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_loads(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors, config = heads.MAKERS[kind]()
    other = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    path = heads.write(other, config, tmp_path)
    assert same_text(kind, path)


@pytest.mark.parametrize("kind", heads.KINDS)
def test_shards_and_what_is_wrong_with_files(kind: str, tmp_path: Path) -> None:
    tensors, config = heads.MAKERS[kind]()
    path, file = heads.write(tensors, config, tmp_path), tmp_path / "model.safetensors"
    whole, index = file.read_bytes(), tmp_path / "model.safetensors.index.json"
    big = max((n for n in tensors if n.endswith("proj.weight")), default="0.1.weight")
    for wrong, says in [
        (tensors[big] * torch.nan, "holds NaN or infinity"),
        (tensors[big][:-1], "has shape"),
        (tensors[big].int(), "is torch.int32"),
    ]:
        heads.write(tensors | {big: wrong}, config, tmp_path)
        with pytest.raises(ValueError, match=rf"tensor {re.escape(big)} {says}"):
            same_text(kind, path)
    file.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        same_text(kind, path)
    file.unlink()
    places: dict[str, str] = {}
    for i in range(2):
        part = sorted(tensors)[i::2]
        save_file({n: tensors[n].contiguous() for n in part}, tmp_path / f"{i}.safetensors")
        places |= dict.fromkeys(part, f"{i}.safetensors")
    with pytest.raises(ValueError, match=r"no model\.safetensors\.index\.json"):
        same_text(kind, path)
    index.write_text(json.dumps({"weight_map": places}))
    assert same_text(kind, path)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"1\.safetensors: not a complete"):
        same_text(kind, path)


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def test_code_in_a_state_dict_is_never_run(tmp_path: Path) -> None:
    tensors, config = heads.eagle()
    heads.write({}, config, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({**tensors, "x": Runs(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="other Python objects, which are never loaded"):
        load_eagle(tmp_path, target(), "f32")
    assert not (tmp_path / "ran").exists()


def same_text(kind: str, path: Path) -> bool:
    """Does the tiny target say the same with that head as alone?"""
    prompts, params = tiny.prompts(2), tiny.greedy(max_tokens=12)
    llm = tiny.llm(f"{kind.split('-')[0]}:model={path},k=3")
    assert not llm.engine.metrics.drafter_errors
    alone = tiny.llm().generate(prompts, params)
    return tiny.ids(llm.generate(prompts, params)) == tiny.ids(alone)
