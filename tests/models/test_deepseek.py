"""DeepSeek's layers against transformers', and against themselves in other groupings of rows."""

from __future__ import annotations

import pytest
import torch

from foretell.attention.cpu import CpuAttention
from foretell.attention.reference import ReferenceAttention
from foretell.models.loader import load
from tests.models.test_decoder import PARENTS, TOKENS, error, reference
from tests.models.tiny import DEEPSEEK, Cache, make, save


@pytest.fixture(scope="module", params=DEEPSEEK)
def pair(request, tmp_path_factory):
    model = make(request.param)
    path = save(model, tmp_path_factory.mktemp("model"))
    return model, load(str(path), "f32", progress=False)


@pytest.mark.parametrize("backend", [ReferenceAttention, CpuAttention])
def test_prefill_chunks_and_decode_equal_transformers(pair, backend):
    model, loaded = pair
    expected = reference(model, TOKENS)
    whole, _ = Cache(loaded, backend()).run(TOKENS, 0)
    assert error(whole, expected) < 1e-4
    cache, parts, start = Cache(loaded, backend()), [], 0
    for size in (17, 1, 9, 1, 1, 11):
        parts.append(cache.run(TOKENS[start : start + size], start)[0])
        start += size
    print("ERR", error(whole, expected), error(torch.cat(parts), expected))
    assert error(torch.cat(parts), expected) < 1e-4
