"""Without numba everything runs in plain torch: slowly, and with the same promises."""

from __future__ import annotations

import subprocess
import sys

from tests import tiny

SCRIPT = """
import sys
sys.modules["numba"] = None  # an import of it fails
from foretell import LLM, SamplingParams
prompts = [[5, 9, 11, 5, 9, 11, 5, 9], [7, 8, 7, 8, 7], list(range(3, 40))]
for weights in ("f32", "bf16", "int8", "int4"):
    scheme = "prompt-lookup:k=6,adaptive=false"
    llm = LLM(sys.argv[1], weights=weights, speculation=scheme, max_model_len=128)
    for params in (
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True),
    ):
        plain = llm.generate(prompts, params, speculate=False)
        drafted = llm.generate(prompts, params)
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
        for a, b, c in zip(plain, drafted, alone, strict=True):
            assert a.token_ids == b.token_ids == c.token_ids, weights
    assert sum(r.stats.drafted for r in drafted) > 0
    llm.close()
print("same")
"""


def test_text_is_the_same_with_and_without_drafts(tmp_path):
    path = tiny.write_model(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, timeout=500
    )
    assert run.stdout.strip() == "same", run.stderr
    assert run.stderr.count("numba cannot be had") == 1
