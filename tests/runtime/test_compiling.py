"""A first start says that it compiles, where that takes long, and says it once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
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
        ["compiling kernels, once on this machine: a minute or two"] * said
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


STEPS = """
import sys
from numba.core.event import Listener, register
from tests import heads, tiny
from tests.runtime.ranks import OPTIONS, model
from foretell.llm import LLM

class Compiled(Listener):
    def on_start(self, event):
        print(event.data["dispatcher"], flush=True)
    def on_end(self, event):
        pass

scheme = heads.scheme(sys.argv[1]) if sys.argv[1] == "eagle" else sys.argv[1]
llm = LLM(str(model()), **OPTIONS | {"weights": sys.argv[2]}, speculation=tiny.fixed(scheme))
register("numba:compile", Compiled())
print("started", flush=True)
for params in (tiny.greedy(), tiny.sampled(), tiny.sampled(top_k=5, repetition_penalty=1.1)):
    llm.generate(tiny.prompts(6), params)
assert llm.engine.metrics.drafted > 0
assert not llm.engine.metrics.drafter_errors, llm.engine.metrics.last_drafter_error
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("scheme", "weights"),
    [("prompt-lookup:k=4,ngram_min=1", "int8"), ("draft-model:weights=int4,k=3", "f32"),
     ("eagle", "int8")],
)  # fmt: skip
def test_what_has_started_does_not_compile_any_more(scheme, weights, tmp_path):
    """Who is told that a server is there must not wait for kernels."""
    env = os.environ | {"PYTHONPATH": os.getcwd(), "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, scheme, weights],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["started"]
