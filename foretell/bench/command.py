"""`foretell bench`: from options to tables."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from foretell.bench.arms import open_llms, parse_scheme
from foretell.bench.environment import environment
from foretell.bench.report import broken_promises, histogram, markdown, say, show_tables, summarize
from foretell.bench.report_page import report_page
from foretell.bench.run import (
    PLAIN,
    SAME_TEXT,
    Arm,
    BenchConfig,
    check_writable,
    measure,
    write_json,
)
from foretell.bench.timeline import record
from foretell.bench.workloads import Conversation, default_workload, pick, read_workload
from foretell.config import EngineConfig
from foretell.engine.trace import Trace
from foretell.files import write_whole
from foretell.llm import LLM
from foretell.progress import progress_bar
from foretell.terminal import say_wrote

BATCHES = (1, 2, 4, 8, 16)
DEFAULT_SCHEMES = ("prompt-lookup", "draft-model:weights=int4")


def bench(
    schemes: SequenceOf[str] = DEFAULT_SCHEMES,
    config: BenchConfig | None = None,
    engine: EngineConfig | None = None,
    *,
    prompts: Path | None = None,
    limit: int | None = None,
    json: Path | None = None,
    as_markdown: bool = False,
    trace: Path | None = None,
    report: Path | None = None,
    break_even: bool = False,
    console: Console | None = None,
) -> bool:
    """Measures schemes against plain decoding and prints what came out.

    Args:
        schemes: as ``--speculation`` writes them; each is compared with the same plain run.
        engine: model, weights and limits; its own speculation is not looked at, the prefix cache
            is always off and there are at least as many slots as conversations at once.
        prompts: JSONL of prompts, see `foretell.bench.workloads.parse`; None is our own workload.
        limit: at most that many conversations of each category, evenly spaced.
        json: file for everything measured.
        as_markdown: print Markdown in place of terminal tables.
        trace: file for each engine's steps as trace events.
        report: file for everything as one page of HTML.
        break_even: measure at 1, 2, 4, 8 and 16 conversations at once too, for the report.

    Returns:
        False if a scheme that promises the text of plain decoding gave another one.

    Raises:
        ValueError: an option, the file of prompts or the model is wrong.
        KeyboardInterrupt: it was interrupted; what was measured is printed and written.
    """
    config, engine = config or BenchConfig(), engine or EngineConfig()
    console = console or Console()
    parsed = {text: parse_scheme(text) for text in schemes or DEFAULT_SCHEMES}
    conversations = pick(read_workload(prompts) if prompts else default_workload(), limit)
    for path in (json, report, trace):
        if path is not None:
            check_writable(path)
    most = max(config.batch, max(BATCHES) if break_even else 0)
    opened = open_llms(parsed, engine, most)
    llms = list(opened.values())
    arms = [Arm(PLAIN, llms[0], speculate=False)]
    for text, llm in opened.items():
        arms.append(Arm(text, llm, same_text=parsed[text].verification in SAME_TEXT))

    room = llms[0].engine.runtime.max_model_len
    turns = sum(len(conversation.turns) for conversation in conversations)
    with _tracing(trace, arms), progress_bar("measuring", turns, lines=True) as advance:
        measurement = measure(arms, conversations, config, room, advance)
    if not measurement.answers:
        raise KeyboardInterrupt  # before the first was whole
    lines = summarize(measurement, arms)
    if as_markdown:
        say(console, markdown(lines))
    else:
        show_tables(lines, console)
        say(console, histogram(lines))
    broken = broken_promises(measurement, arms)
    for note in _notes(measurement.skipped, measurement.complete, broken, llms):
        say(console, note)
    more = measurement.complete
    swept = sweep(arms, conversations, config, room) if break_even and more else {}
    left = [batch for batch in BATCHES if batch not in swept] if break_even and more else []
    if left:
        say(console, f"Interrupted: not tried with {left[0]} at once and more.")
    facts = {
        "environment": environment(),
        "bench": asdict(config) | {"prompts": str(prompts or "default"), "limit": limit},
        "engine": [asdict(llm.config) | {"model": engine.model} for llm in llms],
        "summary": [asdict(line) for line in lines],
        "break_even": {str(batch): dict(values) for batch, values in swept.items()},
    }
    if json is not None:
        write_json(json, measurement, facts)
    if report is not None:
        ids = llms[0].chat_prompt([{"role": "user", "content": conversations[0].turns[0]}])
        more = more and len(ids) + 96 < room
        steps = record(arms, ids, config.seed, config.temperature) if more else {}
        about = facts | {"model": Path(engine.model).name, "weights": engine.weights}
        write_whole(report, report_page(lines, measurement, swept, steps, about).encode())
    say_wrote(json, report)
    if left or not measurement.complete:
        raise KeyboardInterrupt  # a script must not take a part for all of it
    return not broken


def sweep(
    arms: list[Arm], conversations: list[Conversation], config: BenchConfig, room: int
) -> dict[int, dict[str, float]]:
    """Speed-ups by conversations at once, on the same first turns for every batch.

    Returns:
        By batch and scheme, each the median over conversations of their own ratio.
    """
    turns = [c.turns[:1] for c in pick(conversations, 4)]
    some = [Conversation(str(i), "all", turns[i % len(turns)]) for i in range(max(BATCHES))]
    found: dict[int, dict[str, float]] = {}
    with progress_bar("by batch", len(BATCHES) * len(some), lines=True) as advance:
        for batch in BATCHES:
            measurement = measure(arms, some, replace(config, batch=batch), room, advance)
            lines = summarize(measurement, arms)
            if not measurement.complete:
                break
            found[batch] = {line.scheme: line.speedup for line in lines}
    return found


@contextmanager
def _tracing(path: Path | None, arms: list[Arm]) -> Iterator[None]:
    """A track for each engine; plain decoding's steps are those of the first."""
    if path is None:
        yield
        return
    with Trace(path) as trace:
        for arm in arms[1:]:
            name = f"{PLAIN} and {arm.name}" if arm is arms[1] else arm.name
            arm.llm.engine.metrics.trace_to(trace.track(name))
        yield
    if trace.whole:
        say_wrote(path)


def _notes(skipped: list[str], complete: bool, broken: list[str], llms: list[LLM]) -> list[str]:
    notes: list[str] = []
    if not complete:
        notes.append("Interrupted: these numbers are of the prompts done so far.")
    if skipped:
        notes.append(
            f"{len(skipped)} turns do not fit into the context with their answer and were left "
            "out: " + ", ".join(skipped)
        )
    for llm in llms:
        metrics = llm.engine.metrics
        if metrics.drafter_errors and llm.config.speculation:
            notes.append(
                f"{llm.config.speculation.method}: the drafter failed {metrics.drafter_errors} "
                f"times, its numbers mean nothing ({metrics.last_drafter_error})"
            )
    if broken:
        notes.append(f"NOT THE SAME TEXT in {len(broken)} answers, which is a fault of foretell:")
        notes.extend(f"  {line}" for line in broken)
    return notes
