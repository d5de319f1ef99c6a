"""Heads against plain float64 references: logits step by step, KV, positions, carry-over."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foretell.drafters.eagle import Eagle
from foretell.drafters.medusa import Medusa
from foretell.runtime.runner import Runtime
from foretell.sequence import FinishReason, Sequence
from foretell.spec.drafter import Rows
from tests import heads, tiny
from tests.drafters.tiny import advance, ask, chain, commit, features_of, fresh, paths, sequence

TARGET = load_file(tiny.model("f32").path / "model.safetensors")
NORM_INPUTS = {f"fc_norm.{i}.weight": torch.linspace(0.5, 1.5, 32) for i in range(3)}
VARIANTS: dict[str, Callable[[], tuple[heads.Tensors, dict[str, Any]]]] = {
    "eagle": heads.eagle,
    "eagle-norms": lambda: heads.eagle(norms=True),
    "eagle-wide": heads.wide_eagle,
    "eagle3": heads.eagle3,
    "eagle3 norm_before_residual": lambda: changed(heads.eagle3(), norm_before_residual=True),
    "eagle3 norm_output": lambda: changed(heads.eagle3(), norm_output=True),
    "eagle3 fc_norm": lambda: changed(heads.eagle3(), NORM_INPUTS, fc_norm=True),
    "eagle3 norm_before_fc": lambda: changed(
        heads.eagle3(), {"input_norm.weight": torch.linspace(0.5, 1.5, 96)}, norm_before_fc=True
    ),
    "eagle3 last state only": lambda: last_state_only(),
    "eagle3 rope": lambda: changed(heads.eagle3(), rope_theta=137.0),
    **{f"mtp-{layout}": lambda layout=layout: heads.mtp(layout) for layout in heads.LAYOUTS},
}


def changed(
    head: tuple[heads.Tensors, dict[str, Any]], more: heads.Tensors | None = None, **settings: Any
) -> tuple[heads.Tensors, dict[str, Any]]:
    return head[0] | (more or {}), head[1] | settings


def last_state_only() -> tuple[heads.Tensors, dict[str, Any]]:
    tensors, config = changed(heads.eagle3(), eagle_config={"use_aux_hidden_state": False})
    del tensors["fc.weight"]
    return tensors, config


class Recorder:
    """Keeps what each pass of the head was asked and what it said."""

    def __init__(self, runtime: Runtime) -> None:
        self.passes: list[tuple[Rows, Tensor]] = []
        inner = runtime.forward_head

        def forward_head(head: Any, rows: Rows, features: Tensor) -> tuple[Tensor, Tensor]:
            logits, following = inner(head, rows, features)
            self.passes.append((rows, logits))
            return logits, following

        runtime.forward_head = forward_head
        runtime.draft_chains = lambda *_: None  # level by level

    def paths(self) -> list[tuple[list[int], Tensor]]:
        """Of all draft passes since the last call: tokens from the root to a row, its logits."""
        at: dict[int, int] = {}
        out: list[tuple[list[int], Tensor]] = []
        for rows, logits in self.passes:
            for r, cell in enumerate(rows.cells):
                at[cell] = rows.tokens[r]
                bits = [j for j in range(1, 64) if rows.ancestors[r] >> j & 1]
                assert rows.positions[r] == rows.base[r] + len(bits)
                out.append(([at[rows.base[r] + j] for j in bits], logits[r]))
        self.passes.clear()
        return out


def build(variant: str, tmp_path: Path, options: str) -> tuple[Eagle, heads.Plain, Recorder]:
    tensors, config = VARIANTS[variant]()
    path = heads.write(tensors, config, tmp_path)
    kind = variant.split()[0]
    drafter = fresh(f"{kind.split('-')[0]}:model={path},{options}")
    assert isinstance(drafter, Eagle)
    return drafter, heads.Plain(kind, tensors, config, TARGET), Recorder(drafter.runtime)


def expected(plain: heads.Plain, text: Sequence, path: list[int], taps: int) -> Tensor:
    """Logits [V] behind drafts ``path``: target features for the text, then the head's own."""
    tapped = features_of(text.tokens, 0, len(text.tokens) - 1, 32 * taps).double()
    features, tokens = plain.fuse(tapped), text.tokens[1:]
    logits, following = plain.run(features, tokens)
    for token in path:
        features = torch.cat([features, following[-1:]])
        tokens = [*tokens, token]
        logits, following = plain.run(features, tokens)
    return logits[-1]


def same(mine: Tensor, wide: Tensor, drafter: Eagle) -> None:
    right = wide if drafter.vocab.ids is None else wide[drafter.vocab.ids]
    scale = right.abs().max()  # without norms the sums grow from step to step
    torch.testing.assert_close(mine.double() / scale, right / scale, atol=2e-5, rtol=0)


@pytest.mark.parametrize("options", ["k=4", "depth=3,topk=3,nodes=9"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_plain_network(variant: str, options: str, tmp_path: Path) -> None:
    drafter, plain, recorder = build(variant, tmp_path, options)
    taps, rng = len(drafter.needs.features), random.Random(0)
    text = sequence([rng.randrange(tiny.VOCAB) for _ in range(23)], slot=1)
    commit(drafter, (text, 9))  # a prompt in chunks
    commit(drafter, (text, 23))
    for turn in range(4):
        same(drafter._logits[1], expected(plain, text, [], taps), drafter)
        recorder.passes.clear()
        tree = drafter.propose(ask([text], drafter.shape.num_nodes))
        drafted = recorder.paths()
        assert max(len(path) for path, _ in drafted) == (3 if options == "k=4" else 2)
        for path, logits in drafted:
            same(logits, expected(plain, text, path, taps), drafter)
        if turn == 0:  # greedy: the likeliest of what was computed
            first = expected(plain, text, [], taps)
            assert paths(tree)[0][0] == int(first.argmax())
        taken = paths(tree)[-1][:turn]
        advance(drafter, [(text, [*taken, rng.randrange(tiny.VOCAB)])])


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_logits(layers: int, tmp_path: Path) -> None:
    tensors, config = heads.medusa(3, layers)
    drafter = fresh(f"medusa:model={heads.write(tensors, config, tmp_path)},depth=9,topk=2,nodes=9")
    assert isinstance(drafter, Medusa)
    assert len(drafter.heads) == 3, "counted, whatever the config says"
    text = sequence([3, 1, 4, 1, 5])
    commit(drafter, (text, 5))
    x = features_of(text.tokens, 3, 4, 32).double()[0]
    tree = drafter.propose(ask([text], 9))
    best: list[list[int]] = []
    for i in range(3):
        y = x
        for at in range(layers):
            weight, bias = (
                tensors[f"{i}.{at}.linear.{kind}"].double() for kind in ("weight", "bias")
            )
            y = y + torch.nn.functional.silu(weight @ y + bias)
        logits = tensors[f"{i}.{layers}.weight"].double() @ y
        mine = drafter.heads[i](drafter._features[:1])[0]
        torch.testing.assert_close(mine.double(), logits, atol=1e-3, rtol=0)
        best.append(logits.topk(2).indices.tolist())
    assert max(len(path) for path in paths(tree)) == 3, "no deeper than there are heads"
    for path in paths(tree):
        assert all(token in best[at] for at, token in enumerate(path))
    assert [b[0] for b in best] in paths(tree)


def test_medusa_takes_the_likeliest_nodes_of_the_published_tree() -> None:
    drafter = fresh(f"{heads.scheme('medusa')},k=7")
    assert isinstance(drafter, Medusa)
    assert drafter.needs.nodes == 7
    text = sequence([3, 1, 4])
    commit(drafter, (text, 3))
    tree = drafter.propose(ask([text], 7))
    assert tree.num_drafted == [7]
    parents = tree.parents[0].tolist()
    assert parents[:4] == [-1, 0, 1, 2], "the likeliest guess of every head first"
    assert parents.count(0) > 1


@pytest.mark.parametrize("kind", heads.KINDS)
def test_nothing_is_drafted_before_the_root_was_seen(kind: str) -> None:
    drafter = fresh(f"{heads.scheme(kind)},k=3")
    text = sequence([3, 1, 4, 1, 5, 9, 2, 6], slot=1)
    assert drafter.propose(ask([text], 3)).num_drafted == [0]
    commit(drafter, (text, 5))  # more of the prompt is to come
    assert drafter.propose(ask([text], 3)).num_drafted == [0]
    commit(drafter, (text, 8))
    assert drafter.propose(ask([text], 3)).num_drafted == [3]
    text.tokens.append(5)  # a step that it did not see
    assert drafter.propose(ask([text], 3)).num_drafted == [0]
    text.tokens.pop()
    assert drafter.propose(ask([sequence(text.tokens, slot=1)], 3)).num_drafted == [0]
    drafter.forget([1])
    assert drafter.propose(ask([text], 3)).num_drafted == [0]


@pytest.mark.parametrize("kind", heads.LAYERED)
def test_k_tokens_cost_k_passes(kind: str) -> None:
    drafter = fresh(f"{heads.scheme(kind)},k=4")
    recorder = Recorder(drafter.runtime)
    text = sequence([3, 1, 4, 1, 5])
    commit(drafter, (text, 5))
    for accept in (4, 0, 2):
        recorder.passes.clear()
        draft = chain(drafter.propose(ask([text], 4)))
        advance(drafter, [(text, [*draft[:accept], 9])])
        assert [len(rows) for rows, _ in recorder.passes] == [1, 1, 1, accept + 1]
        rows, _ = recorder.passes[-1]  # all that was accepted, with the target's features
        assert rows.tokens == text.tokens[-accept - 1 :]
        assert (
            rows.positions
            == rows.cells
            == [len(text.tokens) - 2 - i for i in range(accept, -1, -1)]
        )
        assert rows.outputs == [accept]


@pytest.mark.parametrize("kind", heads.LAYERED)
def test_embedding_and_lm_head_are_the_targets_own(kind: str) -> None:
    drafter = fresh(heads.scheme(kind))
    target = drafter.runtime.target.model
    assert isinstance(drafter, Eagle)
    assert drafter.head.embedding is target.embedding
    assert (drafter.head.lm_head is target.lm_head) == (kind != "eagle3")


@pytest.mark.parametrize("kind", heads.KINDS)
@pytest.mark.parametrize("count", [False, True])
def test_reduced_vocabulary(kind: str, count: bool, tmp_path: Path) -> None:
    """Rows of the lm_head by rank: the same logits for what is left, and nothing else proposed."""
    ranking = random.Random(1).sample(range(tiny.VOCAB), tiny.VOCAB)
    source = heads.written(kind)
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "token_ranking.json").write_text(json.dumps(ranking))
    (tmp_path / "ids.json").write_text(json.dumps(ranking[:20]))
    chosen = "20" if count else str(tmp_path / "ids.json")
    method = kind.split("-")[0]
    options = "depth=2,topk=3,nodes=9"
    small = fresh(f"{method}:model={tmp_path},draft_vocab={chosen},{options}")
    whole = fresh(f"{method}:model={source},{options}")
    assert isinstance(small, Eagle | Medusa)
    assert isinstance(whole, Eagle | Medusa)
    text = sequence([3, 1, 4, 1, 5])
    copy = sequence(text.tokens)
    commit(small, (text, 5))
    commit(whole, (copy, 5))
    ids = small.vocab.ids
    known = range(tiny.VOCAB) if whole.vocab.ids is None else whole.vocab.ids.tolist()
    assert ids is not None
    assert ids.tolist() == sorted(set(ranking[:20]) & set(known))
    if isinstance(small, Eagle) and isinstance(whole, Eagle):
        wide = torch.full((tiny.VOCAB,), torch.nan)
        wide[list(known)] = whole._logits[0]
        torch.testing.assert_close(small._logits[0], wide[ids], atol=1e-5, rtol=1e-5)
    tree = small.propose(ask([text], 9))
    assert tree.num_drafted == [9]
    assert set(tree.tokens[0, 1:].tolist()) <= set(ids.tolist())


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("[1, 1]", "different token ids"),
        ("[64]", "from 0 to 63"),
        ("{", "not a list"),
        ("[]", "dif"),
    ],
)
def test_bad_vocabulary_files(listed: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(listed)
    with pytest.raises(ValueError, match=message):
        fresh(f"{heads.scheme('eagle')},draft_vocab={tmp_path / 'ids.json'}")
    head = heads.eagle3()[0]
    (tmp_path / "ids.json").write_text(json.dumps((~head["t2d"]).nonzero()[:, 0].tolist()))
    with pytest.raises(ValueError, match="none of the tokens that the head knows"):
        fresh(f"{heads.scheme('eagle3')},draft_vocab={tmp_path / 'ids.json'}")
    with pytest.raises(ValueError, match=r"token_ranking\.json is missing"):
        fresh(f"{heads.scheme('eagle')},draft_vocab=20")


def test_nothing_is_asked_for_behind_an_answers_end() -> None:
    """Its pairs are run all the same, for those who share its pages."""
    cells = []
    for reason in (None, FinishReason.STOP):
        drafter = fresh(heads.scheme("eagle"))
        recorder = Recorder(drafter.runtime)
        text = sequence(list(range(3, 12)))
        text.finish_reason = reason
        commit(drafter, (text, len(text.tokens)))
        [(rows, logits)] = recorder.passes
        assert len(rows.outputs) == len(logits) == (reason is None)
        cells.append([x.clone() for layer in drafter.runtime.kv.layers["draft"] for x in layer])
    for one, other in zip(*cells, strict=True):
        assert one.any()
        assert torch.equal(one, other)
