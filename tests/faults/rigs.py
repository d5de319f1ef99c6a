"""The rigs of the fault tests: baselines, scripted drafters, a model that counts, a tokenizer.

SELF is `SELF` (a drafter that replays the baseline past any end, and the target drafting for
itself), HOSTILE and MIXED are the scripted drafters of that name, COPY is a prompt that repeats.
DECLARE takes the end (a token, a stop string, a cap) from a baseline that ran past it.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from safetensors.torch import load_file, save_file

from foretell.answer import Result
from foretell.llm import LLM
from foretell.models.loader import LoadedModel, load
from foretell.sequence import SamplingParams, Sequence
from tests import tiny
from tests.fakes import Nodes, Scripted

SELF = ("tests.fakes:Oracle,k={k}", "draft-model:weights=target,k={k}")
HOSTILE = "tests.fakes:Hostile,k={k}"
MIXED = "tests.fakes:Mixed,k={k}"
LOOKUP = "prompt-lookup:k={k},ngram_min=1,patience=0"
ALL = (*SELF, HOSTILE, MIXED, LOOKUP, "tests.fakes:Bushy,k={k}", "tests.faults.rigs:Ragged,k={k}")
COPY = [7, 31, 12, 44, 9, 23, 50, 18, 36, 5] * 4


class Ragged(Scripted):
    """Right for a random number of tokens, then nothing: every chunking of the text."""

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        node = 0
        for token in self.truth(sequence, rng.randint(0, nodes.budget)):
            node = nodes.add(node, token)


class EndChain(Scripted):
    """A chain that is right for some tokens and then proposes the end of the text."""

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        node = 0
        for token in self.truth(sequence, sequence.num_output % nodes.budget):
            node = nodes.add(node, token)
        for token in self.eos:
            nodes.add(node, token)


class EndEverywhere(Scripted):
    """The right chain with the end of the text proposed beside every one of its tokens."""

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        node = 0
        for token in self.truth(sequence, nodes.budget):
            for end in self.eos:
                nodes.add(node, end)
            child = nodes.add(node, token)
            if not child:
                return
            node = child


class Star(Scripted):
    """The whole vocabulary as children of the root, as far as the budget goes, in random order."""

    def grow(self, nodes: Nodes, sequence: Sequence, rng: random.Random) -> None:
        order = list(range(self.runtime.vocab_size))
        rng.shuffle(order)
        for token in order:
            nodes.add(0, token)


class Pieces:
    """A tokenizer over a table of byte strings; special ids have no text unless asked for."""

    def __init__(self, pieces: list[bytes], special: tuple[int, ...] = (0, tiny.EOS)) -> None:
        self.pieces, self.special = pieces, special

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        kept = [i for i in ids if not (skip_special and i in self.special)]
        return b"".join(self.pieces[i] for i in kept).decode("utf-8", errors="replace")

    def encode(self, text: str) -> list[int]:
        out, rest = list[int](), text.encode()
        while rest:
            at = next(i for i, p in enumerate(self.pieces) if i > 1 and p and rest.startswith(p))
            out.append(at)
            rest = rest[len(self.pieces[at]) :]
        return out


def split(text: str, cuts: tuple[int, ...] = (1, 2, 1, 3)) -> list[bytes]:
    """The bytes of a text in 64 pieces, ids 2 to 63 in order: characters fall apart."""
    data, out = text.encode(), [b"<pad>", b"</s>"]
    while len(out) < 63:
        size = cuts[len(out) % len(cuts)]
        out.append(data[:size])
        data = data[size:]
    assert data, "the text is too short for 62 pieces"
    return [*out, data]


TEXT = (
    "One two three; naïve café, 東京 한국어 \U0001f642\U0001f469\u200d\U0001f469\u200d\U0001f467 "
    "four END five STOP six, seven eight nine ten eleven."
)
COUNTING_TEXT = Pieces(split(TEXT))
"""Pieces of `TEXT`: what the counting model says from id 2 on."""
RANDOM_TEXT = Pieces(
    [b"<pad>", b"</s>", *[bytes([b]) for b in b"abcdefghijklmnopqrstuvwxyz .,;"]]
    + [w.encode() for w in ("the", " of", "and ", "zz", "q\n", "End", "oo", "ab", "ba", "x y")]
    + [bytes([b]) for b in "é".encode() + "東".encode() + "\U0001f642".encode()]
    + [b"a\xc3", b"\xa9b", b"\xe6\x9d", b"\xb1 ", b"\xf0\x9f", b"\x99\x82!", b"\xe2", b"\x80\x8d"]
    + [b" in", b" an", b"\t", b"er", b"th"]
)
assert len(RANDOM_TEXT.pieces) == tiny.VOCAB


@cache
def counting_model(weights: str = "f32") -> LoadedModel:
    """A Llama of which token t is always followed by t + 1, and the last by 0: no attention, no
    MLP, one direction for each token."""
    path = tiny.write_model(Path(mkdtemp()))
    config = json.loads((path / "config.json").read_text())
    config |= {"hidden_size": tiny.VOCAB, "tie_word_embeddings": False, "num_hidden_layers": 1}
    tensors = {
        name: tensor
        for name, tensor in load_file(path / "model.safetensors").items()
        if "layers.1." not in name
    }
    v = tiny.VOCAB
    for name, old in tensors.items():
        shape = [
            v if size == 32 and not _is_heads(name, i) else size for i, size in enumerate(old.shape)
        ]
        tensors[name] = torch.zeros(*shape) if old.dim() > 1 else torch.ones(*shape)
    tensors["model.embed_tokens.weight"] = torch.eye(v)
    tensors["lm_head.weight"] = 8 * torch.eye(v).roll(1, 0)  # row t + 1 answers to token t
    save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return load(str(path), weights, progress=False)


def _is_heads(name: str, axis: int) -> bool:
    """Does that axis of a weight count heads times their width (32 too), not hidden units?"""
    return (axis == 0 and "q_proj" in name) or (axis == 1 and "o_proj" in name)


def counting(speculation: str | None = None, **options) -> LLM:
    """An engine over the counting model, which says `TEXT` from id 2 on."""
    options = {"page_size": 4, "kv_memory": "8MiB", "max_model_len": 256, "threads": 1} | options
    engine = LLM(counting_model(), speculation=tiny.fixed(speculation), weights="f32", **options)
    engine.tokenizer = COUNTING_TEXT  # type: ignore[assignment]
    return engine


def count_from(token: int, length: int) -> list[int]:
    return [(token + 1 + i) % tiny.VOCAB for i in range(length)]


def spoken(speculation: str | None = None, **options) -> LLM:
    """An engine over the tiny random model, with text."""
    engine = tiny.llm(speculation, **options)
    engine.tokenizer = RANDOM_TEXT  # type: ignore[assignment]
    return engine


def plain(prompts: list[list[int]], params, make=tiny.llm, **options) -> list[Result]:
    """No drafter, one request at a time, nothing shared."""
    return make(max_num_seqs=1, prefix_caching=False, **options).generate(prompts, params)


def script(prompts: list[list[int]], answers: list[list[int]], eos: tuple[int, ...] = ()) -> None:
    """What the scripted drafters take for the truth."""
    Scripted.answers = {tuple(p): list(a) for p, a in zip(prompts, answers, strict=True)}
    Scripted.eos = eos


def view(result: Result) -> tuple:
    """All that a user sees of an answer and that must not depend on speculation."""
    logprobs = result.logprobs and [
        (p.token_id, round(p.logprob, 4), tuple((t, round(v, 4)) for t, v in p.top))
        for p in result.logprobs
    ]
    return (
        result.token_ids,
        result.text,
        result.finish_reason,
        result.error,
        logprobs,
        result.stats.num_tokens,
        result.stats.num_prompt_tokens,
    )


def check_same(got: list[Result], expected: list[Result]) -> None:
    """Equal in everything a user sees, and consistent in itself."""
    assert [view(r) for r in got] == [view(r) for r in expected]
    for result in got:
        check_counts(result)


def check_counts(result: Result) -> None:
    """Every per-token field describes the same tokens."""
    count, stats = len(result.token_ids), result.stats
    assert len(result.from_draft) == count == stats.num_tokens == len(stats.token_times)
    assert result.logprobs is None or [p.token_id for p in result.logprobs] == result.token_ids
    assert 0 <= stats.accepted <= stats.drafted
    assert sum(result.from_draft) == stats.accepted == sum(stats.accepted_by_position)
    assert count == stats.num_passes + stats.accepted - _ends_in_draft(result)


def _ends_in_draft(result: Result) -> int:
    """The last pass adds no token of its own if the answer ends with an accepted draft."""
    return int(bool(result.from_draft) and result.from_draft[-1])


def params(base: SamplingParams, **changes) -> SamplingParams:
    return SamplingParams(**({f: getattr(base, f) for f in base.__dataclass_fields__} | changes))
