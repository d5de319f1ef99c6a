"""Host work that is hidden behind device work, and how long the device is idle, for each step.

    python benchmarks/overlap.py --threads 1
    python benchmarks/overlap.py --tensor-parallel 2

For plain decoding and for both schedules (a draft model of 4 tokens, a head of one token), with 1
and 64 sequences, with device work on the caller's thread and beside it; over ranks it is always
beside. Both ways take turns, so that a machine that slows down does so for both.

*Host* is the engine's own time in a step: its phases without what it waits for the device. *Hidden*
is the part of that during which the device was at work. *Idle* is a step's time without device
work; sampling counts as that. Medians over steps without prompts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from foretell.bench.environment import environment
from foretell.bench.workloads import default_workload
from foretell.llm import LLM
from foretell.runtime.parallel import ParallelRuntime
from foretell.runtime.rank import memory
from foretell.runtime.stream import Inline, Worker
from foretell.sequence import SamplingParams

SCHEMES = {
    "plain": None,
    "draft model, k=4": "draft-model:weights=int4,k=4,adaptive=false",
    "head, k=1": "eagle:k=1,adaptive=false",
}
PROMPT = 17
"""Tokens: a page and one more, so that after the first run all but that one are in the cache."""
Spans = list[tuple[float, float]]


@dataclass
class Recorder:
    """A listener that keeps when the host and the device were busy."""

    steps: list[tuple[Spans, Mapping[str, int]]] = field(default_factory=list)
    works: Spans = field(default_factory=list)
    _phases: Spans = field(default_factory=list)

    def phase(self, name: str, start: float, end: float) -> None:
        if name == "schedule":
            self._phases = []
        self._phases.append((start, end))

    def work(self, name: str, start: float, end: float) -> None:
        self.works.append((start, end))

    def step(self, counts: Mapping[str, int]) -> None:
        self.steps.append((self._phases, dict(counts)))


class Waits:
    """When the engine waited for its device."""

    def __init__(self, llm: LLM) -> None:
        self.spans: Spans = []
        clock, runtime, inner = llm.engine.metrics.now, llm.engine.runtime, llm.engine.runtime.wait

        def wait(work):
            start = clock()
            try:
                return inner(work)
            finally:
                self.spans.append((start, clock()))

        runtime.wait = wait


def shared(one: Spans, others: Spans) -> float:
    """Seconds in which spans of both lie; those of one list do not overlap."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in one for c, d in others)


def measure(llm: LLM, prompts: list[list[int]], tokens: int) -> list[tuple[float, ...]]:
    """Of each step: its seconds, the host's, hidden ones, the device's idle ones, new tokens."""
    recorder, waits = Recorder(), Waits(llm)
    llm.engine.metrics.trace_to(recorder)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    llm.engine.runtime.wait = type(llm.engine.runtime).wait.__get__(llm.engine.runtime)
    found: list[tuple[float, ...]] = []
    for (phases, counts), (following, _) in zip(recorder.steps, recorder.steps[1:], strict=False):
        if counts["batch"] < len(prompts) or counts["rows"] > 16 * len(prompts):
            continue  # prompts, or answers that have ended
        start, end = phases[0][0], following[0][0]
        near = lambda spans, s=start, e=end: [x for x in spans if x[1] > s and x[0] < e]  # noqa: E731
        busy, idle_host = near(recorder.works), near(waits.spans)
        host = sum(b - a for a, b in phases) - shared(phases, idle_host)
        hidden = shared(phases, busy) - sum(
            shared([wait], [work]) for wait in idle_host for work in busy
        )
        idle = end - start - shared([(start, end)], busy)
        found.append((end - start, host, hidden, idle, counts["emitted"]))
    return found


def line(name: str, batch: int, where: str, steps: list[tuple[float, ...]]) -> str:
    step, host, hidden, idle, _ = (1e3 * statistics.median(x) for x in zip(*steps, strict=True))
    share = sum(x[2] for x in steps) / sum(x[1] for x in steps)
    rate = sum(x[4] for x in steps) / sum(x[0] for x in steps)
    return (
        f"| {name} | {batch} | {where} | {step:.2f} | {host:.2f} | {hidden:.2f} | {share:.0%} "
        f"| {idle:.2f} | {rate:.1f} |"
    )


def tell_memory(llm: LLM) -> None:
    """What each rank holds of target and draft."""
    ours = memory(llm.engine.runtime, llm.engine.drafter)
    for rank, each in enumerate([ours, *llm.engine.runtime.leader.memory]):
        shown = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in each.items())
        print(f"rank {rank}, MiB: {shown}")


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """[count] prompts, each a stretch of the workload's text."""
    text = "\n\n".join(turn for c in default_workload() for turn in c.turns)
    ids = llm.tokenizer.encode(text)
    most = len(ids) // PROMPT
    return [ids[PROMPT * (i % most) :][:PROMPT] for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for foretell generate")
    parser.add_argument("--threads", type=int, help="CPU threads, all cores if not given")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    print(
        "| | sequences | device work | ms a step | host ms | hidden ms | hidden | idle ms | tok/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    model, ranks, most = given.model, given.tensor_parallel, max(given.batches)
    for name in given.schemes:
        llm = LLM(
            model, speculation=SCHEMES[name], tensor_parallel=ranks,
            threads=given.threads, max_num_seqs=most, max_model_len=256,
        )  # fmt: skip
        runtime = llm.engine.runtime
        streams = {"over ranks": runtime.stream}
        if ranks == 1:
            model = llm.target  # loaded once for all schemes
            streams = {"on the caller's thread": Inline(), "beside it": Worker("pass")}
        for batch in given.batches:
            asked, found = prompts(llm, batch), {where: [] for where in streams}
            for repeat in range(given.repeats + 1):
                for where, stream in streams.items():
                    runtime.stream = stream
                    steps = measure(llm, asked, given.tokens if repeat else 2)
                    llm.engine.device.settle()
                    if repeat:  # the first one warms up
                        found[where] += steps
            for where, steps in found.items():
                print(line(name, batch, where, steps), flush=True)
        if isinstance(runtime, ParallelRuntime):
            tell_memory(llm)
        for stream in streams.values():
            stream.close()
        llm.close()
    facts = environment()
    print(f"\n{facts['cpu']}, {facts['threads']} threads, {facts['packages']}")


if __name__ == "__main__":
    main()
