"""`foretell advise`: which scheme for these prompts on this machine, up to which load, or none.

Everything is measured on a sample of the prompts, as `foretell bench` does: plain decoding and each
scheme with its controller take turns; what is accepted by depth comes from drafts of fixed length,
which are made at the first load only. What is promised is what the bench prints for the same
prompts; the interval of the speed-up is a bootstrap over conversations. For other hardware the
acceptance that was measured goes through a roofline (`foretell.bench.roofline`).
"""

from __future__ import annotations

import random
import shlex
import statistics
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import mul
from pathlib import Path

from rich.console import Console

from foretell.bench.arms import open_llms, parse_scheme
from foretell.bench.command import DEFAULT_SCHEMES
from foretell.bench.report import Line, percentile, speeds, summarize
from foretell.bench.report import say as tell
from foretell.bench.roofline import Roofline
from foretell.bench.run import PLAIN, Arm, BenchConfig, Measurement, measure
from foretell.bench.workloads import Conversation, default_workload, pick, read_workload
from foretell.config import EngineConfig, SpeculationConfig
from foretell.drafters import schemes
from foretell.llm import LLM
from foretell.models.hub import packaged_head, resolve
from foretell.models.loader import open_source
from foretell.progress import progress_bar

WORTH = 1.03
"""A speed-up pays if its whole interval lies above that."""
BATCHES = (1, 4, 16)
PREDICTED = (1, 4, 16, 64, 256)
_ALWAYS = ",adaptive=false"
_ROUNDS = 3
"""Batches of several at once that are asked at least."""
Ratios = list[list[float]]
"""Of one conversation, by batch."""


@dataclass(frozen=True)
class Finding:
    """One scheme at one load."""

    scheme: str
    batch: int
    speedup: float
    low: float
    """Of a 90% interval."""
    high: float
    end_to_end: float
    """Prefill included."""
    speed: float
    """Tokens per second of one conversation, as plain decoding's."""
    plain_speed: float
    tau: float
    """Of drafts that are always made, as is the acceptance."""
    acceptance: list[float]
    """[depth] of the drafts that reached a depth how many were accepted there too."""
    depth: int
    """Draft tokens that pay at this load, by what steps cost here; 0 for none."""

    @property
    def share(self) -> float:
        """Part of the passes that had a draft, by what they gave: lookup often finds nothing."""
        accepted = sum(accumulate(self.acceptance, mul))
        return min(1.0, max(self.tau - 1, 0.0) / accepted) if accepted else 0.0


def advise(
    given: SequenceOf[str],
    config: BenchConfig,
    engine: EngineConfig,
    *,
    prompts: Path | None = None,
    sample: int = 8,
    batches: SequenceOf[int] = BATCHES,
    predict: Roofline | None = None,
    console: Console | None = None,
) -> list[Finding]:
    """Measures, prints a recommendation with the flags to paste, and returns what it rests on.

    Args:
        given: schemes, as ``--speculation`` writes them; those worth trying if empty.
        prompts: the user's own; None is the package's workload.
        sample: conversations that are asked.
        batches: conversations at once that are tried.
        predict: other hardware.

    Raises:
        ValueError: an option, the file of prompts or the model is wrong.
    """
    console = console or Console()
    conversations = _sample(read_workload(prompts) if prompts else default_workload(), sample)
    own, always = _schemes(given, engine.model)
    context, target, findings, drafts = 0, None, list[Finding](), dict[str, Line]()
    for batch in batches:
        # Anew for each: what a controller has learnt at one load is not what a bench begins with.
        llms = open_llms(own if drafts else own | always, engine, batch, target)
        first = next(iter(llms.values()))
        target, room = first.target, first.engine.runtime.max_model_len
        arms = [Arm(PLAIN, first, speculate=False), *(Arm(text, llms[text]) for text in llms)]
        asked = _at_once(conversations, batch)
        with progress_bar(f"{batch} at once", sum(len(c.turns) for c in asked), lines=True) as tick:
            found = measure(arms, asked, replace(config, batch=batch), room, tick)
        if not found.complete:
            if not findings:
                raise KeyboardInterrupt  # advice from half a measurement is none
            console.print(f"Interrupted: not tried with {batch} at once and more.\n")
            break
        lines = {line.scheme: line for line in summarize(found, arms) if line.category == "all"}
        drafts = drafts or {text: lines.get(text + _ALWAYS, lines[text]) for text in own}
        lengths = [a.num_prompt_tokens + a.num_tokens // 2 for a in found.answers]
        context = round(statistics.fmean(lengths))
        for text in own:
            line, tau, accepted = lines[text], drafts[text].tau, drafts[text].acceptance
            measured = line.end_to_end, line.speed, line.plain_speed
            speedups = line.speedup, *bootstrap(_ratios(found, text, batch))
            depth = _depth(llms[text], accepted, batch, context)
            findings.append(Finding(text, batch, *speedups, *measured, tau, accepted, depth))
        for llm in llms.values():  # not `close`: a bench afterwards must begin with what this had
            llm.engine.runtime.close()
    _print(console, findings, config, engine, prompts)
    if len(conversations) < 5:  # a bootstrap knows nothing of what others are like
        console.print(f"\nOnly {len(conversations)} prompts: the intervals say little.")
    if predict is not None:
        _print_prediction(console, findings, predict, context)
    return findings


def _sample(conversations: list[Conversation], count: int) -> list[Conversation]:
    """Evenly over the file, all of one category."""
    if count < 1:
        raise ValueError(f"sample={count}: must be 1 or more conversations")
    return pick([replace(c, category="all") for c in conversations], count)


def _at_once(conversations: list[Conversation], batch: int) -> list[Conversation]:
    """As they are, one at a time; else whole batches, again and again if there are too few for some
    of them: what runs at one moment shares that moment's noise."""
    count = len(conversations)
    if batch > 1:
        count = batch * max(_ROUNDS, -(-count // batch))
    again = [conversations[i % len(conversations)] for i in range(count)]
    return [replace(c, id=f"{c.id}.{i}") for i, c in enumerate(again)]


def _schemes(
    given: SequenceOf[str], model: str
) -> tuple[dict[str, SpeculationConfig], dict[str, SpeculationConfig]]:
    """Those that are given or worth trying, and each as one that always drafts, where that can be
    had."""
    if not given:
        sizes = open_source(resolve(model))[1].sizes
        given = (*DEFAULT_SCHEMES, *(name for name in schemes() if packaged_head(name, sizes)))
    own = {text: parse_scheme(text) for text in given}
    return own, {
        text + _ALWAYS: replace(speculation, adaptive=False)
        for text, speculation in own.items()
        if speculation.adaptive and not speculation.also
    }


def _ratios(found: Measurement, scheme: str, batch: int) -> list[Ratios]:
    """Decoding speed over plain decoding's: of each conversation, which may have been asked several
    times to fill batches, by batch; all in one where they ran one at a time."""
    plain, own = (speeds([a for a in found.answers if a.arm == arm]) for arm in (PLAIN, scheme))
    ratios: dict[str, dict[int, list[float]]] = {}
    for name in (name for name in plain if name in own):
        whole, _, place = name.rpartition(".")  # see `_at_once`
        turn = int(place) // batch if batch > 1 else 0
        ratios.setdefault(whole, {}).setdefault(turn, []).append(own[name] / plain[name])
    turns = sorted({turn for each in ratios.values() for turn in each})
    return [[each.get(turn, []) for turn in turns] for each in ratios.values()]


def bootstrap(ratios: SequenceOf[Ratios], seed: int = 0) -> tuple[float, float]:
    """A 90% interval of `_median`: other conversations, and other moments for the batches."""
    if not ratios:
        return 0.0, 0.0
    rng, turns = random.Random(seed), range(len(ratios[0]))
    medians = [
        _median(rng.choices(ratios, k=len(ratios)), rng.choices(turns, k=len(turns)))
        for _ in range(1000)
    ]
    return percentile(medians, 5), percentile(medians, 95)


def _median(ratios: SequenceOf[Ratios], turns: SequenceOf[int]) -> float:
    """Over conversations, each of which counts once, of what `_ratios` found in these batches."""
    each = ([ratio for turn in turns for ratio in own[turn]] for own in ratios)
    return statistics.median([statistics.median(own) for own in each if own] or [0.0])


def _depth(llm: LLM, acceptance: SequenceOf[float], batch: int, context: int) -> int:
    """The depth that gives most by what the controller has learnt of this machine."""
    assert llm.engine.drafting
    if llm.engine.drafting.controller is None:  # whoever asked for a fixed length gets it
        return llm.engine.drafting.k
    costs = llm.engine.drafting.controller.costs
    attention = costs.keys((context * batch, 0))
    best, chosen, reached, tokens = batch / (costs.base(batch) + attention), 0, 1.0, 1.0
    for depth, chance in enumerate(acceptance, 1):
        reached *= chance
        tokens += reached
        counts = (1, depth * costs.reach(context * batch), depth * batch)
        took = costs.propose[0](counts) + costs.observe[0]((1, tokens * batch))
        took += costs.base(batch * (1 + depth)) + attention
        took += costs.keys((0, context * batch * depth))
        if tokens * batch / took > best:
            best, chosen = tokens * batch / took, depth
    return chosen


def _print(
    console: Console,
    findings: list[Finding],
    config: BenchConfig,
    engine: EngineConfig,
    prompts: Path | None,
) -> None:
    say = partial(tell, console)
    say(
        f"{'at once':>7}  {'speed-up':>8}  {'90%':>9}  {'end to end':>10}  {'tok/s':>6}  "
        f"{'plain':>6}  {'tau':>4}  {'depth':>5}  scheme"
    )
    for f in findings:
        say(
            f"{f.batch:7}  {f.speedup:7.2f}x  {f.low:.2f}-{f.high:.2f}  {f.end_to_end:9.2f}x  "
            f"{f.speed:6.1f}  {f.plain_speed:6.1f}  {f.tau:4.2f}  {f.depth:5}  {f.scheme}"
        )
    say(
        "speed-up, end to end, tok/s, plain: as foretell bench measures them; 90%: where the "
        "speed-up lies for other prompts; tau: tokens a target pass with drafts always made; "
        "depth: draft tokens that pay most at that load by what steps cost here, 0: none do"
    )
    first = findings[0].batch
    # What surely pays goes before what may pay more.
    best = max((f for f in findings if f.batch == first), key=lambda f: (f.low >= WORTH, f.speedup))
    if best.low < WORTH:
        rates = "-".join(f"{rate:.0%}" for rate in best.acceptance[:1]) or "none"
        why = "too little for what drafts cost here"
        if best.high >= WORTH:
            why = "it may pay or not. More prompts (--sample), or a quieter machine, would tell"
        say(
            f"\nDon't speculate: the best scheme, {best.scheme}, gives {best.speedup:.2f}x "
            f"({best.low:.2f}-{best.high:.2f}) at {first} at once. Of its first draft tokens "
            f"{rates} are accepted, tau is {best.tau:.2f}: {why}."
        )
        elsewhere = [f for f in findings if f.low >= WORTH and f.depth]
        if elsewhere:
            f = max(elsewhere, key=lambda f: f.speedup)
            say(
                f"At {f.batch} at once {f.scheme} gives {f.speedup:.2f}x "
                f"({f.low:.2f}-{f.high:.2f}): worth a try where that is the usual load."
            )
        return
    pays = [f.batch for f in findings if f.scheme == best.scheme and f.low >= WORTH]
    upto = max(pays)
    flags = f"--speculation {shlex.quote(best.scheme)}{_flags(engine)}"
    say(
        f"\nUse {best.scheme}: {best.speedup:.2f}x ({best.low:.2f}-{best.high:.2f}) at {first} at "
        f"once. It pays up to {upto} at once of those tried; above, its controller turns it off."
    )
    say(f"\n  foretell serve {flags}")
    check_with = f"--prompts {shlex.quote(str(prompts))} " if prompts else ""
    check_with += f"--batch {first} " if first > 1 else ""
    say(
        f"  foretell bench {flags} {check_with}--max-tokens {config.max_tokens} "
        f"--temperature {config.temperature:g}    # to see for yourself"
    )


def _flags(engine: EngineConfig) -> str:
    """What was measured with, where it is no default."""
    given, default = {"model": engine.model, "weights": engine.weights}, EngineConfig()
    given |= {n: v for n, v in engine.options("speculation").items() if v != getattr(default, n)}
    return "".join(
        f" --{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(str(value))}")
        for name, value in given.items()
    )


def _print_prediction(
    console: Console, findings: list[Finding], roofline: Roofline, context: int
) -> None:
    say = partial(tell, console)
    say(f"\nExtrapolated, not measured. {roofline.assumptions}.")
    say(f"{'at once':>7}  {'speed-up':>8}  {'depth':>5}  scheme   ({context} tokens of context)")
    first = findings[0].batch
    for f in (f for f in findings if f.batch == first):
        for batch in PREDICTED:
            speedup, depth = roofline.speedup(f.scheme, f.acceptance, batch, context, f.share)
            say(f"{batch:7}  {speedup:7.2f}x  {depth:5}  {f.scheme}")
