"""Ranks that die, hang or do not fit, and what is left when a program ends: nothing waits for ever,
and no process stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from foretell.config import EngineConfig
from foretell.engine import build
from foretell.runtime import parallel
from foretell.runtime.ranks import RankError
from tests import heads, tiny
from tests.runtime.ranks import model, start

PATIENCE = 6.0
"""Seconds until a rank counts as lost here: more than a crowded machine ever makes one wait."""
PARAMS = tiny.greedy(max_tokens=200)


def gone(pid: int, within: float = 60.0) -> bool:
    """Whether a process ends in time. A zombie has ended."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_what_is_in_flight(number):
    with start(rank_timeout=PATIENCE) as llm:
        (process,) = llm.engine.runtime.leader.processes
        stream = llm.stream(tiny.prompts(1)[0], PARAMS)
        next(stream)
        process.send_signal(number)
        began = time.monotonic()
        with pytest.raises(
            RankError, match=r"rank 1 .*(has ended by SIGKILL|no sign of life|not taken part)"
        ):
            list(stream)
        assert time.monotonic() - began < 10 * PATIENCE  # bounded, not fast
        assert gone(process.pid)
        with pytest.raises(RankError, match="rank 1"):  # at once, and for good
            llm.generate([[3, 4]], PARAMS)
        assert not llm.engine.scheduler.running


MOMENTS = ["loading", "connecting", "step", "catch-up", "following"]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_is_lost_at_any_moment(moment, number, monkeypatch):
    """While it loads, before it is connected, in the middle of a step, and of the head's pass in
    either schedule: it is named, requests in flight fail, and nothing is left of it."""
    processes, struck = [], []

    def strike() -> None:
        if not struck:
            struck.append(number)
            processes[0].send_signal(number)

    def hear(self, stage):
        processes[:] = self.processes
        if (moment, stage) == ("loading", "loaded"):
            strike()
        told = heard(self, stage)
        if (moment, stage) == ("connecting", "memory"):
            strike()
        return told

    heard = parallel.Leader.hear
    monkeypatch.setattr(parallel.Leader, "hear", hear)
    lost = r"rank 1 .*(has ended by SIGKILL|no sign of life|not taken part)"
    with contextlib.ExitStack() as stack:
        if moment in ("loading", "connecting"):
            with pytest.raises(RankError, match=lost):
                start(rank_timeout=PATIENCE)
        else:
            llm = stack.enter_context(
                start(rank_timeout=PATIENCE, speculation=tiny.fixed(f"{heads.scheme('eagle')},k=1"))
            )
            runtime, place = llm.engine.runtime, "run_target" if moment == "step" else "run_head"
            run, calls = getattr(runtime, place), []

            def running(*given):
                calls.append(given)
                if len(calls) == 6:
                    strike()
                return run(*given)

            monkeypatch.setattr(runtime, place, running)
            # A penalty goes the ordinary way, where what was accepted is shown to the head.
            params = tiny.greedy(
                max_tokens=200, repetition_penalty=1 + 0.1 * (moment == "catch-up")
            )
            with pytest.raises(RankError, match=lost):
                llm.generate(tiny.prompts(2), params)
            assert not llm.engine.scheduler.running
            with pytest.raises(RankError, match="rank 1"):
                llm.generate([[3, 4]], params)
        assert gone(processes[0].pid)


def test_interrupts_leave_the_ranks_in_step_and_a_hanging_one_is_named(monkeypatch):
    """Ctrl-C in the middle of a pass ends the request; the ranks finish the pass. A rank that hangs
    still has a pulse; it only takes no part."""
    params = tiny.greedy(max_tokens=30)
    with start(rank_timeout=3.0) as llm:
        expected = tiny.ids(llm.generate([[3, 4]], params))
        for delay in (0.02, 0.05, 0.1):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with suppress(KeyboardInterrupt):
                while True:
                    llm.generate(tiny.prompts(4), params)
            timer.join()
            llm.engine.check()
            assert tiny.ids(llm.generate([[3, 4]], params)) == expected
        channel = llm.engine.runtime.leader.channel
        monkeypatch.setattr(channel, "send", lambda words: None)  # it never hears of the pass
        with pytest.raises(RankError, match="rank 1 has not taken part in a pass for 3 s"):
            llm.generate([[3, 4]], params)


def test_a_rank_that_does_not_fit_is_refused(monkeypatch):
    real, begun = parallel.identity, []
    monkeypatch.setattr(parallel, "identity", lambda config: real(config) | {"model": "other"})
    end = parallel._end
    monkeypatch.setattr(parallel, "_end", lambda *given: (begun.extend(given[0]), end(*given)))
    with pytest.raises(RankError, match="rank 1 has other model files than rank 0"):
        start()
    assert len(begun) == 1
    assert gone(begun[0].pid)


def test_what_does_not_divide_starts_no_process(monkeypatch):
    monkeypatch.setattr(build, "Leader", None)
    config = EngineConfig(model=str(model()), weights="f32", tensor_parallel=3)
    with pytest.raises(ValueError, match="tensor_parallel=3: the model's num_heads=4"):
        build.build_engine(config)


PROGRAM = """
import sys
from tests import tiny
from tests.runtime.ranks import start
llm = start()
print(llm.engine.runtime.leader.processes[0].pid, flush=True)
if sys.argv[1] != "end":
    while True:
        llm.generate([[3, 4]] * 8, tiny.greedy(max_tokens=200))
"""


@pytest.mark.parametrize(
    "ends",
    [
        {"end": None, "interrupt": signal.SIGINT},
        pytest.param({"kill": signal.SIGKILL}, marks=pytest.mark.slow),
    ],
)
def test_no_process_is_left(ends):
    """Whether a program ends, is interrupted or killed; at once, as starting takes long."""
    programs = {
        how: subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        )
        for how in ends
    }  # fmt: skip
    try:
        for how, number in ends.items():
            program = programs[how]
            pid = int(program.stdout.readline())
            if number is not None:
                time.sleep(0.3)
                os.killpg(program.pid, number)  # as a terminal does: to all of the group
            program.wait(60)
            assert gone(pid), how
            assert (program.returncode == 0) == (how == "end")
    finally:
        for program in programs.values():
            with suppress(ProcessLookupError):
                program.kill()
            program.communicate()


COLD = """
from tests import tiny
from tests.runtime.ranks import start
with start(rank_timeout=3.0) as llm:
    print(tiny.ids(llm.generate([[3, 4]], tiny.greedy(max_tokens=4))))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiling_does_not_count_as_a_hang(tmp_path):
    """A first start on a machine compiles for longer than ranks have to answer."""
    env = os.environ | {"PYTHONPATH": os.getcwd(), "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COLD], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "compiling kernels" in done.stderr
