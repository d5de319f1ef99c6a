"""Tools: told to the model through its chat template, and found again in what it says.

Two ways of calling are known, by what the template says: Hermes' (Qwen, for one), JSON between
tags, and Llama 3's, an answer that is one JSON object.
"""

from __future__ import annotations

import json
from typing import Any

from foretell.models.tokenizer import Tokenizer
from foretell.server.splitter import CLOSE, OPEN, Splitter

# As json.dumps writes, and so the calls that models were trained on.
_SPACES = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}


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
        self.tagged = OPEN in source
        self.listed = OPEN + "[" in source  # SmolLM2 puts its calls into one list
        if self.tagged and OPEN in hidden:
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
        start, between = "object", '"; "'
        if self.tagged:
            start, between = f'"{OPEN}\\n" object "\\n{CLOSE}"', '"\\n"'
        if self.listed:
            start = f'"{OPEN}" object "{CLOSE}"'
            call = {"type": "array", "items": call, "minItems": 1}
            call |= {} if many else {"maxItems": 1}
        repeat = f" ({between} call)*" if many and not self.listed else ""
        return (
            f"start: call{repeat}\ncall: {start}\nobject: %json {json.dumps({**call, **_SPACES})}\n"
        )

    def splitter(self) -> Splitter:
        """For one answer."""
        return Splitter(self.arguments, self.tagged)
