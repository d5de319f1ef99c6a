"""Stop strings with a tokenizer read from the model's directory, as a user meets it."""

from __future__ import annotations

import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foretell.llm import LLM
from foretell.sequence import FinishReason, SamplingParams
from tests import tiny
from tests.faults import rigs

TOKENS = ["<pad>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ã", "©", *"0123456789,.;:!?"]
TOKENS += [f"<unused{i}>" for i in range(tiny.VOCAB - len(TOKENS))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The counting model, which goes on with the alphabet, with byte-level BPE of 64 tokens."""
    path = tmp_path_factory.mktemp("model") / "counting"
    shutil.copytree(rigs.counting_model().path, path)
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(TOKENS[:2])
    inner.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(path)


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        (["gh"], "ef", 4),
        (["k", "hij"], "efg", 6),
        (["z é"], "efghijklmnopqrstuvwxy", 25),
        (["é0"], "efghijklmnopqrstuvwxyz ", 26),
        (["cde"], None, 30),  # half of it is in the prompt
    ],
)
def test_A2_text_in_and_text_out(directory, stop, text, count):
    params = SamplingParams(temperature=0, max_tokens=30, stop=stop, logprobs=1)
    options = {"weights": "f32", "max_model_len": 64, "kv_memory": "1MiB", "threads": 1}
    (expected,) = LLM(directory, **options).generate("abcd", params)
    assert expected.prompt_token_ids == [2, 3, 4, 5]
    assert len(expected.token_ids) == count
    assert expected.finish_reason == (FinishReason.STOP if text else FinishReason.LENGTH)
    assert expected.text == (text or "efghijklmnopqrstuvwxyz é01234")
    for scheme in ("draft-model:weights=target,k=8", "draft-model:weights=int4,k=3"):
        engine = LLM(directory, speculation=scheme, **options)
        rigs.check_same(engine.generate("abcd", params), [expected])
        deltas = list(engine.stream("abcd", params))
        assert "".join(delta.text for delta in deltas) == expected.text
