"""Configs of the wrong types end in one line that names the file or the field."""

from __future__ import annotations

import json

import pytest

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
