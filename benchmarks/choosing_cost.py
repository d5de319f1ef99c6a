"""What choosing budgets costs: the controller's own time a step, beside a simulated engine's steps.

    python benchmarks/choosing_cost.py

Seat by seat as the engine calls it, learning included; the median over steps, in microseconds. The
simulated engine has the costs of the default model: a step of one row takes 4 ms, each further row
0.06 ms.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.spec.world import Draft, World, controller


def main() -> None:
    for name, drafts in {
        "one scheme": lambda: [Draft(lambda slot, step: 0.75, level=4e-4, call=1e-4)],
        "two schemes": lambda: [
            Draft(lambda slot, step: 0.75, level=4e-4, call=1e-4),
            Draft(lambda slot, step: 0.9 if (step // 60 + slot) % 2 else 0.1),
        ],
    }.items():
        for batch in (1, 4, 8, 16, 32):
            world = World(drafts(), lambda step, batch=batch: batch, row=0.015)
            adaptive = controller(world)
            spent: list[float] = []
            calls = [adaptive.choose, adaptive.learn, adaptive.passed]
            calls += [adaptive.costs.learn_target, adaptive.costs.learn_propose]
            calls += [adaptive.costs.learn_observe, adaptive.costs.learn_beside]
            for call in calls:
                owner = call.__self__  # type: ignore[attr-defined]
                setattr(owner, call.__name__, timed(call, spent))
            steps: list[float] = []
            for _ in range(400):
                before = world.seconds
                spent.clear()
                world.run(1, adaptive)
                steps.append(sum(spent) / (world.seconds - before))
                spent.append(0.0)
            took = 1e6 * statistics.median(steps) * world.seconds / 400
            print(f"{name}, {batch:2} at once: {took:5.0f} us, {statistics.median(steps):.2%}")


def timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """Notes how long each call takes."""

    def run(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments)
        spent.append(time.perf_counter() - start)
        return result

    return run


if __name__ == "__main__":
    main()
