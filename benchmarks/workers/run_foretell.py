"""foretell as a worker of peers.py: ``run_foretell.py MODEL THREADS``."""

from __future__ import annotations

import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from prompts import prompts
from serve import serve

from foretell.bench.environment import environment
from foretell.llm import LLM
from foretell.sequence import SamplingParams
from foretell.spec.tree_shape import DynamicShape, chain

sys.path.insert(0, str(Path(__file__).parent.parent))
from tree_cost import parents_of, verification

LOOKUP = "prompt-lookup:k=12"
BITS = {"bf16": 16, "int8": 8, "int4": 5}
"""Of a weight, its share of scales and minima included where they matter."""


class Foretell:
    def __init__(self, model: str, threads: int) -> None:
        self.model, self.threads = model, threads
        self.open = cache(self._open)

    def _open(self, weights: str, mode: str) -> LLM:
        plain = None if mode == "plain" else self.open(weights, "plain").target
        return LLM(
            plain or self.model,
            weights=weights,
            speculation=LOOKUP if mode == "lookup" else None,
            threads=self.threads,
            max_num_seqs=8,
            max_model_len=2304,
            kv_memory="1GiB",
            prefix_caching=False,  # no prompt is computed before its turn
        )

    def about(self) -> dict[str, Any]:
        return environment() | {"threads": self.threads, "lookup": LOOKUP}

    def prompts(self, weights: str) -> dict[str, list[list[int]]]:
        return prompts(self.open(weights, "plain"))

    def answer(
        self, weights: str, mode: str, prompts: list[list[int]], tokens: int
    ) -> dict[str, Any]:
        """Greedy answers of exactly ``tokens`` tokens to all prompts at once.

        Returns:
            Seconds to the first token and to the last, tokens in all, target passes of the first.
        """
        llm = self.open(weights, mode)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        results = llm.generate(prompts, params)
        end = time.perf_counter()
        return {
            "first": (results[0].stats.first_token or end) - start,
            "all": end - start,
            "tokens": sum(len(result.token_ids) for result in results),
            "passes": results[0].stats.num_passes,
        }

    def passes(self, weights: str, context: int, seconds: float) -> dict[str, Any]:
        """Milliseconds of a target pass over 1 to 16 rows, and over a root with 32 nodes as chain
        and as tree, all taking turns; ratios are medians over rounds."""
        runtime = self.open(weights, "passes").engine.runtime
        assert runtime.kv is not None
        runtime.set_pages(0, list(range(runtime.page_table.shape[1])))
        for keys, values in runtime.kv.layers["target"]:
            keys.normal_()
            values.normal_()
        shapes = {
            **{str(rows): parents_of(chain(rows - 1)) if rows > 1 else [-1] for rows in (1, 4, 8)},
            "16": parents_of(chain(15)),
            "chain 32": parents_of(chain(32)),
            "tree 32": parents_of(DynamicShape(6, 4, 32).fixed()),
        }
        rows = {name: verification(parents, context) for name, parents in shapes.items()}
        times: dict[str, list[float]] = {name: [] for name in rows}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times["1"]) < 8:
            for name, each in rows.items():
                start = time.perf_counter()
                runtime.forward_target(each)
                times[name].append(1000 * (time.perf_counter() - start))
        times = {name: each[3:] for name, each in times.items()}  # the first ones warm up
        ratios = {
            name: statistics.median(a / b for a, b in zip(each, times["1"], strict=True))
            for name, each in times.items()
        }
        pairs = zip(times["tree 32"], times["chain 32"], strict=True)
        ratios["tree/chain"] = statistics.median(a / b for a, b in pairs)
        return {"ms": {n: statistics.median(each) for n, each in times.items()}, "ratio": ratios}

    def floor(self, weights: str) -> dict[str, float]:
        """Bytes of the weights that a pass reads, and bytes a second that this machine reads."""
        c = self.open(weights, "plain").target.config
        heads = 2 * (c.num_heads + c.num_kv_heads) * c.head_dim
        layer = c.hidden_size * (heads + 3 * c.intermediate_size)
        size = (c.num_layers * layer + c.vocab_size * c.hidden_size) * BITS[weights] / 8
        data = torch.ones(2**25, dtype=torch.int64)  # 256 MiB, more than caches hold
        best = 0.0
        for threads in (1, self.threads):  # one may do as well as all, or better
            torch.set_num_threads(threads)
            for _ in range(6):
                start = time.perf_counter()
                torch.sum(data)
                best = max(best, data.nbytes / (time.perf_counter() - start))
        torch.set_num_threads(1)  # as the engine has it
        return {"weight_bytes": size, "bytes_per_second": best}


if __name__ == "__main__":
    serve(Foretell(sys.argv[1], int(sys.argv[2])))
