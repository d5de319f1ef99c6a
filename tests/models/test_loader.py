"""Every tensor is accounted for, whatever the files look like (M2, M4)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.models.loader import load
from tests.models.tiny import Cache, make, save
from tests.reference import ReferenceAttention

TOKENS = list(range(3, 23))


def logits(path) -> torch.Tensor:
    return Cache(load(str(path), "f32", progress=False), ReferenceAttention()).run(TOKENS, 0)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = save(make("qwen2", num_hidden_layers=1), tmp_path_factory.mktemp("qwen2"))
    return path, load_file(path / "model.safetensors")


def rewrite(saved, tmp_path, tensors, **changes):
    config = json.loads((saved[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path


NAMES = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.post_attention_layernorm.weight",
    *(f"model.layers.0.self_attn.{n}_proj.{k}" for n in "qkv" for k in ("weight", "bias")),
    "model.layers.0.self_attn.o_proj.weight",
    *(f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("trap", ["drop", "rename", "reshape", "duplicate"])
def test_each_tensor_matters(saved, tmp_path, name, trap):
    tensors = dict(saved[1])
    assert set(tensors) == set(NAMES)
    if trap == "drop":
        del tensors[name]
    elif trap == "rename":
        tensors[name + "_old"] = tensors.pop(name)
    elif trap == "reshape":
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    else:
        tensors["copy_of." + name] = tensors[name].clone()
    path = rewrite(saved, tmp_path, tensors)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as caught:
        load(str(path), "f32", progress=False)
    assert "\n" not in str(caught.value)


def test_two_loads_agree_and_stated_buffers_are_ignored(saved, tmp_path):
    tensors = saved[1] | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    path = rewrite(saved, tmp_path, tensors)
    assert torch.equal(logits(path), logits(path))
    assert torch.equal(logits(path), logits(saved[0]))


def test_a_tied_checkpoint_may_hold_its_head_if_it_is_the_embedding(saved, tmp_path):
    head = saved[1]["model.embed_tokens.weight"].clone()
    path = rewrite(saved, tmp_path, saved[1] | {"lm_head.weight": head})
    assert torch.equal(logits(path), logits(saved[0]))
    path = rewrite(saved, tmp_path, saved[1] | {"lm_head.weight": head + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        load(str(path), "f32", progress=False)
    rewrite(saved, tmp_path, saved[1], tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        load(str(path), "f32", progress=False)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_and_one_file_give_the_same_model(tied, dtype, tmp_path):
    model = make("llama", tie_word_embeddings=tied)
    for weight in model.parameters():  # not .to(dtype), which would round RoPE's buffers too
        weight.data = weight.data.to(dtype)
    one = save(model, tmp_path / "one")
    many = save(model, tmp_path / "many", max_shard_size="30KB")
    assert len(list(many.glob("*.safetensors"))) > 2
    loaded = load(str(many), "f32", progress=False)
    assert loaded.config.tie_embeddings == tied
    assert torch.equal(logits(one), logits(many))
    for weight in model.parameters():
        weight.data = weight.data.float()
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert (logits(many) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_damaged_shards_are_named(tmp_path):
    path = save(make("llama"), tmp_path, max_shard_size="30KB")
    first, second = sorted(path.glob("*.safetensors"))[:2]
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        load(str(path), progress=False)
    first.write_bytes(whole)
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    with pytest.raises(ValueError, match=name.replace(".", r"\.") + " is in"):
        load(str(path), progress=False)
    second.unlink()
    with pytest.raises(ValueError, match=second.name):
        load(str(path), progress=False)


def test_eos_comes_from_both_config_files(saved, tmp_path):
    path = rewrite(saved, tmp_path, saved[1])
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 2, 9]}')
    assert load(str(path), "int8", progress=False).config.eos_token_ids == (2, 7, 9)


def test_what_its_maker_recommends_comes_with_a_model(saved, tmp_path, caplog):
    path = rewrite(saved, tmp_path, saved[1])
    assert load(str(path), "int8", progress=False).recommended == {}
    said = {"temperature": 0.6, "top_k": 20, "top_p": None, "min_p": 7, "do_sample": True}
    (path / "generation_config.json").write_text(json.dumps(said))
    found = load(str(path), "int8", progress=False).recommended
    assert found == {"temperature": 0.6, "top_k": 20}
    assert "min_p=7" in caplog.text
