"""A head of a few hundred weights with the face of `foretell.models.trainable`, and batches."""

from __future__ import annotations

import torch
from torch import nn

from foretell.spec.training import Loss, TrainingBatch

VOCAB, HIDDEN = 24, 8


class TinyHead(nn.Module):
    """Two layers over cat(feature, embedding of the next token); unrolled twice by `tiny_loss`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.config = {"model_type": "tiny", "hidden_size": HIDDEN}
        self.embedding = nn.Parameter(torch.randn(VOCAB, HIDDEN), requires_grad=False)
        self.mix = nn.Linear(2 * HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, HIDDEN))
            for _ in range(2)
        )
        self.norm = nn.RMSNorm(HIDDEN)

    def step(self, tokens, feature):
        x = self.mix(torch.cat([feature, self.embedding[tokens]], dim=-1))
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)

    def tensors(self):
        return {n: p for n, p in self.named_parameters() if p.requires_grad}


def tiny_loss(head, batch) -> Loss:
    """Cross-entropy with the next token but one, over two steps, and some noise on the feature."""
    feature = batch.features[:, :-2] + 0.1 * torch.randn_like(batch.features[:, :-2])
    wanted = batch.wanted[:, 2:].float()
    total, agreed, matched = torch.zeros(()), [], []
    for _ in range(2):
        feature = head.step(batch.tokens[:, 1:-1], feature)
        logits = feature.float() @ head.embedding.T  # [B, T - 2, V]
        law = logits.log_softmax(-1).gather(-1, batch.tokens[:, 2:, None])[..., 0]
        total = total - (law * wanted).sum() / 2
        agreed.append((law.exp() * wanted).sum())
        matched.append(((logits.argmax(-1) == batch.tokens[:, 2:]) * wanted).sum())
    counted = wanted.sum().expand(2)
    return Loss(
        total, {"ce": total.detach()}, torch.stack(agreed).detach(), torch.stack(matched), counted
    )


def quiet_loss(head, batch) -> Loss:
    """`tiny_loss` without noise: ranks and accumulation then compute the same sums."""
    with torch.random.fork_rng([]):
        torch.manual_seed(int(batch.tokens.sum()))
        return tiny_loss(head, batch)


class TinyBatches:
    """So many batches of random text a rank and epoch, each made from its number alone."""

    def __init__(self, count: int = 12, seed: int = 0) -> None:
        self.count, self.seed = count, seed

    def num_batches(self, rank: int = 0, world: int = 1) -> int:
        return self.count // world

    def epoch(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1):
        for i in range(start, self.num_batches(rank, world)):
            yield self.make(epoch * self.count + i * world + rank)

    def make(self, number: int) -> TrainingBatch:
        g = torch.Generator().manual_seed(1000 * self.seed + number)
        length = int(torch.randint(6, 12, (), generator=g))
        shape = (2, length)
        return TrainingBatch(
            tokens=torch.randint(VOCAB, shape, generator=g),
            documents=torch.zeros(shape, dtype=torch.int64),
            positions=torch.arange(length).expand(shape),
            wanted=torch.rand(shape, generator=g) < 0.7,
            features=torch.randn(*shape, HIDDEN, generator=g),
        )
