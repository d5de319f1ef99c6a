"""llama.cpp as a worker of peers.py: ``run_llamacpp.py GGUF THREADS FOLDER``.

llama-cpp-python's low-level calls, without its per-token Python: what is timed is llama.cpp. The
greedy choice is NumPy's argmax, cheaper than llama.cpp's sampler. Q8_0 and BF16 are made from the
same GGUF by llama.cpp's own quantiser. Prompt lookup drafts are llama-cpp-python's.
"""

from __future__ import annotations

import ctypes
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from serve import serve

FORMATS = {"int8": "Q8_0", "bf16": "BF16", "int4": "Q4_1"}
BATCH = 2048
"""Rows of a batch; llama.cpp itself computes 512 at a time."""
DRAFT = 10


class Context:
    """A model with its KV cache, for 1 sequence or for 8."""

    def __init__(self, path: Path, threads: int, sequences: int) -> None:
        self.model = lib.llama_model_load_from_file(
            str(path).encode(), lib.llama_model_default_params()
        )
        params = lib.llama_context_default_params()
        params.n_ctx = 2304 if sequences == 1 else 256 * sequences
        params.n_batch = BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp made no context for {path.name}")
        self.memory = lib.llama_get_memory(self.context)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(BATCH, 0, 1)

    def clear(self) -> None:
        lib.llama_memory_clear(self.memory, False)

    def forget(self, sequence: int, position: int) -> None:
        lib.llama_memory_seq_rm(self.memory, sequence, position, -1)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One batch of (token, position, sequence, wanted): greedy tokens of the wanted rows."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if lib.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        return [self._argmax(i) for i, row in enumerate(rows) if row[3]]

    def _argmax(self, row: int) -> int:
        logits = lib.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocab,)).argmax())


def prompt_rows(prompt: list[int], sequence: int) -> list[tuple[int, int, int, bool]]:
    last = len(prompt) - 1
    return [(token, i, sequence, i == last) for i, token in enumerate(prompt)]


class LlamaCpp:
    def __init__(self, gguf: str, threads: int, folder: str) -> None:
        self.gguf, self.threads, self.folder = Path(gguf), threads, Path(folder)
        self._log = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.open = cache(self._open)

    def _open(self, weights: str, sequences: int) -> Context:
        return Context(self._file(weights), self.threads, sequences)

    def _file(self, weights: str) -> Path:
        """The GGUF in that format; the given file itself if it is a Q4_1."""
        kind = FORMATS[weights]
        if kind in self.gguf.name:
            return self.gguf
        path = self.folder / f"{self.gguf.stem.removesuffix('.Q4_1')}.{kind}.gguf"
        if not path.exists():
            params = lib.llama_model_quantize_default_params()
            params.nthread, params.allow_requantize = self.threads, True
            params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
            made = path.with_suffix(".part")
            names = str(self.gguf).encode(), str(made).encode()
            if lib.llama_model_quantize(*names, ctypes.byref(params)):
                raise RuntimeError(f"llama.cpp could not turn {self.gguf.name} into {kind}")
            made.rename(path)
        return path

    def about(self) -> dict[str, Any]:
        return {
            "version": f"llama-cpp-python {lib.__version__}",
            "features": lib.llama_print_system_info().decode(),
            "formats": FORMATS,
            "lookup": f"LlamaPromptLookupDecoding(2, {DRAFT})",
        }

    def answer(
        self, weights: str, mode: str, prompts: list[list[int]], tokens: int
    ) -> dict[str, Any]:
        """As run_foretell.py."""
        llm = self.open(weights, len(prompts))
        llm.clear()
        start = time.perf_counter()
        last = llm.run([row for i, p in enumerate(prompts) for row in prompt_rows(p, i)])
        first = time.perf_counter() - start
        passes = 1
        if mode == "lookup":
            passes += self._look_up(llm, [*prompts[0], *last], tokens - 1)
        else:
            lengths = [len(prompt) for prompt in prompts]
            for step in range(tokens - 1):
                where = enumerate(zip(last, lengths, strict=True))
                last = llm.run([(token, n + step, i, True) for i, (token, n) in where])
                passes += 1
        return {
            "first": first,
            "all": time.perf_counter() - start,
            "tokens": tokens * len(prompts),
            "passes": passes,
        }

    def _look_up(self, llm: Context, text: list[int], wanted: int) -> int:
        """Goes on with the text by ``wanted`` tokens; returns how many passes that took."""
        drafter = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=DRAFT)
        passes, end = 0, len(text) + wanted
        while len(text) < end:
            room = end - len(text) - 1
            draft = drafter(np.array(text, dtype=np.intc)).tolist()[:room]
            root = len(text) - 1
            rows = [(token, root + i, 0, True) for i, token in enumerate([text[-1], *draft])]
            chosen = llm.run(rows)
            passes += 1
            taken = 0
            while taken < len(draft) and draft[taken] == chosen[taken]:
                taken += 1
            text.extend(chosen[: taken + 1])
            llm.forget(0, len(text) - 1)
        return passes


if __name__ == "__main__":
    serve(LlamaCpp(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
