"""What must hold for every file of the repository."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES_A_FILE = 350
MOST_CODE_LINES = 22_500
TEXT = {".py", ".md", ".toml", ".jsonl", ".json", ".yml", ".txt", ""}
# Put together so that this file does not hold what it looks for.
MACHINE = re.compile(
    "|".join(["/" + "work/", "/" + "root/", "/" + "home/[a-z]", "/" + "tmp/brief"])
)
UNFINISHED = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]))


def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.suffix in TEXT and path.is_file()]


def package() -> list[Path]:
    return sorted((ROOT / "foretell").rglob("*.py"))


def length(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_module_is_long():
    long = {str(p.relative_to(ROOT)): n for p in package() if (n := length(p)) > MOST_LINES_A_FILE}
    assert not long


def code_lines(text: str) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    lines: set[int] = set()
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        prose = token.type == tokenize.STRING and before in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        )
        layout = token.type in (tokenize.NL, tokenize.COMMENT)
        if not prose and not layout and token.string.strip():
            lines |= set(range(token.start[0], token.end[0] + 1))
        if not layout:
            before = token.type
    return len(lines)


def test_code_lines_are_counted_without_prose():
    text = (
        '"""Doc.\n\nMore."""\n\n# why\nx = """a\nb"""\n\ndef f():\n    """Doc."""\n    return 1\n'
    )
    assert code_lines(text) == 4


def test_the_package_stays_small():
    assert sum(code_lines(path.read_text()) for path in package()) <= MOST_CODE_LINES


def test_no_path_of_one_machine():
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files()
        if (match := MACHINE.search(path.read_text(errors="replace")))
    }
    assert not found


def test_nothing_is_left_unfinished():
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files()
        if path.suffix == ".py" and (match := UNFINISHED.search(path.read_text()))
    }
    assert not found


def test_nothing_in_the_package_or_tests_needs_data_from_outside():
    # README and docs may name such files in commands for people who have them.
    outside = "shared" + "/"
    found = [
        str(path.relative_to(ROOT))
        for path in files()
        if path.suffix == ".py" and f"../{outside}" in path.read_text()
    ]
    assert not found
