"""Chat templates: a conversation as the text that a model was trained on.

Templates are Jinja programs that come with a checkpoint, so they run in Jinja's sandbox, with the
settings and helpers that transformers gives them (`apply_chat_template`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any


class ChatTemplate:
    """A template and the special tokens that it may name.

    Args:
        source: the Jinja text.
        special_tokens: by role, such as ``eos_token``.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        ask: bool = True,
    ) -> str:
        """The conversation up to where the assistant's answer starts.

        Args:
            tools: functions that the model may call, as OpenAI's API describes them.
            ask: False ends with the last message, which may be the assistant's.

        Raises:
            ValueError: a message is malformed, or the template refuses the conversation.
        """
        plain = [_plain(message) for message in messages]
        try:
            return self._template.render(
                messages=plain,
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=ask,
                **self.special_tokens,
            )
        except Exception as error:  # templates raise their own
            raise ValueError(f"the chat template refuses these messages: {error}") from None

    @cached_property
    def _template(self) -> Any:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """``{% generation %}`` marks what an assistant wrote, for training; here it is text."""

            tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

            def parse(self, parser: Any) -> nodes.Node:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body, lineno=line)

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        return environment.from_string(self.source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As json.dumps: Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain(message: Any) -> dict[str, Any]:
    """A message as plain JSON values, so that no object's methods reach the template; what is None
    counts as not given.

    Raises:
        ValueError: it has no role or no content.
    """
    form = '{"role": "user", "content": "..."}'
    if not isinstance(message, Mapping):
        raise ValueError(f"message {message!r:.60}: must be a dict such as {form}")
    given = {key: value for key, value in message.items() if value is not None}
    if not isinstance(given.get("role"), str):
        raise ValueError(f"message {message!r:.60}: has no role; write {form}")
    if "content" not in given and "tool_calls" not in given:
        raise ValueError(f"message {message!r:.60}: has no content; write {form}")
    if not isinstance(given.get("content", ""), str | list | tuple):
        raise ValueError(f"message {message!r:.60}: content must be a text")
    try:
        return json.loads(json.dumps(given))
    except (TypeError, ValueError) as error:
        raise ValueError(f"message {message!r:.60}: {error}") from None
