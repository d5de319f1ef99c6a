"""Steps as they followed each other: taken from an engine, drawn one lane an arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from markupsafe import Markup

from foretell.bench.plots import Picture, colour
from foretell.bench.run import Arm
from foretell.engine.metrics import PHASES
from foretell.sequence import SamplingParams

_WIDTH, _LANE, _BAR = 900, 74, 30
_MOST_STEPS = 8


@dataclass(frozen=True)
class Step:
    """One step; times in seconds."""

    phases: list[tuple[str, float, float]]  # name, start, end
    counts: Mapping[str, int]

    @property
    def start(self) -> float:
        return self.phases[0][1]

    @property
    def end(self) -> float:
        return self.phases[-1][2]


@dataclass
class Recorder:
    """A listener that keeps every step in memory: for short runs."""

    steps: list[Step] = field(default_factory=list[Step])
    _phases: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])

    def phase(self, name: str, start: float, end: float) -> None:
        if name == "schedule":
            self._phases = []
        self._phases.append((name, start, end))

    def work(self, name: str, start: float, end: float) -> None:
        """The device's own times are not drawn."""

    def step(self, counts: Mapping[str, int]) -> None:
        self.steps.append(Step(self._phases, dict(counts)))


def record(arms: list[Arm], ids: list[int], seed: int, temperature: float) -> dict[str, list[Step]]:
    """Some steps of each arm on one prompt, those after the prompt's own and a few more. Nothing
    is measured with them."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=96)
    found: dict[str, list[Step]] = {}
    for arm in arms:
        recorder = Recorder()
        arm.llm.engine.metrics.trace_to(recorder)
        arm.llm.generate(ids, params, speculate=arm.speculate)
        decoding = [step for step in recorder.steps if step.counts["rows"] < len(ids)]
        found[arm.name] = _window(decoding)
    return found


def _window(steps: list[Step]) -> list[Step]:
    """The consecutive steps whose tokens a step are nearest to the whole run's: neither the best
    nor the worst."""
    if len(steps) <= _MOST_STEPS:
        return steps
    emitted = [step.counts["emitted"] for step in steps]
    mean = sum(emitted) / len(emitted)
    at = min(
        range(len(steps) - _MOST_STEPS),
        key=lambda i: abs(sum(emitted[i : i + _MOST_STEPS]) / _MOST_STEPS - mean),
    )
    return steps[at : at + _MOST_STEPS]


def timeline(lanes: dict[str, list[Step]]) -> Markup:
    """Steps to one scale of time, phases in colour, each step's new tokens above it; empty where
    there are none."""
    shown = {name: steps for name, steps in lanes.items() if steps}
    if not shown:
        return Markup()
    # As far as every lane reaches: none is empty at its end.
    span = min(steps[-1].end - steps[0].start for steps in shown.values())
    picture, x, y = Picture("steps and their phases over time", _WIDTH), 0.0, 56.0
    for phase in PHASES:
        picture.bar(x, 20, 14, 10, _fill(phase))
        picture.text(x + 20, 29.5, phase)
        x += 44 + 8 * len(phase)
    for name, steps in shown.items():
        origin, tokens = steps[0].start, 0
        for step in steps:
            left = _WIDTH * (step.start - origin) / span
            if left >= _WIDTH - 8:
                break
            tokens += step.counts["emitted"]
            picture.text(min(left + 1, _WIDTH - 18), y + 32, f"+{step.counts['emitted']}")
            for phase, start, end in step.phases:
                x = _WIDTH * (start - origin) / span
                wide = min(_WIDTH * (end - start) / span, _WIDTH - x)
                if wide > 0:
                    hint = f"{phase}: {1000 * (end - start):.2f} ms"
                    picture.bar(x, y + 38, wide, _BAR, _fill(phase), hint)
        picture.text(0, y + 12, f"{name}: {tokens} tokens in {1000 * span:.0f} ms", "label")
        y += _LANE + 14
    return picture.svg(y)


def _fill(phase: str) -> str:
    return f"fill:{colour(PHASES.index(phase) + 5)}"
