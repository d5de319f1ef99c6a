"""Heads trained for some seconds on a tiny target's own texts are right: features, tokens and
positions meet in the engine as they did in training, which used the plain networks only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from foretell.llm import LLM
from foretell.spec.drafter import Commit
from tests import heads, tiny

PROMPTS = tiny.prompts(6, seed=3)
PARAMS = tiny.greedy(max_tokens=30)


def texts(llm: LLM) -> list[tuple[list[int], Tensor]]:
    """Prompts with their greedy answers, and the features that the drafter was shown."""
    seen: dict[str, list[Tensor]] = {}
    inner, tokens = llm.engine.drafter.observe, dict[str, list[int]]()

    def observe(commit: Commit) -> None:
        inner(commit)
        assert commit.features is not None
        parts = commit.features.split([len(t) - 1 for t in commit.tokens])
        for sequence, part in zip(commit.sequences, parts, strict=True):
            seen.setdefault(sequence.request_id, []).append(part.double().clone())
            tokens[sequence.request_id] = sequence.tokens

    llm.engine.drafter.observe = observe
    llm.generate(PROMPTS, PARAMS)
    return [(tokens[name], torch.cat(parts)) for name, parts in seen.items()]


def trained(kind: str, data: list[tuple[list[int], Tensor]], steps: int) -> heads.Tensors:
    tensors, config = heads.MAKERS[kind]()
    if kind == "eagle":  # without norms large weights do not train
        tensors = {name: 0.2 * t if t.dim() == 2 else t for name, t in tensors.items()}
    target = load_file(tiny.model("f32").path / "model.safetensors")
    plain = heads.Plain(kind, tensors, config, target)
    for weight in plain.t.values():
        weight.requires_grad_()
    optimiser = torch.optim.Adam(plain.t.values(), lr=3e-3)
    known = tensors.get("t2d", torch.ones(tiny.VOCAB, dtype=torch.bool))
    for step in range(steps):
        tokens, features = data[step % len(data)]
        features = features[: len(tokens) - 2]
        fused, loss = plain.fuse(features), torch.zeros((), dtype=torch.float64)
        following = fused
        for ahead in (0, 1):  # the second time on its own features, one place on
            inputs, labels = tokens[1 + ahead : -1], torch.tensor(tokens[2 + ahead :])
            logits, following = plain.run(following[: len(inputs)], inputs)
            kept = known[labels]
            loss = loss + torch.nn.functional.cross_entropy(logits[kept], labels[kept])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return tensors | {name: t.detach().float() for name, t in plain.t.items()}


@pytest.mark.parametrize("kind", heads.LAYERED)
def test_a_trained_head_is_accepted(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    untrained = tiny.llm(f"{heads.scheme(kind)},k=2", max_num_seqs=1, prefix_caching=False)
    data = texts(untrained)
    path = heads.write(trained(kind, data, 400), heads.MAKERS[kind]()[1], tmp_path)
    method = kind.split("-")[0]
    taus: list[float] = []
    for options in ("k=2", "depth=2,topk=2,nodes=5"):
        llm = tiny.llm(f"{method}:model={path},{options}", max_num_seqs=3)
        results = llm.generate(PROMPTS, PARAMS)
        assert tiny.ids(results) == [t[len(p) :] for (t, _), p in zip(data, PROMPTS, strict=True)]
        taus.append(sum(result.stats.tau for result in results) / len(results))
    assert min(taus) > (1.5 if kind == "eagle3" else 1.8)  # a third of its vocabulary is missing
