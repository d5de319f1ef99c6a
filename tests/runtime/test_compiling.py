"""A first start says that it compiles, where that takes long, and says it once."""

from __future__ import annotations

import logging
import threading
import time

import pytest

pytest.importorskip("numba")
from foretell.attention import compiling


@pytest.fixture
def notice(monkeypatch):
    monkeypatch.setattr(compiling, "_LONG", 0.05)
    return compiling.Notice()


def wait(notice, said, caplog) -> None:
    deadline = time.monotonic() + 30
    while said != len(caplog.records) and time.monotonic() < deadline:
        time.sleep(0.01)
    notice._said and notice._said.join()
    assert [record.message for record in caplog.records] == (
        ["compiling kernels, once on this machine: it takes up to a minute"] * said
    )


def test_long_compiling_is_told_once(notice, caplog):
    for _ in range(3):
        notice.on_start(None)
    wait(notice, 1, caplog)
    for _ in range(3):
        notice.on_end(None)
    notice.on_start(None)
    wait(notice, 1, caplog)


def test_short_compiling_is_not_told(notice, caplog):
    caplog.set_level(logging.DEBUG)
    notice.on_start(None)
    notice.on_end(None)
    wait(notice, 0, caplog)
    notice.on_start(None)  # and what takes long after it is
    wait(notice, 1, caplog)


def test_one_process_compiles_while_others_wait(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compiling, "_IDLE", 0.3)
    first, second = compiling.Notice(tmp_path), compiling.Notice(tmp_path)
    for _ in range(2):  # the turn is kept from one kernel to the next
        first.on_start(None)
        first.on_end(None)
    begun = threading.Event()

    def other() -> None:
        second.on_start(None)
        begun.set()

    waiting = threading.Thread(target=other)
    first.on_start(None)
    waiting.start()
    assert not begun.wait(0.5)
    first.on_end(None)
    assert begun.wait(30)
    waiting.join()
    told = [record.message for record in caplog.records]
    assert told == ["another process is compiling kernels, waiting for it"]


def test_a_place_without_a_lock_compiles_all_the_same(tmp_path):
    for place in (None, tmp_path / "nowhere"):
        notice = compiling.Notice(place)
        notice.on_start(None)
        notice.on_end(None)


def test_numba_tells_of_what_it_compiles(monkeypatch):
    import numba

    from foretell.attention import kernels  # noqa: F401 (installs the listener)

    heard = []
    monkeypatch.setattr(compiling.Notice, "on_start", lambda self, event: heard.append(event))
    monkeypatch.setattr(compiling.Notice, "on_end", lambda self, event: None)
    numba.njit(lambda x: x + 1)(1)
    assert heard
