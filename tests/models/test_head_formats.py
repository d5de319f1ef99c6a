"""Heads as others publish them, and every trap that lies in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foretell.models import head_formats as formats
from foretell.models.head_formats import LoadedHead, load_eagle, load_eagle3, load_mtp
from foretell.models.hub import resolve
from foretell.models.loader import load
from foretell.models.medusa_formats import load_medusa
from tests import heads, tiny

LOADERS = {"eagle": load_eagle, "eagle3": load_eagle3, "mtp": load_mtp}
Head = tuple[heads.Tensors, dict[str, Any]]


def target():
    return tiny.model("f32")


def read(method: str, head: Head, path: Path, **options: Any) -> LoadedHead:
    return LOADERS[method](heads.write(*head, path), target(), "f32", **options)


def without(head: Head, *names: str) -> Head:
    return {n: t for n, t in head[0].items() if n not in names}, head[1]


def renamed(head: Head, old: str, new: str) -> Head:
    return {n.replace(old, new): t for n, t in head[0].items()}, head[1]


def x(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


MAKERS = {
    "eagle": heads.eagle,
    "eagle-norms": lambda: heads.eagle(norms=True),
    "eagle3": heads.eagle3,
    **{f"mtp-{layout}": lambda layout=layout: heads.mtp(layout) for layout in heads.LAYOUTS},
}
SHARED = ("embed_tokens.weight", "head.weight", "t2d")
"""May be missing: the target's are taken."""
TELLING = ("eh_proj.weight", "mtp.fc.weight", "input_proj.weight", "q_norm.weight", "k_norm.weight")
"""Without them it is another layout."""


@pytest.mark.parametrize("kind", MAKERS)
def test_a_missing_tensor_and_one_left_over_are_named(kind: str, tmp_path: Path) -> None:
    head, method = MAKERS[kind](), kind.split("-")[0]
    for name in head[0]:
        if name.endswith((*SHARED, *TELLING)):
            continue
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            read(method, without(head, name), tmp_path)
    prefix = heads.LAYOUTS[kind.split("-")[1]][0] if method == "mtp" else ""
    more = head[0] | {f"{prefix}colour.weight": torch.ones(3)}
    with pytest.raises(ValueError, match=r"no place for tensor .*colour\.weight"):
        read(method, (more, head[1]), tmp_path)


# ---- EAGLE


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
    assert torch.equal(_some(head.norm_embed), tensors["embedding_layernorm.weight"])
    assert torch.equal(_some(head.norm_out), tensors["norm.weight"])
    assert torch.equal(_some(head.layers[0].input_norm), tensors["layers.0.input_layernorm.weight"])
    assert head.norm_hidden is None
    assert not head.recycle_normed
    hass, sizes = without((tensors, plain), "norm.weight", "layers.0.input_layernorm.weight")
    head = read("eagle", (hass, sizes | {"add_para_norm": True}), tmp_path).head
    assert torch.equal(_some(head.norm_embed), tensors["embedding_layernorm.weight"])
    assert torch.equal(_some(head.norm_hidden), tensors["hidden_states_layernorm.weight"])
    assert head.norm_out is None
    assert head.layers[0].input_norm is None


def _some(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


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
    tensors, config = MAKERS[method]()
    head = read(method, (tensors, config | {"num_hidden_layers": 40}), tmp_path).head
    assert len(head.layers) == head.config.num_layers == 1


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_rope_is_the_heads_own(method: str, tmp_path: Path) -> None:
    tensors, config = MAKERS[method]()
    config = {k: v for k, v in config.items() if k != "rope_theta"}
    assert read(method, (tensors, config), tmp_path).head.config.rope_theta == 10000.0
    own = config | {"rope_theta": 77.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    head = read(method, (tensors, own), tmp_path).head
    assert head.config.rope_theta == 77.0
    assert float(head.rope.sin[1, 0]) == pytest.approx(float(torch.tensor(0.5).sin()))


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_another_vocabulary_is_refused(method: str, tmp_path: Path) -> None:
    tensors, config = MAKERS[method]()
    with pytest.raises(ValueError, match="made for a vocabulary of 63, the target's is 64"):
        read(method, (tensors, config | {"vocab_size": 63}), tmp_path)
    less = {k: v for k, v in config.items() if k != "intermediate_size"}
    with pytest.raises(ValueError, match="lacks 'intermediate_size'"):
        read(method, (tensors, less), tmp_path)


def test_a_head_for_another_width_is_refused(tmp_path: Path) -> None:
    tensors, config = heads.eagle()
    with pytest.raises(ValueError, match="made for a target of hidden size 64, this one has 32"):
        read("eagle", (tensors, config | {"hidden_size": 64}), tmp_path)


# ---- EAGLE-3


@pytest.mark.parametrize(
    ("listed", "taps"),
    [
        ([1, 0, 1], (1, 0, 1)),  # begins with 1: outputs of these layers
        ([2, 1, 2], (1, 0, 1)),  # else inputs
        ([2, 2, 1], (1, 1, 0)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_both_ways_to_count_layers(
    listed: list[int], taps: tuple[int, ...], nested: bool, tmp_path: Path
) -> None:
    tensors, config = heads.eagle3()
    del config["eagle_config"]
    ids = {"eagle_aux_hidden_state_layer_ids": listed}
    config |= {"eagle_config": ids} if nested else ids
    assert read("eagle3", (tensors, config), tmp_path).taps == taps


def test_layers_by_default_and_out_of_range(tmp_path: Path) -> None:
    settings: dict[str, Any] = {}
    assert formats._taps(settings, 36, tmp_path) == (1, 17, 32)
    listed = {"eagle_aux_hidden_state_layer_ids": [2, 47, 91]}
    assert formats._taps(listed, 94, tmp_path) == (1, 46, 90)
    listed = {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}
    assert formats._taps(listed, 94, tmp_path) == (1, 46, 90)
    for wrong in ([2, 3, 95], [0, 1, 2]):
        with pytest.raises(ValueError, match="of a target that has 94"):
            formats._taps({"eagle_aux_hidden_state_layer_ids": wrong}, 94, tmp_path)
    with pytest.raises(ValueError, match="use_aux_hidden_state=false"):
        formats._taps({"use_aux_hidden_state": False}, 94, tmp_path)


def test_d2t_holds_offsets(tmp_path: Path) -> None:
    tensors, config = heads.eagle3()
    ids = tensors["t2d"].nonzero()[:, 0]
    loaded = read("eagle3", (tensors, config), tmp_path)
    assert loaded.vocab.ids is not None
    assert loaded.vocab.ids.tolist() == ids.tolist()
    with pytest.raises(ValueError, match="d2t"):  # a table of ids
        read("eagle3", (tensors | {"d2t": ids}, config), tmp_path)
    shifted = tensors | {"t2d": tensors["t2d"].roll(1)}
    with pytest.raises(ValueError, match="d2t and t2d"):
        read("eagle3", (shifted, config), tmp_path)
    with pytest.raises(ValueError, match="tensor d2t is missing"):
        read("eagle3", without((tensors, config), "d2t"), tmp_path)
    assert read("eagle3", without((tensors, config), "t2d"), tmp_path).vocab.ids is not None


def test_a_full_vocabulary_needs_no_map(tmp_path: Path) -> None:
    head = without(heads.eagle3(draft_vocab=tiny.VOCAB), "d2t", "t2d")
    loaded = read("eagle3", head, tmp_path)
    assert loaded.vocab.ids is None
    out = loaded.head.lm_head(x(2, 32))
    torch.testing.assert_close(out, x(2, 32) @ head[0]["lm_head.weight"].T, atol=1e-5, rtol=1e-5)


def test_a_head_without_lm_head_shares_the_targets(tmp_path: Path) -> None:
    full = without(heads.eagle3(draft_vocab=tiny.VOCAB), "d2t", "t2d", "lm_head.weight")
    assert read("eagle3", full, tmp_path).head.lm_head is target().model.lm_head
    some = without(heads.eagle3(), "lm_head.weight")
    loaded = read("eagle3", some, tmp_path)
    rows = target().model.lm_head(x(2, 32))[:, some[0]["t2d"]]
    torch.testing.assert_close(loaded.head.lm_head(x(2, 32)), rows, atol=1e-5, rtol=1e-5)


def test_speculators_and_specforge(tmp_path: Path) -> None:
    tensors, config = heads.eagle3()
    reference = read("eagle3", (tensors, config), tmp_path).head
    nested = {k: v for k, v in config.items() if k in heads.SIZES}
    speculators = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": nested,
        "draft_vocab_size": 40,
        "eagle_aux_hidden_state_layer_ids": heads.AUX,
        "norm_before_residual": False,
        "fc_norm": False,
        "norm_output": True,
    }
    moved = renamed((tensors, speculators), "midlayer.", "layers.0.")
    loaded = read("eagle3", moved, tmp_path)
    assert loaded.taps == (1, 0, 1)
    assert loaded.head.recycle_normed
    assert not loaded.head.residual_normed
    wide = x(2, 64)
    assert torch.equal(loaded.head.layers[0].qkv(wide), reference.layers[0].qkv(wide))
    del speculators["norm_before_residual"], speculators["norm_output"]
    loaded = read("eagle3", moved, tmp_path).head
    assert loaded.residual_normed, "their readers take an absent key as true"
    assert not loaded.recycle_normed
    assert not reference.residual_normed
    prefixed = {f"model.{n}" if n.split(".")[0] in ("fc", "midlayer", "norm") else n: t
                for n, t in tensors.items()}  # fmt: skip
    again = read("eagle3", (prefixed, config), tmp_path).head
    assert torch.equal(again.layers[0].qkv(wide), reference.layers[0].qkv(wide))


def test_eagle31_norms_exclude_each_other(tmp_path: Path) -> None:
    tensors, config = heads.eagle3()
    both = {"fc_norm": True, "norm_before_fc": True}
    with pytest.raises(ValueError, match="both fc_norm and norm_before_fc"):
        read("eagle3", (tensors, config | both), tmp_path)
    with pytest.raises(ValueError, match=r"fc_norm\.0\.weight is missing"):
        read("eagle3", (tensors, config | {"fc_norm": True}), tmp_path)
    with pytest.raises(ValueError, match=r"no place for tensor input_norm\.weight"):
        read("eagle3", (tensors | {"input_norm.weight": torch.ones(96)}, config), tmp_path)


def test_a_narrower_head_brings_its_own_embedding(tmp_path: Path) -> None:
    tensors, config = heads.eagle3()
    narrow = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    shapes = {
        "fc.weight": (16, 96), "norm.weight": (16,), "lm_head.weight": (40, 16),
        "midlayer.hidden_norm.weight": (16,), "midlayer.input_layernorm.weight": (16,),
        "midlayer.post_attention_layernorm.weight": (16,),
        "midlayer.self_attn.q_proj.weight": (16, 32), "midlayer.self_attn.k_proj.weight": (8, 32),
        "midlayer.self_attn.v_proj.weight": (8, 32), "midlayer.self_attn.o_proj.weight": (16, 16),
        "midlayer.mlp.gate_proj.weight": (48, 16), "midlayer.mlp.up_proj.weight": (48, 16),
        "midlayer.mlp.down_proj.weight": (16, 48),
    }  # fmt: skip
    small = {n: torch.randn(shape) for n, shape in shapes.items()}
    small |= {name: tensors[name] for name in ("d2t", "t2d")}
    config |= narrow | {"target_hidden_size": 32}
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is missing"):
        read("eagle3", (small, config), tmp_path)
    small["embed_tokens.weight"] = table = torch.randn(tiny.VOCAB, 16)
    loaded = read("eagle3", (small, config), tmp_path)
    assert torch.equal(loaded.head.embedding(torch.tensor([5])), table[5:6])
    prompts = tiny.prompts(2)
    text = tiny.ids(tiny.llm(f"eagle3:model={tmp_path},k=3").generate(prompts, tiny.greedy()))
    assert text == tiny.ids(tiny.llm().generate(prompts, tiny.greedy()))


# ---- MTP


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
    assert torch.equal(_some(loaded.norm_out), head[0]["mtp.norm.weight"] + 1)
    assert torch.equal(
        _some(loaded.layers[0].q_norm), head[0]["mtp.layers.0.self_attn.q_norm.weight"] + 1
    )


@pytest.mark.parametrize("normed", [True, False])
def test_what_an_mtp_module_feeds_on_is_an_option(normed: bool, tmp_path: Path) -> None:
    loaded = read("mtp", heads.mtp(), tmp_path, recycle_normed=normed)
    assert loaded.head.recycle_normed == normed


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


# ---- Medusa


def medusa(tensors: heads.Tensors, path: Path, **options: Any):
    return load_medusa(heads.write(tensors, None, path), target(), "f32", **options)


def test_medusa_state_dicts(tmp_path: Path) -> None:
    tensors, _ = heads.medusa(2, 2)
    plain, vocab = medusa(tensors, tmp_path)
    assert len(plain) == 2
    assert [len(head.blocks) for head in plain] == [2, 2]
    assert vocab.ids is None
    merged, _ = medusa({f"medusa_head.{n}": t for n, t in tensors.items()}, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    state, _ = load_medusa(tmp_path, target(), "f32")
    for i in range(2):
        assert torch.equal(plain[i](x(3, 32)), merged[i](x(3, 32)))
        assert torch.equal(plain[i](x(3, 32)), state[i](x(3, 32)))


def test_vllms_medusa_form(tmp_path: Path) -> None:
    tensors, _ = heads.medusa(2, 1)
    vllm = {f"blocks.{i}.layers.0.weight": tensors[f"{i}.0.linear.weight"] for i in range(2)}
    shared, _ = medusa(vllm, tmp_path)
    assert all(head.lm_head is target().model.lm_head for head in shared)
    vllm |= {f"lm_heads.{i}.weight": tensors[f"{i}.1.weight"][:40] for i in range(2)}
    vllm["token_map"] = torch.arange(40) + 20
    loaded, vocab = medusa(vllm, tmp_path)
    assert vocab.ids is not None
    assert vocab.ids.tolist() == list(range(20, 60))
    assert loaded[0](x(3, 32)).shape == (3, 40)


def test_medusa_names_what_is_missing_and_left_over(tmp_path: Path) -> None:
    tensors, _ = heads.medusa(2)
    for name in ("0.0.linear.bias", "1.1.weight"):
        with pytest.raises(ValueError, match=f"{name} is missing"):
            medusa({n: t for n, t in tensors.items() if n != name}, tmp_path)
    with pytest.raises(ValueError, match=r"no place for tensor 5\.0\.linear\.weight"):
        medusa(tensors | {"5.0.linear.weight": torch.ones(32, 32)}, tmp_path)
    with pytest.raises(ValueError, match="no Medusa head here"):
        medusa({"colour": torch.ones(1)}, tmp_path)


def test_the_hub_may_hold_a_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return "/somewhere"

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    resolve("org/head", head=True)
    resolve("org/model")
    assert ["pytorch_model.bin" in patterns for patterns in asked] == [True, False]
