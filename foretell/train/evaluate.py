"""What a trained head is worth, measured where it will serve: in the engine, on prompts that it
has never seen. `foretell train evaluate`."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from foretell.bench.arms import open_llms
from foretell.bench.environment import environment
from foretell.bench.report import Line, broken_promises, histogram, say, show_tables, summarize
from foretell.bench.run import (
    PLAIN,
    Arm,
    BenchConfig,
    Measurement,
    check_writable,
    measure,
    write_json,
)
from foretell.bench.workloads import (
    Conversation,
    by_category,
    default_workload,
    pick,
    read_workload,
)
from foretell.config import EngineConfig
from foretell.llm import LLM
from foretell.models.checkpoint import read_json
from foretell.progress import progress_bar
from foretell.sequence import SamplingParams
from foretell.terminal import Origins
from foretell.train.agreement import Agreement, agreement
from foretell.train.config import EvaluateConfig
from foretell.train.head_files import method_of

TEMPERATURES = (0.0, 1.0)
SAMPLES = 6
"""Answers that the report shows."""
_TEXT = 256
"""Tokens of the text that trainer and engine are compared on."""


@dataclass
class Evaluation:
    """What was found."""

    head: str
    method: str
    agreement: Agreement
    lines: dict[float, list[Line]] = field(default_factory=dict[float, list[Line]])
    """By temperature, as `foretell bench` has them; totals come last."""
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Answers in pieces: text, and whether the draft guessed it."""
    problems: list[str] = field(default_factory=list[str])
    """Why the numbers mean nothing; empty in a valid evaluation."""
    written: bool = True
    """False: it was interrupted, and a valid one was there before."""

    @property
    def valid(self) -> bool:
        return not self.problems

    def totals(self) -> list[tuple[float, Line]]:
        """One line for each temperature and scheme, over all prompts."""
        return [
            (temperature, line)
            for temperature, lines in self.lines.items()
            for line in {line.scheme: line for line in lines}.values()
        ]


def find_head(run: Path) -> Path:
    """The finished head of a run, or that of its last checkpoint.

    Raises:
        ValueError: there is neither.
    """
    if (head := run / "fit" / "head").is_dir():
        return head
    steps = [
        path for path in run.glob("fit/step-*/head") if re.fullmatch(r"step-\d+", path.parent.name)
    ]
    if not steps:
        raise ValueError(f"{head}: no such head; run foretell train fit first, or name one")
    return max(steps, key=lambda path: int(path.parent.name.removeprefix("step-")))


def evaluate(
    run: Path,
    config: EvaluateConfig | None = None,
    bench: BenchConfig | None = None,
    engine: EngineConfig | None = None,
    *,
    head: Path | None = None,
    prompts: Path | None = None,
    limit: int | None = None,
) -> Evaluation:
    """Measures a head as chain and tree against plain decoding, greedily and at temperature 1, and
    writes ``evaluation.json`` into the run.

    Args:
        run: the run's directory.
        bench: as `foretell.bench`; its temperature is not looked at.
        engine: target, weights and limits, see `open_llms`.
        head: the head's directory; by default the run's own.
        prompts: held-out prompts as `foretell.bench.workloads.parse` reads them; by default our own
            workload.
        limit: at most so many conversations of each category.

    Raises:
        ValueError: an option, the head, the prompts or the target is wrong.
    """
    config, bench = config or EvaluateConfig(), bench or BenchConfig()
    engine = engine or EngineConfig()
    head = head or find_head(run)
    method = method_of(head)
    conversations = pick(read_workload(prompts) if prompts else default_workload(), limit)
    out = run / "evaluation.json"
    run.mkdir(parents=True, exist_ok=True)
    check_writable(out)
    llms = open_llms(config.schemes(method, head), engine, bench.batch)
    arms = [Arm(PLAIN, next(iter(llms.values())), speculate=False)]
    arms += [Arm(name, llm) for name, llm in llms.items()]

    first = arms[0].llm.chat_prompt([{"role": "user", "content": conversations[0].turns[0]}])
    result = Evaluation(str(head), method, agreement(llms["chain"], head, first[:_TEXT]))
    room = llms["chain"].engine.runtime.max_model_len
    turns = sum(len(conversation.turns) for conversation in conversations)
    found: list[Measurement] = []
    with progress_bar("measuring", turns * len(TEMPERATURES), lines=True) as advance:
        for temperature in TEMPERATURES:
            own = replace(bench, temperature=temperature)
            found.append(measure(arms, conversations, own, room, advance))
            _add(result, temperature, found[-1], arms)
            if not found[-1].complete:
                break
        else:
            result.samples = _samples(llms["tree"], conversations, bench, room)
    for name, llm in llms.items():
        if errors := llm.engine.metrics.drafter_errors:
            what = llm.engine.metrics.last_drafter_error
            result.problems.append(f"{name}: the drafter failed {errors} times ({what})")
    facts = {
        "environment": environment(),
        "bench": asdict(bench) | {"prompts": str(prompts or "default"), "limit": limit},
        "engine": [asdict(llm.config) | {"model": engine.model} for llm in llms.values()],
        **_as_json(result, config),
    }
    if not found[-1].complete and out.exists():
        with suppress(OSError, ValueError):
            result.written = not read_json(out).get("valid")
    if result.written:
        write_json(out, _joined(found), facts)
    return result


def _add(result: Evaluation, temperature: float, measurement: Measurement, arms: list[Arm]) -> None:
    if measurement.answers:
        result.lines[temperature] = summarize(measurement, arms)
    if not measurement.complete:
        result.problems.append("it was interrupted: these are the prompts done so far")
    for line in broken_promises(measurement, arms):
        result.problems.append(f"NOT THE SAME TEXT at temperature {temperature:g}: {line}")


def _samples(
    llm: LLM, conversations: list[Conversation], bench: BenchConfig, room: int
) -> list[dict[str, Any]]:
    """Greedy answers to one prompt of each category."""
    params = SamplingParams(temperature=0, max_tokens=bench.max_tokens, seed=0)
    out: list[dict[str, Any]] = []
    for category, group in by_category(conversations).items():
        prompt = group[0].turns[0]
        ids = llm.chat_prompt([{"role": "user", "content": prompt}])
        if len(ids) + bench.max_tokens > room or len(out) == SAMPLES:
            continue
        (answer,) = llm.generate([ids], params)
        origins = Origins(llm.tokenizer, answer.prompt_token_ids)
        pieces = origins.split(answer.text, answer.token_ids, answer.from_draft)
        out.append(
            {
                "category": category,
                "prompt": prompt,
                "tau": round(answer.stats.tau, 3),
                "pieces": [list(piece) for piece in pieces],
            }
        )
    return out


def _joined(found: list[Measurement]) -> Measurement:
    """All answers, each arm's name with the temperature."""
    return Measurement(
        answers=[
            replace(answer, arm=f"{answer.arm} at {temperature:g}")
            for temperature, measurement in zip(TEMPERATURES, found, strict=False)
            for answer in measurement.answers
        ],
        skipped=found[0].skipped,
        complete=len(found) == len(TEMPERATURES) and all(m.complete for m in found),
    )


def _as_json(result: Evaluation, config: EvaluateConfig) -> dict[str, Any]:
    return {
        "head": result.head,
        "method": result.method,
        "valid": result.valid,
        "problems": result.problems,
        "evaluate": asdict(config),
        "agreement": asdict(result.agreement) | {"says": str(result.agreement)},
        "summary": [
            {"temperature": temperature, **asdict(line), "cumulative": cumulative(line)}
            for temperature, lines in result.lines.items()
            for line in lines
        ],
        "samples": result.samples,
    }


def cumulative(line: Line) -> list[float]:
    """[depth] of all drafts, the share that was accepted up to there."""
    return [count / line.drafted[0] for count in line.accepted] if line.drafted else []


# ---- showing


def show(result: Evaluation, console: Console) -> None:
    """What it is worth and where drafts end, as `foretell bench` shows it."""
    lines = [
        replace(line, category=line.scheme, scheme=f"temperature {temperature:g}")
        for temperature, line in result.totals()
    ]
    show_tables(lines, console)
    named = [replace(line, scheme=f"{line.category}, {line.scheme}") for line in lines]
    said = [histogram(named), str(result.agreement), *(["NOT VALID:"] if result.problems else [])]
    for text in (*said, *(f"  {problem}" for problem in result.problems)):
        say(console, text)
