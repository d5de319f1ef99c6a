"""What answers look like, for the OpenAPI document alone: `reply` writes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model


def exact(name: str, /, **fields: Any) -> Any:
    """A model with these fields and no others. All are required, but for those with a default."""
    given: dict[str, Any] = {
        key: kind if isinstance(kind, tuple) else (kind, ...) for key, kind in fields.items()
    }
    return create_model(name, __config__=ConfigDict(extra="forbid"), **given)


def counts(names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), int)


TEXT, COUNTS = str | None, list[int]
_DETAIL = exact("ErrorDetail", message=str, type=str, param=TEXT, code=TEXT)
ERROR = exact("Error", error=_DETAIL)
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ERROR, "description": "The request is at fault; the message says how."},
    "5XX": {"model": ERROR, "description": "The server is."},
}

_CACHED = exact("PromptDetails", cached_tokens=int)
_ACCEPTED = exact(
    "CompletionDetails",
    **counts("accepted_prediction_tokens rejected_prediction_tokens reasoning_tokens"),
)
_SPECULATED = exact(
    "Speculated",
    target_passes=int,
    tokens_per_pass=float,
    drafted_by_position=COUNTS,
    accepted_by_position=COUNTS,
)
_USAGE = exact(
    "Usage",
    **counts("prompt_tokens completion_tokens total_tokens"),
    prompt_tokens_details=_CACHED,
    completion_tokens_details=_ACCEPTED,
    speculation=_SPECULATED,
)
_ENDS = Literal["stop", "length", "abort"]
_HEAD: dict[str, Any] = {"id": str, "created": int, "model": str, "usage": _USAGE}

_ENTRY: dict[str, Any] = {"token": str, "logprob": float, "bytes": list[int] | None}
_TOPS = list[exact("Alternative", **_ENTRY)]
_OF_TOKEN = exact("ChatLogprob", **_ENTRY, top_logprobs=_TOPS)
_CHAT_LOGPROBS = exact("ChatLogprobs", content=list[_OF_TOKEN], refusal=None)
_FUNCTION = exact("CalledFunction", name=str, arguments=str)
_CALL = exact("Called", id=str, type=Literal["function"], function=_FUNCTION)
_SAID = exact(
    "Said", role=Literal["assistant"], content=TEXT, refusal=None, tool_calls=(list[_CALL], [])
)
_CHAT_CHOICE = exact(
    "ChatChoice",
    index=int,
    message=_SAID,
    logprobs=_CHAT_LOGPROBS | None,
    finish_reason=Literal[_ENDS, "tool_calls"],
)
CHAT = exact(
    "ChatCompletion", **_HEAD, object=Literal["chat.completion"], choices=list[_CHAT_CHOICE]
)

_LOGPROBS = exact(
    "CompletionLogprobs",
    tokens=list[str],
    token_logprobs=list[float],
    top_logprobs=list[dict[str, float]] | None,
    text_offset=COUNTS,
)
_CHOICE = exact(
    "CompletionChoice", index=int, text=str, logprobs=_LOGPROBS | None, finish_reason=_ENDS
)
COMPLETION = exact("Completion", **_HEAD, object=Literal["text_completion"], choices=list[_CHOICE])
EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}
"""With stream=true an answer comes as server-sent events."""

_SCHEME = exact("Scheme", method=str, k=int, verification=str)
MODEL = exact(
    "Model",
    id=str,
    object=Literal["model"],
    created=int,
    owned_by=str,
    max_model_len=int,
    sampling=dict[str, float],
    speculation=_SCHEME | None,
)
MODELS = exact("Models", object=Literal["list"], data=list[MODEL])
TOKENS = exact("Tokens", tokens=COUNTS, count=int, max_model_len=int)
PROMPT = exact("Text", prompt=str)
HEALTH = exact("Health", status=str, **counts("running waiting kv_pages kv_pages_free"))


def answers(model: type[BaseModel], more: dict[str, Any] | None = None) -> dict[str, Any]:
    """A route's keywords for a success of this shape."""
    found: dict[int | str, dict[str, Any]] = {200: {"model": model, "content": more or {}}}
    return {"responses": found, "response_model": None}
