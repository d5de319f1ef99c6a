"""What Prometheus reads: the engine's own counters as they stand, and histograms of requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from foretell.answer import Result
from foretell.engine.engine import Engine
from foretell.engine.metrics import Drafts

_FAST = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.0)
_SLOW = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ServerMetrics:
    """A registry of its own, so that servers in one process stay apart."""

    def __init__(self, engine: Engine, schemes: SequenceOf[str]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCounters(engine, schemes))  # type: ignore[arg-type]
        make: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "foretell_http_requests", "Requests answered.", ["route", "method", "status"], **make
        )
        self.answers = Counter(
            "foretell_answers", "Answers ended, by reason.", ["finish_reason"], **make
        )
        self.prompt_tokens = Counter(
            "foretell_prompt_tokens", "Tokens of prompts, of each answer.", **make
        )
        self.ttft = Histogram(
            "foretell_time_to_first_token_seconds", "From arrival.", buckets=_SLOW, **make
        )
        self.itl = Histogram(
            "foretell_inter_token_latency_seconds",
            "Between an answer's tokens, those of one step counting once.",
            buckets=_FAST,
            **make,
        )
        self.e2e = Histogram(
            "foretell_request_seconds", "From arrival to the last token.", buckets=_SLOW, **make
        )

    def ended(self, results: Iterable[Result | None]) -> None:
        """Takes in the answers of a request that is over."""
        for result in results:
            if result is None:
                self.answers.labels("abort").inc()
                continue
            self.answers.labels(str(result.finish_reason)).inc()
            stats = result.stats
            self.prompt_tokens.inc(stats.num_prompt_tokens)
            if stats.first_token is None or stats.last_token is None:
                continue
            self.ttft.observe(stats.ttft)
            self.e2e.observe(stats.last_token - stats.arrival)
            steps = sorted(set(stats.token_times))
            for before, after in pairwise(steps):
                self.itl.observe(after - before)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCounters:
    """Reads the engine when it is asked; nothing is counted twice."""

    def __init__(self, engine: Engine, schemes: SequenceOf[str]) -> None:
        self.engine, self.schemes = engine, schemes

    def collect(self) -> Iterator[Metric]:
        engine, m = self.engine, self.engine.metrics
        yield _counter("engine_steps", "Target passes.", m.num_steps)
        yield _counter("engine_rows", "Rows of all target passes.", m.num_rows)
        yield _counter("generated_tokens", "Tokens of answers.", m.emitted)
        yield _counter(
            "answer_passes",
            "Target passes, counted for each answer: generated tokens by passes is tau.",
            m.num_passes,
        )
        yield _counter("failed_answers", "Answers that ended with an error.", m.num_failed)
        yield _counter("preemptions", "For want of pages.", engine.scheduler.num_preemptions)
        yield _counter("drafter_errors", "Steps that lost their drafts.", m.drafter_errors)
        yield from self._drafts()
        seconds = CounterMetricFamily(
            "foretell_step_seconds", "Time of steps by phase.", labels=["phase"]
        )
        for phase, spent in m.phase_seconds.items():
            seconds.add_metric([phase], spent)
        yield seconds
        yield _gauge("running_answers", "In the batch.", len(engine.scheduler.running))
        yield _gauge("waiting_answers", "In the queue.", len(engine.scheduler.waiting))
        yield _gauge("kv_pages", "Pages of KV memory.", engine.cache.num_pages)
        yield _gauge("kv_pages_free", "Free, or kept for their prefix.", engine.cache.num_free)
        yield _gauge("draft_limit", "Draft tokens a step at most.", engine.k)

    def _drafts(self) -> Iterator[Metric]:
        known = self.engine.metrics.by_scheme
        each = [(name, known.get(i, Drafts())) for i, name in enumerate(self.schemes)]
        for kind in ("drafted", "accepted"):
            whole = CounterMetricFamily(f"foretell_{kind}_tokens", "Of drafts.", labels=["scheme"])
            deep = CounterMetricFamily(
                f"foretell_{kind}_tokens_by_position",
                "Drafts by how deep they reached; position 1 is the first draft token.",
                labels=["scheme", "position"],
            )
            for name, drafts in each:
                whole.add_metric([name], getattr(drafts, kind))
                for i, count in enumerate(list(getattr(drafts, f"{kind}_by_position")), 1):
                    deep.add_metric([name, str(i)], count)
            yield from (whole, deep)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"foretell_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"foretell_{name}", text, value=value)
