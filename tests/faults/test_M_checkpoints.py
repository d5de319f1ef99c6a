"""M: vocabularies and checkpoints of a target and its draft, as the engine meets them.

What a single loader must refuse is tested in tests/models; here a pair is started and run. The
sharpest test of a draft that was loaded right: with the target's own weights, written in another
form, no draft token is ever refused.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foretell.llm import LLM
from tests import tiny
from tests.faults.pairs import WORDS, write_pair, write_tokenizer

PROMPTS = tiny.prompts(4, seed=31)
OPTIONS = {"weights": "f32", "page_size": 4, "kv_memory": "4MiB", "threads": 1}


def start_pair(target: Path, draft: Path, weights: str = "f32", **options) -> LLM:
    spec = f"draft-model:model={draft},weights={weights},k=4"
    return LLM(str(target), speculation=tiny.fixed(spec), **(OPTIONS | options))


def run(target: Path, llm: LLM) -> float:
    """Share of draft tokens that were accepted; the text must be that of the target alone."""
    plain = tiny.ids(LLM(str(target), **OPTIONS).generate(PROMPTS, tiny.greedy()))
    results = llm.generate(PROMPTS, tiny.greedy())
    assert tiny.ids(results) == plain
    assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
    assert sum(r.stats.drafted for r in results) > 0
    return sum(r.stats.accepted for r in results) / sum(r.stats.drafted for r in results)


def configure(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    config = {name: value for name, value in (config | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))


def swap(words: list[str], i: int, j: int) -> list[str]:
    out = list(words)
    out[i], out[j] = out[j], out[i]
    return out


def test_M1_equal_vocabularies(tmp_path):
    target, draft = write_pair(tmp_path)
    assert run(target, start_pair(target, draft)) == 1.0


def pad_embedding(path: Path, rows: int) -> None:
    """More rows than the tokenizer has words; the draft loves the first of them."""
    tensors = load_file(path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    new = 10 * table[:1].expand(rows - len(table), -1)
    tensors["model.embed_tokens.weight"] = torch.cat([table, new])
    tensors["lm_head.weight"] = torch.cat([table, new])
    save_file(tensors, path / "model.safetensors")
    configure(path, vocab_size=rows)


@pytest.mark.parametrize("padded", ["target", "draft"])
def test_M1_padded_by_128(padded, tmp_path):
    """Padding is no difference, and ids beyond the smaller vocabulary are never proposed."""
    pair = dict(zip(("target", "draft"), write_pair(tmp_path), strict=True))
    pad_embedding(pair[padded], tiny.VOCAB + 128)
    llm = start_pair(pair["target"], pair["draft"])
    propose, proposed = llm.engine.drafter.propose, set()

    def watching(ask):
        tree = propose(ask)
        proposed.update(tree.tokens.flatten().tolist()[1:])
        return tree

    llm.engine.drafter.propose = watching
    run(pair["target"], llm)
    if padded == "draft":
        assert max(proposed) < tiny.VOCAB


@pytest.mark.parametrize(
    ("words", "first"),
    [
        (swap(WORDS, 17, 40), 17),
        ([*WORDS[:-1], "other"], tiny.VOCAB - 1),
        ([*WORDS, "<|tool|>"], tiny.VOCAB),
        ([f"x{word}" for word in WORDS[2:]] + WORDS[:2], 0),
    ],
    ids=["swapped", "renamed", "added", "family"],
)
def test_M1_another_vocabulary_is_refused_at_the_start(words, first, tmp_path):
    target, draft = write_pair(tmp_path, draft_words=words, draft_vocab=len(words))
    with pytest.raises(ValueError, match=f"id {first} is .* choose a draft of the same family"):
        start_pair(target, draft)


@pytest.mark.parametrize("trap", ["drop", "rename", "transpose", "duplicate"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_M2_no_tensor_is_ever_made_up(role, trap, tmp_path):
    pair = dict(zip(("target", "draft"), write_pair(tmp_path), strict=True))
    file = pair[role] / "model.safetensors"
    whole = load_file(file)
    for name in (n for n in whole if "layers.1" in n or "norm" in n):
        tensors = dict(whole)
        tensor = tensors[name] if trap == "duplicate" else tensors.pop(name)
        if trap in ("rename", "duplicate"):
            tensors[f"{name}.copy"] = tensor.clone()
        if trap == "transpose":
            wide = tensor[:, None] if tensor.dim() == 1 else tensor
            if wide.shape[0] == wide.shape[1]:
                continue  # no shape tells
            tensors[name] = wide.T.contiguous()
        save_file(tensors, file)
        with pytest.raises(ValueError, match="tensor"):
            start_pair(pair["target"], pair["draft"])
    save_file(whole, file)
    assert run(pair["target"], start_pair(pair["target"], pair["draft"])) == 1.0


ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("theta", [1e2, 1e6])
@pytest.mark.parametrize("kind", ROPES)
def test_M3_rope_settings_reach_the_draft_in_both_layouts(kind, theta, tmp_path):
    target, draft = write_pair(tmp_path)
    plain = kind == "default"
    configure(target, rope_theta=theta, rope_scaling=None if plain else ROPES[kind])
    configure(draft, rope_theta=None, rope_parameters={"rope_theta": theta, **ROPES[kind]})
    llm = start_pair(target, draft)
    assert run(target, llm) == 1.0
    models = llm.target.model, llm.engine.drafter.draft.model
    assert torch.equal(models[0].rope.cos, models[1].rope.cos[: len(models[0].rope.cos)])
    configure(draft, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    assert run(target, start_pair(target, draft)) < 1.0, "other settings would show"


def write_shards(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {}
    for i in range(3):
        part = names[i::3]
        save_file({n: tensors[n] for n in part}, path / f"model-0000{i + 1}-of-00003.safetensors")
        index |= dict.fromkeys(part, f"model-0000{i + 1}-of-00003.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def untie(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    configure(path, tie_word_embeddings=False)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("target_tied", [True, False])
@pytest.mark.parametrize("draft_tied", [True, False])
def test_M4_tied_or_not_in_one_file_or_many(target_tied, draft_tied, shards, tmp_path):
    target, draft = write_pair(tmp_path)
    for path, tied in ((target, target_tied), (draft, draft_tied)):
        if not tied:
            untie(path)
    if shards:
        write_shards(draft)
    llm = start_pair(target, draft)
    assert run(target, llm) == 1.0


def test_M4_a_smaller_draft_vocabulary(tmp_path):
    """A draft without the last ids: it never proposes them, nor looks them up."""
    words = [*WORDS[:-4], *(f"<|unused{i}|>" for i in range(4))]
    target, draft = write_pair(tmp_path, target_words=words)
    tensors = load_file(draft / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = table[:-4].contiguous()
    save_file(tensors, draft / "model.safetensors")
    configure(draft, vocab_size=tiny.VOCAB - 4)
    write_tokenizer(draft, words[:-4])
    llm = start_pair(target, draft)
    assert llm.engine.drafter.draft.config.vocab_size == tiny.VOCAB - 4
    assert 0 < run(target, llm) <= 1.0
