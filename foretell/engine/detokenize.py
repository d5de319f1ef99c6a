"""Ids to text as they come: no broken characters, and stop strings found at their first end."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol


class Decoder(Protocol):
    """What is asked of a tokenizer."""

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str: ...


class Detokenizer:
    """Text of one answer, grown token by token.

    `text` is all that is known; `certain` is how much of it may be shown: neither the start of a
    character whose bytes are still to come nor what may turn out to be the start of a stop string.

    Args:
        tokenizer: decodes ids.
        prompt: ids before the answer; the last few give the first token its context.
        stop: strings that end the answer.
        skip_stop_until: no stop string is looked for while at most so many tokens are out.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt: SequenceOf[int],
        stop: SequenceOf[str] = (),
        skip_stop_until: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.skip_stop_until = skip_stop_until
        self.text = ""
        self.num_tokens = 0
        self._ids = list(prompt[-6:])
        self._prefix, self._read = 0, len(self._ids)
        self._early = 0  # characters of the open piece that are text already
        self._stop_offset = 0
        self._hold = max((len(s) - 1 for s in self.stop), default=0)
        self.stopped = False

    @property
    def certain(self) -> int:
        """Characters of `text` that later tokens cannot change."""
        return len(self.text) if self.stopped else max(0, len(self.text) - self._hold)

    def push(self, token: int) -> bool:
        """Takes the next token; True when a stop string is complete: `text` is cut before it."""
        self._ids.append(token)
        self.num_tokens += 1
        known = self.tokenizer.decode(self._ids[self._prefix : self._read])
        now = self.tokenizer.decode(self._ids[self._prefix :])
        whole = now.rstrip("\ufffd")  # what follows may be a character whose bytes are to come
        if len(whole) > len(known) + self._early:
            self._extend(whole[len(known) + self._early :])
            self._early = len(whole) - len(known)
        if len(whole) == len(now) > len(known):
            self._prefix, self._read, self._early = self._read, len(self._ids), 0
        return self.stopped

    def finish(self) -> None:
        """No token follows: what was held back is text now, whole character or not."""
        if self.stopped:
            return
        known = self.tokenizer.decode(self._ids[self._prefix : self._read])
        now = self.tokenizer.decode(self._ids[self._prefix :])
        if len(now) > len(known) + self._early:
            self._extend(now[len(known) + self._early :])
        self.stopped = True

    def _extend(self, piece: str) -> None:
        start = max(self._stop_offset, len(self.text) - self._hold)
        self.text += piece
        if self.num_tokens <= self.skip_stop_until:
            self._stop_offset = len(self.text)
            return
        # The match that ends first is the one that tokens coming singly would have met first.
        ends = [
            (at + len(stop), at) for stop in self.stop if (at := self.text.find(stop, start)) >= 0
        ]
        if ends:
            self.text = self.text[: min(ends)[1]]
            self.stopped = True
