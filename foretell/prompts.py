"""What callers hand in as prompts and parameters, in every form it may have."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

from foretell.config import whole
from foretell.sequence import SamplingParams


def is_prompt(prompt: Any) -> bool:
    """A text or token ids, not messages of a conversation."""
    prompt = _as_list(prompt)
    return not prompt or not isinstance(prompt[0], dict)


def as_prompts(prompts: Any) -> list[Any]:
    """One or many as many. Arrays and tensors are lists of token ids, or of such lists."""
    prompts = _as_list(prompts)
    if isinstance(prompts, str):
        return [prompts]
    single = prompts and not isinstance(_as_list(prompts[0], strict=False), str | SequenceOf)
    return [prompts] if single else prompts


def as_conversations(messages: Any) -> list[list[Any]]:
    """One conversation or many as many.

    Raises:
        ValueError: neither.
    """
    if isinstance(messages, list | tuple) and messages:
        inner = [isinstance(part, list | tuple) for part in messages]
        if all(inner):
            return [as_conversation(part) for part in messages]
    return [as_conversation(messages)]


def as_conversation(messages: Any) -> list[Any]:
    """The messages of one conversation; what is in them is for the chat template.

    Raises:
        ValueError: not a list of any.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(
            f"messages={messages!r:.60}: must be a list such as "
            '[{"role": "user", "content": "..."}]; generate takes a bare text'
        )
    if not messages:
        raise ValueError("messages is empty: give at least one user message")
    return list(messages)


def token_ids(prompt: Any) -> list[int]:
    """Ids as Python's ints, whatever they come as.

    Raises:
        ValueError: something in there is no whole number.
    """
    prompt = _as_list(prompt)
    if prompt and isinstance(prompt[0], dict):
        raise ValueError("these are messages, not prompts: use chat")
    return [whole("prompt: token id", token) for token in prompt]


def _as_list(value: Any, strict: bool = True) -> Any:
    if hasattr(value, "tolist"):  # NumPy and torch
        value = value.tolist()
    if isinstance(value, str):
        return value
    if isinstance(value, SequenceOf) and not isinstance(value, bytes):
        return list(value)
    if strict:
        raise ValueError(
            f"prompt {value!r:.80}: must be a text or a list of token ids, or a list of those"
        )
    return value


def each_params(
    params: SamplingParams | SequenceOf[SamplingParams] | None,
    count: int,
    default: SamplingParams,
) -> list[SamplingParams]:
    """One for each prompt; the default where none are given.

    Raises:
        ValueError: not so many, or not SamplingParams.
    """
    if params is None:
        return [default] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, SequenceOf) or not all(
        isinstance(own, SamplingParams) for own in params
    ):
        raise ValueError(f"params={params!r:.80}: give SamplingParams, one for all or for each")
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling parameters for {count} prompts: give one or all")
    return list(params)
