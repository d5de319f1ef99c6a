"""Text to token ids and back, over transformers' tokenizers. transformers is imported on use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any


class Tokenizer:
    """A model's tokenizer and chat template.

    Args:
        inner: a transformers tokenizer.
        name: what error messages call it.
    """

    def __init__(self, inner: Any, name: str) -> None:
        self.inner = inner
        self.name = name

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads the tokenizer of a model directory or a .gguf file.

        Raises:
            ValueError: there is none that transformers can read.
        """
        from transformers import AutoTokenizer
        from transformers.utils import logging

        shown = logging.get_verbosity()
        logging.set_verbosity_error()  # not the place for hints about transformers itself
        logging.disable_progress_bar()
        try:
            if path.suffix == ".gguf":
                inner = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
            else:
                inner = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # the library meets missing and damaged files in many ways
            reason = re.sub(r"\s+", " ", str(error))[:160]
            raise ValueError(f"{path}: no tokenizer can be read from it ({reason})") from None
        finally:
            logging.set_verbosity(shown)
        return cls(inner, str(path))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special: put what the model expects around a text (a begin-of-text token).
        """
        return list(self.inner(text, add_special_tokens=add_special)["input_ids"])

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids, spaces as they are."""
        return self.inner.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer starts.

        Raises:
            ValueError: the model has no chat template, or it refuses these messages.
        """
        if not self.has_chat_template:
            raise ValueError(f"{self.name}: this model has no chat template; generate from text")
        try:
            text = self.inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise their own
            raise ValueError(f"the chat template refuses these messages: {error}") from None
        return self.encode(text, add_special=False)

    @property
    def eos_token_id(self) -> int | None:
        return self.inner.eos_token_id

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text."""
        return frozenset(self.inner.all_special_ids)

    def __len__(self) -> int:
        return len(self.inner)

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
