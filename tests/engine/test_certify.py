"""`foretell certify` passes a sound engine and fails one with a fault, whatever the fault."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import signal
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import foretell.bench.certify as certify_module
import foretell.drafters.draft_model as draft_module
import foretell.engine.choose as choose_module
import foretell.engine.engine as engine_module
import foretell.engine.rows as rows_module
import foretell.spec.verify as verify_module
from foretell import progress
from foretell.answer import Follower
from foretell.bench.certify import certify
from foretell.bench.certify_config import CertifyConfig
from foretell.bench.certify_law import Setting, Tie, p_value
from foretell.cli import main
from foretell.config import EngineConfig, SpeculationConfig
from foretell.drafters.draft_model import DraftModel
from foretell.engine.cache import PageCache
from foretell.engine.engine import Engine
from foretell.models.grammar import Grammar
from foretell.runtime import sampling
from foretell.runtime.runner import Runtime
from foretell.spec.verify import Outcome
from tests import heads, tiny

LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789 \n{}[]":,.-+E\\/ABCDFGHIJKL'
DRAFT = "draft-model:weights=int4,k=4"
PARTS = ["same text", "same bits", "same distribution", "acceptance 1.0", "KV audit"]


@cache
def model() -> Path:
    """A tiny random model whose tokens are letters, enough of them for JSON."""
    path = tiny.write_model(Path(mkdtemp()) / "tiny")
    letters = [{" ": "Ġ", "\n": "Ċ"}.get(letter, letter) for letter in LETTERS]
    words = ["<unk>", "</s>", *letters]
    assert len(set(words)) == tiny.VOCAB
    inner = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(words[:2])
    inner.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    prompts = ["the cat sat on the cat", "abcabcabcabc 12", '{"a": [1, 2, 3]}', "so it goes"]
    lines = [json.dumps({"id": f"p{i}", "turns": [text]}) for i, text in enumerate(prompts)]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    return path


def run(scheme: str = DRAFT, folder: Path | None = None, **options) -> tuple[bool, dict, str]:
    """Verdict, the JSON and what was printed."""
    folder = folder or Path(mkdtemp())
    speculation = SpeculationConfig.parse(scheme)
    engine = EngineConfig(
        model=str(model()), weights="f32", speculation=speculation, page_size=4,
        kv_memory="64MiB", max_model_len=256, threads=1,
    )  # fmt: skip
    config = replace(CertifyConfig().quick(), **options)
    console = Console(file=io.StringIO(), width=200)
    passed = certify(
        engine,
        config,
        prompts=model() / "prompts.jsonl",
        json=folder / "certificate.json",
        html=folder / "certificate.html",
        console=console,
    )
    found = json.loads((folder / "certificate.json").read_text())
    assert found["passed"] == passed == all(part["passed"] for part in found["parts"])
    return passed, found, console.file.getvalue()


def failed(found: dict) -> set[str]:
    return {part["name"] for part in found["parts"] if not part["passed"]}


@pytest.mark.parametrize(
    "scheme",
    [
        DRAFT,
        *(
            pytest.param(scheme, marks=pytest.mark.slow)
            for scheme in (
                f"{DRAFT},verification=rejection",
                f"{DRAFT},verification=block",
                "draft-model:weights=int4,depth=3,topk=3,nodes=10",
                "prompt-lookup:k=6,ngram_min=1,patience=0",
                f"prompt-lookup:k=6+{DRAFT}",
                f"{heads.scheme('eagle-norms')},depth=3,topk=2,nodes=8",
                f"{heads.scheme('medusa')},k=8",
            )
        ),
    ],
)
def test_a_sound_engine_passes(scheme, tmp_path):
    passed, found, printed = run(scheme, tmp_path)
    assert passed, printed
    assert [part["name"] for part in found["parts"]] == PARTS
    assert "left out" not in printed
    assert all(part["counts"] for part in found["parts"])
    has_kv = "draft-model" in scheme or "eagle" in scheme
    assert ("draft cells" in found["parts"][-1]["counts"]) == has_kv


def command(*arguments: str) -> int:
    small = ["--weights=f32", "--kv-memory=64MiB", "--max-model-len=256", "--threads=1"]
    few = ["--limit=1", "--max-tokens=8", "--samples=100", "--batch=2"]
    prompts = f"--prompts={model() / 'prompts.jsonl'}"
    return main(["certify", f"--model={model()}", prompts, *small, *few, *arguments])


def test_the_command_says_by_its_status(monkeypatch, capsys, tmp_path):
    page = tmp_path / "certificate.html"
    assert command("--speculation=draft-model:weights=int4,k=2", f"--html={page}") == 0
    assert "Speculation changes nothing: draft-model on tiny (f32)." in capsys.readouterr().out
    text = page.read_text()
    assert hashlib.sha256((model() / "model.safetensors").read_bytes()).hexdigest() in text
    assert "http" not in text
    assert str(model().parent) not in text
    off_by_one(monkeypatch)
    assert command("--speculation=draft-model:weights=int4,k=2", f"--html={page}") == 1
    assert "NOT CERTIFIED" in capsys.readouterr().out
    assert "Not certified" in page.read_text()


def test_it_tells_how_far_it_is_and_ends_without_a_certificate(monkeypatch, capsys, tmp_path):
    page = tmp_path / "certificate.html"
    page.write_text("before")
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    monkeypatch.setattr(certify_module, "audit", lambda *_: signal.raise_signal(signal.SIGINT))
    assert command("--speculation=draft-model:weights=int4,k=2", f"--html={page}") == 130
    out, err = capsys.readouterr()
    assert "pass  acceptance 1.0" in out
    assert "Speculation changes nothing" not in out
    assert "interrupted" in err
    for part in ("plain decoding", "same text", "same distribution", "acceptance 1.0"):
        assert re.search(rf"{part}: [\d,]+ of [\d,]+, .* min left", err)
    assert page.read_text() == "before"
    assert list(tmp_path.iterdir()) == [page]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--speculation=none"], "nothing to certify"),
        (["--speculation=draft-model:verification=typical"], "changes the text by its nature"),
        (["--speculation=prompt-lookup:k=99"], "k=99"),
        (["--html=/nowhere/x.html"], "no folder"),
        (["--samples=5"], "samples=5"),
        (["--max-tokens=250"], "no prompt leaves room"),
    ],
)
def test_a_mistake_gets_one_line(arguments, says, capsys):
    assert command(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


# ---- the distribution test's own arithmetic


def test_p_values_are_uniform_under_the_law_and_small_elsewhere():
    law_of = {(0,): 0.5, (1,): 0.3, (2,): 0.15, (3,): 0.05}
    rng, texts = np.random.default_rng(0), list(law_of)

    def p(weights, seed):
        counts = rng.multinomial(400, weights)
        return p_value(Counter(dict(zip(texts, counts, strict=True))), law_of, 1e-3, seed)

    same = [p(list(law_of.values()), seed) for seed in range(200)]
    assert 0.4 < np.mean(same) < 0.6
    assert 5 <= sum(value <= 0.1 for value in same) <= 40
    assert p([0.4, 0.4, 0.15, 0.05], 0) < 1e-3


def test_the_law_is_the_definition():
    top = ((5, 0.0), (7, -0.5), (2, -1.0), (9, -3.0))
    setting = Setting("x", 0.5, 2, frequency=1.0, presence=0.5)
    found = setting.law(top, (5,))  # 5 falls to -1.5 and out
    assert list(found) == [7, 2]
    assert found[7] / found[2] == pytest.approx(np.exp(0.5 / 0.5))
    with pytest.raises(Tie):
        setting.law(((5, 0.0), (7, -0.5), (2, -0.50001)), ())


# ---- planted faults: what breaks, and the parts that must see it


def off_by_one(patch):
    """Draft nodes stand one place too far in the text."""
    lay_out = rows_module.lay_out

    def wrong(items, tree, wants_prompt):
        rows, spans = lay_out(items, tree, wants_prompt)
        at = rows.positions, rows.ancestors
        rows.positions[:] = [p + (a > 0) for p, a in zip(*at, strict=True)]
        return rows, spans

    patch.setattr(engine_module, "lay_out", wrong)


def stale_draft_kv(patch):
    """Accepted tokens keep the KV that the draft wrote: the target's own is overwritten."""
    observe = Engine._observe

    def wrong(self, items, spans, starts, *rest):
        layers = self.runtime.kv.layers
        for item, start in zip(items, starts, strict=True):
            sequence = item.sequence
            accepted = range(start + item.num_run, sequence.num_computed)
            if "draft" in layers and accepted:
                cells = self.runtime._physical(sequence.slot, accepted)
                for mine, theirs in zip(layers["target"], layers["draft"], strict=True):
                    for own, other in zip(mine, theirs, strict=True):
                        for cell in cells:
                            page, at = divmod(cell, self.runtime.page_size)
                            own[page, :, at] = other[page, :, at]
        observe(self, items, spans, starts, *rest)

    patch.setattr(Engine, "_observe", wrong)


def softmax_as_q(patch):
    """The draft takes its likeliest token and says it was drawn from its softmax."""

    grow = draft_module.grow_tree

    def wrong(ask, budgets, first, step, shape, noise, vocab):
        silent = noise
        if ask.sample:
            silent = lambda seeds, positions: torch.zeros(len(seeds), vocab.size)  # noqa: E731
        return grow(ask, budgets, first, step, shape, silent, vocab)

    patch.setattr(draft_module, "grow_tree", wrong)


def penalties_ignored(patch):
    """Draft nodes are shaped with the root's history."""
    tree_rows = sampling.tree_rows

    def wrong(shape, tokens, parents):
        if not shape.params.has_penalties:
            return tree_rows(shape, tokens, parents)
        return [sampling.ShapeRow(shape)] * len(tokens)

    patch.setattr(choose_module, "tree_rows", wrong)


def batch_variant(patch):
    """A product whose last bit depends on how many rows it has."""
    forward = Runtime._run

    def wrong(self, model, group, batch, taps):
        output = forward(self, model, group, batch, taps)
        scale = 1 + 2.0**-22 * (len(batch.batch.tokens) % 3)
        return replace(output, logits=output.logits * scale)

    patch.setattr(Runtime, "_run", wrong)


def never_moved(patch):
    """Accepted nodes of a tree stay where they were computed."""
    patch.setattr(Runtime, "move", lambda self, slot, source, target: None)


def pages_leak(patch):
    """One page of every other sequence that ends is never given back."""
    release, count = PageCache.release, itertools.count()

    def wrong(self, sequence):
        if next(count) % 2 and sequence.pages:
            sequence.pages.pop()
        release(self, sequence)

    patch.setattr(PageCache, "release", wrong)


def shared_noise(patch):
    """Noise depends on the place in the batch too."""
    draw = choose_module.draw
    wrong = lambda shaped, greedy, seeds, positions: draw(  # noqa: E731
        shaped, greedy, [s + i for i, s in enumerate(seeds)], positions
    )
    patch.setattr(choose_module, "draw", wrong)


def draft_of_another_token(patch):
    """The draft is shown another last token than the one that was committed."""
    observe = DraftModel.observe

    def wrong(self, commit):
        shown = [[*tokens[:-1], (tokens[-1] + 1) % tiny.VOCAB] for tokens in commit.tokens]
        observe(self, replace(commit, tokens=shown))

    patch.setattr(DraftModel, "observe", wrong)


def residual_forgotten(patch):
    """A refused draft is replaced by the target's law, not by what the draft left of it."""
    path = verify_module.rejection_path

    def wrong(tokens, parents, p, q, coins):
        accepted, _ = path(tokens, parents, p, q, coins)
        return accepted, p[accepted[-1] if accepted else 0].double()

    patch.setattr(verify_module, "rejection_path", wrong)


def temperature_ignored(patch):
    """Drafts are tested against the target's law at temperature 1."""
    law_of = choose_module.law

    def wrong(shaped, rows):
        return law_of(shaped * rows[0].shape.params.temperature, rows)

    patch.setattr(choose_module, "law", wrong)


def one_too_many(patch):
    """The last accepted token of a step is committed without having been compared."""
    coupled = verify_module.coupled

    def wrong(tree, choices):
        outcomes = coupled(tree, choices)
        drawn = choices if isinstance(choices, list) else choices.tolist()
        for b, (_, parents) in enumerate(tree.lists):
            last = outcomes[b].path[-1] if outcomes[b].path else 0
            if last + 1 < len(parents) and parents[last + 1] == last:
                path = [*outcomes[b].path, last + 1]
                outcomes[b] = Outcome(path, drawn[b][last + 1])
        return outcomes

    patch.setattr(verify_module, "coupled", wrong)


def grammar_of_the_root(patch):
    """A grammar's mask is that of the root for every node."""
    mask = Grammar.mask
    patch.setattr(Grammar, "mask", lambda self, path: mask(self, ()))


def silent_drafter(patch):
    """The drafter raises: the text stays, and nothing is shown."""

    def wrong(self, ask):
        raise RuntimeError("planted")

    patch.setattr(DraftModel, "propose", wrong)


def stream_repeats(patch):
    """A stream says the first token of a part again."""
    delta = Follower.delta

    def wrong(self):
        found = delta(self)
        if found and len(found.token_ids) > 1:
            return replace(found, token_ids=[found.token_ids[0], *found.token_ids])
        return found

    patch.setattr(Follower, "delta", wrong)


TREE = "draft-model:weights=int4,depth=3,topk=3,nodes=10"
CORE = [
    (off_by_one, DRAFT, {"same text", "same bits", "KV audit", "acceptance 1.0"}),
    (stale_draft_kv, DRAFT, {"KV audit"}),
    (softmax_as_q, DRAFT, {"same distribution"}),
    (penalties_ignored, DRAFT, {"same text"}),
    (batch_variant, DRAFT, {"same bits"}),
]
MORE = [
    (never_moved, TREE, {"KV audit"}),
    (pages_leak, DRAFT, {"KV audit"}),
    (shared_noise, DRAFT, {"same text"}),
    (draft_of_another_token, DRAFT, {"KV audit", "acceptance 1.0"}),
    (residual_forgotten, DRAFT, {"same distribution"}),
    (temperature_ignored, DRAFT, {"same distribution"}),
    (one_too_many, DRAFT, {"same text"}),
    (grammar_of_the_root, DRAFT, {"same text"}),
    (silent_drafter, DRAFT, {"same text", "same distribution", "acceptance 1.0"}),
    (stream_repeats, DRAFT, {"same text"}),
]
FAULTS = [*CORE, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]


@pytest.mark.parametrize(
    ("fault", "scheme", "seen"), FAULTS, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_planted_fault_fails(fault, scheme, seen, monkeypatch, tmp_path):
    """A quick look sees it."""
    fault(monkeypatch)
    passed, found, printed = run(scheme, tmp_path)
    print(fault.__name__, failed(found), printed)
    assert not passed
    assert seen <= failed(found), printed
    assert "NOT CERTIFIED" in printed
