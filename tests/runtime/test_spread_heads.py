"""Heads that draft single tokens, spread over ranks as the target is: the parts compute what the
whole does, the text is that of one rank, and each rank holds its part and no more."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from foretell.attention.cpu import CpuAttention
from foretell.config import SpeculationConfig
from foretell.drafters import build, spread_head
from foretell.engine.one_token import OneToken
from foretell.llm import LLM
from foretell.models.loader import load
from foretell.runtime.kv import KVPool
from foretell.runtime.rank import memory
from foretell.runtime.ranks import RankError
from foretell.runtime.runner import Runtime
from tests import heads, tiny
from tests.models.tiny import Cache, save_with_mtp
from tests.runtime.ranks import OPTIONS, model, on_threads, start

PROMPTS = tiny.prompts(5)
PARAMS = [tiny.greedy(max_tokens=24), tiny.sampled(max_tokens=24)]
DEEPSEEK = "deepseek"
ROWS = 9


@cache
def checkpoint() -> Path:
    save_with_mtp(path := Path(mkdtemp()), vocab_size=tiny.VOCAB, initializer_range=0.3)
    return path


@cache
def some_ids() -> Path:
    """Tokens to propose: nearly all of them are the first rank's."""
    (file := Path(mkdtemp()) / "ids.json").write_text(json.dumps([*range(2, 40), 50, 63]))
    return file


def narrow() -> str:
    """EAGLE-3 of another width than the target: it has a table of its own."""
    tensors, config = heads.eagle3()
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=g) * shape[-1] ** -0.5  # noqa: E731
    width = heads.HIDDEN // 2
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name, shape in shapes.items():
        if name not in ("d2t", "t2d", "fc.weight"):
            wide = "q_proj k_proj v_proj"
            inputs = any(f"{part}.weight" in name for part in wide.split())
            own = [
                size // 2 if size == heads.HIDDEN or (inputs and size == 2 * heads.HIDDEN) else size
                for size in shape
            ]
            if "q_proj" in name or "o_proj" in name:  # its heads stay what they are
                own["o_proj" in name] = heads.HEADS * heads.DIM
            tensors[name] = draw(*own) * 2 if len(own) > 1 else 1 + 0.3 * draw(*own)
    tensors["fc.weight"] = draw(width, 3 * heads.HIDDEN)
    tensors["embed_tokens.weight"] = draw(tiny.VOCAB, width)
    config |= {"hidden_size": width, "target_hidden_size": heads.HIDDEN}
    return f"eagle3:model={heads.write(tensors, config)}"


def scheme(kind: str) -> str:
    if kind == DEEPSEEK:
        return "mtp:k=1"
    if kind == "narrow":
        return f"{narrow()},k=1"
    if kind == "some":
        return f"{heads.scheme('eagle')},k=1,draft_vocab={some_ids()}"
    return f"{heads.scheme(kind)},k=1"


def path_of(kind: str) -> Path:
    return checkpoint() if kind == DEEPSEEK else model()


def run(loaded, kind, ranks):
    """Pairs of random features, then more behind them."""
    speculation, attention = SpeculationConfig.parse(scheme(kind)), CpuAttention()
    runtime = Runtime(loaded, attention, max_num_seqs=1, max_model_len=64, page_size=8)
    drafter, apart = build(speculation, runtime), spread_head(speculation, loaded)
    assert (apart is None) == (ranks is None)
    head = apart.head if ranks and ranks.rank else drafter.head  # as each is loaded
    assert head.ranks is ranks
    cache = Cache(loaded, attention)
    cache.kv = KVPool(
        {"target": head.config.kv_group(torch.float32)}, 16, 8, torch.device("cpu")
    ).layers["target"]
    g = torch.Generator().manual_seed(1)
    features = head.feature(
        torch.randn(ROWS, loaded.config.hidden_size * len(drafter.needs.features), generator=g)
    )
    tokens = torch.randint(2, tiny.VOCAB, (ROWS,), generator=g).tolist()
    return cache.run_head(head, tokens, features)


@pytest.mark.parametrize("kind", [*heads.LAYERED, "some", "narrow", DEEPSEEK])
@pytest.mark.parametrize("world", [2, 4])
def test_parts_compute_what_the_whole_does(kind, world):
    path = path_of(kind)
    logits, following = run(load(str(path), "f32", progress=False), kind, None)
    assert logits.abs().max() > 0.1

    def part(ranks):
        return run(load(str(path), "f32", progress=False, ranks=ranks), kind, ranks)

    first, *others = on_threads(world, part)
    torch.testing.assert_close(first[0], logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first[1], following, rtol=1e-4, atol=1e-4)
    for other in others:  # the same features, bit for bit, and no logits
        assert other[0].shape == (ROWS, 0)
        assert torch.equal(other[1], first[1])


@cache
def one(path: Path):
    llm = LLM(str(path), **OPTIONS)
    return [tiny.ids(llm.generate(PROMPTS, params)) for params in PARAMS]


@pytest.mark.parametrize(
    "kind",
    [
        "eagle3",
        DEEPSEEK,
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (*heads.LAYERED, "some", "narrow")
            if kind != "eagle3"
        ),
    ],
)
def test_the_text_of_one_rank(kind, monkeypatch):
    """In the schedule of single tokens, whose steps end with the head's pass on all ranks, and in
    the ordinary one, where rank 0 sends what is accepted."""
    options = {"halves": True} if kind == DEEPSEEK else {}
    found, draft = list[int](), OneToken.draft
    monkeypatch.setattr(OneToken, "draft", lambda self: (found.append(1), draft(self))[1])
    alone = LLM(str(path_of(kind)), **OPTIONS, speculation=tiny.fixed(scheme(kind)))
    with LLM(
        str(path_of(kind)), **OPTIONS, **options, tensor_parallel=2,
        speculation=tiny.fixed(scheme(kind)),
    ) as two:  # fmt: skip
        assert two.engine.drafter.head.ranks is not None
        for params, expected in zip(PARAMS, one(path_of(kind)), strict=True):
            found.clear()
            results = two.generate(PROMPTS, params)
            assert tiny.ids(results) == expected
            assert len(found) > 10
            drafts = [result.stats.accepted for result in alone.generate(PROMPTS, params)]
            assert [result.stats.accepted for result in results] == drafts
            assert tiny.ids(two.generate(PROMPTS, params, speculate=False)) == expected
        found.clear()
        penal = tiny.greedy(max_tokens=24, repetition_penalty=1.2)  # needs the host in between
        assert tiny.ids(two.generate(PROMPTS, penal)) == tiny.ids(alone.generate(PROMPTS, penal))
        assert not found
        metrics = two.engine.metrics
        assert metrics.drafted > metrics.accepted > 0
        assert metrics.drafter_errors == 0, metrics.last_drafter_error
        two.engine.device.settle()
        tiny.check_idle(two)
        (process,) = two.engine.runtime.leader.processes
        check_memory(two, alone)
    assert process.returncode == 0


def check_memory(two: LLM, alone: LLM) -> None:
    """Of what can be divided each rank has half."""
    whole = memory(alone.engine.runtime, alone.engine.drafter.head)
    ours = memory(two.engine.runtime, two.engine.drafter.head)
    (theirs,) = two.engine.runtime.leader.memory
    pages = two.engine.runtime.kv.num_pages / alone.engine.runtime.kv.num_pages
    latent = two.target.config.mla is not None  # then what is cached is on every rank
    assert ours["draft KV"] == theirs["draft KV"] > 0
    assert ours["draft KV"] == pytest.approx(whole["draft KV"] * pages / (1 if latent else 2))
    halves, both = [ours["draft weights"], theirs["draft weights"]], whole["draft weights"]
    assert halves[0] == pytest.approx(halves[1], rel=0.1)  # rank 0 has its tokens' numbers, too
    assert max(halves) < 0.8 * both
    known = sum(size for name, size in theirs.items() if name != "all tensors")
    assert known <= theirs["all tensors"] < known + 200_000


def test_a_broken_pass_of_a_head_ends_the_group(monkeypatch):
    """The ranks are out of step then: going on without drafts would mix up exchanges."""
    with start(speculation=tiny.fixed(scheme("eagle")), rank_timeout=6.0) as llm:
        head, calls = llm.engine.drafter.head, [0]
        run = type(head).run

        def failing(*given):
            calls[0] += 1
            if calls[0] == 4:
                raise RuntimeError("out of memory")
            return run(*given)

        monkeypatch.setattr(type(head), "run", failing)
        with pytest.raises(RankError, match="a pass over 2 ranks failed: out of memory"):
            llm.generate(PROMPTS, PARAMS[0])
        with pytest.raises(RankError):
            llm.generate(PROMPTS, PARAMS[0])


def test_more_tokens_are_drafted_on_the_first_rank_alone():
    target = load(str(model()), "f32", progress=False)
    target.model.ranks = object()
    for text in ("eagle:k=2", "eagle:tree=medusa", "draft-model:k=1", "medusa:k=1"):
        assert spread_head(SpeculationConfig.parse(text), target) is None
