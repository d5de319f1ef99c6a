"""foretell side by side with llama.cpp and OpenVINO GenAI: same weights, prompts, bits and threads.

    python benchmarks/peers.py --peer-python PATH       # a python that has llama_cpp or
                                                        # openvino_genai; may be given twice
    python benchmarks/peers.py --cells chat --weights int8 --json out.json

Every engine runs in a process of its own and sleeps while another one is timed. For each prompt
the engines answer one after the other, in an order that is reversed every time; a ratio is the
median over such turns, so a machine that slows down does so for all of them alike. Answers are
greedy and of exactly 128 tokens. ``--json FILE`` adds the cells to what FILE has already, so that
a long comparison can be taken in pieces; ``--cells none`` only shows it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from workers.client import Worker, start
from workers.quiet import Quiet
from workers.table import markdown, show

CELLS = ("chat", "long", "batch", "copy", "passes")
WEIGHTS = ("int8", "bf16", "int4")
TOKENS = 128
CONCURRENT = 8
CONTEXTS = (60, 2000)
BUSY = 0.1
"""Share of all cores that other programs may take in a turn that counts."""
RETRIES = 6
"""Turns of a cell that are taken again for that."""


def turns(cell: str, prompts: dict[str, list[list[int]]]) -> list[list[list[int]]]:
    """What is asked at once, turn by turn, in one round."""
    if cell == "batch":
        return [(prompts["chat"] * 2)[:CONCURRENT]] * 2
    return [[prompt] for prompt in prompts[cell]] * (1 if cell == "chat" else 2)


def measure(
    workers: list[Worker], cell: str, weights: str, rounds: int, console: Console
) -> dict[str, Any]:
    """One cell: answers of every engine that can, in turn, and what else the machine did."""
    mode = "lookup" if cell == "copy" else "plain"
    asked = turns(cell, workers[0].ask("prompts", weights=weights))
    able, notes = [], []
    for worker in workers:
        try:  # loads the model, and takes page faults and compilation out of the times
            worker.ask("answer", weights=weights, mode=mode, prompts=asked[0], tokens=24)
            able.append(worker)
        except RuntimeError as error:
            notes.append(f"{worker.name}: {error}")
            console.print(f"{cell} {weights}: {notes[-1]}", style="yellow", highlight=False)
    quiet = Quiet([worker.process.pid for worker in able])
    if not quiet.wait():
        console.print("The machine is busy: another program is running.", style="yellow")
    records, busy, again = [], [], RETRIES
    todo = list(enumerate(asked * rounds))
    while todo:
        turn, prompts = todo.pop(0)
        quiet.start()
        answers = []
        for worker in able if turn % 2 == 0 else reversed(able):
            answer = worker.ask(
                "answer", weights=weights, mode=mode, prompts=prompts, tokens=TOKENS
            )
            answers.append({"engine": worker.name, "turn": turn, **answer})
        others = quiet.others()
        if others > BUSY and again:  # somebody else came in: once more, later
            again -= 1
            todo.append((turn, prompts))
            quiet.wait(5)
            continue
        records += answers
        busy.append(others)
    share = max(busy, default=0.0)
    if share > BUSY:
        console.print(
            f"{cell} {weights}: other programs had {share:.0%} of the processor in a turn"
        )
    return {"records": records, "others": share, "notes": notes}


def own(worker: Worker, weights: str, seconds: float) -> dict[str, Any]:
    """What only foretell is asked: a pass by its number of rows, and a tree against a chain."""
    quiet = Quiet([worker.process.pid])
    quiet.wait()
    found = {
        str(context): worker.ask("passes", weights=weights, context=context, seconds=seconds)
        for context in CONTEXTS
    }
    return {"contexts": found, "others": quiet.others()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a short name or a .gguf file")
    parser.add_argument("--peer-python", type=Path, action="append", default=[], metavar="PATH")
    parser.add_argument("--cells", nargs="+", choices=[*CELLS, "none"], default=list(CELLS))
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="for converted models; beside the model if not")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    if given.rounds < 1 or given.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    console = Console()
    results: dict[str, Any] = {"about": {}, "cells": {}}
    if given.json and given.json.exists():
        results = json.loads(given.json.read_text())
    cells = [cell for cell in given.cells if cell != "none"]
    workers: list[Worker] = []
    try:
        if cells:
            workers = start(given.model, given.threads, given.peer_python, given.folder)
    except ValueError as error:
        parser.error(str(error))
    try:
        for worker in workers:
            results["about"][worker.name] = worker.ask("about")
        for weights in given.weights if workers else ():
            results["about"].setdefault("floor", {})[weights] = workers[0].ask(
                "floor", weights=weights
            )
            for cell in cells:
                if cell == "passes":
                    found = own(workers[0], weights, 4.0)
                else:
                    found = measure(workers, cell, weights, given.rounds, console)
                results["cells"][f"{cell} {weights}"] = found
                if given.json:  # what is measured stays, whatever comes next
                    given.json.write_text(json.dumps(results, indent=1))
    except (KeyboardInterrupt, RuntimeError) as error:
        console.print(f"stopped ({error}): the cells so far are shown", style="yellow")
    finally:
        for worker in workers:
            worker.close()
    show(console, results)
    if len(workers) == 1:
        console.print(
            "No peer was found: pip install llama-cpp-python (it builds natively) or openvino-genai"
            " optimum-intel nncf into an environment of their own, and give --peer-python PATH.",
            style="dim",
        )
    if given.markdown:
        print(markdown(results))


if __name__ == "__main__":
    sys.exit(main())
