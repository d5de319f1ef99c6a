"""EAGLE-3 heads as others publish them, and every trap that lies in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretell.models import head_formats as formats
from tests import heads, tiny
from tests.models.reading import read, renamed, target, without, x


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


def test_a_head_may_read_the_last_hidden_state_only(tmp_path: Path) -> None:
    """nvidia's gpt-oss heads say so; their readers then have no fc."""
    tensors, config = heads.eagle3()
    config |= {"eagle_config": {"use_aux_hidden_state": False}}
    loaded = read("eagle3", without((tensors, config), "fc.weight"), tmp_path)
    assert loaded.taps == (-1,)
    assert torch.equal(loaded.head.feature(x(2, 32)), x(2, 32))
    with pytest.raises(ValueError, match=r"no place for tensor fc\.weight"):
        read("eagle3", (tensors, config), tmp_path)
    other = config | {"target_hidden_size": 64}
    with pytest.raises(ValueError, match="made for a target of hidden size 64, this one has 32"):
        read("eagle3", without((tensors, other), "fc.weight"), tmp_path)


def test_heads_of_other_schemes_are_refused_by_name(tmp_path: Path) -> None:
    tensors, config = heads.eagle3()
    parallel = tensors | {"mask_hidden": torch.ones(1, 1, 96)}
    for head in (
        (parallel, config),
        (tensors, config | {"speculators_model_type": "peagle"}),
        (tensors, config | {"parallel_drafting": True}),
    ):
        with pytest.raises(ValueError, match=r"a P-EAGLE head \(mask_hidden\).*EAGLE-3 head"):
            read("eagle3", head, tmp_path)
    with pytest.raises(ValueError, match="a head for dflash, not for eagle3"):
        read("eagle3", (tensors, config | {"speculators_model_type": "dflash"}), tmp_path)
    with pytest.raises(ValueError, match="a head for eagle3, not for eagle"):
        read("eagle", (tensors, config | {"speculators_model_type": "eagle3"}), tmp_path)


def test_a_head_for_another_width_is_refused(tmp_path: Path) -> None:
    tensors, config = heads.eagle3()
    with pytest.raises(ValueError, match="made for a target of hidden size 64, this one has 32"):
        read("eagle3", (tensors, config | {"target_hidden_size": 64}), tmp_path)


@pytest.mark.parametrize("listed", ["abc", [None], [2, "1", 2], 5])
def test_layers_that_are_no_numbers(listed: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be layer numbers"):
        formats._taps({"eagle_aux_hidden_state_layer_ids": listed}, 36, tmp_path)


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
    with pytest.raises(ValueError, match=r"^[^:]*: tensor d2t has shape \[40\]"):
        read("eagle3", (tensors, config | {"draft_vocab_size": 39}), tmp_path)


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
