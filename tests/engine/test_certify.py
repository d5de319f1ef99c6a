"""`foretell certify` passes a sound engine and fails one with a fault, whatever the fault."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
from rich.console import Console
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from foretell.bench.certify import certify
from foretell.bench.certify_config import CertifyConfig
from foretell.config import EngineConfig, SpeculationConfig
from tests import tiny

LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789 \n{}[]":,.-+eE\\/ABCDFGHIJKL'
DRAFT = "draft-model:weights=int4,k=4"
PARTS = ["same text", "same bits", "same distribution", "acceptance 1.0", "KV audit"]


@cache
def model() -> Path:
    """A tiny random model whose tokens are letters, enough of them for JSON."""
    path = tiny.write_model(Path(mkdtemp()) / "tiny")
    letters = list(dict.fromkeys(LETTERS))
    letters += [chr(c) for c in range(0x370, 0x400) if chr(c).isalpha()]
    words = ["<unk>", "</s>", *letters][: tiny.VOCAB]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    prompts = ["the cat sat on the cat", "abcabcabcabc 12", '{"a": [1, 2, 3]}', "so it goes"]
    lines = [json.dumps({"id": f"p{i}", "turns": [text]}) for i, text in enumerate(prompts)]
    (path / "prompts.jsonl").write_text("\n".join(lines))
    return path


def run(scheme: str = DRAFT, folder: Path | None = None, **options) -> tuple[bool, dict, str]:
    """Verdict, the JSON and what was printed."""
    folder = folder or Path(mkdtemp())
    speculation = SpeculationConfig.parse(scheme)
    engine = EngineConfig(
        model=str(model()), weights="f32", speculation=speculation, page_size=4,
        kv_memory="64MiB", max_model_len=256, threads=1,
    )  # fmt: skip
    config = CertifyConfig(**({"max_tokens": 24, "limit": 3, "samples": 400, "batch": 8} | options))
    console = Console(file=io.StringIO(), width=200)
    passed = certify(
        engine,
        config,
        prompts=model() / "prompts.jsonl",
        json=folder / "certificate.json",
        html=folder / "certificate.html",
        console=console,
    )
    found = json.loads((folder / "certificate.json").read_text())
    assert found["passed"] == passed == all(part["passed"] for part in found["parts"])
    return passed, found, console.file.getvalue()


def failed(found: dict) -> set[str]:
    return {part["name"] for part in found["parts"] if not part["passed"]}


@pytest.mark.parametrize("scheme", [DRAFT, f"{DRAFT},verification=rejection"])
def test_a_sound_engine_passes(scheme, tmp_path):
    passed, found, printed = run(scheme, tmp_path)
    assert passed, printed
    assert [part["name"] for part in found["parts"]] == PARTS
    assert not any(part["notes"] for part in found["parts"][2:]), printed
