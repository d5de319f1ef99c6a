"""What a weight format costs in quality: perplexity of one text, format by format.

    python benchmarks/perplexity.py
    python benchmarks/perplexity.py --text held_out.txt --weights f32 --weights int4

The text is cut into pieces of 512 tokens, each seen from its first token on. KL is the mean
divergence of each position's distribution from the first format's, in nats; *agree* the share of
positions at which both have the same likeliest token.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from foretell.bench.workloads import default_workload
from foretell.llm import LLM
from foretell.progress import progress_bar
from foretell.spec.drafter import run_rows

PIECE = 512


def log_probs(llm: LLM, ids: list[int]) -> torch.Tensor:
    """[T, V] float32 of what follows each token."""
    runtime = llm.engine.runtime
    pages = -(-(PIECE + 1) // runtime.page_size)
    parts: list[torch.Tensor] = []
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        runtime.set_pages(0, list(range(pages)))
        rows = run_rows([0], [0], [piece])
        rows.outputs[:] = range(len(piece))
        parts.append(runtime.forward_target(rows).logits.log_softmax(-1))
    return torch.cat(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="as for foretell generate")
    parser.add_argument("--text", type=Path, help="a text file; the bench's prompts if not given")
    parser.add_argument("--tokens", type=int, default=3072, help="tokens of it at most")
    parser.add_argument("--weights", action="append", help="f32, bf16, int8 and int4 if not given")
    given = parser.parse_args()
    text = "\n\n".join(turn for c in default_workload() for turn in c.turns)
    if given.text:
        text = given.text.read_text(encoding="utf-8")
    table = Table(title=f"{given.model}: perplexity", title_justify="left")
    for column in ("weights", "perplexity", "of the first", "KL", "agree"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    first: torch.Tensor | None = None
    formats = given.weights or ["f32", "bf16", "int8", "int4"]
    with progress_bar("formats", len(formats)) as advance:
        for weights in formats:
            llm = LLM(given.model, weights=weights, max_num_seqs=1)
            ids = llm.tokenizer.encode(text)[: given.tokens]
            found = log_probs(llm, ids)
            inside = [t for t in range(len(ids) - 1) if (t + 1) % PIECE]
            chosen = found[inside].gather(1, torch.tensor(ids)[[t + 1 for t in inside], None])
            loss = float(-chosen.mean())
            if first is None:
                first, least = found, loss
            kl = float((first.exp() * (first - found)).sum(-1).mean())
            agree = float((first.argmax(-1) == found.argmax(-1)).float().mean())
            table.add_row(
                weights, f"{math.exp(loss):.3f}", f"{math.exp(loss - least):.4f}", f"{kl:.4f}",
                f"{agree:.1%}",
            )  # fmt: skip
            llm.close()
            advance(1)
    Console().print(table)


if __name__ == "__main__":
    main()
