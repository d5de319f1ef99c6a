"""Tools: told to the model through its chat template, and found again in what it says.

Two ways of calling are known, by what the template says: Hermes' (Qwen, for one), JSON between
tags, and Llama 3's, an answer that is one JSON object.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from typing import Any

from foretell.models.tokenizer import Tokenizer

# As json.dumps writes, and so the calls that models were trained on.
_SPACES = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Calls:
    """How one model calls tools.

    Args:
        tokenizer: of the model, with its chat template.

    Raises:
        ValueError: the template does not say how.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        source = tokenizer.template.source if tokenizer.template else ""
        if "tools" not in source:
            raise ValueError("this model's chat template has no place for tools")
        added = tokenizer.inner.get_added_tokens_decoder().values()
        hidden = {token.content for token in added if token.special}
        self.tagged = _OPEN in source
        self.listed = _OPEN + "[" in source  # SmolLM2 puts its calls into one list
        if self.tagged and _OPEN in hidden:
            raise ValueError("this model's tags of tool calls are not text")
        if not self.tagged and not ("parameters" in source and "ipython" in source):
            raise ValueError("this model's way to call tools is none that is known here")
        self.arguments = "arguments" if self.tagged else "parameters"

    def grammar(self, functions: list[dict[str, Any]], many: bool) -> str:
        """An answer that calls one of these functions, or ``many``."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function["name"]},
                    self.arguments: function.get("parameters") or {"type": "object"},
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for function in functions
        ]
        call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if not self.tagged:
            return json.dumps({**call, **_SPACES})
        if self.listed:
            call = {"type": "array", "items": call, "minItems": 1}
            call |= {} if many else {"maxItems": 1}
        repeat = ' ("\\n" call)*' if many and not self.listed else ""
        body = "object" if self.listed else '"\\n" object "\\n"'
        return (
            f'start: call{repeat}\ncall: "{_OPEN}" {body} "{_CLOSE}"\n'
            f"object: %json {json.dumps({**call, **_SPACES})}\n"
        )

    def splitter(self) -> Splitter:
        return Splitter(self)


def _objects(text: str) -> Iterator[Any]:
    """JSON objects, in a list or one behind the other with a semicolon between them, as Llama's
    models write several calls."""
    text = text.strip()
    while text:
        read, end = json.JSONDecoder().raw_decode(text)
        yield from read if isinstance(read, list) else [read]
        text = text[end:].lstrip("; \n")


class Splitter:
    """Tells calls from text in one answer, as it comes."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._held = ""
        self._shown = False

    def feed(self, text: str) -> str:
        """Takes what is new; returns what is certainly text."""
        self._held += text
        if self._calls.tagged:
            at = self._held.find(_OPEN)
            if at < 0:  # its beginning may be what the text ends with
                sizes = range(min(len(_OPEN), len(self._held)), 0, -1)
                size = next((n for n in sizes if _OPEN.startswith(self._held[-n:])), 0)
                at = len(self._held) - size
        else:
            start = self._held.lstrip()
            maybe = not self._shown and (not start or start.startswith("{"))
            at = 0 if maybe else len(self._held)
        sure, self._held = self._held[:at], self._held[at:]
        self._shown = self._shown or bool(sure)
        return sure

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Nothing follows: the text that is left, and the calls. What cannot be read is text."""
        held, self._held = self._held, ""
        parts = [held]
        if self._calls.tagged:
            parts = [part.partition(_CLOSE)[0] for part in held.split(_OPEN)[1:]]
        found: list[dict[str, Any]] = []
        try:
            for part in parts:
                for call in _objects(part):
                    found.append(self._call(call["name"], call[self._calls.arguments]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return held, []
        return ("", found) if found else (held, [])

    @staticmethod
    def _call(name: Any, arguments: Any) -> dict[str, Any]:
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError("not a call")
        text = json.dumps(arguments, ensure_ascii=False)
        function = {"name": name, "arguments": text}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
