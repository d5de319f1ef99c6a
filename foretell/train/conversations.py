"""Conversations in the forms that data sets have, and where in their tokens the answers lie."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from foretell.models.tokenizer import Tokenizer
from foretell.train.samples import Sample

Message = dict[str, Any]
FORMS = "prompt, prompt + completion, turns, messages, conversations or text"
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant"),
    "system": "system",
}
_LATER = "..."
"""Stands for an answer that is still to come: some templates leave out empty ones."""


class Dropped(ValueError):
    """A row that nothing can be learnt from; the message is the reason to count it under."""


def read_conversation(row: Any) -> tuple[list[Message], bool]:
    """Messages of a row of JSON, and whether its answers are only placeholders.

    Takes ``{"prompt": text or messages, "completion" or "response": the same}``, ``{"turns":
    [texts of the user]}``, ``{"messages": [...]}`` as OpenAI's API has them and ``{"conversations":
    [{"from": ..., "value": ...}]}``.

    Raises:
        Dropped: it is of another form or says nothing.
    """
    if not isinstance(row, dict):
        raise Dropped("not a JSON object")
    waiting = "turns" in row
    if waiting:
        messages: list[Message] = []
        for turn in _items(row["turns"]):
            messages += [*_said("user", turn), *_said("assistant", _LATER)]
        messages = messages[:-1]
    elif "messages" in row or "conversations" in row:
        messages = [_message(m) for m in _items(row.get("messages", row.get("conversations")))]
    elif "prompt" in row:
        answer = row.get("completion", row.get("response"))
        messages = _said("user", row["prompt"])
        messages += [] if answer is None else _said("assistant", answer)
    else:
        raise Dropped(f"no {FORMS}")
    if not messages or any(m.get("content") == "" and "tool_calls" not in m for m in messages):
        raise Dropped("empty")
    if messages[-1]["role"] != "user" and not any(m["role"] == "assistant" for m in messages):
        raise Dropped("nothing to answer")
    return messages, waiting


def _said(role: str, what: Any) -> list[Message]:
    """A text of ``role``, or messages that bring their own."""
    if isinstance(what, str):
        return [{"role": role, "content": what if what.strip() else ""}]
    return [_message(message) for message in _items(what)]


def _message(given: Any) -> Message:
    if not isinstance(given, dict):
        raise Dropped("a message is not a JSON object")
    if "from" in given:
        given = {"role": given["from"], "content": given.get("value")}
        if not isinstance(given["role"], str) or given["role"] not in _SPEAKERS:
            raise Dropped("unknown speaker")
        given["role"] = _SPEAKERS[given["role"]]
    if not isinstance(given.get("role"), str):
        raise Dropped("a message has no role")
    if isinstance(given.get("content"), str) and not given["content"].strip():
        return {**given, "content": ""}
    return given


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Dropped("not a list of messages")
    return value


def encode_conversation(
    messages: list[Message], tokenizer: Tokenizer, end_ids: Collection[int], waiting: bool = False
) -> Sample:
    """Token ids of a conversation through the model's chat template, answers marked.

    An answer starts where the template, asked for one, stops, and ends with the first of
    ``end_ids``, as the model's own would; where a template has no such token it ends where the
    template does when the conversation ends there. What follows the last answer is left out; a
    conversation that ends with the user's words ends with the template's request for an answer.

    Args:
        end_ids: the model's end-of-turn tokens.
        waiting: the assistant's messages are placeholders; their spans are empty, and each one's
            end-of-turn token stays behind it.

    Raises:
        Dropped: the template refuses the messages, or is not concatenative: what it writes for the
            first messages is not the beginning of what it writes for all.
    """
    template = tokenizer.template
    if template is None:
        raise ValueError(f"{tokenizer.name}: this model has no chat template")
    is_open = messages[-1]["role"] != "assistant"
    try:
        whole = template.render(messages, ask=is_open)
        whole.encode()
    except UnicodeEncodeError:
        raise Dropped("half of a character (a lone surrogate)") from None
    except ValueError as error:
        raise Dropped(f"the chat template refuses it ({str(error).split(': ', 1)[-1]})") from None
    ids = tokenizer.encode(whole, add_special=False)

    def place(count: int, ask: bool) -> int:
        """Tokens that the first messages take."""
        try:
            part = template.render(messages[:count], ask=ask)
        except ValueError:
            part = None
        if part is None or not whole.startswith(part):
            raise Dropped("the chat template is not concatenative")
        return _common(ids, tokenizer.encode(part, add_special=False))

    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [place(i, True) for i in answers]
    spans: list[tuple[int, int]] = []
    for i, start, limit in zip(answers, starts, [*starts[1:], len(ids)], strict=False):
        ends = (at + 1 for at in range(start, limit) if ids[at] in end_ids)
        end = next(ends, None) or place(i + 1, False)
        if not start < end <= limit:
            raise Dropped("empty")
        spans.append((start, end))
    if not is_open:
        ids = ids[: spans[-1][1]]
    tokens = np.array(ids, dtype=np.int32)
    return _emptied(tokens, spans, end_ids) if waiting else Sample(tokens, tuple(spans))


def encode_text(text: Any, tokenizer: Tokenizer) -> Sample:
    """A text as it is, without a template; every token behind its first is a lesson.

    Raises:
        Dropped: it is none, or says nothing.
    """
    if not isinstance(text, str):
        raise Dropped("text is not a string")
    try:
        text.encode()  # the tokenizer would raise a TypeError
    except UnicodeEncodeError:
        raise Dropped("half of a character (a lone surrogate)") from None
    ids = tokenizer.encode(text)
    if len(ids) < 3 or not text.strip():
        raise Dropped("empty")
    return Sample(np.array(ids, dtype=np.int32), ((1, len(ids)),), given=True)


def _common(ids: list[int], part: list[int]) -> int:
    """Tokens of ``ids`` that cover ``part``. They differ where a token of ``ids`` reaches across
    the border: it counts to what is before."""
    if ids[: len(part)] == part:
        return len(part)
    pairs = enumerate(zip(ids, part, strict=False))
    return 1 + next((at for at, (a, b) in pairs if a != b), min(len(ids), len(part)) - 1)


def _emptied(tokens: np.ndarray, spans: list[tuple[int, int]], end_ids: Collection[int]) -> Sample:
    """Without the placeholders."""
    keep = np.ones(len(tokens), dtype=bool)
    for start, end in spans:
        keep[start : end - int(int(tokens[end - 1]) in end_ids)] = False
    starts = [int(keep[:start].sum()) for start, _ in spans]
    return Sample(tokens[keep], tuple((start, start) for start in starts))
