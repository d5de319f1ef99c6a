"""A tiny random Llama with peaked logits, and engines around it. No download."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from foretell.llm import LLM
from foretell.models.loader import LoadedModel, load
from foretell.sequence import SamplingParams

VOCAB = 64
EOS = 1
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456 \n"[: VOCAB - 2]
"""What `write_tokenizer` gives the ids behind those of <unk> and </s>."""


def write_tokenizer(path: Path, template: str) -> None:
    """A tokenizer of one letter a token, with a chat template, beside a model."""
    vocabulary = {"<unk>": 0, "</s>": 1, **{letter: i for i, letter in enumerate(LETTERS, 2)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    path: Path, *, seed: int = 0, vocab_size: int = VOCAB, max_positions: int = 512, layers: int = 2
) -> Path:
    """Writes config.json and model.safetensors of a random Llama (grouped queries, tied)."""
    hidden, heads, kv_heads, dim, inner = 32, 4, 2, 8, 48
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g) * shape[-1] ** -0.5  # noqa: E731
    tensors = {
        "model.embed_tokens.weight": draw(vocab_size, hidden) * 4,
        "model.norm.weight": 1 + 0.1 * draw(hidden),
    }
    for i in range(layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            prefix + "input_layernorm.weight": 1 + 0.1 * draw(hidden),
            prefix + "post_attention_layernorm.weight": 1 + 0.1 * draw(hidden),
            prefix + "self_attn.q_proj.weight": 2 * draw(heads * dim, hidden),
            prefix + "self_attn.k_proj.weight": 2 * draw(kv_heads * dim, hidden),
            prefix + "self_attn.v_proj.weight": 2 * draw(kv_heads * dim, hidden),
            prefix + "self_attn.o_proj.weight": 2 * draw(hidden, heads * dim),
            prefix + "mlp.gate_proj.weight": 2 * draw(inner, hidden),
            prefix + "mlp.up_proj.weight": 2 * draw(inner, hidden),
            prefix + "mlp.down_proj.weight": 2 * draw(hidden, inner),
        }
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": True,
        "eos_token_id": EOS,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@cache
def model(weights: str = "f32", seed: int = 0, max_positions: int = 512) -> LoadedModel:
    """A loaded tiny model, shared by all tests."""
    path = write_model(Path(mkdtemp()), seed=seed, max_positions=max_positions)
    return load(str(path), weights, progress=False)


def llm(speculation: str | None = None, weights: str = "f32", seed: int = 0, **options) -> LLM:
    """An engine over the tiny model; small pages, so that borders are crossed often."""
    options = {"page_size": 4, "kv_memory": "8MiB", "max_model_len": 256, "threads": 1} | options
    return LLM(model(weights, seed), speculation=fixed(speculation), weights=weights, **options)


def fixed(speculation: str | None) -> str | None:
    """A scheme that always drafts k, unless it says otherwise: what most tests are about."""
    if speculation is None or "+" in speculation or "adaptive=" in speculation:
        return speculation
    return speculation + ("," if re.search(r":.*=|:[A-Z]", speculation) else ":") + "adaptive=false"


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Random prompts of very different lengths; half of them repeat themselves."""
    g = torch.Generator().manual_seed(seed)
    out: list[list[int]] = []
    for i in range(count):
        length = int(torch.randint(1, longest, (1,), generator=g))
        ids = torch.randint(2, VOCAB, (length,), generator=g).tolist()
        out.append((ids[: max(1, length // 3)] * 3) if i % 2 else ids)
    return out


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 24, "ignore_eos": True} | changes))


def sampled(seed: int = 7, **changes) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "seed": seed} | changes)
    )


@cache
def _plain(asked: str, weights: str) -> list[list[int]]:
    prompts, params = _ASKED[asked]
    return ids(llm(None, weights, max_num_seqs=1, prefix_caching=False).generate(prompts, params))


_ASKED: dict[str, tuple[list[list[int]], SamplingParams]] = {}


def plain(prompts: list[list[int]], params: SamplingParams, weights: str = "f32"):
    """Texts of plain decoding, one prompt at a time; computed once."""
    _ASKED[asked := repr((prompts, params))] = prompts, params
    return _plain(asked, weights)


def ids(results) -> list[list[int]]:
    return [result.token_ids for result in results]


def check_idle(engine_of: LLM) -> None:
    """Nothing runs, every page is free or idle, and nothing was lost."""
    engine = engine_of.engine
    assert not engine.has_work
    engine.check()
    assert engine.cache.num_free == engine.cache.num_pages
