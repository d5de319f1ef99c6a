"""Is the machine idle, and did it stay so? Processor time of everybody else, from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

IDLE = 0.05
"""Share of all cores that other programs may take."""


class Quiet:
    """Watches what programs other than this one and ``pids`` take. Only on Linux; elsewhere every
    machine counts as idle."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self._since = self._now()

    def start(self) -> None:
        """`others` counts from here."""
        self._since = self._now()

    def wait(self, seconds: float = 15.0) -> bool:
        """Waits until the machine is idle; False if it still is not. Then `others` starts anew."""
        end = time.monotonic() + seconds
        while True:
            self._since = self._now()
            time.sleep(0.5)
            idle = self.others() <= IDLE
            if idle or time.monotonic() > end:
                self._since = self._now()
                return idle

    def others(self) -> float:
        """Share of all cores that others took since `wait`, a hypervisor's other guests included
        where it tells."""
        (then, busy_then, own_then), (now, busy, own) = self._since, self._now()
        spent = (busy - busy_then) - (own - own_then)
        return max(0.0, spent / ((now - then) * (os.cpu_count() or 1)))

    def _now(self) -> tuple[float, float, float]:
        """Seconds: the clock, all cores' busy time, our own."""
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return time.monotonic(), 0.0, 0.0
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, interrupts, soft, steal = (int(f) for f in fields[:8])
        busy = (user + nice + system + interrupts + soft + steal) / tick
        own = sum(os.times()[:2])
        for pid in self.pids:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            own += (int(words[11]) + int(words[12])) / tick
        return time.monotonic(), busy, own
