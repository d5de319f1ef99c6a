"""Does `foretell bench` measure what `foretell advise` promised? One after the other.

    python benchmarks/advice.py                                   # our own workload
    python benchmarks/advice.py spec_bench.jsonl --clock passes   # on a machine with other work
    python benchmarks/advice.py --clock cpu                       # likewise

With ``--clock passes`` time goes by what passes of so many rows cost (`pass_cost.py`: int8, the
default model), so that neither noise nor other programs matter and what is left is how the two
commands differ. With ``--clock cpu`` it is what this process computes. Both are asked the same
prompts, short ones from all over the file, with one thread.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))
from foretell.bench.advise import advise
from foretell.bench.command import bench
from foretell.bench.run import BenchConfig
from foretell.bench.workloads import default_workload, pick, read_workload
from foretell.config import EngineConfig
from foretell.engine import kept
from foretell.engine.engine import Engine
from foretell.runtime.runner import Runtime

SCHEMES = ["prompt-lookup:k=8", "eagle", "auto"]
ROWS = [1, 2, 4, 8, 16, 48, 1000]
TARGET_MS = [12.8, 13.4, 18.2, 27.7, 45.9, 115.8, 2210.0]
SHORT = 700
"""Letters of a conversation's questions."""


def go_by_passes(folder: Path) -> None:
    """Replaces the clock that engines and benches read, for this process.

    Args:
        folder: for the costs that engines measure by it.
    """
    now = [0.0]
    time.perf_counter = lambda: now[0]
    kept.home = lambda: folder

    def charged(owner: Any, name: str, milliseconds: Any) -> None:
        call = getattr(owner, name)

        def wrapped(*given: Any) -> Any:
            now[0] += milliseconds(*given) / 1000
            return call(*given)

        setattr(owner, name, wrapped)

    def target_or_draft(runtime: Any, model: Any, group: str, ready: Any, taps: Any) -> float:
        rows = len(ready.batch.tokens)
        return float(np.interp(rows, ROWS, TARGET_MS)) if group == "target" else 1 + 0.2 * rows

    charged(Runtime, "_run", target_or_draft)
    charged(Runtime, "run_head", lambda _, head, ready, f: 1.2 + 0.05 * len(ready.batch.tokens))
    charged(Runtime, "draft_chains", lambda _, head, ask, lengths, *more: 1.4 * max(lengths) - 0.9)
    charged(Engine, "step", lambda *_: 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("prompts", nargs="?", type=Path)
    parser.add_argument("--sample", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--clock", choices=["wall", "cpu", "passes"], default="wall")
    args = parser.parse_args()
    given = read_workload(args.prompts) if args.prompts else default_workload()
    short = [replace(c, category="all") for c in given if sum(map(len, c.turns)) < SHORT]
    engine = EngineConfig(threads=1, max_num_seqs=max(args.batches))
    print("| at once | scheme | speed-up: advised | measured | end to end: advised | measured "
          "| tok/s: advised | measured |")  # fmt: skip
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        if args.clock == "passes":
            go_by_passes(Path(folder))
        elif args.clock == "cpu":
            time.perf_counter = time.process_time
        prompts, out = Path(folder) / "prompts.jsonl", Path(folder) / "bench.json"
        lines = [{"id": c.id, "turns": c.turns} for c in pick(short, args.sample)]
        prompts.write_text("\n".join(map(json.dumps, lines)))
        silent, config = Console(file=io.StringIO()), BenchConfig(max_tokens=args.max_tokens)
        findings = advise(
            SCHEMES, config, engine, prompts=prompts, sample=args.sample, batches=args.batches,
            console=silent,
        )  # fmt: skip
        for batch in args.batches:
            own = replace(config, batch=batch)
            bench(SCHEMES, own, engine, prompts=prompts, json=out, console=silent)
            for line in json.loads(out.read_text())["summary"]:
                (f,) = (f for f in findings if (f.batch, f.scheme) == (batch, line["scheme"]))
                print(
                    f"| {batch} | {f.scheme} | {f.speedup:.2f}x | {line['speedup']:.2f}x "
                    f"| {f.end_to_end:.2f}x | {line['end_to_end']:.2f}x "
                    f"| {f.speed:.1f} | {line['speed']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
