"""A model's tokenizer as one file: converted by transformers once, kept, and read in its place.

Importing transformers and converting a GGUF file's vocabulary takes seconds, reading the kept file
a tenth of one. It lies in ``.foretell`` beside the model: a line of JSON that says what it was
made of, and a line of JSON with the tokenizer. What is damaged, out of date or cannot be written
is made anew at every start.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from foretell.files import write_whole

FOLDER = ".foretell"
_SOURCES = (".json", ".jinja", ".model", ".txt")
"""Files beside a model that its tokenizer may be made of."""


@dataclass(frozen=True)
class TokenizerFile:
    """All that is known of a tokenizer."""

    backend: str
    """The JSON of the `tokenizers` library."""
    chat_template: str | None
    special_tokens: dict[str, str]
    """By role, such as ``eos_token``."""


def read(path: Path) -> TokenizerFile:
    """The tokenizer of a model directory or a .gguf file.

    Raises:
        ValueError: there is none that transformers can read.
    """
    gguf = path.name if path.suffix == ".gguf" else None
    folder = path.parent if gguf else path
    kept = folder / FOLDER / f"{gguf or 'model'}.tokenizer.json"
    made_of = _made_of(folder, gguf)
    found = _kept(kept, made_of)
    if found is None:
        found = _convert(folder, gguf)
        with suppress(OSError):  # a read-only place: every start converts
            _keep(kept, made_of, found)
    return found


def _made_of(folder: Path, gguf: str | None) -> dict[str, Any]:
    """What a kept file depends on."""
    files: list[tuple[str, int, int]] = []
    with suppress(OSError):
        for file in sorted([*folder.iterdir(), *folder.glob("*/*.jinja")]):
            if (file.suffix in _SOURCES or file.name == gguf) and file.is_file():
                at = file.stat()
                files.append((str(file.relative_to(folder)), at.st_size, at.st_mtime_ns))
    versions = {name: version(name) for name in ("tokenizers", "transformers")}
    return {"files": [list(file) for file in files], **versions}


def _kept(path: Path, made_of: dict[str, Any]) -> TokenizerFile | None:
    try:
        head, body = path.read_bytes().split(b"\n", 1)
        stated = json.loads(head)
        if stated == {**made_of, "sha256": hashlib.sha256(body).hexdigest()}:
            return TokenizerFile(**json.loads(body))
    except (OSError, ValueError, TypeError):
        pass
    return None


def _keep(path: Path, made_of: dict[str, Any], found: TokenizerFile) -> None:
    body = json.dumps(asdict(found)).encode()
    head = json.dumps({**made_of, "sha256": hashlib.sha256(body).hexdigest()}).encode()
    write_whole(path, head + b"\n" + body)


def _convert(folder: Path, gguf: str | None) -> TokenizerFile:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    shown = logging.get_verbosity()
    logging.set_verbosity_error()  # not the place for hints about transformers itself
    logging.disable_progress_bar()
    options = {"gguf_file": gguf} if gguf else {"local_files_only": True}
    try:
        inner: Any = AutoTokenizer.from_pretrained(str(folder), **options)
        inner.backend_tokenizer.no_truncation()  # as transformers does at each call
        inner.backend_tokenizer.no_padding()
        return TokenizerFile(
            inner.backend_tokenizer.to_str(),
            inner.get_chat_template() if inner.chat_template else None,
            dict(inner.special_tokens_map),
        )
    except Exception as error:  # the library meets missing and damaged files in many ways
        reason = re.sub(r"\s+", " ", str(error))[:160]
        where = folder / gguf if gguf else folder
        raise ValueError(f"{where}: no tokenizer can be read from it ({reason})") from None
    finally:
        logging.set_verbosity(shown)
