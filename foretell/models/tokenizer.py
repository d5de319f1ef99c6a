"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from foretell.models.chat_template import ChatTemplate
from foretell.models.tokenizer_file import read


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        inner: a `tokenizers.Tokenizer`.
        name: what error messages call it.
        template: None where the model has none.
    """

    def __init__(self, inner: Any, name: str, template: ChatTemplate | None = None) -> None:
        self.inner = inner
        self.name = name
        self.template = template

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads the tokenizer of a model directory or a .gguf file.

        Raises:
            ValueError: there is none that can be read.
        """
        import tokenizers

        found = read(path)
        template = None
        if found.chat_template:
            template = ChatTemplate(found.chat_template, found.special_tokens)
        return cls(tokenizers.Tokenizer.from_str(found.backend), str(path), template)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special: put what the model expects around a text (a begin-of-text token).

        Raises:
            ValueError: the text holds half of a character.
        """
        try:
            return self.inner.encode(text, add_special_tokens=add_special).ids
        except TypeError:
            raise ValueError("the text holds half of a character (a lone surrogate)") from None

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids, spaces as they are."""
        return self.inner.decode(list(ids), skip_special_tokens=skip_special)

    @property
    def has_chat_template(self) -> bool:
        return self.template is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer starts.

        Raises:
            ValueError: the model has no chat template, or it refuses these messages.
        """
        if self.template is None:
            raise ValueError(f"{self.name}: this model has no chat template; generate from text")
        return self.encode(self.template.render(messages, tools), add_special=False)

    @cached_property
    def id_to_token(self) -> dict[int, str]:
        """Id to the vocabulary's own spelling, added tokens included."""
        return {index: token for token, index in self.inner.get_vocab().items()}


_PADDING = re.compile(r"\[?<?\|?(PAD|pad|unused|reserved|extra)[\w ]*\|?>?\]?")


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Draft tokens are target tokens only if both map every id to the same string. One vocabulary
    may be longer by padding.

    Raises:
        ValueError: they differ; names the first id that does.
    """
    a, b = target.id_to_token, draft.id_to_token
    for index in sorted(a.keys() | b.keys()):
        one, other = a.get(index), b.get(index)
        if one == other or (one is None and _PADDING.fullmatch(other or "")):
            continue
        if other is None and _PADDING.fullmatch(one or ""):
            continue
        raise ValueError(
            f"target and draft do not share a vocabulary: id {index} is {one!r} in {target.name} "
            f"and {other!r} in {draft.name}; choose a draft of the same family"
        )
