"""The certificate: what was certified, and each part's verdict, on the terminal, as JSON and as one
page of HTML."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from foretell.bench.certify_config import CertifyConfig
from foretell.bench.certify_part import Part, Rig
from foretell.bench.environment import told
from foretell.bench.page import render
from foretell.bench.report import say
from foretell.files import sha256
from foretell.models.hub import packaged_head, resolve
from foretell.progress import progress_bar

_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "config.json", "tokenizer.json")


@dataclass(frozen=True)
class Certificate:
    """Everything there is to say."""

    about: dict[str, Any]
    config: CertifyConfig
    parts: list[Part]

    @property
    def passed(self) -> bool:
        return all(part.passed for part in self.parts)

    def json(self) -> str:
        parts = [asdict(part) | {"passed": part.passed} for part in self.parts]
        whole = {"passed": self.passed, **self.about, "asked": asdict(self.config), "parts": parts}
        return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"

    def html(self) -> str:
        about, environment = self.about, self.about["environment"]
        told_of = {
            "target": f"{about['model']}, {about['weights']} weights",
            "scheme": about["scheme"] + _pairs(about["settings"]),
            "prompts": f"{about['prompts']}; {_pairs(asdict(self.config), '')}",
            "engine": _pairs(about["engine"], ""),
            "platform": environment["platform"],
            **told(environment),
            "date": f"{about['date']}, {about['seconds']:.0f} s",
        }
        return render(
            "certificate.html",
            about=about, passed=self.passed, parts=self.parts, facts_told=told_of,
        )  # fmt: skip


def identify(rig: Rig) -> dict[str, Any]:
    """Names, formats and digests of what is certified; no folders."""
    speculation = rig.speculation
    options = {k: Path(v).name if k == "model" else v for k, v in speculation.options.items()}
    first = rig.engine.speculation
    assert first is not None
    shown = {"k": speculation.k, "verification": speculation.verification} | options
    if first.also:  # the others draft as configured only
        shown |= {"always drafting": speculation.method}
    files = {"target": rig.target.path}
    if given := speculation.options.get("model"):
        files["draft"] = resolve(given, head=True)
    elif packaged := packaged_head(speculation.method, rig.target.config.sizes):
        files["draft"] = packaged
    limits = ("max_model_len", "max_num_batched_tokens", "page_size", "kv_memory", "threads")
    return {
        "model": Path(rig.engine.model).name,
        "weights": rig.target.weights,
        "scheme": "+".join(scheme.method for scheme in (first, *first.also)),
        "settings": shown,
        "engine": {name: getattr(rig.engine, name) for name in limits},
        "files": {
            f"{owner}: {path.name}": found
            for owner, where in files.items()
            for path, found in digests(where).items()
        },
    }


def digests(path: Path) -> dict[Path, str]:
    """SHA-256 of a model's files: of one file, or of a folder's weights, config and tokenizer."""
    found = [path] if path.is_file() else sorted({f for kind in _WEIGHTS for f in path.glob(kind)})
    out: dict[Path, str] = {}
    with progress_bar("hashing files", len(found)) as advance:
        for file in found:
            out[file] = sha256(file)
            advance(1)
    return out


def print_part(part: Part, console: Console) -> None:
    """One line, and what is wrong below it."""
    counts = ", ".join(f"{number:,} {name}" for name, number in part.counts.items())
    say(console, f"{'pass' if part.passed else 'FAIL'}  {part.name}: {counts}",
        None if part.passed else "bold red")  # fmt: skip
    for line in part.findings:
        say(console, f"      {line}")
    if part.more:
        say(console, f"      and {part.more} more")
    for line in part.notes:
        say(console, f"      note: {line}")


def print_verdict(certificate: Certificate, console: Console) -> None:
    """The last line."""
    about = certificate.about
    what = f"{about['scheme']} on {about['model']} ({about['weights']})"
    if certificate.passed:
        say(console, f"Speculation changes nothing: {what}.", "bold green")
    else:
        failed = ", ".join(part.name for part in certificate.parts if not part.passed)
        say(console, f"NOT CERTIFIED: {what} fails {failed}.", "bold red")


def _pairs(values: dict[str, Any], before: str = ": ") -> str:
    shown = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
    return before + shown if shown else ""
