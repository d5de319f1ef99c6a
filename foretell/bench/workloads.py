"""Prompts to measure with: our own default workload, or JSON lines as Spec-Bench writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Conversation:
    """User turns that are asked one after the other, each answer staying in the conversation."""

    id: str
    category: str
    turns: tuple[str, ...]


def default_workload() -> list[Conversation]:
    """Conversations of our own writing: Spec-Bench's six tasks and code edits."""
    text = resources.files("foretell.bench").joinpath("data/default.jsonl").read_text("utf-8")
    return parse(text, "default.jsonl")


def read_workload(path: Path) -> list[Conversation]:
    """Reads a JSONL file of prompts.

    Raises:
        ValueError: no such file, not text, or a line that is no prompt; the message has its number.
    """
    try:
        return parse(path.read_text("utf-8-sig"), str(path))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: not UTF-8; convert the file first") from None


def parse(text: str, name: str) -> list[Conversation]:
    """Reads JSON lines.

    Each line is an object with ``turns`` (a list of user messages), ``prompt`` (one message),
    ``messages`` or ``conversations`` (logged, in OpenAI's or ShareGPT's form, of which the user's
    are asked). Its id is ``question_id`` or ``id``, else the line number; its category is the first
    there is of ``task``, ``category`` and ``bench``, else ``all``. Other fields and empty lines are
    ignored.

    Args:
        text: the file's content.
        name: what the error messages call it.

    Raises:
        ValueError: a line is no prompt, or there is none at all.
    """
    found: dict[str, Conversation] = {}
    for number, line in enumerate(text.split("\n"), start=1):  # U+2028 is legal inside a string
        if line.strip():
            try:
                conversation = _conversation(json.loads(line), number)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{name}:{number}: not JSON ({error.msg} at column {error.colno}); "
                    'write one object a line, for example {"turns": ["Hello!"]}'
                ) from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name}:{number}: {error}") from None
            if conversation.id in found:
                raise ValueError(f"{name}:{number}: id {conversation.id!r} occurs a second time")
            found[conversation.id] = conversation
    if not found:
        raise ValueError(f'{name}: no prompts; write one object a line: {{"turns": ["Hello!"]}}')
    return list(found.values())


def _conversation(row: Any, number: int) -> Conversation:
    if not isinstance(row, dict):
        raise ValueError('not an object; write for example {"turns": ["Hello!"]}')
    turns = row.get("turns", row.get("prompt", _asked(row)))
    if turns is None:
        raise ValueError("neither 'turns' nor 'prompt' nor 'messages' nor 'conversations'")
    if isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list) or not turns:
        raise ValueError(
            "'turns' must be a list of at least one message, and a log have one of the user's"
        )
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError("every turn must be text that is not empty")
    try:
        "".join(turns).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a character (a lone surrogate) in a turn") from None
    name = next((row[key] for key in ("question_id", "id") if row.get(key) is not None), number)
    category = next((row[key] for key in ("task", "category", "bench") if row.get(key)), "all")
    return Conversation(str(name), str(category), tuple(turns))


def _asked(row: dict[str, Any]) -> list[str] | None:
    """The user's messages of a logged conversation, or of a line of OpenAI's batch files."""
    body = row["body"] if isinstance(row.get("body"), dict) else row
    said = body.get("messages", body.get("conversations"))
    if not isinstance(said, list):
        return None
    said = [m for m in said if isinstance(m, dict)]
    asked = [m for m in said if m.get("role", m.get("from")) in ("user", "human")]
    return [_text(m.get("content", m.get("value"))) for m in asked]


def _text(content: Any) -> Any:
    """A content's text where it is a list of parts of text; anything else as it is."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if len(found) == len(texts) else content


def by_category(conversations: list[Conversation]) -> dict[str, list[Conversation]]:
    """Groups in the order of their first appearance."""
    groups: dict[str, list[Conversation]] = {}
    for conversation in conversations:
        groups.setdefault(conversation.category, []).append(conversation)
    return groups


def pick(conversations: list[Conversation], limit: int | None) -> list[Conversation]:
    """At most ``limit`` conversations of each category, evenly spaced over the file.

    Raises:
        ValueError: limit is less than 1.
    """
    if limit is None:
        return conversations
    if limit < 1:
        raise ValueError(f"limit={limit}: must be 1 or more prompts of each category")
    return [
        group[i * len(group) // min(limit, len(group))]
        for group in by_category(conversations).values()
        for i in range(min(limit, len(group)))
    ]
