"""What only DeepSeek's models have: experts, a cache that is compressed, 8-bit checkpoints, and an
MTP module with a layer of their own kind. (Parity with transformers: test_decoder.)"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.attention.cpu import CpuAttention
from foretell.models.config import ModelConfig
from foretell.models.frozen import FrozenTarget
from foretell.models.head_formats import load_eagle
from foretell.models.loader import load
from foretell.models.moe import Experts, route
from foretell.models.mtp_formats import load_mtp
from foretell.models.trainable import TrainableHead
from foretell.models.trainable_files import head_config, head_tensors
from foretell.models.trainable_new import new_head
from foretell.runtime.kv import KVPool, page_bytes
from tests import heads
from tests.models.test_decoder import TOKENS, error, reference
from tests.models.tiny import Cache, make, save, save_with_mtp


def experts_of(path, weights="f32") -> Experts:
    block = load(str(path), weights, progress=False).model.layers[-1].block
    assert isinstance(block, Experts)
    return block


@pytest.mark.parametrize("weights", ["f32", "int8", "bf16", "int4"])
@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_a_rows_experts_do_not_depend_on_other_rows(kind, weights, tmp_path):
    block = experts_of(save(make(kind), tmp_path), weights)
    x = torch.randn(67, 64, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([block(row[None]) for row in x])
    assert torch.equal(block(x), alone)
    for first, end in ((0, 7), (7, 30), (30, 67)):
        assert torch.equal(block(x[first:end]), alone[first:end])
    order = torch.randperm(67, generator=torch.Generator().manual_seed(1))
    assert torch.equal(block(x[order]), alone[order])


def test_the_bias_chooses_and_does_not_weigh(tmp_path):
    config = experts_of(save(make("v3"), tmp_path)).config
    logits = torch.zeros(1, 8)
    bias = torch.tensor([0.0, 0, 0, 0.1, 0, 0.2, 0, 0.3])
    ids, weights = route(config, logits, bias)
    # Every score is 1/2, and the two groups with the largest biases are kept: experts 4 to 7.
    assert set(ids[0].tolist()) > {5, 7}
    assert torch.allclose(weights, torch.full((1, 3), 2.5 / 3))
    everywhere = torch.tensor([9.0, 9, 0, 0, 9, 9, 0, 0])
    assert set(route(config, logits, everywhere)[0][0].tolist()) < {0, 1, 4, 5}


def test_the_cache_holds_latents_once(tmp_path):
    loaded = load(str(save(make("v3"), tmp_path)), "bf16", progress=False)
    group = loaded.config.kv_group(loaded.kv_dtype)
    assert page_bytes([group], 16) == 3 * 16 * (32 + 8) * 2  # layers, cells, rank + rope, bytes
    pool = KVPool({"target": group}, 4, 8, torch.device("cpu"))
    for keys, values in pool.layers["target"]:
        assert keys is values
        assert keys.shape == (4, 1, 8, 40)
        keys[0, 0, :, 0] = torch.arange(8)
    pool.move("target", [1, 2], [0, 1])  # a cell that is read and written: reads come first
    for keys, _ in pool.layers["target"]:
        assert keys[0, 0, :, 0].tolist() == [1, 2, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("weights", ["int8", "bf16", "int4"])
def test_every_format_is_near_the_original(weights, tmp_path):
    path = save(make("v3"), tmp_path)
    exact, _ = Cache(load(str(path), "f32", progress=False), CpuAttention()).run(TOKENS, 0)
    ours, _ = Cache(load(str(path), weights, progress=False), CpuAttention()).run(TOKENS, 0)
    similar = torch.cosine_similarity(ours, exact, dim=1).median()
    assert similar > {"int8": 0.99, "bf16": 0.999, "int4": 0.8}[weights]


def to_fp8(path) -> None:
    """Turns a checkpoint's matrices into 8-bit floats with scales, as DeepSeek-V3's are; and the
    float32 tensors that they stand for are written to ``path / "same"``."""
    tensors, same = load_file(path / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        same[name] = tensor
        if not name.endswith("_proj.weight") and "with_mqa" not in name:
            continue
        blocks = [-(-size // 128) for size in tensor.shape]
        scale = torch.rand(*blocks, generator=torch.Generator().manual_seed(0)) + 0.5
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide = wide[: tensor.shape[0], : tensor.shape[1]]
        tensors[name] = (tensor / wide).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        same[name] = tensors[name].float() * wide
    save_file(tensors, path / "model.safetensors")
    settings = json.loads((path / "config.json").read_text())
    (path / "same").mkdir()
    (path / "same" / "config.json").write_text(json.dumps(settings))
    save_file(same, path / "same" / "model.safetensors")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": fp8}))


def test_8_bit_checkpoints_are_read_as_what_they_stand_for(tmp_path):
    path = save(make("v3", hidden_size=160, intermediate_size=200), tmp_path)
    to_fp8(path)
    ours, _ = Cache(load(str(path), "f32", progress=False), CpuAttention()).run(TOKENS, 0)
    same, _ = Cache(load(str(path / "same"), "f32", progress=False), CpuAttention()).run(TOKENS, 0)
    assert torch.equal(ours, same)


def test_scales_that_do_not_fit_are_named(tmp_path):
    path = save(make("v3"), tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(path / "model.safetensors")
    tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"o_proj\.weight is torch\.float32 .* with scales"):
        load(str(path), "f32", progress=False)


@pytest.mark.parametrize("inner", [{}, {"first_k_dense_replace": 9}])
def test_the_mtp_module_computes_what_transformers_layer_does(inner, tmp_path):
    """Its layer has experts; and in a model without any, it has none."""
    model, layer, own = save_with_mtp(tmp_path, **inner)
    loaded = load(str(tmp_path), "f32", progress=False)
    expected = reference(model, TOKENS)
    logits, features = Cache(loaded, CpuAttention()).run(TOKENS, 0, taps=(-1,))
    assert error(logits, expected) < 1e-4
    head = load_mtp(tmp_path, loaded, "f32").head
    cache = Cache(loaded, CpuAttention())
    ours = cache.run_head(head, TOKENS[1:], features[:-1])

    def norm(x, name):
        x = x * (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt()
        return x * own[f"{name}.weight"]

    with torch.no_grad():
        states = model.model(torch.tensor([TOKENS])).last_hidden_state[:, :-1]
        embedded = model.model.embed_tokens(torch.tensor([TOKENS[1:]]))
        x = torch.cat([norm(embedded, "enorm"), norm(states, "hnorm")], -1)
        x = x @ own["eh_proj.weight"].T
        places = torch.arange(len(TOKENS) - 1)[None]
        later = torch.full((places.shape[1], places.shape[1]), -torch.inf).triu(1)[None, None]
        turned = model.model.rotary_emb(x, places)
        x = layer(x, attention_mask=later, position_ids=places, position_embeddings=turned)
        x = norm(x, "shared_head.norm")
        expected = model.lm_head(x)[0]
    assert error(ours[0], expected) < 1e-4
    assert error(ours[1], x[0]) < 1e-4  # what it feeds on next is behind its norm


def test_a_model_that_is_dense_refuses_such_a_module(tmp_path):
    save_with_mtp(tmp_path)
    dense = load(str(save(make("llama"), tmp_path / "llama")), "f32", progress=False)
    with pytest.raises(ValueError, match=r"latent attention .* and a mixture of experts"):
        load_mtp(tmp_path, dense, "f32")


CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 5, "num_attention_heads": 4, "kv_lora_rank": 32,
    "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "moe_layer_freq": 2, "scoring_func": "sigmoid",
}  # fmt: skip


def test_which_layers_have_experts():
    moe = ModelConfig.from_hf(CONFIG).moe
    assert moe is not None
    assert [moe.has_experts(i) for i in range(5)] == [False, False, True, False, True]
    assert ModelConfig.from_hf(CONFIG | {"n_routed_experts": None}).moe is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"scoring_func": "softmax"}, "chosen by softmax and noaux_tc"),
        ({"topk_method": "greedy"}, "chosen by sigmoid and greedy"),
        ({"n_group": 3}, "8 experts do not make 3 groups"),
        ({"topk_group": 5}, "more than n_group"),
        ({"num_experts_per_tok": 5}, "more than there are in 2 of 4 groups"),
        ({"kv_lora_rank": 0}, "kv_rank=0: at least 1"),
        ({"qk_rope_head_dim": 7}, "must be even"),
        ({"n_shared_experts": "2"}, "num_shared='2'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "quantised",
        ),
    ],
)
def test_what_would_not_be_computed_faithfully_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        ModelConfig.from_hf(CONFIG | changes)


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_heads_with_ordinary_layers_are_made_for_such_a_target(method, tmp_path):
    path = save(make("v3"), tmp_path / "model")
    head = new_head(method, FrozenTarget.open(str(path)))
    assert isinstance(head, TrainableHead)
    (tmp_path / "head").mkdir()
    heads.write(head_tensors(head), head_config(head), tmp_path / "head")
    loaded = load(str(path), "f32", progress=False)
    load_head = {"eagle": load_eagle, "mtp": load_mtp}[method]
    config = load_head(tmp_path / "head", loaded, "f32").head.config
    assert (config.num_kv_heads, config.head_dim, config.mla) == (4, 12, None)
