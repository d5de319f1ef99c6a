"""From answers to the table: medians, and ratios over turns taken one after the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

PEERS = ("llama.cpp", "OpenVINO")
Value = Callable[[dict[str, Any]], float]


def _decoding(record: dict[str, Any]) -> float:
    return (record["tokens"] - 1) / (record["all"] - record["first"])


def _first(record: dict[str, Any]) -> float:
    return 1000 * record["first"]


def _throughput(record: dict[str, Any]) -> float:
    return record["tokens"] / record["all"]


ROWS: tuple[tuple[str, str, Value, bool], ...] = (
    ("chat", "chat tok/s", _decoding, True),
    ("long", "after 1000 tok/s", _decoding, True),
    ("long", "first token ms", _first, False),
    ("batch", "8 at once tok/s", _throughput, True),
    ("copy", "lookup tok/s", _decoding, True),
)
"""Cell, name, value of an answer, and whether more is better."""
TARGETS = {"int8": 1.3, "bf16": 1.0}
"""Times the peer's speed, plain decoding."""


def ratio(records: list[dict[str, Any]], peer: str, value: Value, more: bool) -> float | None:
    """How many times the peer's speed foretell has: the median over turns."""
    by_turn: dict[int, dict[str, float]] = {}
    for record in records:
        by_turn.setdefault(record["turn"], {})[record["engine"]] = value(record)
    pairs = [(t["foretell"], t[peer]) for t in by_turn.values() if peer in t and "foretell" in t]
    if not pairs:
        return None
    return statistics.median(us / them if more else them / us for us, them in pairs)


def lines(results: dict[str, Any]) -> list[list[str]]:
    """Rows of the comparison: what, foretell, then speed and ratio of each peer."""
    out: list[list[str]] = []
    for weights in ("int8", "bf16", "int4"):
        for cell, name, value, more in ROWS:
            found = results["cells"].get(f"{cell} {weights}")
            if not found or not found["records"]:
                continue
            records = found["records"]
            row = [f"{weights} {name}", _median(records, "foretell", value)]
            for peer in PEERS:
                times = ratio(records, peer, value, more)
                row += [_median(records, peer, value), "" if times is None else f"{times:.2f}"]
            out.append([*row, _target(cell, weights, more), f"{found['others']:.0%}"])
    return out


HEADINGS = ("", "foretell", "llama.cpp", "x", "OpenVINO", "x", "goal", "busy")
OWN = ("pass at", "1 row ms", "4", "8", "16", "chain 32", "tree 32", "tree/chain")


def own(results: dict[str, Any]) -> list[list[str]]:
    """Rows of foretell's passes: milliseconds of one row, then ratios to it."""
    out: list[list[str]] = []
    for key, found in results["cells"].items():
        if key.startswith("passes"):
            for context, cost in found["contexts"].items():
                names = ("4", "8", "16", "chain 32", "tree 32", "tree/chain")
                ratios = [f"{cost['ratio'][name]:.2f}" for name in names]
                out.append([f"{key.split()[1]} {context}", f"{cost['ms']['1']:.2f}", *ratios])
    return out


def floors(results: dict[str, Any]) -> list[str]:
    """A plain chat pass against the time that reading the weights takes here."""
    out: list[str] = []
    for weights, floor in results["about"].get("floor", {}).items():
        found = results["cells"].get(f"chat {weights}")
        if found and found["records"]:
            ours = [r for r in found["records"] if r["engine"] == "foretell"]
            took = 1000 / statistics.median(_decoding(record) for record in ours)
            least = 1000 * floor["weight_bytes"] / floor["bytes_per_second"]
            out.append(
                f"{weights}: {took:.2f} ms a token in chat, {took / least:.2f} times the "
                f"{least:.2f} ms that reading {floor['weight_bytes'] / 1e6:.0f} MB takes at "
                f"{floor['bytes_per_second'] / 1e9:.1f} GB/s (goal 1.3)"
            )
    return out


def show(console: Console, results: dict[str, Any]) -> None:
    if compared := lines(results):
        table = Table(title="medians; ratio: times the peer's speed", title_justify="left")
        for at, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if at == 0 else "right", no_wrap=True)
        for row in compared:
            table.add_row(*row)
        console.print(table)
    if passes := own(results):
        table = Table(
            title="foretell: a pass by its rows, as times one row's", title_justify="left"
        )
        for heading in OWN:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in passes:
            table.add_row(*row)
        console.print(table)
    for line in floors(results):
        console.print(line, highlight=False)
    console.print(_versions(results), style="dim", highlight=False)


def markdown(results: dict[str, Any]) -> str:
    """The same for docs/benchmarks.md."""
    parts = [_grid(HEADINGS, lines(results), left=1), _grid(OWN, own(results), left=1)]
    parts += ["\n".join(f"* {line}" for line in floors(results)), _versions(results)]
    return "\n\n".join(part for part in parts if part)


def _grid(headings: tuple[str, ...], rows: list[list[str]], left: int) -> str:
    if not rows:
        return ""
    rule = ["---" if at < left else "---:" for at in range(len(headings))]
    return "\n".join(f"| {' | '.join(row)} |" for row in ([*headings], rule, *rows))


def _median(records: list[dict[str, Any]], engine: str, value: Value) -> str:
    values = [value(record) for record in records if record["engine"] == engine]
    return f"{statistics.median(values):.0f}" if values else ""


def _target(cell: str, weights: str, more: bool) -> str:
    if cell == "batch" or not more:
        return "1.0"
    return f"{TARGETS[weights]}" if cell != "copy" and weights in TARGETS else ""


def _versions(results: dict[str, Any]) -> str:
    about = results["about"]
    ours = about.get("foretell", {})
    peers = [about[name]["version"] for name in PEERS if name in about]
    facts = [ours.get("cpu"), f"{ours.get('threads')} threads", f"commit {ours.get('commit')}"]
    return ", ".join(str(fact) for fact in (*facts, *peers))
