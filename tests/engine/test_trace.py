"""A trace tells every step, its phases lie inside it and fill it, and a killed program leaves a
file that can be read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from foretell.engine.metrics import PHASES
from foretell.engine.trace import Trace
from foretell.runtime.stream import Worker
from tests import tiny

SCHEME = "draft-model:weights=int4,k=4"
DEVICE = 2
"""The second row of the first track."""


def events(text: str) -> list[dict]:
    """As the viewers read it: the closing bracket may be missing."""
    text = text.rstrip()
    return json.loads(text if text.endswith("]") else text.rstrip(",") + "]")


@pytest.fixture
def traced(tmp_path):
    """Answers under a trace, the engine and its events."""
    engine, path = tiny.llm(SCHEME), tmp_path / "out.json"
    engine.generate([[2, 3]], tiny.greedy(max_tokens=9))  # before: not in the trace
    before = engine.engine.metrics.num_steps, engine.engine.metrics.drafted
    with Trace(path) as trace:
        engine.engine.metrics.trace_to(trace.track("engine"))
        results = engine.generate(tiny.prompts(5), tiny.greedy())
    return engine.engine.metrics, before, results, events(path.read_text())


def test_steps_and_their_counts(traced):
    metrics, (num_steps, drafted), results, found = traced
    steps = [event for event in found if event["name"] == "step"]
    assert len(steps) == metrics.num_steps - num_steps
    counts = [step["args"] for step in steps]
    assert sum(c["drafted"] for c in counts) == metrics.drafted - drafted > 0
    assert sum(c["accepted"] for c in counts) == sum(r.stats.accepted for r in results) > 0
    assert sum(c["emitted"] for c in counts) == sum(len(r.token_ids) for r in results)
    assert max(c["batch"] for c in counts) == 5
    assert all(c["rows"] >= c["batch"] >= 1 for c in counts)
    names = {e["args"]["name"] for e in found if e["ph"] == "M"}
    assert names == {"foretell", "engine", "engine: device"}


def test_device_work_has_a_row_of_its_own(traced):
    """On the caller's thread it lies inside the phases that wait for it."""
    metrics, (num_steps, _), _, found = traced
    works = [event for event in found if event["ph"] == "X" and event["tid"] == DEVICE]
    names = [work["name"] for work in works]
    assert set(names) == {"draft", "target", "sample", "catch-up"}
    assert names.count("target") == names.count("sample") == metrics.num_steps - num_steps
    phases = [event for event in found if event["ph"] == "X" and event["tid"] != DEVICE]
    for work in works:
        where = {"draft": "propose", "target": "forward", "catch-up": "observe"}
        inside = where.get(work["name"], work["name"])
        begins, ends = work["ts"], work["ts"] + work["dur"]
        assert any(
            phase["name"] == inside
            and phase["ts"] - 0.01 <= begins
            and ends <= phase["ts"] + phase["dur"] + 0.01
            for phase in phases
        ), work["name"]


def test_beside_the_host_device_work_overlaps_its_phases(tmp_path):
    llm, path = tiny.llm(SCHEME), tmp_path / "out.json"
    llm.engine.runtime.stream = Worker("pass")
    with Trace(path) as trace:
        llm.engine.metrics.trace_to(trace.track("engine"))
        llm.generate(tiny.prompts(5), tiny.greedy())
    found = [event for event in events(path.read_text()) if event["ph"] == "X"]
    targets = [e for e in found if e["tid"] == DEVICE and e["name"] == "target"]
    aheads = [e for e in found if e["tid"] != DEVICE and e["name"] == "ahead"]
    assert len(targets) == len(aheads)
    for work, phase in zip(targets, aheads, strict=True):
        assert work["ts"] < phase["ts"] + phase["dur"], "the pass begins within the phase"


def test_phases_lie_inside_their_step_and_fill_it(traced):
    _, _, _, found = traced
    spans = [event for event in found if event["ph"] == "X" and event["tid"] != DEVICE]
    at, covered = 0, []
    while at < len(spans):
        step, phases = spans[at], spans[at + 1 : at + 1 + len(PHASES)]
        assert (step["name"], *(p["name"] for p in phases)) == ("step", *PHASES)
        end = step["ts"]
        for phase in phases:
            assert phase["ts"] >= end - 0.01, "phases follow each other"
            end = phase["ts"] + phase["dur"]
        assert end <= step["ts"] + step["dur"] + 0.01
        covered.append(sum(p["dur"] for p in phases) / step["dur"])
        at += 1 + len(PHASES)
    covered.sort()
    assert covered[len(covered) // 2] > 0.8, "what lies between phases is a small part of a step"


def test_a_killed_program_leaves_whole_lines(tmp_path):
    path = tmp_path / "out.json"
    program = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from foretell.engine.trace import Trace
        from tests import tiny
        llm = tiny.llm({SCHEME!r})
        llm.engine.metrics.trace_to(Trace(Path({str(path)!r})).track("engine"))
        for i, delta in enumerate(llm.stream([2, 3, 4], tiny.greedy())):
            if i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
    """)
    done = subprocess.run([sys.executable, "-c", program], check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    text = path.read_text()
    assert text.endswith(",\n")
    assert sum(event["name"] == "step" for event in events(text)) >= 5


def test_a_step_that_failed_leaves_no_events(tmp_path, monkeypatch):
    engine = tiny.llm()
    with Trace(tmp_path / "out.json") as trace:
        engine.engine.metrics.trace_to(trace.track("engine"))
        with monkeypatch.context() as patch:
            patch.setattr(engine.engine.runtime, "forward_target", lambda rows: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.generate([[2, 3]], tiny.greedy(max_tokens=3))
        engine.close()
        engine.generate([[2, 3]], tiny.greedy(max_tokens=3))
    found = events((tmp_path / "out.json").read_text())
    assert sum(event["name"] == "step" for event in found) == 3
    assert sum(event["name"] == "forward" for event in found) == 3


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog):
    with Trace(Path("/dev/full")) as trace:
        engine = tiny.llm()
        engine.engine.metrics.trace_to(trace.track("engine"))
        (result,) = engine.generate([[2, 3]], tiny.greedy(max_tokens=3))
    assert len(result.token_ids) == 3
    assert caplog.text.count("the trace ends here") == 1
    assert not trace.whole


def test_without_a_trace_timers_are_plain():
    metrics = tiny.llm().engine.metrics
    assert type(metrics.phase("forward")).__name__ == "Timer"
    with pytest.raises(ValueError, match="cannot be written"):
        Trace(Path("/nowhere/out.json"))
