"""One prompt, answered plainly and speculatively: the same text at two speeds."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, field

from foretell.answer import Result
from foretell.config import SpeculationConfig
from foretell.llm import LLM
from foretell.progress import progress_bar
from foretell.sequence import FinishReason, SamplingParams

_PROMPT = """\
Here is a JSON object:

```json
{
  "name": "desk lamp",
  "price": 49.5,
  "stock": 12,
  "colour": "green",
  "material": "glass and brass",
  "height_cm": 38,
  "weight_kg": 2.4,
  "bulb": "E14, 40 watts",
  "cable_m": 1.8,
  "made_in": "Lübeck",
  "warranty_years": 3
}
```

Change the price to 59.5 and the stock to 7, and leave the rest as it is. \
Answer with the whole object."""
"""An edit that a model of 135 million parameters gets right; speculation likes edits."""


@dataclass
class _Arm:
    """One way to decode."""

    name: str
    speculate: bool
    results: list[Result] = field(default_factory=list[Result])

    @property
    def speed(self) -> float:
        return statistics.median(result.stats.tokens_per_second for result in self.results)


def show(llm: LLM, speculation: SpeculationConfig, repeats: int, max_tokens: int = 192) -> bool:
    """Prints the answer as it comes, both speeds (median of ``repeats`` alternating runs) and the
    acceptance length; True when every run gave the same tokens."""
    # The closing fence ends the answer: small models chat on behind it.
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop="\n```\n")
    prompt = llm.chat_prompt([{"role": "user", "content": _PROMPT}])
    plain, speculative = _Arm("plain", False), _Arm(speculation.method, True)
    arms = [plain, speculative]
    # The first answers are not timed (they compile and touch all weights): one is what is shown.
    print(f"{_PROMPT}\n\n--- the answer of {llm.config.model}\n", flush=True)
    shown = None
    for delta in llm.stream(prompt, params, speculate=False):
        print(delta.text, end="", flush=True)
        shown = delta.result or shown
    assert shown is not None
    fenced = shown.finish_reason != FinishReason.STOP or shown.text.endswith("```")
    print("\n---" if fenced else "\n```\n---", flush=True)
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8))
    with progress_bar("timing", 2 * repeats, shown=sys.stderr.isatty()) as advance:
        for run in range(repeats):  # alternately: a machine that slows down does so for both
            for arm in arms if run % 2 == 0 else arms[::-1]:
                arm.results += llm.generate(prompt, params, speculate=arm.speculate)
                advance(1)
    results = [shown, *plain.results, *speculative.results]
    for result in results:
        if result.error:
            print(f"foretell: {result.error}", file=sys.stderr)
            return False
    stats = speculative.results[0].stats
    same = all(
        result.token_ids == shown.token_ids and result.text == shown.text for result in results
    )
    print(f"{plain.name:<14} {plain.speed:7.1f} tokens/s")
    print(
        f"{speculative.name:<14} {speculative.speed:7.1f} tokens/s   "
        f"{speculative.speed / max(plain.speed, 1e-9):.2f}x   τ {stats.tau:.2f} tokens a pass, "
        f"{stats.accepted} of {stats.drafted} drafted tokens accepted"
    )
    print(f"{shown.stats.num_tokens} tokens, medians of {repeats} alternating runs; ", end="")
    verdict = "identical" if same else "NOT identical: this is a bug, please report it"
    print(f"tokens and text are {verdict}")
    return same
