"""Configs in both of transformers' layouts, and RoPE tables against transformers' (M3)."""

from __future__ import annotations

import pytest
import torch

from foretell.models.config import ModelConfig
from foretell.models.rope import Rope, frequencies

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-tuned": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def hf_config(theta: float, scaling: dict, old_layout: bool) -> dict:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
    }
    if not old_layout:
        return {**config, "rope_parameters": {"rope_theta": theta, **scaling}}
    old = {**scaling, "type": scaling["rope_type"]}
    old.pop("rope_type")
    return {**config, "rope_theta": theta, "rope_scaling": old}


@pytest.mark.parametrize("old_layout", [True, False])
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name, theta, old_layout):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = hf_config(theta, SCALINGS[name], old_layout)
    config = ModelConfig.from_hf(settings)
    assert (config.rope_theta, config.rope_scaling["rope_type"]) == (
        theta,
        SCALINGS[name]["rope_type"],
    )
    theirs = LlamaRotaryEmbedding(LlamaConfig(**hf_config(theta, SCALINGS[name], False)))
    for length in (200, 900):  # past max_position_embeddings, where `dynamic` stretches
        rope = Rope(config, max_model_len=length)
        positions = torch.arange(length, dtype=torch.int32)
        rope.cover(positions)
        cos, sin = theirs(torch.zeros(1), positions[None])
        assert torch.allclose(rope.cos[:length], cos[0, :, :16], atol=2e-5)
        assert torch.allclose(rope.sin[:length], sin[0, :, :16], atol=2e-5)


def test_a_grown_table_has_the_same_entries_as_one_made_at_once():
    config = ModelConfig.from_hf(hf_config(1e4, SCALINGS["yarn"], True))
    grown, whole = Rope(config), Rope(config)
    whole.reserve(5000)
    for size in (300, 301, 1234, 5000):
        grown.cover(torch.tensor([size - 1]))
        assert torch.equal(grown.cos[:size], whole.cos[:size])
        assert torch.equal(grown.sin[:size], whole.sin[:size])


def test_dynamic_depends_on_the_context_limit_only_beyond_the_models_own():
    config = ModelConfig.from_hf(hf_config(1e4, SCALINGS["dynamic"], True))
    plain = frequencies(config)[0]
    assert torch.equal(frequencies(config, 256)[0], plain)
    assert not torch.equal(frequencies(config, 512)[0], plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "supported are LlamaForCausalLM"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope.*supported are default"),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "two RoPE bases"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"num_key_value_heads": 3}, "cannot share"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change, message):
    settings = {**hf_config(1e4, SCALINGS["default"], False), **change}
    if "rope_scaling" in change or "rope_theta" in change:
        settings.setdefault("rope_parameters", {})
        settings["rope_parameters"] = change.get("rope_parameters", {})
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(settings)


def test_windows_of_qwen_follow_its_switch_and_layers():
    base = {**hf_config(1e4, SCALINGS["default"], False), "architectures": ["Qwen2ForCausalLM"]}
    base |= {"sliding_window": 8, "max_window_layers": 1}
    assert ModelConfig.from_hf(base).windows is None
    assert ModelConfig.from_hf({**base, "use_sliding_window": True}).windows == (None, 8)
    kinds = ["sliding_attention", "full_attention"]
    named = {**base, "use_sliding_window": True, "layer_types": kinds}
    assert ModelConfig.from_hf(named).windows == (8, None)
    assert ModelConfig.from_hf({**base, "architectures": ["MistralForCausalLM"]}).windows == (8, 8)
