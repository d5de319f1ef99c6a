"""The ranks of a tensor-parallel group: how they meet, what they exchange, who is still there.

Everything that can wait is bounded. Each rank writes a pulse into the store that rank 0 holds;
rank 0 looks at the pulses whenever it waits, and a rank whose store has gone ends itself.
"""

# pyright: reportPrivateImportUsage=false
# (torch documents its stores where they are imported from here, but does not say so in code)

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foretell.runtime.channel import share

_AGES = timedelta(days=3650)
"""For waits that end with the process: a pulse that fails ends it."""
_BEATS = 10
"""Pulses within the time after which a rank counts as lost."""
_GRACE = 120.0
"""Seconds until the first pulse: a process starts and imports torch."""
_LOST = 3
"""Exit status of a rank that has lost rank 0."""


class RankError(ConnectionError):
    """A rank has died, hangs or does not fit; the message names it."""


class Group:
    """One rank's way to the others. Torch's process groups as objects of their own, so that
    several engines in one process each have theirs.

    Args:
        host, port: of the store, which rank 0 holds (port 0: any free one, see `port`).
        timeout: seconds without a sign of life after which a rank is lost.
        neighbours: ranks on this node, which share its memory and cores.
        held: the store is held by somebody else (torchrun's agent).
        device: where the tensors lie: gloo on a CPU, NCCL on GPUs.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        host: str,
        port: int,
        timeout: float,
        *,
        neighbours: int,
        held: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.world, self.timeout = rank, world, timeout
        self.neighbours = neighbours
        self.device = device or torch.device("cpu")
        self.sharers = neighbours if self.device.type == "cpu" else 1
        """Ranks that take their KV from the same memory."""
        patience = timedelta(seconds=timeout)
        holds, listening = rank == 0 and not held, None
        if holds and host == "127.0.0.1":  # else it would listen on every address
            listening = socket.create_server((host, port))
            port = listening.getsockname()[1]
        store = dist.TCPStore(
            host, port, None, holds, patience, wait_for_workers=False,
            master_listen_fd=listening.detach() if listening else None,
        )  # fmt: skip
        self.port = store.port
        # Of its own connection: a pulse never waits behind a call that does.
        pulses = dist.TCPStore(host, self.port, None, False, patience, wait_for_workers=False)
        self._store, self._pulses = (dist.PrefixStore("foretell", s) for s in (store, pulses))
        self._ended = threading.Event()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._local = host in ("127.0.0.1", "localhost")
        self.halves = False
        self._exchange: Any = None
        self.exchanges = 0
        """Exchanges that this rank has begun: who is behind is who holds the others up."""
        if rank:
            threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def connect(self) -> None:
        """Opens the connections for exchanges; without them each rank sees what it has itself. All
        ranks must come, and soon.

        Raises:
            RuntimeError: one does not.
        """
        self._exchange = self._process_group("exchange", timedelta(seconds=2 * self.timeout))

    def words(self) -> dist.ProcessGroup:
        """Another process group, for host memory, whose waits are ended by pulses alone.

        Raises:
            RuntimeError: as `connect`.
        """
        patience = timedelta(seconds=2 * self.timeout)
        group = self._process_group("words", patience, host_only=True)
        group._set_default_timeout(_AGES)
        return group

    def _process_group(self, name: str, timeout: timedelta, host_only: bool = False) -> Any:
        store = dist.PrefixStore(name, self._store)
        if self.device.type == "cuda" and not host_only:
            settings = dist.ProcessGroupNCCL.Options()
            settings._timeout = timeout
            return dist.ProcessGroupNCCL(store, self.rank, self.world, settings)
        gloo: Any = dist.ProcessGroupGloo
        if not self._local:
            return gloo(store, self.rank, self.world, timeout)
        settings = gloo._Options()
        settings._timeout = timeout
        settings._devices = [gloo.create_device(hostname="127.0.0.1")]  # nobody else may connect
        return gloo(store, self.rank, self.world, settings)

    # ---- exchanges

    def sum(self, x: Tensor) -> Tensor:
        """`start_sum`, and the wait for it."""
        return self.start_sum(x)()

    def start_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """See `models.sharding.Ranks`. Two terms have one sum in any order; of more, a ring or a
        tree would add in an order that depends on the place in the buffer, so they are added here.
        """
        self.exchanges += 1
        x, exchange = x.contiguous(), self._exchange
        if exchange is None:
            return lambda: x
        parts = [x] if self.world == 2 else [torch.empty_like(x) for _ in range(self.world)]
        work = exchange.allreduce(parts) if self.world == 2 else exchange.allgather([parts], [x])

        def wait() -> Tensor:
            work.wait()
            total = parts[0]
            for part in parts[1:]:
                total += part
            return total

        return wait

    def start_exchange(
        self, sent: SequenceOf[Tensor], come: SequenceOf[int]
    ) -> Callable[[], SequenceOf[Tensor]]:
        """See `models.sharding.Ranks`."""
        self.exchanges += 1
        sizes, rows = [len(part) for part in sent], torch.cat([*sent])
        got = rows.new_empty(sum(come), rows.shape[1])
        settings = dist.AllToAllOptions()
        work = self._exchange.alltoall_base(got, rows, list(come), sizes, settings)

        def wait() -> SequenceOf[Tensor]:
            work.wait()
            assert rows is not None  # kept until it is sent
            return got.split(list(come))

        return wait

    def gather(self, x: Tensor) -> SequenceOf[Tensor]:
        """See `models.sharding.Ranks`."""
        if not len(x):  # nothing to tell, and every rank knows it
            return []
        self.exchanges += 1
        settings = dist.GatherOptions()
        settings.rootRank = 0
        parts = [] if self.rank else [torch.empty_like(x) for _ in range(self.world)]
        if self._exchange is not None:
            self._exchange.gather([] if self.rank else [parts], [x.contiguous()], settings).wait()
        return parts

    def share(self, x: Tensor) -> Tensor:
        """See `models.sharding.Ranks`."""
        self.exchanges += 1
        share(x := x.contiguous(), self._exchange)
        return x

    # ---- agreement

    def tell(self, stage: str, facts: Any) -> None:
        """The others' part of `hear`."""
        self._store.set(f"{stage}/{self.rank}", json.dumps(facts))

    def ask(self, stage: str, facts: Any) -> Any:
        """`tell`, and what rank 0 answers.

        Raises:
            RankError: rank 0 refuses.
        """
        self.tell(stage, facts)
        while not self._store.check([f"{stage}/answer"]):
            time.sleep(0.02)
        answer = json.loads(self._store.get(f"{stage}/answer"))
        if isinstance(answer, str):
            raise RankError(answer)
        return answer

    def hear(self, stage: str, lost: Callable[[], str | None]) -> list[Any]:
        """What every other rank tells at this stage, in order.

        Args:
            lost: see `lost`; asked again and again.

        Raises:
            RankError: a rank is lost.
        """
        keys = [f"{stage}/{rank}" for rank in range(1, self.world)]
        while not self._store.check(keys):
            if (reason := lost()) is not None:
                raise RankError(reason)
            time.sleep(0.02)
        return [json.loads(self._store.get(key)) for key in keys]

    def answer(self, stage: str, facts: Any) -> None:
        """Rank 0's answer to all that asked; a text is a refusal."""
        self._store.set(f"{stage}/answer", json.dumps(facts))

    def told(self, rank: int, stage: str) -> Any:
        """What a rank has told, None if nothing yet."""
        key = f"{stage}/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    # ---- signs of life

    def lost(self) -> str | None:
        """On rank 0: which rank has given no sign of life for too long, None if all did."""
        now = time.monotonic()
        for rank in range(1, self.world):
            pulse, since = self._seen.get(rank, (b"", now))
            if (found := self._pulse(rank)) != pulse or rank not in self._seen:
                self._seen[rank] = (found, now)
            elif now - since > (self.timeout if found else max(self.timeout, _GRACE)):
                return f"rank {rank} has given no sign of life for {self.timeout:g} s"
        return None

    def behind(self) -> str | None:
        """On rank 0: which rank holds the others up, None if that is rank 0."""
        counts = [self.exchanges]
        counts += [int((self._pulse(rank) or b"0 0").split()[1]) for rank in range(1, self.world)]
        last = min(range(1, self.world), key=counts.__getitem__)
        if self.exchanges < counts[last]:
            return None
        return f"rank {last} has not taken part in a pass for {self.timeout:g} s"

    def _pulse(self, rank: int) -> bytes:
        key = f"pulse/{rank}"
        return self._pulses.get(key) if self._pulses.check([key]) else b""

    def _beat(self) -> None:
        beats = 0
        while not self._ended.wait(self.timeout / _BEATS):
            beats += 1
            try:
                self._pulses.set(f"pulse/{self.rank}", f"{beats} {self.exchanges}")
            except Exception:
                if not self._ended.is_set():
                    print(f"foretell: rank {self.rank}: rank 0 is gone", file=sys.stderr)
                    os._exit(_LOST)

    def close(self) -> None:
        """Stops giving signs of life."""
        self._ended.set()
        self._exchange = None
