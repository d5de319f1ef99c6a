"""OpenVINO GenAI as a worker of peers.py: ``run_openvino.py HF_DIRECTORY THREADS FOLDER``.

Models are exported from the same weights with optimum-intel, once, into FOLDER. The computing
precision is the faster one of each case on an AVX-512 processor: float32 (with int8 products) for
one sequence and bf16 for eight; bf16 weights are kept as float16, which OpenVINO prefers, and
computed in bf16. Its KV cache is its default, uint8.
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from serve import serve

FORMATS = {"int8": ["int8"], "bf16": ["fp16"], "int4": ["int4", "--group-size", "64"]}
"""Of optimum's export; 64 because 128 does not divide the model's width of 576."""
DRAFT, NGRAM = 5, 3


class OpenVino:
    def __init__(self, source: str, threads: int, folder: str) -> None:
        self.source, self.threads, self.folder = source, threads, Path(folder)
        self.open = cache(self._open)

    def _export(self, weights: str) -> Path:
        path = self.folder / f"openvino-{weights}"
        if not (path / "openvino_model.xml").exists():
            program = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
            options = ["--task", "text-generation-with-past", "--weight-format", *FORMATS[weights]]
            command = [*program, "-m", self.source, *options, str(path)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"optimum-intel: {done.stderr.strip()[-300:]}")
        return path

    def _open(self, weights: str, kind: str) -> Any:
        one = weights != "bf16" and kind != "batch"
        settings = {
            "INFERENCE_NUM_THREADS": self.threads,
            "INFERENCE_PRECISION_HINT": "f32" if one else "bf16",
            "PERFORMANCE_HINT": "LATENCY",
        }
        schedule = genai.SchedulerConfig()
        schedule.enable_prefix_caching = False
        path = str(self._export(weights))
        if kind == "batch":
            schedule.max_num_batched_tokens = 2048
            schedule.max_num_seqs = 8
            schedule.dynamic_split_fuse = True
            schedule.cache_size = 1
            return genai.ContinuousBatchingPipeline(path, schedule, "CPU", settings)
        lookup = {"prompt_lookup": True} if kind == "lookup" else {}
        return genai.LLMPipeline(path, "CPU", scheduler_config=schedule, **lookup, **settings)

    def about(self) -> dict[str, Any]:
        return {
            "version": f"openvino-genai {genai.__version__}",
            "formats": {name: " ".join(options) for name, options in FORMATS.items()},
            "lookup": f"num_assistant_tokens={DRAFT}, max_ngram_size={NGRAM}",
        }

    def answer(
        self, weights: str, mode: str, prompts: list[list[int]], tokens: int
    ) -> dict[str, Any]:
        """As run_foretell.py."""
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        pipeline = self.open(weights, "batch" if len(prompts) > 1 else mode)
        if mode == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = DRAFT, NGRAM
        if len(prompts) > 1:
            start = time.perf_counter()
            results = pipeline.generate(inputs, [config] * len(inputs))
            end = time.perf_counter()
            made = sum(len(result.m_generation_ids[0]) for result in results)
            return {"first": 0.0, "all": end - start, "tokens": made}
        mask = ov.Tensor(np.ones((1, len(prompts[0])), dtype=np.int64))
        start = time.perf_counter()
        result = pipeline.generate(genai.TokenizedInputs(inputs[0], mask), config)
        end = time.perf_counter()
        metrics = result.perf_metrics
        return {
            "first": metrics.get_ttft().mean / 1000,
            "all": end - start,
            "tokens": len(result.tokens[0]),
        }


if __name__ == "__main__":
    serve(OpenVino(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
