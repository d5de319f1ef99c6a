"""Imports point one way."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "foretell"
LAYERS = [
    {"progress", "config", "files", "placed"},
    {"sequence"},
    {"spec", "prompts", "answer"},
    {"attention"},
    {"models"},
    {"drafters"},
    {"runtime"},
    {"engine"},
    {"llm", "server", "bench", "train", "cli", "flags", "terminal", "demo", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
NOBODY_IMPORTS = {"train", "server", "cli", "__main__"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(tree: ast.AST) -> set[str]:
    """Parts of the package that a module imports, anywhere in it, TYPE_CHECKING included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            module = node.module or ""
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("foretell.")} & set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_import_points_upwards(path):
    here = part(path)
    assert here in LEVEL, f"{here} is in no layer: add it to LAYERS"
    parts = imported_parts(ast.parse(path.read_text()))
    if here not in ("__main__",):
        # `foretell serve` and `foretell train`, when they are called
        allowed = {"server", "train"} if here == "cli" else set()
        assert not (parts - {here} - allowed) & NOBODY_IMPORTS, parts
    assert not [name for name in parts if LEVEL[name] > LEVEL[here]], f"{here} imports {parts}"


def test_the_walk_sees_every_way_to_import():
    code = "import foretell.llm\nfrom foretell import bench\ndef f():\n  from foretell.cli import x"
    assert imported_parts(ast.parse(code)) == {"llm", "bench", "cli"}
