"""Losses of draft heads as small functions, and `judge`, which adds up a head's steps under a rule.

Everything is summed over positions; `training.Loss` says who divides. Laws are over the draft's
vocabulary: where that is reduced the target's law is renormalised over it, and positions whose own
token lies outside are left out of the loss (EAGLE-3), but count as missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretell.spec.training import Loss, Rule


def kl(target: Tensor, draft: Tensor) -> Tensor:
    """KL(target || draft) of log laws [M, Vd]: [M]. Its gradient is that of cross-entropy."""
    law = target.exp()
    return (law * target.clamp(min=-1e4)).sum(-1) - (law * draft).sum(-1)


def cross_entropy(labels: Tensor, draft: Tensor) -> Tensor:
    """-log q of the text's own tokens, labels [M] by draft id: [M]."""
    return -draft.gather(-1, labels[:, None])[:, 0]


def acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """sum min(p, q) = 1 - TV of log laws [M, Vd]: [M] what rejection accepts at temperature 1
    (Leviathan et al., 2211.17192)."""
    return torch.minimum(target, draft).exp().sum(-1)


def likelihood_kept(target: Tensor, draft: Tensor, decay: float = 3.0) -> Tensor:
    """LK loss (2602.23881, hybrid form): KL while hardly anything is accepted, then more and more
    of 1 - acceptance, the quantity that matters: [M]."""
    accepted = acceptance(target, draft)
    share = torch.exp(-decay * accepted.detach())
    return share * kl(target, draft) + (1 - share) * (1 - accepted)


def regression(feature: Tensor, target: Tensor) -> Tensor:
    """SmoothL1 between features [M, H], mean over H (EAGLE, 2401.15077): [M]."""
    return F.smooth_l1_loss(feature.float(), target.float(), reduction="none").mean(-1)


@dataclass(frozen=True)
class Judged:
    """One step of a head over M positions, and what it should have said."""

    logits: Tensor  # [M, Vd]
    target: Tensor  # [M, Vd] the target's logits over the draft's vocabulary, no gradient
    labels: Tensor  # [M] int64 the text's token by draft id; -1 where the draft lacks it
    valid: Tensor  # [M] bool: there is such a token, and it is wanted
    feature: Tensor | None = None  # [M, H] the head's
    wanted_feature: Tensor | None = None  # [M, H] the target's


def judge(steps: Iterable[Judged], rule: Rule, num_steps: int) -> Loss:
    """Adds up the steps of a head under a rule.

    Args:
        num_steps: how many there are: weights decay^j are normalised over them.
    """
    weights = [rule.decay**j for j in range(num_steps)]
    total: Tensor | None = None
    parts: dict[str, Tensor] = {}
    agreed: list[Tensor] = []
    matched: list[Tensor] = []
    counted: list[Tensor] = []
    for j, step in enumerate(steps):
        weight = weights[j] / sum(weights)
        known = step.valid & (step.labels >= 0) & (step.target.amax(-1) > -torch.inf)
        draft = step.logits.float().log_softmax(-1)[known]  # [K, Vd]
        target = step.target[known].float().log_softmax(-1)
        if rule.divergence == "ce":
            each = cross_entropy(step.labels[known], draft)
        else:
            each = (kl if rule.divergence == "kl" else likelihood_kept)(target, draft)
        loss = weight * each.sum()
        _add(parts, rule.divergence, loss)
        if rule.regression and step.feature is not None:
            assert step.wanted_feature is not None
            valid = step.valid
            far = weight * regression(step.feature[valid], step.wanted_feature[valid]).sum()
            _add(parts, "regression", far)
            loss = loss + rule.regression * far
        total = loss if total is None else total + loss
        with torch.no_grad():
            agreed.append(acceptance(target, draft).sum())
            matched.append((draft.argmax(-1) == target.argmax(-1)).sum().float())
            counted.append(step.valid.sum().float())
    assert total is not None
    return Loss(total, parts, torch.stack(agreed), torch.stack(matched), torch.stack(counted))


def _add(parts: dict[str, Tensor], name: str, value: Tensor) -> None:
    value = value.detach()
    parts[name] = parts[name] + value if name in parts else value
