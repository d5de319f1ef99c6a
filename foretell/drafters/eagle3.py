"""EAGLE-3: features from a low, a middle and a high layer of the target, fused into one.

Li et al., *EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test* (2503.01840). Trained on its own features from the second step on, it predicts tokens only
and may have an lm_head of its own over a reduced vocabulary. It drafts as EAGLE does.
"""

from __future__ import annotations

from foretell.drafters.eagle import Eagle
from foretell.models.head_formats import load_eagle3
from foretell.spec.training import Rule


class Eagle3(Eagle):
    """Chains and trees from a head over three of the target's layers. It learns as EAGLE does,
    but from the target's laws alone: its features are its own."""

    rule = Rule(steps=4, decay=0.8)
    read = staticmethod(load_eagle3)
