"""Tells calls of tools from text in one answer, character by character as it comes.

A call is recognised as soon as its name and the beginning of its arguments are there, and its
arguments go out as the model writes them. Since every character is judged by what stands before
it, an answer says the same in one piece, in any pieces, and whole.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = " \t\r\n"


class Nesting:
    """How deep the next character of a JSON text lies."""

    def __init__(self) -> None:
        self.depth = 0
        self._quoted = self._escaped = False

    def take(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = character == "\\"
            self._quoted = character != '"'
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1


class Splitter:
    """One answer of a model that was told of tools.

    Args:
        key: what the model calls a call's arguments.
        tagged: calls stand between tags; else an answer that begins with an object is one.
    """

    def __init__(self, key: str, tagged: bool) -> None:
        self.key, self.tagged = key, tagged
        self.num_calls = 0
        self._take: Callable[[str], None] = self._text
        self._listed = False  # a list of calls stands between the tags
        self._held: list[str] = []  # not known yet what it is
        self._space = ""  # at the end of what is text: shown once more text follows
        self._shown: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def feed(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Takes what is new. Returns what is certainly text, and what is new of calls, as the
        deltas of OpenAI's streams: index, id and name with a call's first one, then arguments."""
        for character in text:
            self._take(character)
        return self._news()

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """Nothing follows. What cannot be read as a call is text."""
        if self._take in (self._text, self._tag, self._object):
            self._show()
        if not self.num_calls:
            self._shown.append(self._space)
        return self._news()

    def _news(self) -> tuple[str, list[dict[str, Any]]]:
        text, calls = "".join(self._shown), list(self._calls.values())
        self._shown, self._calls = [], {}
        return text, calls

    # ---- what a character is, by what stands before it

    def _text(self, character: str) -> None:
        if self.tagged:
            self._held.append(character)
            while not OPEN.startswith("".join(self._held)):
                self._show(1)
            if len(self._held) == len(OPEN):
                self._listed = False
                self._take = self._tag
        elif character == "{":
            self._begin(character)
        else:
            self._held.append(character)
            if character not in _SPACE:
                self._no_call()

    def _tag(self, character: str) -> None:
        if character == "{":
            self._begin(character)
        elif character in _SPACE or (character == "[" and not self._listed):
            self._listed = self._listed or character == "["
            self._held.append(character)
        else:
            self._no_call(character)

    def _begin(self, character: str) -> None:
        self._start = len(self._held)
        self._nesting = Nesting()
        self._asked = False
        self._take = self._object
        self._object(character)

    def _object(self, character: str) -> None:
        self._held.append(character)
        self._nesting.take(character)
        depth = self._nesting.depth
        if character == "{" and depth == 2 and not self._asked:
            self._asked = True  # if these are the arguments, the name is known
            call = self._read("}}")
            if call is not None and not call[1]:
                self._call(call[0], "{")
                self._take = self._arguments
        elif depth == 0:
            call = self._read("")
            if call is None:
                self._no_call()
            else:
                self._call(call[0], json.dumps(call[1], ensure_ascii=False))
                self._take = self._behind

    def _arguments(self, character: str) -> None:
        self._nesting.take(character)
        self._say(character)
        if self._nesting.depth == 1:
            self._take = self._rest

    def _rest(self, character: str) -> None:
        self._nesting.take(character)
        if self._nesting.depth == 0:
            self._take = self._behind

    def _behind(self, character: str) -> None:
        if self._held or (self.tagged and character == "<"):
            self._held.append(character)
            if not CLOSE.startswith("".join(self._held)):
                self._held.pop()
                self._no_call(character)
            elif len(self._held) == len(CLOSE):
                self._held.clear()
                self._take = self._text
        elif character == "{":
            self._begin(character)
        elif character not in _SPACE + (";,]" if self.tagged else ";"):
            self._no_call(character)

    def _plain(self, character: str) -> None:
        self._held.append(character)
        self._show()

    # ---- what follows from it

    def _no_call(self, character: str = "") -> None:
        """What is held is text; between tags what comes may be a call again."""
        self._show()
        self._take = self._text if self.tagged else self._plain
        if character:
            self._take(character)

    def _show(self, count: int | None = None) -> None:
        text = "".join(self._held[:count])
        del self._held[:count]
        bare = text.rstrip(_SPACE)
        if bare:
            self._shown += [self._space, bare]
            self._space = ""
        self._space += text[len(bare) :]

    def _read(self, missing: str) -> tuple[str, dict[str, Any]] | None:
        """Name and arguments of the object that is held, where it is a call."""
        try:
            read = json.loads("".join(self._held[self._start :]) + missing)
            name, arguments = read["name"], read[self.key]
        except (ValueError, KeyError, RecursionError):
            return None
        fits = isinstance(name, str) and isinstance(arguments, dict)
        return (name, arguments) if fits else None

    def _call(self, name: str, arguments: str) -> None:
        self._held.clear()
        index, self.num_calls = self.num_calls, self.num_calls + 1
        self._calls[index] = {
            "index": index,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _say(self, text: str) -> None:
        index = self.num_calls - 1
        call = self._calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
        call["function"]["arguments"] += text


def put_together(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whole calls from what `Splitter` said of them one after the other."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta["index"] == len(calls):
            own = {name: value for name, value in delta.items() if name != "index"}
            calls.append({**own, "function": dict(delta["function"])})
        else:
            calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return calls
