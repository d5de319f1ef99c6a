"""Threads of compiled kernels: fewer while the machine is busy, all again when it is not."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest

from foretell.attention import pool
from foretell.attention.pool import Crowd
from foretell.attention.together import WAITED


def test_a_stall_halves_the_threads_for_a_while_that_grows():
    now = [0.0]
    crowd = Crowd(lambda: now[0])
    assert crowd.allowed(8) == 8
    crowd.tell(8, 0)
    assert crowd.allowed(8) == 8
    rests = []
    for _ in range(8):
        crowd.tell(8, 0.5)
        assert crowd.allowed(8) == 4
        assert crowd.allowed(2) == 2  # never more than asked for
        start = now[0]
        while crowd.allowed(8) < 8:
            now[0] += 0.01
        rests.append(round(now[0] - start, 1))
    assert rests == sorted(rests)
    assert rests[-1] == 2  # all are tried again within seconds
    assert rests[0] < 0.2
    for _ in range(12):
        crowd.tell(8, 0)
    crowd.tell(2, 1)
    assert crowd.allowed(2) == 1
    now[0] += 0.2  # quiet calls have shortened the rest
    assert crowd.allowed(2) == 2


def test_stalls_are_read_where_the_barrier_counts_them(monkeypatch):
    seen, told = [], []
    monkeypatch.setattr(pool, "_crowd", Crowd())
    monkeypatch.setattr(pool._crowd, "tell", lambda *told_: told.append(told_))
    sync = np.zeros(192, np.uint8)
    meeting = threading.Barrier(3)

    def kernel(share: int, shares: int) -> None:
        seen.append((share, shares))
        if share == 1:
            sync.view(np.int64)[WAITED // 8] = 1 << 60
        meeting.wait(10)

    pool.together(kernel, (), 3, sync)
    assert sorted(seen) == [(0, 3), (1, 3), (2, 3)]
    ((shares, waited),) = told
    assert shares == 3
    assert waited > 1


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
def test_a_fork_makes_threads_of_its_own():
    def run() -> list[int]:
        seen: list[int] = []
        meeting = threading.Barrier(2)

        def kernel(share: int, shares: int) -> None:
            seen.append(share)
            meeting.wait(10)

        pool.together(kernel, (), 2, np.zeros(192, np.uint8))
        return sorted(seen)

    assert run() == [0, 1]
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(run()))
    child.start()
    child.join(20)
    assert child.exitcode == 0
    assert answers.get() == [0, 1]
