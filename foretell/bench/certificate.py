"""The certificate: what was certified, and each part's verdict, on the terminal, as JSON and as one
page of HTML."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from foretell.bench.certify_config import CertifyConfig
from foretell.bench.certify_part import Part, Rig
from foretell.bench.page import page
from foretell.models.hub import resolve
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
        return page(f"{self.about['scheme']} on {self.about['model']}", _body(self))


def identify(rig: Rig) -> dict[str, Any]:
    """Names, formats and digests of what is certified; no folders."""
    speculation = rig.speculation
    options = {k: Path(v).name if k == "model" else v for k, v in speculation.options.items()}
    assert rig.engine.speculation is not None
    also = "+".join(scheme.method for scheme in rig.engine.speculation.also)
    shown = {"k": speculation.k, "verification": speculation.verification} | options
    shown |= {"also": also} if also else {}
    files = {"target": rig.target.path}
    if given := speculation.options.get("model"):
        files["draft"] = resolve(given, head=True)
    limits = ("max_model_len", "max_num_batched_tokens", "page_size", "kv_memory", "threads")
    return {
        "model": Path(rig.engine.model).name,
        "weights": rig.target.weights,
        "scheme": speculation.method,
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
            out[file] = digest(file)
            advance(1)
    return out


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def print_verdict(certificate: Certificate, console: Console) -> None:
    """A line for each part, what is wrong below it, and the verdict."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    for part in certificate.parts:
        counts = ", ".join(f"{number:,} {name}" for name, number in part.counts.items())
        say(f"{'pass' if part.passed else 'FAIL'}  {part.name}: {counts}",
            None if part.passed else "bold red")  # fmt: skip
        for line in part.findings:
            say(f"      {line}")
        if len(part.findings) < part.counts.get("failures", 0):
            say(f"      and {part.counts['failures'] - len(part.findings)} more")
        for line in part.notes:
            say(f"      note: {line}")
    about = certificate.about
    what = f"{about['scheme']} on {about['model']} ({about['weights']})"
    if certificate.passed:
        say(f"Speculation changes nothing: {what}.", "bold green")
    else:
        failed = ", ".join(part.name for part in certificate.parts if not part.passed)
        say(f"NOT CERTIFIED: {what} fails {failed}.", "bold red")


# ---- the page


def _body(certificate: Certificate) -> str:
    about = certificate.about
    verdict = "pass" if certificate.passed else "fail"
    title = "Speculation changes nothing" if certificate.passed else "Not certified"
    facts = {
        "target": f"{about['model']}, {about['weights']} weights",
        "scheme": about["scheme"] + _pairs(about["settings"]),
        "prompts": f"{about['prompts']}; {_pairs(asdict(certificate.config), '')}",
        "engine": _pairs(about["engine"], ""),
        "machine": "{cpu}, threads: {threads}, {platform}".format(**about["environment"]),
        "versions": ", ".join(
            f"{name} {version}" for name, version in about["environment"]["packages"].items()
        ),
        "commit": about["environment"]["commit"] or "none",
        "command": about["environment"]["command"],
        "date": f"{about['date']}, {about['seconds']:.0f} s",
    }
    rows = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    files = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td><code>{found}</code></td></tr>"
        for name, found in about["files"].items()
    )
    return (
        f'<p class="eyebrow">foretell certificate</p><h1 class="{verdict}">{title}</h1>'
        f"<p class=lead>{escape(about['scheme'])} on {escape(about['model'])} "
        f"({escape(about['weights'])}), {escape(about['date'])}</p>"
        + "".join(_section(part) for part in certificate.parts)
        + f"<h2>What was certified</h2><div class=wide><table class=facts>{rows}</table></div>"
        + f"<h2>Files, SHA-256</h2><div class=wide><table class=facts>{files}</table></div>"
    )


def _section(part: Part) -> str:
    verdict = "pass" if part.passed else "fail"
    counts = "".join(
        f"<div><b>{number:,}</b><span>{escape(name)}</span></div>"
        for name, number in part.counts.items()
    )
    findings = "".join(f"<li>{escape(line)}</li>" for line in part.findings)
    more = part.counts.get("failures", 0) - len(part.findings)
    findings += f"<li>and {more} more</li>" if more > 0 else ""
    notes = "".join(f"<p class=note>{escape(line)}</p>" for line in part.notes)
    return (
        f'<section class="card {verdict}"><h2><span class="badge {verdict}">{verdict}</span> '
        f"{escape(part.name)}</h2><p>{escape(part.claim[0].upper() + part.claim[1:])}.</p>"
        f"<div class=counts>{counts}</div>"
        + (f"<ul class=findings>{findings}</ul>" if findings else "")
        + _tests(part)
        + notes
        + "</section>"
    )


def _tests(part: Part) -> str:
    """The distribution tests as a table."""
    tests = [detail for detail in part.details if "p" in detail]
    if not tests:
        return ""
    names = ("test", "setting", "answers", "drafted", "texts", "p")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(f'{test[name]:.3g}' if name == 'p' else str(test[name]))}</td>"
            for name in names
        )
        + "</tr>"
        for test in tests
    )
    return f"<div class=wide><table><tr>{head}</tr>{rows}</table></div>"


def _pairs(values: dict[str, Any], before: str = ": ") -> str:
    shown = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
    return before + shown if shown else ""
