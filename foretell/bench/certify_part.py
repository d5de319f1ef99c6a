"""What certifying is made of: the requests that are asked, and what each part of it found."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from foretell.bench.certify_config import CertifyConfig
from foretell.config import EngineConfig, SpeculationConfig
from foretell.llm import LLM
from foretell.models.loader import LoadedModel
from foretell.sequence import SamplingParams, Sequence

log = logging.getLogger("foretell")

MOST_FINDINGS = 10
"""Of one part: what is wrong at all is wrong everywhere."""


@dataclass
class Part:
    """One thing that was checked. It passed if it found nothing."""

    name: str
    claim: str
    """What holds if it passed."""
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """How much was looked at."""
    findings: list[str] = field(default_factory=list[str])
    """What is wrong, one line each."""
    notes: list[str] = field(default_factory=list[str])
    """What was left out or should be known."""
    details: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Findings and tests as data."""

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def more(self) -> int:
        """Findings that are only counted."""
        return self.counts.get("failures", 0) - len(self.findings)

    @property
    def tests(self) -> list[dict[str, Any]]:
        """Of the details those with a p-value."""
        return [detail for detail in self.details if "p" in detail]

    def count(self, name: str, number: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def fail(self, finding: str, **details: Any) -> None:
        """Takes in one finding; beyond the first few they are only counted."""
        self.count("failures")
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(finding)
            if details:
                self.details.append(details)


@dataclass(frozen=True)
class Request:
    """One prompt under one setting."""

    prompt: str
    """Its name."""
    setting: str
    ids: list[int]
    params: SamplingParams

    @property
    def name(self) -> str:
        return f"{self.prompt}, {self.setting}"


@dataclass(frozen=True)
class Rig:
    """Makes the engines that are compared; all of them run one loaded target.

    Args:
        engine: model, limits, and the scheme that is certified.
        target: loaded already.
    """

    engine: EngineConfig
    target: LoadedModel
    config: CertifyConfig

    @property
    def speculation(self) -> SpeculationConfig:
        """The scheme, always drafting: what pays is no matter here. Of several the last one: before
        it comes the lookup, which has the least to get wrong."""
        first = self.engine.speculation
        assert first is not None
        rule = {"verification": first.verification, "threshold": first.threshold}
        return replace((first, *first.also)[-1], adaptive=False, also=(), **rule)

    def make(self, speculation: SpeculationConfig | str | None, slots: int, **changes: Any) -> LLM:
        """An engine with so many slots."""
        rows = max(slots, self.engine.max_num_batched_tokens)
        limits = {"max_num_seqs": slots, "max_num_batched_tokens": rows}
        options: dict[str, Any] = self.engine.options("model", "speculation") | limits | changes
        return LLM(self.target, speculation=speculation, **options)

    def plain_alone(self) -> LLM:
        """The reference: no drafter, one request at a time, nothing shared."""
        return self.make(None, 1, prefix_caching=False)


def begin(
    llm: LLM, asked: Iterable[tuple[list[int], SamplingParams]], least: int, *, stay: bool
) -> list[Sequence]:
    """Runs requests together until each has so many tokens or has ended.

    Args:
        asked: token ids and parameters.
        stay: those that have enough stay in, else they leave at once.
    """
    sequences = [s for ids, own in asked for s in llm.sequences(ids, own, speculate=True)]
    for sequence in sequences:
        llm.engine.add(sequence)
    while any(not s.finished and s.num_output < least for s in sequences):
        with torch.inference_mode():
            llm.engine.step()
        llm.engine.check()
        if not stay:
            leave(llm, [s for s in sequences if s.num_output >= least])
    return sequences


def leave(llm: LLM, sequences: list[Sequence]) -> None:
    """Ends requests before they are done."""
    for sequence in sequences:
        llm.abort(sequence.request_id)
    llm.engine.drain()


@contextmanager
def guarded(part: Part) -> Iterator[None]:
    """An engine that breaks has failed the part."""
    try:
        yield
    except ValueError:  # an option that does not fit: the user's to put right
        raise
    except Exception as error:
        log.error("certifying: %s", part.name, exc_info=error)
        part.fail(f"the engine broke down: {type(error).__name__}: {error}")


def check_drafter(part: Part, llm: LLM, drafted: int) -> None:
    """A scheme that failed or never drafted shows nothing."""
    metrics = llm.engine.metrics
    if metrics.drafter_errors:
        part.fail(
            f"the drafter failed {metrics.drafter_errors} times ({metrics.last_drafter_error}); "
            "the text stayed, but nothing is shown about this draft"
        )
    elif not drafted:
        part.fail("nothing was drafted: take other prompts or a scheme that drafts for them")
