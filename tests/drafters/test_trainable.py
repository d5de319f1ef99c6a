"""Heads with gradients against the float64 references, over files and back, packed and alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foretell.drafters import find
from foretell.models.frozen import FrozenTarget
from foretell.models.trainable import TrainableHead
from foretell.models.trainable_files import Trainable, open_head
from foretell.models.trainable_new import new_head, widen
from foretell.spec.losses import Judged, acceptance, judge, kl
from foretell.spec.training import Rule, TrainingBatch
from tests import heads, tiny
from tests.drafters.test_heads import VARIANTS

FILE = load_file(tiny.model("f32").path / "model.safetensors")
STEPS = 3


def target() -> FrozenTarget:
    return FrozenTarget.open(str(tiny.model("f32").path))


def batch_of(lengths: list[int], taps: int, seed: int = 0, prompt: int = 3) -> TrainingBatch:
    """One row with texts of these lengths, and two places of padding."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths) + 2
    documents, positions, wanted = (torch.zeros(total, dtype=torch.long) for _ in range(3))
    documents -= 1
    at = 0
    for i, length in enumerate(lengths):
        documents[at : at + length] = i
        positions[at : at + length] = torch.arange(length)
        wanted[at + prompt : at + length] = 1
        at += length
    return TrainingBatch(
        tokens=torch.randint(2, tiny.VOCAB, (1, total), generator=g),
        documents=documents[None],
        positions=positions[None],
        wanted=wanted[None].bool(),
        features=torch.randn(1, total, taps * heads.HIDDEN, generator=g),
        hidden=torch.randn(1, total, heads.HIDDEN, generator=g),
    )


def steps_of(head: Trainable, batch: TrainingBatch, steps: int = STEPS) -> list[Judged]:
    with torch.no_grad():
        return list(head.unroll(batch, steps))


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_step_equals_a_draft_after_each_prefix(variant: str, tmp_path: Path) -> None:
    tensors, config = VARIANTS[variant]()
    path = heads.write(tensors, config, tmp_path)
    kind = variant.split()[0]
    head = open_head(kind.split("-")[0], path, target())
    length = 12
    batch = batch_of([length], len(head.taps))
    plain = heads.Plain(kind, tensors, config, FILE)
    fused = plain.fuse(batch.features[0].double())
    tokens = batch.tokens[0].tolist()
    ids = torch.arange(tiny.VOCAB) if head.draft_ids is None else head.draft_ids
    places = range(1, length - 2)  # the token two places on is the first that is wanted
    for j, step in enumerate(steps_of(head, batch)):
        assert len(step.logits) == len(places)
        for row, t in enumerate(places):
            if t + 2 + j >= length:
                assert not step.valid[row]
                continue
            features = fused[: t + 1]
            for ahead in range(j + 1):
                logits, following = plain.run(features, tokens[1 : t + 2 + ahead])
                features = torch.cat([features, following[-1:]])
            torch.testing.assert_close(
                step.logits[row].double(), logits[-1, ids], atol=5e-4, rtol=1e-3
            )
            assert step.valid[row]
            known = (ids == tokens[t + 2 + j]).nonzero()
            assert int(step.labels[row]) == (int(known) if len(known) else -1)
            said = FILE["model.embed_tokens.weight"][ids] @ batch.hidden[0, t + 1 + j]  # type: ignore[index]
            torch.testing.assert_close(step.target[row], said, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa"])
def test_packed_texts_do_not_know_of_each_other(method: str) -> None:
    head = new_head(method, target(), num_heads=STEPS)
    lengths, taps = [9, 5, 2, 11], len(head.taps)
    packed = batch_of(lengths, taps)
    together = steps_of(head, packed)
    at, row = 0, 0
    for length in lengths:
        cut = slice(at, at + length)
        alone = TrainingBatch(
            **{
                name: value[:, cut]
                for name, value in vars(packed).items()
                if isinstance(value, Tensor)
            }
        )
        own = steps_of(head, alone)
        count = len(own[0].logits)
        for mine, all_of in zip(own, together, strict=True):
            rows = slice(row, row + count)
            assert torch.equal(mine.valid, all_of.valid[rows])
            counts = mine.valid  # what lies behind a text's end is of no matter
            torch.testing.assert_close(
                mine.logits[counts], all_of.logits[rows][counts], atol=1e-4, rtol=1e-4
            )
        at, row = at + length, row + count
    assert row == len(together[0].logits)


def write(head: Trainable, path: Path) -> Path:
    return heads.write(head.tensors(), head.config, path)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle", {"norms": False}),
    ("eagle", {"num_layers": 2}),
    ("eagle", {"taps": (1, -1)}),
    ("eagle3", {}),
    ("mtp", {}),
    ("medusa", {"num_heads": 3, "num_layers": 2}),
]


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("method", "options"), KINDS)
def test_what_is_written_is_read_back(
    method: str, options: dict[str, Any], reduced: bool, tmp_path: Path
) -> None:
    ids = torch.tensor([3, 5, 8, 21, 40, 41]) if reduced else None
    head = new_head(method, target(), draft_ids=ids, **options)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    path = write(head, tmp_path)
    again = open_head(method, path, target())
    mine, theirs = head.tensors(), again.tensors()
    assert mine.keys() == theirs.keys()
    assert head.config == again.config
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    llm = tiny.llm(f"{method}:model={path},k=3")  # and the engine reads it
    plain = tiny.llm()
    params = tiny.greedy(max_tokens=8)
    prompts = tiny.prompts(3)
    assert tiny.ids(llm.generate(prompts, params)) == tiny.ids(plain.generate(prompts, params))
    drafted = llm.engine.drafter.vocab.ids  # type: ignore[attr-defined]
    assert (drafted is None) == (ids is None)
    assert ids is None or torch.equal(drafted, ids)


def test_a_new_head_begins_with_what_the_target_just_said() -> None:
    # Its mixing is nearly the identity on the feature, and its layers add nothing yet.
    head = new_head("eagle", target())
    assert isinstance(head, TrainableHead)
    batch = batch_of([12], 1)
    (step,) = steps_of(head, batch, 1)
    feature = batch.features[0, 1:10]
    normed = feature * (feature.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert (torch.cosine_similarity(step.feature, normed) > 0.95).all()  # type: ignore[arg-type]
    medusa = new_head("medusa", target(), num_heads=2)
    for step in steps_of(medusa, batch_of([8], 1)):
        said = FILE["model.embed_tokens.weight"] @ batch_of([8], 1).features[0].T  # [V, T]
        torch.testing.assert_close(step.logits, said.T[1:6], atol=1e-4, rtol=1e-4)


def test_top_logits_can_stand_for_hidden_states() -> None:
    head = new_head("eagle", target())
    batch = batch_of([12], 1)
    assert batch.hidden is not None
    logits = batch.hidden @ FILE["model.embed_tokens.weight"].T
    top = logits.topk(tiny.VOCAB, dim=-1)
    other = TrainingBatch(
        **{**vars(batch), "hidden": None, "top_ids": top.indices, "top_logits": top.values}
    )
    for mine, theirs in zip(steps_of(head, batch), steps_of(head, other), strict=True):
        torch.testing.assert_close(mine.target, theirs.target, atol=1e-5, rtol=1e-5)
    few = TrainingBatch(
        **{
            **vars(other),
            "top_ids": top.indices[..., :4],
            "top_logits": top.values[..., :4],
        }
    )
    loss = find("eagle").loss(head, few, Rule(divergence="lk"))
    loss.total.backward()
    assert all(w.grad is None or w.grad.isfinite().all() for w in head.parameters())
    neither = TrainingBatch(**{**vars(batch), "hidden": None})
    with pytest.raises(ValueError, match="tap -1"):
        steps_of(head, neither)


def test_losses_are_what_they_are_called() -> None:
    g = torch.Generator().manual_seed(3)
    p, q = (torch.randn(5, 7, generator=g).log_softmax(-1) for _ in range(2))
    expected = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(kl(p, q), expected)
    tv = (p.exp() - q.exp()).abs().sum(-1) / 2
    torch.testing.assert_close(acceptance(p, q), 1 - tv)
    # A law with zeros: they neither count nor poison the gradient.
    zero = p.clone()
    zero[:, 2] = -torch.inf
    zero = zero.log_softmax(-1)
    draft = torch.randn(5, 7, generator=g, requires_grad=True)
    kl(zero, draft.log_softmax(-1)).sum().backward()
    assert draft.grad is not None
    torch.testing.assert_close(draft.grad, draft.detach().softmax(-1) - zero.exp())


@pytest.mark.parametrize("divergence", ["kl", "ce", "lk"])
def test_a_judgement_sums_over_what_is_wanted_and_known(divergence: Any) -> None:
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 6, 9, generator=g)
    targets = torch.randn(2, 6, 9, generator=g)
    labels = torch.tensor([[0, 4, -1, 8, 2, 3], [1, 1, 1, -1, 0, 8]])
    valid = torch.tensor([[1, 1, 1, 1, 0, 1], [1, 0, 1, 1, 0, 0]]).bool()
    feature, wanted = torch.randn(2, 6, 4, generator=g), torch.randn(2, 6, 4, generator=g)
    rule = Rule(steps=2, decay=0.5, divergence=divergence, regression=0.25)
    steps = [
        Judged(logits[j], targets[j], labels[j], valid[j], feature[j], wanted[j]) for j in (0, 1)
    ]
    loss = judge(steps, rule, 2)
    total, agreed = 0.0, [0.0, 0.0]
    for j in (0, 1):
        weight = (1.0, 0.5)[j] / 1.5
        for m in range(6):
            if not valid[j, m]:
                continue
            gap = (feature[j, m] - wanted[j, m]).abs()
            smooth = torch.where(gap < 1, gap.square() / 2, gap - 0.5).mean()
            total += 0.25 * weight * float(smooth)
            if labels[j, m] < 0:
                continue
            p, q = targets[j, m].softmax(-1), logits[j, m].softmax(-1)
            accepted = float(torch.minimum(p, q).sum())
            agreed[j] += accepted
            far = float((p * (p.log() - q.log())).sum())
            share = 2.718281828 ** (-3 * accepted)
            total += (
                weight
                * {
                    "kl": far,
                    "ce": -float(q[labels[j, m]].log()),
                    "lk": share * far + (1 - share) * (1 - accepted),
                }[divergence]
            )
    assert float(loss.total) == pytest.approx(total, rel=1e-5)
    assert loss.agreed is not None
    assert loss.agreed.tolist() == pytest.approx(agreed, rel=1e-5)
    assert loss.counted is not None
    assert loss.counted.tolist() == [5, 3]


def test_long_texts_are_attended_in_parts_with_the_same_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = batch_of([30, 17], 1)
    grads: list[list[Tensor]] = []
    for queries in (256, 7):
        monkeypatch.setattr("foretell.models.trainable._QUERIES", queries)
        head = new_head("eagle", target())
        find("eagle").loss(head, batch, find("eagle").rule).total.backward()
        grads.append([w.grad for w in head.parameters() if w.grad is not None])
    assert len(grads[0]) > 8
    for whole, parts in zip(*grads, strict=True):
        torch.testing.assert_close(whole, parts, atol=1e-3, rtol=1e-3)


def test_prompts_may_count_too_but_not_padding() -> None:
    batch = batch_of([9, 5], 1, prompt=4)
    whole = batch.with_prompts()
    assert int(batch.num_wanted) == 6
    assert int(whole.num_wanted) == 14
    head = new_head("eagle", target())
    assert len(steps_of(head, whole)[0].logits) == 10  # each text's last two have nothing to guess


@pytest.mark.parametrize("taps", [(1, 3, 4), (2, 3, 4), (3, 1, 2)])
def test_layers_that_a_head_reads_are_written_as_they_are_read(
    taps: tuple[int, ...], tmp_path: Path
) -> None:
    deep = FrozenTarget.open(str(tiny.write_model(tmp_path / "target", layers=6)))
    head = new_head("eagle3", deep, taps=taps)
    (tmp_path / "head").mkdir()
    assert open_head("eagle3", write(head, tmp_path / "head"), deep).taps == taps


def test_a_head_that_learns_to_read_more_begins_with_what_it_knew(tmp_path: Path) -> None:
    path = heads.write(*heads.eagle(norms=True), tmp_path)
    head = open_head("eagle", path, target())
    wide = widen(head, target(), (1, 0, -1))
    batch = batch_of([9, 12], 3)
    last = TrainingBatch(**{**vars(batch), "features": batch.features[..., -heads.HIDDEN :]})
    for mine, theirs in zip(steps_of(head, last), steps_of(wide, batch), strict=True):
        torch.testing.assert_close(mine.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    find("eagle").loss(wide, batch, find("eagle").rule).total.backward()
    assert wide.fuse is not None
    assert wide.fuse_up is not None
    up, down = wide.fuse_up.weight, wide.fuse.weight
    assert up.grad is not None
    assert up.grad.abs().max() > 0, "it learns"
    torch.nn.init.normal_(up)
    find("eagle").loss(wide, batch, find("eagle").rule).total.backward()
    assert down.grad is not None
    assert all(part.abs().max() > 0 for part in down.grad.chunk(3, dim=1)), "from each layer"


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("eagle", {"taps": (1,)}, "and -1 behind them"),
        ("eagle", {"taps": (2, -1)}, "layers of the target, 0 to 1"),
        ("eagle", {"taps": (-1, 1)}, "and -1 behind them"),
        ("eagle", {"taps": (0, -1), "norms": False}, "without its norms reads -1 alone"),
        ("eagle3", {"taps": (0, 1, 1)}, "EAGLE-3 takes layers of the target, 1 to 1"),
        ("mtp", {"taps": (0, -1)}, "a head of mtp reads -1 alone"),
        ("medusa", {"taps": (0, -1)}, "a head of medusa reads -1 alone"),
    ],
)
def test_layers_that_a_head_cannot_read(method: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_head(method, target(), **options)


def test_only_a_head_of_the_last_state_learns_to_read_more() -> None:
    with pytest.raises(ValueError, match="already: leave taps out"):
        widen(new_head("eagle", target(), taps=(0, -1)), target(), (1, -1))
    with pytest.raises(ValueError, match="a head of mtp does not learn to read more layers"):
        widen(new_head("mtp", target()), target(), (1, -1))
    with pytest.raises(ValueError, match="without its norms reads -1 alone"):
        widen(new_head("eagle", target(), norms=False), target(), (1, -1))
