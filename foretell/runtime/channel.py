"""How a step's buffer gets from rank 0 to the others: one int32 message, nothing else."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

_SIZE = struct.Struct("<q")
_STOP = -1


class Channel(Protocol):
    def send(self, words: np.ndarray | None) -> None:
        """Rank 0's part: words [n] int32, or None for the end."""
        ...

    def receive(self) -> np.ndarray | None:
        """The others' part. What it returns is overwritten by the next message but one.

        Raises:
            OSError: rank 0 has ended.
        """
        ...


class SharedMemory:
    """On one node: memory that all ranks map, and a socket that says how much of it is new.

    Two places take turns: a rank may still read the last message when the next one comes. It
    cannot be two behind, since every message is followed by a pass that all take part in.
    """

    def __init__(self, file: int, sockets: SequenceOf[socket.socket]) -> None:
        memory = np.frombuffer(mmap.mmap(file, 0), dtype=np.int32)
        self._places, self._sockets = memory.reshape(2, -1), sockets
        self._messages = 0

    @staticmethod
    def file(num_words: int) -> int:
        """A descriptor of memory for messages of up to so many words; nothing is left of it when
        the last process that has it ends."""
        size = 2 * 4 * -(-num_words // 16) * 16
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("foretell")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.truncate(descriptor, size)
        return descriptor

    def send(self, words: np.ndarray | None) -> None:
        size = _STOP if words is None else len(words)
        if words is not None:
            place = self._places[self._messages % 2]
            assert len(words) <= len(place), "more than the buffer was made for"
            place[: len(words)] = words
            self._messages += 1
        for each in self._sockets:
            each.sendall(_SIZE.pack(size))

    def receive(self) -> np.ndarray | None:
        message = self._sockets[0].recv(_SIZE.size, socket.MSG_WAITALL)
        if len(message) < _SIZE.size:
            raise ConnectionError("rank 0 has ended")
        (size,) = _SIZE.unpack(message)
        if size == _STOP:
            return None
        self._messages += 1
        return self._places[(self._messages - 1) % 2, :size]


class Broadcast:
    """Across nodes: torch's broadcast, of the length first."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, words: np.ndarray | None) -> None:
        self._share(torch.tensor([_STOP if words is None else len(words)]))
        if words is not None:
            self._share(torch.from_numpy(words))

    def receive(self) -> np.ndarray | None:
        self._share(size := torch.empty(1, dtype=torch.int64))
        if size.item() == _STOP:
            return None
        self._share(words := torch.empty(int(size.item()), dtype=torch.int32))
        return words.numpy()

    def _share(self, tensor: torch.Tensor) -> None:
        share(tensor, self._group)


def share(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Rank 0's tensor, written into that of others."""
    settings = dist.BroadcastOptions()
    settings.rootRank = 0
    group.broadcast([tensor], settings).wait()
