"""A tiny model with a tokenizer of letters and a chat template, and runs over it."""

from __future__ import annotations

import json
from pathlib import Path

from foretell.config import EngineConfig
from foretell.train.config import PrepareConfig
from foretell.train.prepare import Prepared, prepare
from tests import tiny

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}a {% endif %}"
)


def write_model(path: Path, *, seed: int = 0, template: str = TEMPLATE) -> str:
    """`tests.tiny` with letters for tokens; every turn ends with its end-of-text token."""
    tiny.write_model(path, seed=seed)
    tiny.write_tokenizer(path, template)
    return str(path)


def write_rows(path: Path, rows: list) -> Path:
    """JSONL; a text is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prepared(model: str, run: Path, rows: list, **options) -> Prepared:
    run.mkdir(parents=True, exist_ok=True)
    config = PrepareConfig(model=model, **options)
    return prepare(config, run, [write_rows(run / "given.jsonl", rows)])


def engine(model: str, **options) -> EngineConfig:
    """Small pages, so that borders are crossed often."""
    small = {"page_size": 4, "kv_memory": "8MiB", "threads": 1, "weights": "f32"}
    return EngineConfig(model=model, **{**small, "max_num_seqs": 4, **options})
