"""What README and docs show is there, and works as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from foretell.cli import app
from foretell.config import SpeculationConfig
from foretell.models.hub import is_cached

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str) -> list[str]:
    lines = [line for _, block in re.findall(r"```(sh|)\n(.*?)```", text, re.DOTALL)
             for line in block.splitlines()]  # fmt: skip
    return [line.strip() for line in lines if re.match(r"\s*(foretell|make) ", line)]


def test_it_starts_with_the_two_commands():
    first = blocks(README, "sh")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]
    assert README.index(first) < 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_flag_exists(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    group = typer.main.get_command(app)
    for line in commands(page.read_text()):
        program, name, *rest = shlex.split(line, comments=True)
        if program == "make":
            assert name in targets, line
            continue
        command = group.commands[name]
        known = {
            flag for option in command.params for flag in (*option.opts, *option.secondary_opts)
        }
        for word in rest:
            if word.startswith("--") and word != "--help":
                assert word.split("=")[0] in known | {"--help"}, f"{line}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_speculation_can_be_read(page):
    for text in re.findall(r"--speculation ([\w:=,.-]+)", page.read_text()):
        name = text.rstrip(".,")
        assert (SpeculationConfig.parse(name) is None) == (name == "none")


def test_python_reads():
    assert len(blocks(README, "python")) >= 3
    for code in blocks(README, "python"):
        compile(code, "README.md", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("code", blocks(README, "python"), ids=range(3))
def test_python_runs(code, capsys):
    if not is_cached("smollm2"):
        pytest.skip("run `foretell pull smollm2` first: this needs the default model")
    exec(compile(code, "README.md", "exec"), {})
