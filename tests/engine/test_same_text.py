"""The headline: whatever is drafted, by whom and how, the text is that of plain decoding."""

import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretell.sequence import SamplingParams
from tests import heads, tiny
from tests.fakes import Scripted
from tests.faults.white_box import start, steps

SCHEMES = [
    "prompt-lookup:k=8,ngram_min=1",
    "prompt-lookup:k=12,ngram_min=1,branches=3,patience=0",
    "draft-model:weights=target,k=4",
    "draft-model:weights=int4,k=3",
    "draft-model:weights=int4,depth=4,topk=3,nodes=14",
    "draft-model:weights=target,tree=eagle",
    "tests.fakes:Grown,depth=5,topk=3,nodes=20",
    "draft-model:weights=int4,tree=medusa",
    *(f"{heads.scheme(kind)},k=3" for kind in heads.KINDS),
    *(
        f"{heads.scheme(kind)},depth=4,topk=3,nodes=14"
        for kind in ("eagle-norms", "eagle3", "mtp-deepseek", "medusa")
    ),
    f"{heads.scheme('eagle')},tree=eagle",
    f"{heads.scheme('medusa')},tree=medusa",
    "tests.fakes:Oracle,k=5",
    "tests.fakes:Noise,k=20",
    "tests.fakes:Hostile,k=63",
    "tests.fakes:Mixed,k=6",
    "tests.fakes:Bushy,k=24",
    "tests.fakes:Broken,k=4",
]
PROMPTS = tiny.prompts(9)
SETTINGS = {
    "greedy": tiny.greedy(),
    "seeded": tiny.sampled(),
    "filters": tiny.sampled(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
    "penalties": tiny.sampled(
        presence_penalty=0.7, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={5: 3.0}
    ),
    "greedy penalties": tiny.greedy(frequency_penalty=1.0, repetition_penalty=1.3),
    "eos": tiny.sampled(ignore_eos=False, min_tokens=3, stop_token_ids=[9, 11]),
}
_PLAIN: dict[tuple[str, str], list[list[int]]] = {}


def plain(name: str, weights: str = "f32") -> list[list[int]]:
    """Texts without a drafter, one prompt at a time."""
    if (name, weights) not in _PLAIN:
        engine = tiny.llm(weights=weights, max_num_seqs=1, prefix_caching=False)
        _PLAIN[name, weights] = tiny.ids(engine.generate(PROMPTS, SETTINGS[name]))
    return _PLAIN[name, weights]


def speculative(scheme: str, name: str, weights: str = "f32", **options):
    Scripted.answers = {
        tuple(prompt): answer for prompt, answer in zip(PROMPTS, plain(name, weights), strict=True)
    }
    Scripted.eos = (tiny.EOS,)
    return tiny.llm(scheme, weights, **options)


def check_same(engine, prompts, params, texts) -> None:
    results = engine.generate(prompts, params)
    assert tiny.ids(results) == texts
    tiny.check_idle(engine)
    drafted = sum(result.stats.drafted for result in results)
    assert drafted > 0, "nothing was drafted: the test shows nothing"
    broken = "Broken" in engine.config.speculation.method
    assert bool(engine.engine.metrics.drafter_errors) == broken
    assert tiny.ids(engine.generate(prompts, params)) == texts  # warm prefix cache
    assert any(engine.engine.cache.idle)


each_scheme = pytest.mark.parametrize(
    "scheme", SCHEMES, ids=lambda text: re.sub(r"model=.*/", "", text)
)


@each_scheme
def test_same_greedy_text(scheme):
    check_same(speculative(scheme, "greedy"), PROMPTS, SETTINGS["greedy"], plain("greedy"))


MIXED = [name for name in SETTINGS if name != "greedy"] * 5
"""What each of `MIXED_PROMPTS` is asked with, side by side in one batch."""
MIXED_PROMPTS = tiny.prompts(len(MIXED), seed=1)


@cache
def mixed_texts() -> list[list[int]]:
    engine = tiny.llm(max_num_seqs=1, prefix_caching=False)
    return tiny.ids(engine.generate(MIXED_PROMPTS, [SETTINGS[name] for name in MIXED]))


@each_scheme
def test_same_text_under_every_setting(scheme, monkeypatch):
    texts = mixed_texts()
    answers = {tuple(p): text for p, text in zip(MIXED_PROMPTS, texts, strict=True)}
    assert len(answers) == len(texts)
    monkeypatch.setattr(Scripted, "answers", answers)
    monkeypatch.setattr(Scripted, "eos", (tiny.EOS,))
    engine = tiny.llm(scheme, max_num_seqs=len(texts))
    check_same(engine, MIXED_PROMPTS, [SETTINGS[name] for name in MIXED], texts)


@pytest.mark.parametrize("weights", ["int8", "bf16", "int4"])
@pytest.mark.parametrize(
    "scheme",
    [
        "draft-model:weights=int4,k=4",
        "tests.fakes:Bushy,k=24",
        f"{heads.scheme('eagle-norms')},k=3",
        f"{heads.scheme('eagle3')},depth=3,topk=2,nodes=8",
        f"{heads.scheme('medusa')},k=6",
    ],
)
def test_same_text_in_every_weight_format(scheme, weights):
    for name in ("greedy", "seeded"):
        engine = speculative(scheme, name, weights)
        assert tiny.ids(engine.generate(PROMPTS, SETTINGS[name])) == plain(name, weights)


@settings(max_examples=40, deadline=None)
@given(
    scheme=st.sampled_from(SCHEMES),
    name=st.sampled_from(list(SETTINGS)),
    seqs=st.sampled_from([1, 2, 4]),
    rows=st.sampled_from([64, 65, 80, 512]),
    page_size=st.sampled_from([1, 3, 16]),
    pages=st.sampled_from([45, 1000]),
    caching=st.booleans(),
)
def test_same_text_under_any_limits(scheme, name, seqs, rows, page_size, pages, caching):
    engine = speculative(
        scheme,
        name,
        max_num_seqs=seqs,
        max_num_batched_tokens=rows,
        page_size=page_size,
        max_model_len=128,
        kv_memory=f"{pages * page_size * 1024}B" if pages * page_size >= 130 else "1MiB",
        prefix_caching=caching,
    )
    assert tiny.ids(engine.generate(PROMPTS[:4], SETTINGS[name])) == plain(name)[:4]
    tiny.check_idle(engine)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_greedy_text_does_not_depend_on_the_rule(rule):
    for scheme in (
        "draft-model:weights=int4,k=4",
        "tests.fakes:Noise,k=12",
        *([f"{heads.scheme('eagle3')},topk=2"] if rule != "block" else []),
        f"{heads.scheme('mtp-mimo')},k=3",
    ):
        engine = speculative(f"{scheme},verification={rule}", "greedy")
        assert tiny.ids(engine.generate(PROMPTS, tiny.greedy())) == plain("greedy")


@pytest.mark.parametrize("name", ["greedy", "seeded"])
@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_a_target_drafting_for_itself_is_always_accepted(k, name):
    engine = speculative(f"draft-model:weights=target,k={k}", name, "int8")
    results = engine.generate(PROMPTS, SETTINGS[name])
    assert tiny.ids(results) == plain(name, "int8")
    for result in results:
        assert result.stats.drafted > 0
        assert result.stats.accepted == result.stats.drafted
        assert result.stats.tau > 1
    warm = engine.generate(PROMPTS, SETTINGS[name])
    assert any(result.stats.num_cached_tokens for result in warm)
    assert all(result.stats.accepted == result.stats.drafted for result in warm)


TREES = {
    "depth=5,topk=4,nodes=24": 5,
    "depth=3,topk=6,nodes=40": 3,
    "tree=eagle": 5,
    "tree=medusa": 4,
}


@pytest.mark.parametrize("name", ["greedy", "seeded"])
@pytest.mark.parametrize("tree", TREES)
def test_a_right_tree_of_depth_d_gives_d_plus_one_tokens_a_pass(tree, name):
    engine = speculative(f"tests.fakes:Grown,{tree}", name)
    tokens, count = TREES[tree] + 1, 0
    for prompt, answer in zip(PROMPTS, plain(name), strict=True):
        [sequence] = start(engine, [prompt], SETTINGS[name])
        gains: list[int] = []
        for _ in steps(engine, [sequence]):
            gains.append(sequence.num_output - sum(gains))
        assert sequence.output == answer
        whole = [i for i, gain in enumerate(gains) if gain == tokens]
        first = next(i for i, gain in enumerate(gains) if gain) + 1  # the prompt's own pass
        # A tree shrinks where fewer tokens are left than it has nodes.
        left = [len(answer) - sum(gains[:i]) - 1 for i in range(len(gains))]
        full = [i for i in range(first, len(gains)) if left[i] >= tokens]
        assert whole[: len(full)] == full
        count += len(full)
    assert count > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("tree", TREES)
def test_trees_under_every_rule(tree, rule):
    """Greedy text is that of plain decoding; drawn trees are drawn and partly accepted."""
    scheme = f"draft-model:weights=int4,{tree},verification={rule}"
    engine = speculative(scheme, "greedy")
    results = engine.generate(PROMPTS, tiny.greedy())
    assert tiny.ids(results) == plain("greedy")
    greedy = sum(result.stats.accepted for result in results)
    by_coupled = speculative(scheme.replace(rule, "coupled"), "greedy").generate(
        PROMPTS, tiny.greedy()
    )
    assert greedy == sum(result.stats.accepted for result in by_coupled) > 0
    warm = engine.generate(PROMPTS, SETTINGS["seeded"])
    assert tiny.ids(warm) == tiny.ids(engine.generate(PROMPTS, SETTINGS["seeded"]))
    assert sum(result.stats.accepted for result in warm) > 0
    assert not engine.engine.metrics.drafter_errors
    tiny.check_idle(engine)


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16])
def test_accepted_paths_are_moved_across_page_borders(page_size):
    moves: list[tuple[int, int]] = []
    for scheme in ("draft-model:weights=int4,tree=medusa", "tests.fakes:Bushy,k=40"):
        engine = speculative(scheme, "greedy", page_size=page_size)
        move = engine.engine.runtime.move

        def spy(slot, source, target, move=move):
            moves.extend(zip(source, target, strict=True))
            move(slot, source, target)

        engine.engine.runtime.move = spy
        assert tiny.ids(engine.generate(PROMPTS, tiny.greedy())) == plain("greedy")
        assert tiny.ids(engine.generate(PROMPTS, tiny.greedy())) == plain("greedy")  # warm
    across = sum(source // page_size != target // page_size for source, target in moves)
    assert across > 5


def test_n_answers_are_those_of_plain_decoding_and_differ():
    params = tiny.sampled(n=4)
    expected = tiny.llm(max_num_seqs=1).generate(PROMPTS[:2], params)
    engine = tiny.llm("draft-model:weights=int4,k=4")
    got = engine.generate(PROMPTS[:2], params)
    assert tiny.ids(got) == tiny.ids(expected)
    assert [r.index for r in got] == [0, 1, 2, 3] * 2
    assert len({tuple(r.token_ids) for r in got[:4]}) == 4


def test_different_requests_in_one_batch_keep_their_own_settings():
    names = list(SETTINGS)
    params = [SETTINGS[names[i % len(names)]] for i in range(len(PROMPTS))]
    engine = speculative("tests.fakes:Noise,k=9", "greedy")
    got = tiny.ids(engine.generate(PROMPTS, params))
    assert got == [plain(names[i % len(names)])[i] for i in range(len(PROMPTS))]


def test_without_seed_answers_differ():
    engine = tiny.llm("tests.fakes:Noise,k=4")
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    answers = {tuple(engine.generate([5, 6, 7], params)[0].token_ids) for _ in range(5)}
    assert len(answers) == 5
