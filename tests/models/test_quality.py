"""What the default weight format costs on the real model."""

from __future__ import annotations

import pytest
import torch

from foretell.attention.cpu import CpuAttention
from foretell.bench.workloads import default_workload
from foretell.models.loader import load
from tests.models.tiny import Cache


@pytest.mark.slow
def test_int8_perplexity_is_within_one_percent_of_bf16():
    text = "\n\n".join(turn for c in default_workload() for turn in c.turns)
    loss: dict[str, float] = {}
    for weights in ("bf16", "int8"):
        loaded = load("smollm2", weights, progress=False)
        ids = loaded.tokenizer.encode(text)[:3072]
        total = torch.zeros(())
        for start in range(0, len(ids), 512):
            part = ids[start : start + 512]
            logits, _ = Cache(loaded, CpuAttention(), 64).run(part, 0)
            chosen = torch.tensor(part[1:])[:, None]
            total -= logits[:-1].log_softmax(-1).gather(1, chosen).sum()
        loss[weights] = float(total / len(ids))
    assert abs(loss["int8"] - loss["bf16"]) < 0.01  # nats: one percent of perplexity
