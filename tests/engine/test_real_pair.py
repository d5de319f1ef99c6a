"""Two real models of one family, draft and target, where there are such: K-quantised GGUF files.

    FORETELL_TEST_PAIR=target.gguf:draft.gguf make slow

For example Qwen2.5-Coder-1.5B-Instruct and -0.5B-Instruct in Q4_K_M.
"""

import os

import pytest

from foretell.bench.workloads import default_workload
from foretell.llm import LLM
from foretell.sequence import SamplingParams
from tests.tiny import ids

PAIR = os.environ.get("FORETELL_TEST_PAIR", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(":" not in PAIR, reason="set FORETELL_TEST_PAIR=target.gguf:draft.gguf"),
]


def test_a_smaller_model_of_the_family_drafts_and_the_text_stays():
    target, _, draft = PAIR.partition(":")
    engine = LLM(
        target,
        speculation=f"draft-model:model={draft},k=5",
        max_model_len=2048,
        max_num_seqs=4,
    )
    edits = [c for c in default_workload() if c.category == "code_edit"][:4]
    assert edits, sorted({c.category for c in default_workload()})
    prompts = [engine.chat_prompt([{"role": "user", "content": c.turns[0]}]) for c in edits]
    for params in (
        SamplingParams(temperature=0, max_tokens=48),
        SamplingParams(temperature=0.7, seed=1, max_tokens=48),
    ):
        drafted = engine.generate(prompts, params)
        assert ids(drafted) == ids(engine.generate(prompts, params, speculate=False))
        accepted = sum(result.stats.accepted for result in drafted)
        assert accepted > 0.5 * sum(result.stats.drafted for result in drafted)
    assert engine.engine.metrics.drafter_errors == 0
