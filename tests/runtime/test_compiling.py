"""A first start says that it compiles, where that takes long, and says it once."""

from __future__ import annotations

import logging
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
    notice._timer and notice._timer.join()
    assert [record.message for record in caplog.records] == (
        ["compiling kernels, once on this machine"] * said
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


def test_numba_tells_of_what_it_compiles(monkeypatch):
    import numba

    from foretell.attention import kernels  # noqa: F401 (installs the listener)

    heard = []
    monkeypatch.setattr(compiling.Notice, "on_start", lambda self, event: heard.append(event))
    monkeypatch.setattr(compiling.Notice, "on_end", lambda self, event: None)
    numba.njit(lambda x: x + 1)(1)
    assert heard
