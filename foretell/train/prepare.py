"""First stage: conversations through the target's chat template to token ids."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foretell.files import alone, sha256, write_whole
from foretell.models.hub import resolve
from foretell.models.loader import open_source
from foretell.models.tokenizer import Tokenizer
from foretell.progress import progress_bar
from foretell.train.config import PrepareConfig
from foretell.train.conversations import (
    Dropped,
    encode_conversation,
    encode_text,
    read_conversation,
)
from foretell.train.files import target_digest, write_json
from foretell.train.samples import Sample

_NAMED = 5
"""Rows of each reason that are named."""


@dataclass
class Prepared:
    """What was kept, and what was not and why."""

    samples: list[Sample] = field(default_factory=list[Sample])
    num_rows: int = 0
    cut: list[str] = field(default_factory=list[str])
    """Rows longer than max_len, as file:line."""
    dropped: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Rows by reason."""

    def table(self) -> str:
        """For a terminal."""
        kinds = ("prompts", "conversations", "texts")
        count = Counter(
            kinds[2 if sample.given else bool(sample.num_wanted)] for sample in self.samples
        )
        tokens = sum(len(sample.tokens) for sample in self.samples)
        wanted = sum(sample.num_wanted for sample in self.samples)
        lines = [
            f"{self.num_rows:>9,} rows read",
            f"{len(self.samples):>9,} kept: {count['conversations']:,} with answers, "
            f"{count['prompts']:,} prompts, {count['texts']:,} texts; {tokens:,} tokens, "
            f"{wanted:,} of them answers or text",
        ]
        if self.cut:
            lines.append(f"{len(self.cut):>9,} of them cut to max_len: {_some(self.cut)}")
        for reason, rows in sorted(self.dropped.items(), key=lambda item: -len(item[1])):
            lines.append(f"{len(rows):>9,} dropped, {reason}: {_some(rows)}")
        return "\n".join(lines)


def _some(rows: list[str]) -> str:
    return ", ".join(rows[:_NAMED]) + (", ..." if len(rows) > _NAMED else "")


def prepare(config: PrepareConfig, run: Path, files: Sequence[Path]) -> Prepared:
    """Writes samples.jsonl and samples.json.

    Args:
        run: the run's directory.
        files: JSONL, see `read_conversation`.

    Raises:
        ValueError: the model or a file is not there, or not one row could be kept.
    """
    path = resolve(config.model)
    _, target = open_source(path)
    tokenizer = Tokenizer.load(path)
    if not tokenizer.has_chat_template:
        raise ValueError(f"{path}: this model has no chat template, which says what an answer is")
    out = Prepared()
    seen: set[bytes] = set()
    sizes = [_size(file) for file in files]
    with progress_bar("bytes", sum(sizes), lines=True) as advance:
        for place, source, line in _lines(files):
            advance(len(line))
            if not line.strip():
                continue
            out.num_rows += 1
            try:
                whole = _sample(line, tokenizer, target.eos_token_ids, source)
                parts = _fitted(whole, config.max_len)
                digest = hashlib.blake2b(parts[0].tokens.tobytes(), digest_size=16).digest()
                if digest in seen:
                    raise Dropped("seen before")
            except Dropped as error:
                out.dropped[str(error)].append(place)
                continue
            seen.add(digest)
            out.samples += parts
            if len(whole.tokens) > sum(len(part.tokens) for part in parts):
                out.cut.append(place)
            if config.limit is not None and len(out.samples) >= config.limit:
                del out.samples[config.limit :]
                break
    if not out.samples:
        read, _, *dropped = (line.strip() for line in out.table().splitlines())
        raise ValueError(f"not one row could be kept: {'; '.join([read, *dropped])}")
    with alone(run):
        _write(config, run, out)
    return out


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}") from None


def _lines(files: Sequence[Path]) -> Iterator[tuple[str, str, bytes]]:
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield f"{path.name}:{number}", path.stem, line


def _sample(line: bytes, tokenizer: Tokenizer, end_ids: tuple[int, ...], source: str) -> Sample:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is one
        raise Dropped("malformed JSON") from None
    if isinstance(row, dict) and "text" in row:
        sample = encode_text(row["text"], tokenizer)
        return replace(sample, source=_source(row, source))
    messages, waiting = read_conversation(row)
    sample = encode_conversation(messages, tokenizer, end_ids, waiting)
    return replace(sample, source=_source(row, source))


def _source(row: dict[str, Any], default: str) -> str:
    """Where a row is from; half characters could not be written."""
    return str(row.get("source") or default).encode(errors="replace").decode()


def _fitted(sample: Sample, max_len: int) -> list[Sample]:
    """A text in pieces of max_len; a conversation cut to it, if an answer or the room for one is
    left.

    Raises:
        Dropped: it is not.
    """
    if len(sample.tokens) < max_len:
        return [sample]
    if sample.given:
        starts = range(0, len(sample.tokens), max_len)
        pieces = (sample.tokens[start : start + max_len] for start in starts)
        return [
            replace(sample, tokens=piece, spans=((1, len(piece)),))
            for piece in pieces
            if len(piece) > 1
        ]
    last = sample.spans[-1][1] if sample.spans else 0
    cut = sample if last == len(sample.tokens) == max_len else sample.cut(max_len)
    if not cut.spans or cut.spans[-1][1] == 0:
        raise Dropped("longer than max_len")
    end = cut.spans[-1][1]  # half a question is none
    return [cut.cut(end)]


def _write(config: PrepareConfig, run: Path, out: Prepared) -> None:
    samples, about = run / "samples.jsonl", run / "samples.json"
    rows = (json.dumps(s.as_row(), ensure_ascii=False, separators=(",", ":")) for s in out.samples)
    parts = (f"{row}\n".encode() for row in rows)
    write_whole(samples, b"".join(parts))
    kept: dict[str, Any] = {
        "texts": len(out.samples),
        "with_answers": sum(sample.num_wanted > 0 for sample in out.samples),
        "tokens": sum(len(sample.tokens) for sample in out.samples),
        "wanted": sum(sample.num_wanted for sample in out.samples),
        "cut": len(out.cut),
        "by_source": dict(Counter(sample.source for sample in out.samples).most_common(100)),
    }
    write_json(
        about,
        {
            "version": 1,
            "target": config.model,
            "target_digest": target_digest(config.model),
            "max_len": config.max_len,
            "rows": out.num_rows,
            "kept": kept,
            "dropped": {
                reason: {"rows": len(rows), "first": list(itertools.islice(rows, _NAMED))}
                for reason, rows in out.dropped.items()
            },
            "sha256": sha256(samples),
        },
    )
