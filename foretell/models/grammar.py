"""Answers that obey a grammar: which tokens may follow, at every node of a draft tree.

`llguidance` reads JSON schemas and Lark grammars and keeps a parser over the model's own tokens.
The parser stands where the committed answer stands. For a node of a tree it is led along the path
to that node, asked, and later rolled back, so a draft that breaks the grammar is a rejection like
any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from foretell.models.tokenizer import Tokenizer

# A model may hesitate, but not for ever: some space between the parts of JSON, never only space.
_JSON: Any = {"whitespace_pattern": r"[ \n]{1,16}"}

MOST_TEXT = 2**17
"""Characters of a grammar: reading one of a hundred thousand alternatives takes half a minute."""
MOST_PATTERNS = 16
"""Patterns that one text has to match at once: each more doubles what reading them takes."""
MOST_FORCED = 2**12
"""Tokens that may follow each other without a choice: finding them holds up other answers."""
MOST_ITEMS = 10_000
"""What a parser may keep in mind for one token, a fifth of llguidance's own."""
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/')


class Grammars:
    """Makes grammars for one model.

    Args:
        tokenizer: of the model.
        vocab_size: of its logits.
        end_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int]) -> None:
        import llguidance

        self.vocab_size, self.end_ids = vocab_size, sorted(end_ids)
        if not self.end_ids:
            raise ValueError("grammar: this model has no end-of-text token to end an answer with")
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.inner.to_str(), n_vocab=vocab_size, eos_token=self.end_ids[0]
        )
        self._matcher = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(step_max_items=MOST_ITEMS)
        self._last: tuple[str, Any] = ("", None)  # n answers of one request are read once

    def make(self, text: str) -> Grammar:
        """A grammar at its start.

        Args:
            text: a JSON schema (it begins with a brace), or a Lark grammar as llguidance reads it.

        Raises:
            ValueError: it cannot be read.
        """
        if self._last[0] != text:
            self._last = text, self._read(text)
        return Grammar(self._last[1].deep_copy(), self.vocab_size, self.end_ids)

    def _read(self, text: str) -> Any:
        if len(text) > MOST_TEXT:
            raise ValueError(f"grammar: {len(text)} characters, at most {MOST_TEXT} are read")
        try:
            if text.lstrip().startswith("{"):
                at_once = _at_once(json.loads(text))
                source = self._matcher.grammar_from_json_schema(text, defaults=_JSON)
            else:
                at_once = _LITERAL.sub("", text).count("&")
                source = self._matcher.grammar_from_lark(text)
            if at_once > MOST_PATTERNS:
                message = f"{at_once} patterns for one text to match, at most {MOST_PATTERNS}"
                raise ValueError(message)
            matcher = self._matcher(self._tokenizer, source, log_level=0, limits=self._limits)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"grammar: {_short(str(error))}") from None
        grammar = Grammar(matcher, self.vocab_size, self.end_ids)
        begins = grammar.mask([])
        grammar.forced(1)
        if begins is None or not begins.any() or grammar.problem:
            problem = (grammar.problem or "").replace("NoExtensionBias", "")
            raise ValueError(f"grammar: {problem or 'no answer obeys it'}")
        return matcher


def _at_once(schema: Any) -> int:
    """The most patterns that one text of a JSON schema has to match at once."""
    known: dict[int, int] = {}

    def count(node: Any) -> int:
        if isinstance(node, list):
            return sum(map(count, node))
        if isinstance(node, dict) and id(node) not in known:
            known[id(node)] = 0  # a schema that refers to itself asks for nothing more
            inner = {name: count(value) for name, value in node.items()}
            target: Any = schema if "$ref" in node else None
            for name in str(node.get("$ref", "#")).split("/")[1:]:
                target = target.get(name) if isinstance(target, dict) else None
            known[id(node)] = ("pattern" in node) + inner.get("allOf", 0) + count(target)
        return known.get(id(node), 0)

    count(schema)
    return max(known.values())


def _short(message: str) -> str:
    """An error of the library's without the state that it dumps."""
    for dump in ("\n<state>", "<backtrace>"):
        message = message.partition(dump)[0]
    return " ".join(message.split())


class Grammar:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int, end_ids: list[int]) -> None:
        self._matcher, self._ends, self._vocab = matcher, end_ids, vocab_size
        self._words = np.zeros((vocab_size + 31) // 32, np.int32)
        self._refused: str | None = None
        self._ahead: list[int] = []  # tokens behind the committed ones that the parser has read

    def mask(self, path: SequenceOf[int]) -> np.ndarray | None:
        """Tokens that may follow the answer and then the tokens of ``path``.

        Returns:
            [V] bool; None where ``path`` breaks the grammar or goes on behind its end, so that
            nobody will ever ask what follows. Nothing is allowed once there is a `problem`.
        """
        allowed = np.zeros(self._vocab, np.bool_)
        if not self._lead(path):
            return None if self.problem is None else allowed
        if self._matcher.is_stopped():
            allowed[self._ends] = True
            return allowed
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self.problem is not None:
            return allowed
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        allowed = bits[: self._vocab].view(np.bool_)
        if allowed[self._ends[0]]:
            allowed[self._ends] = True
        return allowed

    def extend(self, token: int) -> bool:
        """Takes in the answer's next token; True where nothing may follow it."""
        if not self._lead([token]):
            raise RuntimeError(self.problem or "the answer broke its grammar")
        self._ahead.clear()
        return self._matcher.is_stopped()

    def forced(self, most: int) -> tuple[int, ...]:
        """Tokens that come next because the grammar leaves no other text, at most ``most``.

        They spell that text as the tokenizer would. A model may spell it otherwise: these are
        guesses, all but certain.
        """
        if most <= 0 or not self._lead([]) or self._matcher.is_stopped():
            return ()
        tokens = self._matcher.compute_ff_tokens()
        if len(tokens) > MOST_FORCED:
            self._refused = f"more than {MOST_FORCED} tokens in a row leave no choice"
        return tuple(tokens[:most])

    @property
    def problem(self) -> str | None:
        """Why the parser gave up (a grammar may need too much work), None while it goes on."""
        return _short(self._matcher.get_error()) if self._matcher.is_error() else self._refused

    def _lead(self, path: SequenceOf[int]) -> bool:
        """Puts the parser behind ``path``; False where it does not go there."""
        shared = 0
        while shared < min(len(path), len(self._ahead)) and path[shared] == self._ahead[shared]:
            shared += 1
        if back := len(self._ahead) - shared:
            self._matcher.rollback(back)
            del self._ahead[shared:]
        for token in path[shared:]:
            if not self._matcher.try_consume_tokens([token]):
                return False
            self._ahead.append(token)
        return self.problem is None
