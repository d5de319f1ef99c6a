"""A pass of a DeepSeek-V3 of random weights over ranks: as one batch and as two halves, one of
which computes during the other's exchanges; with rows that go to experts all to all, as more than
two ranks may send them, and with sums of what each rank's experts make of all rows.

    python benchmarks/experts.py --ranks 4
    python benchmarks/experts.py --latency 1       # milliseconds more for each exchange
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from foretell.attention.base import Layout
from foretell.attention.cpu import CpuAttention
from foretell.attention.pool import set_num_threads
from foretell.models import moe
from foretell.models.loader import load
from foretell.runtime.kv import KVPool
from foretell.runtime.ranks import Group

SIZES = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 32,
    "num_experts_per_tok": 4, "n_shared_experts": 1, "moe_intermediate_size": 256, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "max_position_embeddings": 512,
}  # fmt: skip
REPEATS, PAGE, CONTEXT = 15, 16, 128


def write(path: Path) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).save_pretrained(path)


class Slow:
    """A group whose exchanges take longer by ``seconds``."""

    def __init__(self, group: Group, seconds: float) -> None:
        self._group, self._seconds = group, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _later(self, wait: Callable[[], Any]) -> Callable[[], Any]:
        until = time.perf_counter() + self._seconds

        def come() -> Any:
            result = wait()
            time.sleep(max(0.0, until - time.perf_counter()))
            return result

        return come

    def start_sum(self, x: torch.Tensor) -> Any:
        return self._later(self._group.start_sum(x))

    def start_exchange(self, *parts: Any) -> Any:
        return self._later(self._group.start_exchange(*parts))


def layout_of(sequences: int) -> Layout:
    """Two rows of each, behind a context."""
    pages = CONTEXT // PAGE + 1
    rows = torch.arange(sequences).repeat_interleave(2).int()
    places = torch.tensor([0, 1]).repeat(sequences).int()
    first = rows * pages * PAGE
    return Layout(
        positions=CONTEXT + places,
        cells=first + CONTEXT + places,
        row_seq=rows,
        prefix=torch.full_like(rows, CONTEXT + 1),
        ancestors=torch.where(places == 1, 3, 1).long(),
        base=torch.full_like(rows, CONTEXT),
        page_table=torch.arange(sequences * pages).view(sequences, pages).int(),
        page_size=PAGE,
    )


def measure(path: Path, group: Group, latency: float) -> None:
    model = load(str(path), "f32", progress=False, ranks=Slow(group, latency))  # type: ignore[arg-type]
    kv_group = model.model.config.kv_group(torch.float32)
    arms = {
        "one batch, all to all": (False, 0),
        "sums": (False, 10**9),
        "halves, all to all": (True, 0),
        "sums ": (True, 10**9),
    }
    for sequences in (4, 16, 64, 256):
        layout, taken = layout_of(sequences), {name: list[float]() for name in arms}
        pool = KVPool({"target": kv_group}, layout.page_table.numel(), PAGE, torch.device("cpu"))
        tokens, attention = torch.arange(2 * sequences).int(), CpuAttention()
        attention.plan(layout)
        for _ in range(REPEATS):
            for name, (group.halves, moe.SENT_FROM) in arms.items():
                group.sum(torch.zeros(1))  # together
                start = time.perf_counter()
                model.model.run(tokens, attention, layout, pool.layers["target"], tokens[:0])
                taken[name].append(time.perf_counter() - start)
        if group.rank == 0:
            times = {name: statistics.median(each) * 1e3 for name, each in taken.items()}
            print(f"{sequences:3} sequences:", *(f"{n} {t:6.1f} ms " for n, t in times.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.0, help="milliseconds")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", nargs=3, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    set_num_threads(1)
    with TemporaryDirectory() as made:
        path, port, rank = given.rank or (made, "0", "0")
        if not given.rank:
            write(Path(path))
        world = given.ranks
        group = Group(int(rank), world, "127.0.0.1", int(port), 60, neighbours=world)
        start = [sys.executable, __file__, f"--latency={given.latency}", f"--ranks={world}"]
        others = [
            subprocess.Popen([*start, "--rank", path, str(group.port), str(other)])
            for other in range(1, 1 if given.rank else world)
        ]
        group.connect()
        measure(Path(path), group, given.latency / 1e3)
        for other in others:
            other.wait(60)
        group.close()


if __name__ == "__main__":
    main()
