"""What a conversation is made of: messages with their parts, tools and calls of tools."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretell.server.errors import bad_request


class Strict(BaseModel):
    """Refuses unknown fields and values of other types; None is as if not given."""

    model_config = ConfigDict(extra="forbid", strict=True)
    asks_for_nothing: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Known fields that are not served, with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, harmless in cls.asks_for_nothing.items():
            if data.get(name) is not None and data[name] not in harmless:
                raise bad_request(f"{name} is not supported here; leave it out", name)
        return {
            name: value
            for name, value in data.items()
            if value is not None and name not in cls.asks_for_nothing
        }


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Function(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: Function


class Message(Strict):
    asks_for_nothing: ClassVar = {
        "refusal": (),
        "audio": (),
        "function_call": (),
        "annotations": ([],),
        "reasoning_content": ("",),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: content is one text, arguments are objects."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text_of(self.content),
        }
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in self.tool_calls]
        return message


class Described(Strict):
    name: str = Field(pattern=r"^[\w-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Described


class Named(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: Named


def text_of(content: str | list[TextPart] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    try:
        read = json.loads(arguments)
        json.dumps(read, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (ValueError, RecursionError):
        raise bad_request("tool_calls: arguments must be JSON", "messages") from None
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": read},
    }
