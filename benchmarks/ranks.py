"""What ranks of one node exchange, and what it costs: the buffer of a step by shared memory and by
broadcast; outcomes sent against logits given to all and sampling repeated.

    python benchmarks/ranks.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from foretell.runtime.channel import Broadcast, SharedMemory
from foretell.runtime.ranks import Group
from foretell.runtime.sampling import draw

HIDDEN, VOCAB, REPEATS = 576, 49152, 100
"""Sizes of SmolLM2-135M."""


def timed(work: Callable[[], object]) -> float:
    """Median microseconds."""
    taken: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def measure(group: Group, shared: SharedMemory, echo: SharedMemory) -> None:
    leads, broadcast = group.rank == 0, Broadcast(group.words())

    def there_and_back(channel: SharedMemory | Broadcast, words: np.ndarray) -> None:
        """A buffer that is answered by a byte or so: its way, and the shortest way back."""
        if leads:
            channel.send(words)
            echo.receive()
        else:
            channel.receive()
            echo.send(words[:1])

    lines: list[tuple[str, float]] = []
    for rows in (1, 8, 512):
        words = np.zeros(11 * rows + 64, np.int32)
        for name, channel in (("shared memory", shared), ("broadcast", broadcast)):
            taken = timed(lambda c=channel, w=words: there_and_back(c, w))
            lines.append((f"buffer of {rows} rows by {name}, and a word back", taken))
    for rows in (1, 8, 64):
        x = torch.randn(rows, HIDDEN)
        lines.append((f"sum over ranks of {rows} rows", timed(lambda x=x: group.sum(x.clone()))))
    for rows in (1, 8):
        part, whole = torch.randn(rows, VOCAB // 2), torch.randn(rows, VOCAB)
        everywhere = [[torch.empty_like(part) for _ in range(2)]]
        lines.append((f"logits of {rows} rows to rank 0", timed(lambda p=part: group.gather(p))))
        lines.append((
            f"logits of {rows} rows to all",
            timed(lambda p=part, e=everywhere: group._exchange.allgather(e, [p]).wait()),
        ))  # fmt: skip
        seeds = list(range(rows))
        taken = timed(lambda w=whole, s=seeds: draw(w, [False] * len(s), s, s))
        lines.append((f"drawing {rows} tokens, on every rank", taken))
    if leads:
        for name, taken in lines:
            print(f"{name:<55} {taken:>8.0f} us")


def main() -> None:
    import socket

    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        port, file, one, two = map(int, sys.argv[1:])
        group = Group(1, 2, "127.0.0.1", port, 60, neighbours=2)
        ways = [socket.socket(fileno=fd) for fd in (one, two)]
    else:
        group, file = Group(0, 2, "127.0.0.1", 0, 60, neighbours=2), SharedMemory.file(1 << 16)
        pairs = [socket.socketpair() for _ in range(2)]
        ways = [pair[0] for pair in pairs]
        theirs = [pair[1].fileno() for pair in pairs]
        subprocess.Popen(
            [sys.executable, __file__, *map(str, (group.port, file, *theirs))],
            pass_fds=(file, *theirs),
        )
    group.connect()
    measure(group, SharedMemory(file, ways[:1]), SharedMemory(file, ways[1:]))
    group.close()


if __name__ == "__main__":
    main()
