"""GGUF files written here from tiny models, in every tensor type that can be written."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from foretell.models.gguf import _INNER, _OUTER, GGUF, hf_name
from foretell.models.loader import load, open_source
from tests.models.tiny import Cache, make
from tests.reference import ReferenceAttention

TOKENS = list(range(3, 23))
ARCHITECTURES = {"llama": "llama", "smollm2": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
BIG = {"hidden_size": 128, "intermediate_size": 256}


def write(
    model,
    kind: str,
    path,
    tensor_type: Type = Type.F32,
    extra: dict | None = None,
    more=lambda writer: None,
):
    """What llama.cpp's converter does for these architectures."""
    arch, config = ARCHITECTURES[kind], model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(dim)
    writer.add_eos_token_id(2)
    more(writer)
    names = {hf: ours for ours, hf in _OUTER.items()}
    tensors = dict(model.state_dict()) | (extra or {})
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        ours = names.get(name)
        if ours is None and name.startswith("model.layers."):
            _, _, layer, block = name.split(".", 3)
            stem, _, suffix = block.rpartition(".")
            inner = {hf: own for own, hf in _INNER.items()}[stem]
            ours = f"blk.{layer}.{inner}.{suffix}"
        ours = ours or name
        value = tensor.float()
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = value.shape[0] // dim
            value = value.view(heads, 2, dim // 2, *value.shape[1:]).transpose(1, 2)
            value = value.reshape(tensor.shape)
        kind_of = tensor_type if value.dim() == 2 else Type.F32
        data = gguf.quants.quantize(value.contiguous().numpy(), kind_of)
        writer.add_tensor(ours, data, raw_dtype=kind_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(path) -> torch.Tensor:
    return Cache(load(str(path), "f32", progress=False), ReferenceAttention()).run(TOKENS, 0)[0]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_round_trip_equals_transformers(kind, tmp_path):
    model = make(kind)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    ours = logits(write(model, kind, tmp_path / "m.gguf"))
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    "kind_of",
    [Type.F16, Type.BF16, Type.Q8_0, Type.Q5_0, Type.Q5_1, Type.Q4_0, Type.Q4_1],
)
def test_each_type_loads_as_what_it_stands_for(kind_of, tmp_path):
    model = make("llama", **BIG)
    path = write(model, "llama", tmp_path / "m.gguf", kind_of)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                stored = gguf.quants.quantize(weight.numpy(), kind_of)
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind_of)))
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert (logits(path) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_rope_factors_divide_the_frequencies(tmp_path):
    factors = torch.linspace(1, 4, 16)
    path = write(make("llama"), "llama", tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    rope = load(str(path), "f32", progress=False).model.rope
    plain = 1 / 10000 ** (torch.arange(0, 32, 2) / 32)
    assert torch.allclose(rope.cos[100], (100 * plain / factors).cos(), atol=1e-4)


def test_left_over_tensors_are_refused_in_one_line(tmp_path):
    extra = {"blk.0.attn_sinks.weight": torch.ones(4)}
    path = write(make("llama"), "llama", tmp_path / "extra.gguf", extra=extra)
    with pytest.raises(ValueError, match=r"no place for tensor blk\.0\.attn_sinks\.weight"):
        load(str(path), progress=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A file with a vocabulary, as real ones have it."""
    path = tmp_path_factory.mktemp("whole") / "m.gguf"

    def vocabulary(writer):
        tokens = [f"token {i}" for i in range(94)] + ["</s>", "<|im_end|>"]
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 94 + [1, 3])

    return write(make("llama"), "llama", path, more=vocabulary).read_bytes()


def test_a_file_cut_anywhere_is_refused_in_one_line(whole, tmp_path):
    path, rng = tmp_path / "m.gguf", np.random.default_rng(0)
    path.write_bytes(whole)
    source = GGUF(path)
    assert source.end_token_ids() == (2, 95)
    header = min(tensor.start for tensor in source._header.tensors)
    ends = max(tensor.start + tensor.num_bytes for tensor in source._header.tensors)
    cuts = [0, 3, 4, 8, 23, 24, ends - 1, *rng.integers(0, header, 150), *rng.integers(0, ends, 50)]
    for content in [*(whole[:cut] for cut in cuts), rng.bytes(999)]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"m\.gguf: not a complete GGUF file") as caught:
            load(str(path), progress=False)
        assert "\n" not in str(caught.value)


def test_a_header_with_wrong_bytes_is_refused_or_read_but_never_a_traceback(whole, tmp_path):
    path, rng = tmp_path / "m.gguf", np.random.default_rng(1)
    path.write_bytes(whole)
    header = min(tensor.start for tensor in GGUF(path)._header.tensors)
    said: list[str] = []
    for at in rng.integers(0, header, 300):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            open_source(path)
        except ValueError as error:
            said.append(str(error))
    assert said
    assert [line for line in said if "m.gguf" not in line or "\n" in line] == []


def test_names():
    assert hf_name("blk.12.attn_k_norm.weight") == "model.layers.12.self_attn.k_norm.weight"
    assert hf_name("blk.1.ffn_gate_inp.weight") == "blk.1.ffn_gate_inp.weight"


def test_recommended_sampling_is_read(tmp_path):
    def say(writer):
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", -1)
        writer.add_float32("general.sampling.penalty_repeat", 1.25)

    path = write(make("llama"), "llama", tmp_path / "tiny.gguf", more=say)
    found = load(str(path), "f32", progress=False).recommended
    assert found == {"temperature": 0.5, "repetition_penalty": 1.25}
