"""Kind C of the faults seen in the field, through the whole engine: a request's own law, exactly.

The law of the first tokens of an answer is summed up exactly from the target's log-probabilities
by a shaping written here in float64; counts of many seeded answers are held against it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from scipy.stats import chisquare

from foretell.llm import LLM
from foretell.models.loader import LoadedModel, load
from foretell.sequence import SamplingParams
from tests import tiny
from tests.fakes import Scripted
from tests.faults import rigs

VOCAB = 6
PROMPT = [3, 5, 2, 4, 3, 5, 2, 4, 3, 5]
HORIZON = 3
CHAIN = "draft-model:weights=int4,k=2"
LIKELIEST = "tests.faults.test_C_engine:Likeliest,k=2"
DRAFTERS = [
    CHAIN,  # sampled, or coupled to the same noise
    LIKELIEST,  # argmax, one-hot
    "prompt-lookup:k=2,ngram_min=1,patience=0",
]
TREES = [
    "tests.faults.test_C_engine:Siblings,k=2,width=1",
    "tests.faults.test_C_engine:Siblings,k=6,width=2",
    "tests.faults.test_C_engine:Siblings,k=20,width=4",
    "tests.faults.rigs:Star,k=6",
]


class Likeliest(Scripted):
    """Greedy chain of the target itself, whatever the request's temperature."""

    def grow(self, nodes, sequence, rng):
        node, text = 0, tuple(sequence.tokens[len(PROMPT) :])
        for _ in range(nodes.budget):
            token = int(np.argmax(log_probs(text)))
            node, text = nodes.add(node, token), (*text, token)


class Siblings(Scripted):
    """Every node of depth 0 and 1 has the ``width`` likeliest tokens as children."""

    @dataclass(frozen=True, kw_only=True)
    class Options(Scripted.Options):
        width: int = 1

    def grow(self, nodes, sequence, rng):
        level = [(0, tuple(sequence.tokens[len(PROMPT) :]))]
        for _ in range(2):
            below = []
            for node, text in level:
                for token in np.argsort(-log_probs(text))[: self.options.width].tolist():
                    if child := nodes.add(node, token):
                        below.append((child, (*text, token)))
            level = below


@cache
def small_model() -> LoadedModel:
    path = tiny.write_model(Path(mkdtemp()), vocab_size=VOCAB, seed=5)
    return load(str(path), "f32", progress=False)


def llm(speculation: str | None = None, **options) -> LLM:
    options = {
        "page_size": 4,
        "kv_memory": "16MiB",
        "max_model_len": 64,
        "threads": 1,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 6000,
    } | options
    return LLM(small_model(), speculation=tiny.fixed(speculation), weights="f32", **options)


@cache
def log_probs(text: tuple[int, ...]) -> np.ndarray:
    """The target's own, [V], behind the prompt and that text."""
    _fill()
    if text not in _KNOWN:
        _look([text])
    return _KNOWN[text]


_KNOWN: dict[tuple[int, ...], np.ndarray] = {}


def _fill() -> None:
    if not _KNOWN:
        for length in range(HORIZON + 1):
            _look(list(itertools.product(range(VOCAB), repeat=length)))


def _look(texts: list[tuple[int, ...]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB, ignore_eos=True)
    engine = _looker()
    for text, result in zip(
        texts, engine.generate([[*PROMPT, *text] for text in texts], params), strict=True
    ):
        row = np.zeros(VOCAB)
        for token, value in result.logprobs[0].top:
            row[token] = value
        _KNOWN[text] = row


@cache
def _looker() -> LLM:
    return llm()


def shaped(text: tuple[int, ...], params: SamplingParams) -> np.ndarray:
    """The law [V] of the next token: definitions, not the engine's code."""
    logits = log_probs(text).astype(np.float64).copy()
    counts = np.bincount(np.array(text, dtype=np.int64), minlength=VOCAB)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    logits[list(params.bad_token_ids)] = -np.inf
    logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    logits /= params.temperature
    p = np.exp(logits - logits.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        needed = int((np.cumsum(p[order]) < params.top_p).sum()) + 1
        p[order[needed:]] = 0
    return p / p.sum()


def exact(params: SamplingParams) -> dict[tuple[int, ...], float]:
    law = {(): 1.0}
    for _ in range(HORIZON):
        law = {
            (*text, token): weight * p
            for text, weight in law.items()
            for token, p in enumerate(shaped(text, params))
            if p > 0
        }
    return law


def check_law(answers: list[list[int]], params: SamplingParams) -> None:
    """Chi-square of the first tokens; what the law excludes must never come."""
    law = exact(params)
    seen = dict.fromkeys(law, 0)
    for answer in answers:
        seen[tuple(answer[:HORIZON])] += 1  # KeyError: a token outside the law
    texts = sorted(law, key=law.__getitem__)
    observed, expected, rest = [], [], [0.0, 0.0]
    for text in texts:  # the rarest are counted together
        rest[0] += seen[text]
        rest[1] += law[text] * len(answers)
        if rest[1] >= 5:
            observed.append(rest[0])
            expected.append(rest[1])
            rest = [0.0, 0.0]
    observed[-1] += rest[0]
    expected[-1] += rest[1]
    if len(observed) > 1:
        found = chisquare(observed, np.array(expected) * sum(observed) / sum(expected))
        assert found.pvalue > 1e-4, f"{found} over {len(observed)} cells"


def params(**changes) -> SamplingParams:
    """Room for the largest tree: a draft never has more nodes than tokens that may come."""
    return SamplingParams(**({"temperature": 1.5, "max_tokens": 40, "ignore_eos": True} | changes))


def sample(
    engine: LLM, asked: SamplingParams, count: int = 512
) -> list[tuple[list[int], list[bool]]]:
    """First tokens of many answers and whether each was the draft's. A round of 256 begins
    together, so that everybody drafts from the second token on, and is left when all have some."""
    out: list[tuple[list[int], list[bool]]] = []
    for seed in range(count // 256):
        answers = [([], []) for _ in range(256)]
        for delta in engine.stream(PROMPT, rigs.params(asked, n=256, seed=seed)):
            answers[delta.index][0].extend(delta.token_ids)
            answers[delta.index][1].extend(delta.from_draft)
            if all(len(tokens) >= HORIZON for tokens, _ in answers):
                break
        out += answers
    assert engine.engine.metrics.accepted > 0
    assert not engine.engine.metrics.drafter_errors
    return out


def first(answers: list[tuple[list[int], list[bool]]]) -> list[list[int]]:
    return [tokens[:HORIZON] for tokens, _ in answers]


def test_the_rig_sees_a_shifted_law():
    """Answers of another temperature, or a draft taken without a test, are found out."""
    asked = params(temperature=1.0)
    answers = first(sample(llm(CHAIN), asked))
    with pytest.raises(AssertionError, match="pvalue"):
        check_law(answers, params(temperature=1.4))
    forced = [[a, int(np.argmax(log_probs((a,)))), c] for a, _, c in answers]
    with pytest.raises(AssertionError, match="pvalue"):
        check_law(forced, asked)
    with pytest.raises(KeyError):
        check_law(answers, params(top_k=2))


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("scheme", DRAFTERS)
def test_C1_law_of_the_target_for_sampled_and_for_certain_drafts(scheme, temperature, rule):
    if rule == "block" and scheme != CHAIN:
        pytest.skip("block is rejection for drafts that were not sampled")
    asked = params(temperature=temperature)
    check_law(first(sample(llm(f"{scheme},verification={rule}"), asked)), asked)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("scheme", [*DRAFTERS, *TREES])
def test_C1_twenty_thousand_samples(scheme, rule):
    asked = params()
    check_law(first(sample(llm(f"{scheme},verification={rule}"), asked, 20_480)), asked)


SETTINGS = [
    {"top_k": 2},
    {"top_p": 0.3},
    {"min_p": 0.4},
    {"top_k": 4, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 0.7},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"logit_bias": {1: 2.0, 4: -3.0}},
    {"bad_token_ids": [5, 0]},
]


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("scheme", [CHAIN, TREES[1]])
def test_C2_each_request_of_one_batch_has_its_own_law(scheme, rule):
    """Tokens outside it never come: `check_law` knows no cell for them."""
    engine = llm(f"{scheme},verification={rule}")
    asked = [params(max_tokens=6, **setting) for setting in SETTINGS]
    answers = [list[list[int]]() for _ in asked]
    for seed in range(5):  # 256 answers a round, all kinds side by side
        each = [rigs.params(one, n=8, seed=10 * seed + j) for j in range(4) for one in asked]
        results = engine.generate([PROMPT] * len(each), each)
        assert sum(r.stats.accepted for r in results) > 0
        for i, result in enumerate(results):
            answers[i // 8 % len(asked)].append(result.token_ids)
    for setting, own in zip(asked, answers, strict=True):
        check_law(own, setting)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("scheme", [rigs.MIXED, rigs.HOSTILE, *rigs.SELF])
def test_C3_a_counting_model_goes_on_counting(scheme, k, rule):
    """Row i alone says what token i + 1 is: a replacement from any other row would show."""
    prompts = [[5], [40, 41, 42], [60], [9, 2]]
    answers = [rigs.count_from(prompt[-1], 60) for prompt in prompts]
    rigs.script(prompts, answers)
    engine = rigs.counting(f"{scheme.format(k=k)},verification={rule}")
    results = engine.generate(prompts, tiny.sampled(max_tokens=50))
    assert tiny.ids(results) == [answer[:50] for answer in answers]
    assert sum(r.stats.drafted for r in results) > 0
    for result in results:
        rigs.check_counts(result)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_C3_after_every_step_counters_are_the_committed_length(rule):
    rigs.script([[5]], [rigs.count_from(5, 60)])
    engine = rigs.counting(f"{rigs.MIXED.format(k=4)},verification={rule}")
    for delta in engine.stream([5], tiny.sampled(max_tokens=50)):
        for sequence in engine.engine.scheduler.running:
            assert sequence.num_computed == len(sequence.tokens) - 1
            held = len(sequence.pages) * engine.config.page_size
            assert held - engine.config.page_size < len(sequence.tokens) <= held
        engine.engine.check()
        if delta.result:
            assert 0 < delta.result.stats.accepted < delta.result.stats.drafted


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_C3_law_after_a_rejection(rule):
    """Answers of which a draft was refused, given what they drafted: the replacement's own law."""
    asked = params()
    counts: dict[int, np.ndarray] = {}
    for tokens, from_draft in sample(llm(f"{LIKELIEST},verification={rule}"), asked, 2048):
        row = counts.setdefault(tokens[0], np.zeros(VOCAB))
        if not from_draft[1]:  # the first draft comes behind the first token
            row[tokens[1]] += 1
    tested = 0
    for token, row in counts.items():
        law, refused = shaped((token,), asked), int(np.argmax(log_probs((token,))))
        assert row[refused] == 0, "a refused token replaced itself"
        law[refused] = 0
        expected = law / law.sum() * row.sum()
        kept = expected >= 4
        if kept.sum() > 1:
            tested += 1
            scaled = expected[kept] / expected[kept].sum() * row[kept].sum()
            assert chisquare(row[kept], scaled).pvalue > 1e-4
    assert tested > 2


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("scheme", ["draft-model:weights=int4,k=4", rigs.LOOKUP.format(k=4), None])
def test_C4_no_temperature_is_ignored(scheme, rule):
    """64 answers without a seed are all different when hot and all the same when greedy."""
    engine = tiny.llm(scheme and f"{scheme},verification={rule}", max_num_seqs=64)
    hot = SamplingParams(temperature=1.5, n=64, max_tokens=16, ignore_eos=True)
    answers = engine.generate(rigs.COPY, hot)
    assert len({tuple(answer.token_ids) for answer in answers}) == 64
    cold = engine.generate(rigs.COPY, rigs.params(hot, temperature=0))
    assert len({tuple(answer.token_ids) for answer in cold}) == 1


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("scheme", TREES)
def test_C5_branching_trees_keep_the_law(scheme, rule):
    """1, 2 and 4 siblings at two depths, and a star that holds the whole vocabulary."""
    engine = llm(f"{scheme},verification={rule}")
    asked = params()
    answers = sample(engine, asked)
    check_law(first(answers), asked)
    if "Star" in scheme:  # all that can come was proposed
        assert all(from_draft[1] for _, from_draft in answers)
