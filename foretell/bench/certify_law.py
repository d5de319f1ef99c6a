"""Rejection verification keeps the target's distribution: counts of many seeded answers against
the law of their first tokens, which plain decoding's log-probabilities give exactly.

Each test compares the counts of all texts of `HORIZON` tokens (the first comes without a draft)
with their exact probabilities by the likelihood ratio G. Its p-value is the rank of G among
multinomial samples of the law itself: exact for any sample size, no cell needs a least count.
A test whose p-value is below its share of `ALARM` is done again with new seeds, and only if both
are, it fails. So a sound engine fails with a probability of at most ``ALARM**2`` a run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import numpy as np

from foretell.bench.certify_part import Part, Rig, begin, check_drafter, guarded
from foretell.bench.rehearsed import METHOD as REHEARSED
from foretell.bench.rehearsed import rehearse
from foretell.llm import LLM
from foretell.progress import Advance
from foretell.sequence import SamplingParams

HORIZON = 3
ALARM = 1e-3
"""Probability that any test at all is done again though nothing is wrong."""
_SLOTS, _PROBES = 64, 16
_TIE = 1e-4
"""Log-probabilities nearer than this may be in another order in float32: no such law is used."""

_NODES = 4
"""Of a rehearsed draft: enough to hide two tokens among wrong ones."""

Text = tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """What a test samples with; few tokens stay, so that all texts can be enumerated."""

    name: str
    temperature: float
    top_k: int
    frequency: float = 0.0
    presence: float = 0.0

    def params(self, seed: int, room: int) -> SamplingParams:
        """With room behind the horizon drafts reach beyond it, too."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            frequency_penalty=self.frequency,
            presence_penalty=self.presence,
            max_tokens=HORIZON + room,
            ignore_eos=True,
            seed=seed,
        )

    def law(self, top: tuple[tuple[int, float], ...], text: Text) -> dict[int, float]:
        """The next token's law by definition, in float64.

        Args:
            top: the likeliest tokens with their log-probabilities, at least top_k + HORIZON.
            text: the answer so far, which penalties count.

        Raises:
            Tie: which tokens stay depends on rounding.
        """
        held = Counter(text)
        scores = sorted(
            (
                (value - self.frequency * held[token] - self.presence * (token in held), token)
                for token, value in top
            ),
            key=lambda pair: (-pair[0], pair[1]),
        )
        kept = scores[: self.top_k]
        if len(scores) > self.top_k and kept[-1][0] - scores[self.top_k][0] < _TIE:
            raise Tie
        weights = np.exp((np.array([s for s, _ in kept]) - kept[0][0]) / self.temperature)
        return dict(zip((t for _, t in kept), (weights / weights.sum()).tolist(), strict=True))


SETTINGS = (
    Setting("temperature 1, top-k 4", 1.0, 4),
    Setting("temperature 1.6, top-k 3", 1.6, 3),
    Setting("penalties, top-k 4", 1.2, 4, frequency=1.5, presence=0.5),
)


class Tie(Exception):
    """Which tokens stay depends on rounding: this law cannot be computed from outside."""


def rules(rig: Rig) -> list[str]:
    """The scheme's own rule, and `rejection`. Coupled draws are plain decoding's own, one by one,
    which `same_text` shows; nothing is left for counting."""
    own = rig.speculation.verification
    return ["rejection"] if own == "coupled" else list(dict.fromkeys([own, "rejection"]))


def num_tests(rig: Rig) -> int:
    """At most."""
    return len(rules(rig)) * len(SETTINGS) * (2 if rig.config.crossed else 1)


def same_law(rig: Rig, plain: LLM, prompts: dict[str, list[int]], advance: Advance) -> Part:
    """Tests each rule under each setting with the scheme, on prompts for which it drafts, in turn,
    and with drafts that are the greedy answer hidden in random trees. Not `crossed`: under each
    setting with one or the other."""
    page = rig.engine.page_size
    # All whole pages are shared, so with one token beyond them an answer costs few rows.
    prompts = {
        name: ids[(len(ids) - 1) % page :] if len(ids) > 2 * page else ids
        for name, ids in prompts.items()
    }
    level = ALARM / num_tests(rig)
    part = Part(
        "same distribution",
        "first tokens of many answers are distributed as the target's own law says (a sound "
        f"engine fails with a probability of at most {ALARM**2:.0e})",
    )
    with guarded(part):
        trial = _Trial(part, rig, plain, level, advance)
        for rule in rules(rig):
            trial.rule(rule, prompts)
    if not part.counts.get("tests"):
        part.fail("nothing could be tested: take other prompts")
    return part


@dataclass(frozen=True)
class _Trial:
    """Tests that go into one part."""

    part: Part
    rig: Rig
    plain: LLM
    level: float
    advance: Advance

    def rule(self, rule: Any, prompts: dict[str, list[int]]) -> None:
        own = self.rig.make(replace(self.rig.speculation, verification=rule), _SLOTS)
        known = self.rig.make(f"{REHEARSED},k={_NODES},verification={rule}", _SLOTS)
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        answers = self.plain.generate(list(prompts.values()), greedy)
        rehearse(known, {(tuple(a.prompt_token_ids), None): a.token_ids for a in answers})
        step = 1 if self.rig.config.crossed else 2
        arms = (own, "", SETTINGS[::step]), (known, ", rehearsed", SETTINGS[step - 1 :: step])
        for llm, kind, settings in arms:
            turn, told = cycle(prompts.items()), f"{rule}{kind}"
            for setting in settings:
                some = islice(turn, len(prompts))
                if not any(self.test(f"{name}, {told}", llm, ids, setting) for name, ids in some):
                    self.part.notes.append(f"{told}, {setting.name}: no prompt with early drafts")
            check_drafter(self.part, llm, 1)

    def test(self, name: str, llm: LLM, ids: list[int], setting: Setting) -> bool:
        """One test. False if this prompt is not fit for it."""
        part, config, level = self.part, self.rig.config, self.level
        try:
            law = exact_law(self.plain, ids, setting)
        except Tie:
            return False
        probe = [(ids, setting.params(config.seed + i, room=0)) for i in range(_PROBES)]
        # One before all: what comes at once could not share the prompt's pages.
        tried = [s for few in (probe[:1], probe) for s in begin(llm, few, HORIZON, stay=False)]
        if sum(s.stats.drafted for s in tried) < _PROBES // 8:
            return False  # what is drafted before the horizon is too little to say anything about
        where = f"{name}, {setting.name}"
        count, seen, details = config.samples, Counter[Text](), dict[str, Any]()
        for attempt in (1, 2):
            seed = config.seed + attempt * 2**40
            seen, drafted = self.sample(llm, setting, ids, seed)
            outside = [[list(text), n] for text, n in seen.items() if text not in law]
            p = 0.0 if outside else p_value(seen, law, level, seed)
            part.count("answers", count)
            part.count("drafted", drafted)
            details = {"test": name, "setting": setting.name, "texts": len(law), "p": p}
            details |= {"answers": count, "drafted": drafted, "outside": outside[:5]}
            if p >= level or outside:
                break
        part.details.append(details)
        part.count("tests")
        if details["outside"]:
            text, n = details["outside"][0]
            part.fail(f"{where}: {n} answers begin with {text}, which the target's law excludes")
        elif details["p"] < level:
            text, n, expected = _farthest(seen, law, count)
            part.fail(
                f"{where}: not the target's distribution, p <= {details['p']:.2g} twice (limit "
                f"{level:.2g}); for example {list(text)} came {n} times where {expected:.1f} are "
                "due"
            )
        return True

    def sample(
        self, llm: LLM, setting: Setting, ids: list[int], seed: int
    ) -> tuple[Counter[Text], int]:
        """First tokens of independent answers, and drafts among them that were checked."""
        seen, drafted, count = Counter[Text](), 0, self.rig.config.samples
        room = 2 if self.rig.config.crossed else 1
        for at in range(0, count, _SLOTS):
            size = min(_SLOTS, count - at)
            asked = [(ids, setting.params(seed + at + i, room)) for i in range(size)]
            for sequence in begin(llm, asked, HORIZON, stay=False):
                seen[tuple(sequence.output[:HORIZON])] += 1
                drafted += sequence.stats.drafted
            self.advance(size)
        return seen, drafted


def exact_law(plain: LLM, ids: list[int], setting: Setting) -> dict[Text, float]:
    """Probabilities of all texts of HORIZON tokens, from plain decoding's log-probabilities behind
    each of their beginnings."""
    law: dict[Text, float] = {(): 1.0}
    look = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=setting.top_k + HORIZON + 1
    )
    for _ in range(HORIZON):
        results = plain.generate([[*ids, *text] for text in law], look)
        longer: dict[Text, float] = {}
        for (text, weight), result in zip(law.items(), results, strict=True):
            assert result.logprobs is not None
            for token, p in setting.law(result.logprobs[0].top, text).items():
                longer[(*text, token)] = weight * p
        law = longer
    return law


def p_value(seen: Counter[Text], law: dict[Text, float], level: float, seed: int) -> float:
    """Of the likelihood ratio G, by simulation of the law until ten samples reach it, or until it
    is certainly below ``level`` (Besag and Clifford 1991): exact whatever the counts."""
    texts = sorted(law)
    p = np.array([law[text] for text in texts])
    p /= p.sum()
    observed = np.array([seen[text] for text in texts])
    actual = _ratio(observed[None], p)[0]
    rng, most, enough, runs, above = np.random.default_rng(seed), int(20 / level), 10, 0, 0
    while runs < most:
        samples = rng.multinomial(int(observed.sum()), p, min(100 if runs < 1000 else 5000, most))
        reached = np.flatnonzero(_ratio(samples, p) >= actual - 1e-9)
        if above + len(reached) >= enough:
            return enough / (runs + int(reached[enough - above - 1]) + 1)
        runs, above = runs + len(samples), above + len(reached)
    return (above + 1) / (runs + 1)


def _ratio(counts: np.ndarray, p: np.ndarray) -> np.ndarray:
    """G / 2 of each row of counts [R, cells]: sum O log(O / E)."""
    expected = counts.sum(1, keepdims=True) * p
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = counts * np.log(counts / expected)
    return np.where(counts > 0, terms, 0.0).sum(1)


def _farthest(seen: Counter[Text], law: dict[Text, float], count: int) -> tuple[Text, int, float]:
    """The text whose count is most unlikely, with count and expectation."""
    far = max(law, key=lambda t: abs(seen[t] - count * law[t]) / (count * law[t] + 1e-9) ** 0.5)
    return far, seen[far], count * law[far]
