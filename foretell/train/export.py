"""A finished head for other engines: `foretell train export`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from foretell.files import replacing
from foretell.models.checkpoint import read_json
from foretell.models.head_reader import open_tensors
from foretell.models.hub import resolve
from foretell.models.loader import open_source
from foretell.train.config import FORMATS, Format
from foretell.train.head_files import HeadFiles, read_head
from foretell.train.layouts import Rows, eagle_layout, medusa_layout, speculators_layout

DTYPES = {"": None, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_BESIDE = ("token_ranking.json", "token_ids.pt", "README.md", "LICENSE")
"""Files that go with a head into any layout."""


def export(
    head: Path,
    out: Path,
    form: Format,
    rows: Rows,
    *,
    verifier: str = "",
    architecture: str = "LlamaForCausalLM",
    tokens: int = 4,
    dtype: str = "",
) -> HeadFiles:
    """Writes a head in another layout; whole or not at all.

    Args:
        head: any head's directory that the engine serves.
        out: the new directory. One that holds a head is replaced.
        form: ``foretell`` copies it as it is; ``eagle`` is the authors' for EAGLE and EAGLE-3;
            ``speculators`` and ``medusa`` are vLLM's.
        rows: rows of the target's lm_head, for a head that shares them.
        verifier, architecture: the target's name and class, which ``speculators`` mentions.
        tokens: draft tokens that a server of the ``speculators`` layout takes by default.
        dtype: f32, f16 or bf16 of all weights; empty: as they are.

    Returns:
        What was written.

    Raises:
        ValueError: the head is damaged, the layout cannot say something that it has, or ``out``
            holds something else.
    """
    if form not in FORMATS:
        raise ValueError(f"format {form!r}: choose one of {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: choose one of f32, f16, bf16")
    files = read_head(head)
    if form == "foretell":
        source = open_tensors(head)
        tensors = {name: source.read(name) for name in sorted(source.shapes)}
        files = HeadFiles(files.method, read_json(head / "config.json"), tensors)
    elif form == "speculators":
        files = speculators_layout(
            files, rows, verifier=verifier, architecture=architecture, tokens=tokens
        )
    else:
        files = {"eagle": eagle_layout, "medusa": medusa_layout}[form](files, rows)
    beside = {name: (head / name).read_bytes() for name in _BESIDE if (head / name).is_file()}
    if (kind := DTYPES[dtype]) is not None:
        tensors = {n: t.to(kind) if t.is_floating_point() else t for n, t in files.tensors.items()}
        files = HeadFiles(files.method, files.settings, tensors, files.beside)
    write_head(out, files.settings, files.tensors, beside | files.beside)
    return files


def write_head(
    path: Path,
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    beside: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a head's directory; whole or not at all.

    Raises:
        ValueError: the place is taken by something else, or cannot be written.
    """
    if path.exists() and not (path / "config.json").is_file() and any(path.iterdir()):
        raise ValueError(f"{path}: exists and is no head; name another directory")
    try:
        with replacing(path) as part:
            (part / "config.json").write_text(json.dumps(dict(settings), indent=2) + "\n", "utf-8")
            for name, content in (beside or {}).items():
                (part / name).write_bytes(content)
            # Tensors that share memory, a tied lm_head, would be refused.
            own = {n: tensor.detach().cpu().clone().contiguous() for n, tensor in tensors.items()}
            save_file(own, part / "model.safetensors", metadata={"format": "pt"})
            (part / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror or error})") from None


def target_rows(model: str) -> Rows:
    """Rows of a target's lm_head, read when they are asked for: float32.

    Args:
        model: as `foretell.models.hub.resolve` takes it.
    """

    def rows(ids: Tensor | None) -> Tensor:
        source, config = open_source(resolve(model))
        name = "lm_head.weight" if "lm_head.weight" in source.shapes else _EMBEDDING
        weight = source.read(name)[: config.vocab_size]
        return (weight if ids is None else weight[ids]).to(torch.float32)

    return rows


_EMBEDDING = "model.embed_tokens.weight"
