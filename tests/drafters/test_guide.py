"""The example of docs/schemes.md works as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foretell.config import SpeculationConfig
from foretell.drafters import build, find, schemes
from tests.drafters.tiny import MemoryRuntime, ask, chain, sequence

GUIDE = (Path(__file__).parents[2] / "docs" / "schemes.md").read_text()


def test_the_one_file_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "repeat.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = SpeculationConfig.parse("repeat:Repeat,k=4,period=3")
    assert config is not None
    drafter = build(config, MemoryRuntime())
    assert chain(drafter.propose(ask([sequence([9, 1, 2, 3])], config.k))) == [1, 2, 3, 1]
    with pytest.raises(ValueError, match="period=0: must be at least 1"):
        build(SpeculationConfig(method="repeat:Repeat", options={"period": "0"}), MemoryRuntime())


def test_every_scheme_and_option_is_described() -> None:
    for name in schemes():
        assert f"## {name}\n" in GUIDE
        section = GUIDE.split(f"## {name}\n")[1].split("\n## ")[0]
        assert section.count("```mermaid") == 1, "one picture each"
        assert GUIDE.count(f"| [{name}](#{name}) |") == 1, "what it needs, costs and gives"
        for option, default in vars(find(name).Options()).items():
            assert f"{option}={default}" in section
