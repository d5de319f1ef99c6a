"""Damaged checkpoints end in one line that names the file, the field or the tensor."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from foretell.models.loader import load
from tests import tiny

FIELDS = [
    *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta", "eos_token_id"),
]


@pytest.fixture
def directory(tmp_path):
    return tiny.write_model(tmp_path)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", ["x", -1.5, ["x"], {"x": 1}], ids=repr)
def test_values_of_another_type(name, value, directory):
    settings = json.loads((directory / "config.json").read_text()) | {name: value}
    (directory / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"config\.json|eos_token_id"):
        load(str(directory), "f32", progress=False)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "{", ""])
def test_files_that_are_no_object(file, text, directory):
    (directory / file).write_text(text)
    with pytest.raises(ValueError, match=file):
        load(str(directory), "f32", progress=False)


@pytest.mark.parametrize("ends", ["x", [["a"]], {"a": 1}, 1.5], ids=repr)
def test_ends_that_are_no_ids(ends, directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ValueError, match="eos_token_id"):
        load(str(directory), "f32", progress=False)


@pytest.mark.parametrize("places", [[], {"a": 3}, {"a": "nowhere.safetensors"}], ids=repr)
def test_an_index_that_leads_nowhere(places, directory):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match=r"index\.json|nowhere"):
        load(str(directory), "f32", progress=False)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("end", [tiny.VOCAB, -1, [tiny.EOS, 10**9]], ids=repr)
def test_an_end_of_text_outside_the_vocabulary(file, end, directory):
    path = directory / file
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"eos_token_id": end}))
    with pytest.raises(ValueError, match=r"eos_token_id .* is not in the vocabulary"):
        load(str(directory), "f32", progress=False)


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_no_numbers(name, value, weights, directory):
    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor {name} holds NaN or infinity") as caught:
        load(str(directory), weights, progress=False)
    assert "\n" not in str(caught.value)
