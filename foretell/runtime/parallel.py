"""Tensor parallelism from rank 0: it schedules, drafts, samples and verifies; the others compute.

Of a step the others need only its rows, so these are packed into one buffer and sent; what
verification decided travels with the next one, as cells to move. A draft runs on this rank alone.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from foretell.attention.base import Attention
from foretell.config import EngineConfig
from foretell.models.config import ModelConfig
from foretell.models.head import Head
from foretell.models.loader import LoadedModel
from foretell.runtime.batch import FOLLOW, HEAD, HEADER, with_moves
from foretell.runtime.channel import Broadcast, Channel, SharedMemory
from foretell.runtime.gpu import CudaStream, device_of
from foretell.runtime.identity import difference, identity
from foretell.runtime.ranks import Group, RankError
from foretell.runtime.runner import Output, Runtime
from foretell.runtime.stream import Work, Worker
from foretell.runtime.torchrun import torchrun
from foretell.spec.drafter import KVGroup, Rows
from foretell.spec.tree import MAX_NODES

_LOOK = 0.1
"""Seconds between looks at the others while a pass runs."""
_GRACE = 5.0
"""Seconds that a rank gets to end by itself."""
_NEWS = 5.0
"""Seconds in which it becomes known why a connection broke."""
T = TypeVar("T")


class Leader:
    """Rank 0 of a group: starts the others, and ends with an error when one is lost.

    Raises:
        RankError: a rank does not come, or runs other code, another model or another configuration.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        world = config.tensor_parallel
        self.processes: list[subprocess.Popen[bytes]] = []
        self.failed: str | None = None
        """Why no pass can run any more."""
        self.busy = False
        """Is a pass under way that all take part in?"""
        self.broken: BaseException | None = None
        """What ended one before its end: the ranks are out of step."""
        self.memory: list[dict[str, int]] = []
        """Bytes by group of each other rank."""
        file, sockets = -1, list[socket.socket]()
        if place := torchrun():
            self.group = place.group(config)
        else:
            timeout = config.rank_timeout
            device = device_of(config)
            self.group = Group(0, world, "127.0.0.1", 0, timeout, neighbours=world, device=device)
            file = SharedMemory.file(most_words(config, model))
            sockets = self._spawn(config, file)
        self.group.halves, self.device = config.halves, self.group.device
        # Not the caller's thread, on a CPU either: it looks after the others meanwhile.
        cpu = self.device.type == "cpu"
        self.stream = Worker("pass") if cpu else CudaStream("pass", self.device)
        # Runs when the program ends, too: nothing is left of the others.
        self._finish = weakref.finalize(self, _end, self.processes, None)
        try:
            self._meet(config)
            self.channel: Channel = (
                Broadcast(self._come(self.group.words)) if place else SharedMemory(file, sockets)
            )
        except BaseException:
            self._finish()
            raise
        self._finish.detach()
        self._finish = weakref.finalize(self, _end, self.processes, self.channel, self.stream)

    def _spawn(self, config: EngineConfig, file: int) -> list[socket.socket]:
        sockets = list[socket.socket]()
        package = str(Path(__file__).parents[2])
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        for rank in range(1, config.tensor_parallel):
            mine, theirs = socket.socketpair()
            what = {
                "rank": rank, "port": self.group.port, "memory": file, "socket": theirs.fileno(),
                "config": pickle.dumps(config).hex(),
            }  # fmt: skip
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "foretell.runtime.rank", json.dumps(what)],
                    pass_fds=(file, theirs.fileno()),
                    env=os.environ | {"PYTHONPATH": paths},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for rank 0, which ends the others
                )
            )
            theirs.close()
            sockets.append(mine)
        return sockets

    def _meet(self, config: EngineConfig) -> None:
        mine, found = identity(config), self.hear("identity")
        for rank, theirs in enumerate(found, 1):
            if reason := difference(mine, theirs):
                message = f"rank {rank} {reason}"
                self.group.answer("identity", message)
                raise RankError(message)
        self.group.answer("identity", None)

    def hear(self, stage: str) -> list[Any]:
        """What the other ranks tell.

        Raises:
            RankError: one is lost.
        """
        try:
            return self.group.hear(stage, self.lost)
        except RankError as error:
            self.fail(str(error))

    def connect(self) -> None:
        """Opens the way for exchanges.

        Raises:
            RankError: a rank does not come.
        """
        self._come(self.group.connect)

    def _come(self, meet: Callable[[], T]) -> T:
        """Something for which all must come."""
        try:
            return meet()
        except RuntimeError as error:
            self.fail(self._blame(error, self.group.timeout + _NEWS))

    def lost(self) -> str | None:
        """Which rank has ended or is silent, None if none."""
        for rank, process in enumerate(self.processes, 1):
            if (status := process.poll()) is not None:
                if (why := self.group.told(rank, "error")) is not None:
                    return f"rank {rank}: {why}"
                how = f"with status {status}"
                if status < 0:
                    with suppress(ValueError):
                        how = f"by {signal.Signals(-status).name}"
                return f"rank {rank} (process {process.pid}) has ended {how}"
        return self.group.lost()

    def look(self) -> None:
        """Before a pass.

        Raises:
            RankError: a rank is lost.
        """
        if reason := self.failed or self.lost():
            self.fail(reason)

    @contextmanager
    def all_run(self, words: np.ndarray) -> Iterator[None]:
        """While it lasts all ranks run what these words say."""
        if self.broken is not None:  # exchanges would meet the wrong ones
            raise self.broken
        self.busy = True
        try:
            self.channel.send(words)
            yield
        except BaseException as error:
            self.broken = error
            raise
        finally:
            self.busy = False

    def wait(self, work: Work[T]) -> T:
        """The result of submitted work.

        Raises:
            RankError: a rank has died, or nothing has moved for `rank_timeout` seconds.
        """
        moved, since = self.group.exchanges, time.monotonic()
        while not work.wait(_LOOK):
            now = time.monotonic()
            if self.group.exchanges != moved or not self.busy:
                moved, since = self.group.exchanges, now
            if reason := self.lost():
                self.fail(reason)
            if now - since > self.group.timeout:
                self.fail(self.group.behind() or "rank 0 hangs in a pass")
        if self.broken is not None:
            self.fail(self._blame(self.broken))
        return work.value()

    def _blame(self, error: BaseException, patience: float = _NEWS) -> str:
        """A broken connection comes before the news of who has ended."""
        until = time.monotonic() + patience
        while isinstance(error, RuntimeError | OSError) and time.monotonic() < until:
            if reason := self.lost():
                return reason
            time.sleep(0.02)
        return f"a pass over {self.group.world} ranks failed: {error}"

    def fail(self, reason: str) -> NoReturn:
        """Ends the group.

        Raises:
            RankError: always.
        """
        self.failed = reason
        self._finish.detach()
        _end(self.processes, None)
        raise RankError(f"{reason}; the model cannot run without it: start again")

    def close(self) -> None:
        """Ends the other ranks. May be called twice."""
        self.failed = self.failed or "the ranks were closed"
        self._finish()
        self.stream.close()


def _end(
    processes: SequenceOf[subprocess.Popen[bytes]],
    channel: Channel | None,
    stream: Worker | None = None,
) -> None:
    """With a channel the others are told first and have some time: behind what is under way, as a
    head's pass may be, whose words would get mixed up with these."""
    if channel is not None and (stream is None or stream.join(_GRACE)):
        with suppress(Exception):
            channel.send(None)
    until = time.monotonic() + (_GRACE if channel else 0)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
            continue
        process.kill()
        process.wait()


class ParallelRuntime(Runtime):
    """A runtime whose target is spread over ranks; drafters see no difference."""

    def __init__(
        self, target: LoadedModel, attention: Attention, leader: Leader, **sizes: Any
    ) -> None:
        super().__init__(target, attention, stream=leader.stream, **sizes)
        self.leader = leader
        self._moves: tuple[list[int], list[int]] = ([], [])

    def begin(self, num_pages: int, draft: KVGroup | None) -> None:
        """Takes as many pages as every rank has room for, and connects the ranks.

        Raises:
            RankError: a rank is lost, or has another head.
        """
        leader, group = self.leader, self.leader.group
        num_pages = min([num_pages, *leader.hear("loaded")])
        group.answer("loaded", num_pages)
        self.allocate(num_pages, draft)
        self.warm()
        leader.memory = leader.hear("memory")
        group.answer("memory", None)
        leader.connect()

    def wait(self, work: Work[T]) -> T:
        """See `Runtime.wait`. What interrupts the caller leaves the ranks in step.

        Raises:
            RankError: a rank is lost.
        """
        return self.leader.wait(work)

    def forward_target(self, rows: Rows) -> Output:
        """See `Runtime.forward_target`.

        Raises:
            RankError: a rank was lost before.
        """
        self.leader.look()
        ready, moves = self._ready(rows), self._moves
        self._moves = ([], [])
        with self.leader.all_run(with_moves(ready.words, moves)):
            return self.run_target(ready)

    def forward_head(self, head: Head, rows: Rows, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `Runtime.forward_head`."""
        ready = self._prepare(rows)
        if head.ranks is None:
            return self.run_head(head, ready, features)
        ready.words[HEADER - 1] = HEAD
        with self.leader.all_run(ready.words):
            return self.run_head(head, ready, head.ranks.share(features))

    def follow_target(
        self, head: Head, tokens: Tensor, features: Tensor, outputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Runtime.follow_target`. The other ranks have the features themselves."""
        if head.ranks is None:
            return super().follow_target(head, tokens, features, outputs)
        with self.leader.all_run(np.array([0] * (HEADER - 1) + [FOLLOW], np.int32)):
            head.ranks.share(torch.cat([tokens, outputs]))
            return super().follow_target(head, tokens, features, outputs)

    def move(self, slot: int, source: SequenceOf[int], target: SequenceOf[int]) -> None:
        """Here at once, on the other ranks before their next pass."""
        super().move(slot, source, target)
        self._moves[0].extend(self._physical(slot, source))
        self._moves[1].extend(self._physical(slot, target))

    def close(self) -> None:
        self.leader.close()


def most_words(config: EngineConfig, model: ModelConfig) -> int:
    """Of a buffer, generously: every row an output and moved, every sequence of full length."""
    length = config.max_model_len or model.max_position_embeddings
    pages = (length + MAX_NODES) // config.page_size + 2
    rows = config.max_num_batched_tokens + MAX_NODES * config.max_num_seqs
    return HEADER + 11 * rows + config.max_num_seqs * pages
