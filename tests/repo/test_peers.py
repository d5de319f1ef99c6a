"""benchmarks/peers.py: its workers' protocol and what it makes of their answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from workers.client import Worker
from workers.table import lines, markdown, own

ECHO = """
from serve import serve
class Engine:
    def double(self, number):
        print("noise from a library")
        return {"twice": 2 * number}
    def leave(self):
        raise SystemExit("gone for good")
serve(Engine())
"""


@pytest.fixture
def worker(tmp_path):
    script = tmp_path / "echo.py"
    workers = Path(__file__).parents[2] / "benchmarks" / "workers"
    script.write_text(f"import sys; sys.path.insert(0, {str(workers)!r})\n{ECHO}")
    worker = Worker("echo", [sys.executable, str(script)])
    yield worker
    worker.close()


def test_answers_are_kept_apart_from_what_libraries_print(worker):
    assert worker.ask("double", number=4) == {"twice": 8}
    assert worker.ask("double", number=5) == {"twice": 10}


def test_an_error_is_told_and_the_worker_goes_on(worker):
    with pytest.raises(RuntimeError, match="missing 1 required"):
        worker.ask("double")
    assert worker.ask("double", number=4) == {"twice": 8}


def test_a_worker_that_ends_says_why(worker):
    with pytest.raises(RuntimeError, match="gone for good"):
        worker.ask("leave")


def results(ours: list[float], theirs: list[float]) -> dict:
    """Answers of 11 tokens in those seconds after the first token, which takes a tenth of it."""
    records = [
        {"engine": engine, "turn": turn, "first": 0.1 * s, "all": 1.1 * s, "tokens": 11}
        for engine, seconds in (("foretell", ours), ("llama.cpp", theirs))
        for turn, s in enumerate(seconds)
    ]
    cell = {"records": records, "others": 0.02, "notes": []}
    return {"about": {}, "cells": {"chat int8": cell, "long int8": cell}}


def test_ratios_are_of_neighbours_so_a_slow_turn_does_not_count_against_one_engine():
    (chat, long, first) = lines(results([1.0, 9.0, 2.0], [2.0, 18.0, 2.0]))
    assert chat == ["int8 chat tok/s", "5", "5", "2.00", "", "", "1.3", "2%"]
    assert long[3] == "2.00"
    assert first == ["int8 first token ms", "200", "200", "2.00", "", "", "1.0", "2%"]


def test_a_table_without_peers_has_foretells_column_alone():
    found = results([1.0], [])
    assert next(row[1:4] for row in lines(found)) == ["10", "", ""]
    assert own(found) == []
    assert "| int8 chat tok/s | 10 |  |  |" in markdown(found)
