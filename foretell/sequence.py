"""What one request wants (SamplingParams), where it stands (Sequence) and how it went (Stats).

The one invariant that everything else leans on: ``num_computed < len(tokens)`` while a sequence
lives. The last token is always known but not yet run through the target: it is the *root* that
the next draft tree hangs from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from foretell.config import whole

MAX_ANSWERS = 4096
"""Most answers of one request: each is a sequence in the queue."""


class FinishReason(StrEnum):
    """Why a sequence ended; the values are those of the OpenAI API plus ``abort`` and ``error``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def _real(name: str, value: Any) -> float:
    if not isinstance(value, bool | str | bytes):
        with suppress(TypeError, ValueError, OverflowError):
            return float(value)
    raise ValueError(f"{name}={value!r}: must be a number")


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{name}={value!r}: must be True or False")


def _text(name: str, value: Any) -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise ValueError(f"{name}={value!r}: must be a JSON schema or a Lark grammar, as text")


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _items(name, value, "strings")
    if all(isinstance(text, str) and text for text in texts):
        return texts
    raise ValueError(f"{name}={value!r}: must be non-empty strings")


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(whole(name, token) for token in _items(name, value, "token ids"))


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r}: must be numbers by token id")
    pairs = cast(Mapping[Any, Any], value).items()
    return {whole(name, token): _real(name, bias) for token, bias in pairs}


def _items(name: str, value: Any, what: str) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, str | bytes):
        with suppress(TypeError):
            return tuple(value)
    raise ValueError(f"{name}={value!r}: must be a list of {what}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Every field is exact under speculation.

    Raises:
        ValueError: a value is out of range; the message names the field and the legal range.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the answer holds already."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the answer holds the token."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or answer are divided by it, negative ones multiplied."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits, by token id."""
    bad_token_ids: SequenceOf[int] = ()
    """Tokens that are never chosen."""
    allowed_token_ids: SequenceOf[int] | None = None
    """If given, no other token is ever chosen."""
    min_tokens: int = 0
    """No end-of-text or stop token before that many tokens are out."""
    max_tokens: int | None = 256
    """At most that many tokens; None means up to the context limit."""
    stop: SequenceOf[str] = ()
    """Text that ends the answer; it is not part of the answer."""
    stop_token_ids: SequenceOf[int] = ()
    """Tokens that end the answer, besides the model's own end-of-text."""
    ignore_eos: bool = False
    """Go on after the model's end-of-text token."""
    seed: int | None = None
    """Same seed, same request: same text. None draws a seed when the request arrives."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and of that many alternatives; None for none."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    grammar: str | None = None
    """A JSON schema, or a Lark grammar, that the answer obeys."""
    n: int = 1
    """How many answers."""

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if (value := getattr(self, name)) is not None or name not in _NONE_IS_LEGAL:
                object.__setattr__(self, name, kind(name, value))
        checks: list[tuple[str, bool, str]] = [
            ("temperature", 0 <= self.temperature < float("inf"), "a number from 0 (greedy) up"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < float("inf"),
                "above 0 (1 is off)",
            ),
            ("min_tokens", self.min_tokens >= 0, "0 or more"),
            (
                "max_tokens",
                self.max_tokens is None or self.max_tokens >= 1,
                "1 or more, or None",
            ),
            (
                "min_tokens",
                self.max_tokens is None or self.min_tokens <= self.max_tokens,
                "at most max_tokens",
            ),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "0 or more, or None"),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or self.prompt_logprobs >= 0,
                "0 or more, or None",
            ),
            ("n", 1 <= self.n <= MAX_ANSWERS, f"from 1 to {MAX_ANSWERS}"),
            (
                "allowed_token_ids",
                self.allowed_token_ids != (),
                "at least one token id, or None",
            ),
            (
                "seed",
                self.seed is None or -(2**63) <= self.seed < 2**64,
                "a 64-bit integer or None",
            ),
            (
                "logit_bias",
                all(abs(b) <= 1e6 for b in (self.logit_bias or {}).values()),
                "finite numbers (at most 1e6)",
            ),
        ]
        for name, legal, remedy in checks:
            if not legal:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {remedy}")

    @property
    def has_penalties(self) -> bool:
        """Does the distribution depend on which tokens came before?"""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


# A wrong type would otherwise show up in the middle of a step, which other requests share.
_KINDS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), _real
    ),
    "repetition_penalty": _real,
    **dict.fromkeys(("top_k", "min_tokens", "n", "max_tokens", "seed"), whole),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), whole),
    **dict.fromkeys(("bad_token_ids", "stop_token_ids", "allowed_token_ids"), _token_ids),
    "logit_bias": _bias,
    "stop": _texts,
    "grammar": _text,
    "ignore_eos": _flag,
}
_NONE_IS_LEGAL = {
    *("max_tokens", "seed", "logprobs", "prompt_logprobs", "allowed_token_ids", "logit_bias"),
    "grammar",
}


@dataclass
class Stats:
    """How one answer was made. A *pass* is a run of the target that ended with a new token."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_passes: int = 0
    drafted: int = 0
    """Draft tokens that the target checked, those behind the answer's end left out."""
    accepted: int = 0
    """Draft tokens that became part of the answer."""
    drafted_by_position: list[int] = field(default_factory=list[int])
    """How often a draft reached depth i + 1."""
    accepted_by_position: list[int] = field(default_factory=list[int])
    """How often the draft token at depth i + 1 was accepted."""
    num_preemptions: int = 0
    arrival: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    last_token: float | None = None
    token_times: list[float] = field(default_factory=list[float])
    """When each token came out, in seconds of ``time.perf_counter``."""

    @property
    def tau(self) -> float:
        """Tokens for each target pass, the target's own extra token included; 0 before any."""
        return self.num_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token; 0 before it."""
        return 0.0 if self.first_token is None else self.first_token - self.arrival

    @property
    def itl(self) -> float:
        """Mean seconds between tokens; 0 with fewer than two."""
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return 0.0
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, the first token (prefill) left out; 0 with fewer than two tokens."""
        return 1.0 / self.itl if self.itl > 0 else 0.0


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities at one position: the chosen token first, then the likeliest others."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Step:
    """What one target pass checked: a draft tree, root first, and its nodes that were accepted."""

    tokens: list[int]
    parents: list[int]
    accepted: list[int]


@dataclass(eq=False)
class Sequence:
    """One answer in the making. Owned by the engine; drafters may read ``tokens`` and ``slot``."""

    request_id: str
    tokens: list[int]
    """Prompt and answer so far."""
    params: SamplingParams
    seed: int
    """Resolved: never None, already mixed with the index of the answer for n > 1."""
    num_prompt: int = 0
    index: int = 0
    """Which of a request's n answers."""
    slot: int = -1
    """Place in the running batch, -1 while waiting. Drafters key their state by it."""
    num_computed: int = 0
    """Tokens whose target KV is final; slots of the page table past it are scratch."""
    pages: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[Logprob] = field(default_factory=list[Logprob])
    prompt_logprobs: list[Logprob | None] = field(default_factory=list[Logprob | None])
    from_draft: list[bool] = field(default_factory=list[bool])
    """For each answer token: was it the draft's guess?"""
    stats: Stats = field(default_factory=Stats)
    detokenizer: Any = None
    grammar: Any = None
    """What the answer obeys (`foretell.models.grammar.Grammar`)."""
    shape: Any = None
    """How its logits are shaped; made by the engine at the first draw."""
    speculate: bool = True
    """False: no drafts, and the drafter does not even watch."""
    k: int | None = None
    """Fewer draft tokens a step than the engine's own k."""
    scheme: int | None = None
    """The only one of the engine's schemes that drafts; None: whichever pays."""
    prediction: list[int] = field(default_factory=list[int])
    """What the answer will probably say, for schemes that read it (`Needs.prediction`)."""
    trace: list[Step] | None = None
    """Its trees, step by step; None where nobody asked for them."""
    num_hashed_pages: int = 0
    """Leading pages that the prefix cache knows."""
    hash_parent: int = 0
    """Identity of the last of them in the prefix cache."""

    def __post_init__(self) -> None:
        if not self.num_prompt:
            self.num_prompt = len(self.tokens)
        self.stats.num_prompt_tokens = self.num_prompt

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def check(self) -> None:
        """The invariants of a living sequence."""
        assert self.finished or 0 <= self.num_computed < len(self.tokens), self.request_id
        assert len(self.from_draft) == self.num_output, self.request_id
