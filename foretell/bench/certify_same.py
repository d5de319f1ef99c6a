"""Same seed, same text: every request plainly and alone, then speculatively and in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from foretell.answer import Result
from foretell.bench.certify_config import CertifyConfig
from foretell.bench.certify_part import Part, Request, Rig, check_drafter, guarded
from foretell.bench.rehearsed import METHOD as REHEARSED
from foretell.bench.rehearsed import Known, rehearse
from foretell.bench.run import PLAIN, SAME_TEXT, first_difference
from foretell.llm import LLM
from foretell.progress import Advance
from foretell.sequence import FinishReason, Logprob, SamplingParams

JSON = (
    '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, '
    '"required": ["a", "b"]}'
)
ADAPTIVE = "as configured"
"""The way in which the engine drafts only where that pays, and with all of its schemes."""
Answers = list[Result]
Pairs = list[tuple[Request, Result]]


def settings(max_tokens: int) -> dict[str, SamplingParams]:
    """One of each kind of thing that shapes the target's choice. All ask for the log-probabilities
    of the two likeliest tokens, so that runs are compared to the last bit."""
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "temperature 1": {"temperature": 1.0},
        "top-k 40, top-p 0.9": {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
        "min-p 0.05": {"temperature": 1.5, "min_p": 0.05},
        "penalties, greedy": {
            "temperature": 0,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.6,
            "presence_penalty": 0.4,
        },
        "penalties, sampled": {"temperature": 0.8, "frequency_penalty": 1.5},
        "logit bias": {"temperature": 0.7, "min_tokens": max_tokens // 2},
        "grammar": {"temperature": 0, "grammar": JSON},
    }
    common: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": 2}
    return {name: SamplingParams(**common, **kind) for name, kind in kinds.items()}


def requests(prompts: dict[str, list[int]], config: CertifyConfig) -> list[Request]:
    """Neighbours differ in their setting, so a batch holds all kinds side by side."""
    made: list[Request] = []
    for i, (name, ids) in enumerate(prompts.items()):
        for j, (setting, params) in enumerate(settings(config.max_tokens).items()):
            if config.crossed or j % len(prompts) == i:
                own = replace(params, seed=config.seed + len(made))
                made.append(Request(name, setting, ids, own))
    return made


def references(rig: Rig, asked: list[Request], advance: Advance) -> Pairs:
    """Plain decoding's answer to each request, alone; what it cannot answer is left out."""
    llm, answers = rig.plain_alone(), Pairs()
    greedy: Result | None = None
    for request in asked:
        if request.setting == "logit bias" and greedy:
            request = replace(request, params=_biased(request.params, greedy))
        try:
            # A grammar drafts what it forces, without a scheme too: not here.
            (result,) = llm.generate(request.ids, request.params, speculate=False)
        except ValueError:  # a grammar that this tokenizer cannot write
            result = None
        advance(1)
        if request.setting == "greedy":
            greedy = result
        if result and result.finish_reason != FinishReason.ERROR:
            answers.append((request, result))
    return answers


def _biased(params: SamplingParams, greedy: Result) -> SamplingParams:
    """Against the greedy answer: its most frequent token is banned, others are pushed."""
    common = [token for token, _ in Counter(greedy.token_ids).most_common(4)]
    bias = dict(zip(common, (-100.0, 2.0, -3.0, 1.0), strict=False))
    return replace(params, logit_bias=bias)


def same_text(
    rig: Rig, answers: Pairs, left_out: int, advance: Advance
) -> tuple[Part, Part, list[LLM]]:
    """Asks everything again in each way and compares.

    Returns:
        The part about tokens, the part about bits, and the engines that always drafted.
    """
    part = Part(
        "same text",
        "with the same seed every answer has the tokens, text and ending of plain decoding, "
        "whatever was drafted and whoever shared the batch",
    )
    bits = Part(
        "same bits", "the target's log-probabilities are those of plain decoding to the last bit"
    )
    if left_out:
        part.notes.append(f"{left_out} requests were left out: plain decoding cannot answer them")
    if not answers:
        part.fail("no request could be answered")
        return part, bits, []
    verification = rig.speculation.verification
    exact = verification in SAME_TEXT
    scheme, trees = rig.make(rig.speculation, rig.config.batch), rehearsed(rig, answers)
    comparable = [pair for pair in answers if exact or pair[0].params.greedy]
    if not exact:
        part.notes.append(
            f"{verification} verification keeps the distribution and not the text of a "
            "seed: sampled requests are compared under coupled verification"
        )
    with guarded(part):
        for name, llm, run, own in _ways(rig, scheme, trees, exact, answers, comparable):
            before = llm.engine.metrics.drafted
            got = run(llm, [request for request, _ in own], advance)
            part.count("answers", len(own))
            for (request, expected), answer in zip(own, got, strict=True):
                _compare(part, bits, llm, name, request, expected, answer)
            if llm.engine.drafter:
                part.count("drafted", llm.engine.metrics.drafted - before)
                part.count("accepted", sum(r.stats.accepted for r in got))
                may_rest = name.startswith(ADAPTIVE)
                check_drafter(part, llm, 1 if may_rest else llm.engine.metrics.drafted)
    return part, bits, [scheme, trees]


def rehearsed(rig: Rig, answers: Pairs) -> LLM:
    """An engine whose drafter knows the answers."""
    known: Known = {
        (tuple(request.ids), request.params.seed): result.token_ids for request, result in answers
    }
    return rehearse(rig.make(f"{REHEARSED},k=12", rig.config.batch), known)


def num_ways(rig: Rig) -> int:
    return 6 if rig.speculation.verification in SAME_TEXT else 7


Run = Callable[[LLM, list[Request], Advance], Answers]
Way = tuple[str, LLM, Run, Pairs]


def _ways(
    rig: Rig, scheme: LLM, trees: LLM, exact: bool, everything: Pairs, comparable: Pairs
) -> Iterator[Way]:
    plain = rig.make(None, rig.config.batch)
    some = max(2, rig.config.batch // 4)
    together = partial(all_at_once, speculate=False)
    yield f"{PLAIN}, {rig.config.batch} at once", plain, together, everything
    # Every setting comes by, and one request at a time takes longest.
    alone = comparable[::3] if rig.config.crossed else comparable
    yield "alone, streamed", scheme, streamed, alone
    yield f"{some} at once", scheme, partial(in_groups, size=some), comparable
    yield f"{rig.config.batch} at once", scheme, all_at_once, comparable
    adaptive = rig.make(rig.engine.speculation, rig.config.batch)
    yield f"{ADAPTIVE}, {rig.config.batch} at once", adaptive, all_at_once, comparable
    yield f"rehearsed trees, {rig.config.batch} at once", trees, all_at_once, everything
    if not exact:
        coupled = replace(rig.speculation, verification="coupled")
        llm = rig.make(coupled, rig.config.batch)
        yield f"coupled, {rig.config.batch} at once", llm, all_at_once, everything


def all_at_once(
    llm: LLM, asked: list[Request], advance: Advance, speculate: bool = True
) -> Answers:
    """As many at once as there are slots; whoever ends makes room for the next."""
    ids, params = [r.ids for r in asked], [r.params for r in asked]
    return llm.generate(ids, params, speculate=speculate, progress=advance)


def in_groups(llm: LLM, asked: list[Request], advance: Advance, size: int) -> Answers:
    """Groups that begin together and end one by one."""
    return [
        result
        for at in range(0, len(asked), size)
        for result in all_at_once(llm, asked[at : at + size], advance)
    ]


def streamed(llm: LLM, asked: list[Request], advance: Advance) -> Answers:
    """One at a time, token by token; the parts must add up to the answer."""
    answers: Answers = []
    for request in asked:
        ids, text, result = list[int](), "", None
        for delta in llm.stream(request.ids, request.params):
            ids += delta.token_ids
            text += delta.text
            result = delta.result or result
        assert result is not None
        answers.append(replace(result, token_ids=ids, text=text))
        advance(1)
    return answers


def _compare(
    part: Part, bits: Part, llm: LLM, way: str, request: Request, expected: Result, got: Result
) -> None:
    place = first_difference(expected.token_ids, got.token_ids)
    part.count("tokens", len(expected.token_ids))
    one, other = expected.logprobs or [], got.logprobs or []
    until = len(one) if place is None else place
    unequal = [i for i in range(min(until, len(other))) if one[i] != other[i]]
    bits.count("log-probabilities", until)
    if unequal:
        at = unequal[0]
        bits.fail(
            f"{request.name} ({way}): token {at}: {_values(one[at])} plainly, "
            f"{_values(other[at])} here"
        )
    if place is not None:
        part.fail(
            _difference(llm, way, request, place, expected, got),
            way=way, prompt=request.prompt, setting=request.setting, token=place,
            plain=_at(expected, place), speculative=_at(got, place),
        )  # fmt: skip
    elif (expected.text, expected.finish_reason) != (got.text, got.finish_reason):
        part.fail(
            f"{request.name} ({way}): the tokens are the same, text or ending is not "
            f"({expected.finish_reason}, {got.finish_reason}{got.error or ''})"
        )


def _difference(
    llm: LLM, way: str, request: Request, place: int, expected: Result, got: Result
) -> str:
    def told(answer: Result) -> str:
        if place >= len(answer.token_ids):
            return f"the end ({answer.error or answer.finish_reason})"
        token = answer.token_ids[place]
        text = repr(llm.tokenizer.decode([token])) if llm.tokenizer else ""
        return f"{token} {text}".strip()

    gaps = [_gap(answer, place) for answer in (expected, got)]
    shown = " and ".join("none" if gap is None else f"{gap:.4g}" for gap in gaps)
    return (
        f"{request.name} ({way}): token {place} is {told(expected)} plainly and {told(got)} here; "
        f"gap of the two likeliest logits there: {shown}; {_blame(expected, got, place)}"
    )


def _blame(expected: Result, got: Result, place: int) -> str:
    """Was it computed or chosen otherwise?"""
    one, other = (answer.logprobs or [] for answer in (expected, got))
    if place >= min(len(one), len(other)):
        return "one answer ended before"
    tops = [dict(each[place].top) for each in (one, other)]
    off = [abs(tops[0][token] - tops[1][token]) for token in tops[0].keys() & tops[1].keys()]
    if tops[0] == tops[1]:
        return "the logits are the same, the choice is not"
    return f"the logits differ by {max(off):.2g}" if off else "the logits are quite different"


def _at(answer: Result, place: int) -> dict[str, Any]:
    """Token and two likeliest log-probabilities at one place, for the JSON."""
    logprobs = answer.logprobs or []
    if place >= len(answer.token_ids) or place >= len(logprobs):
        return {"token": None, "finish_reason": str(answer.finish_reason)}
    top = [[token, value] for token, value in logprobs[place].top]
    return {"token": answer.token_ids[place], "top": top, "gap": _gap(answer, place)}


def _gap(answer: Result, place: int) -> float | None:
    logprobs = answer.logprobs or []
    if place >= len(logprobs) or len(logprobs[place].top) < 2:
        return None
    (_, first), (_, second) = logprobs[place].top[:2]
    return first - second


def _values(logprob: Logprob) -> str:
    return "/".join(f"{value:.9g}" for _, value in logprob.top)
