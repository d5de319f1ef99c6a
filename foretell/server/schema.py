"""What answers look like, for the OpenAPI document alone: `reply` writes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Exact):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Exact):
    error: ErrorDetail


class PromptDetails(Exact):
    cached_tokens: int


class CompletionDetails(Exact):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int


class Speculated(Exact):
    target_passes: int
    tokens_per_pass: float
    drafted_by_position: list[int]
    accepted_by_position: list[int]


class Usage(Exact):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    speculation: Speculated


class Alternative(Exact):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(Exact):
    content: list[ChatLogprob]
    refusal: None


class CalledFunction(Exact):
    name: str
    arguments: str


class Called(Exact):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Said(Exact):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[Called] = []


class ChatChoice(Exact):
    index: int
    message: Said
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]


class Head(Exact):
    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(Exact):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Exact):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Scheme(Exact):
    method: str
    k: int
    verification: str


class Model(Exact):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    sampling: dict[str, float]
    speculation: Scheme | None


class Models(Exact):
    object: Literal["list"]
    data: list[Model]


class Tokens(Exact):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(Exact):
    prompt: str


class Health(Exact):
    status: str
    running: int
    waiting: int
    kv_pages: int
    kv_pages_free: int


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "The request is at fault; the message says how."},
    "5XX": {"model": Error, "description": "The server is."},
}
EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}
"""With stream=true an answer comes as server-sent events."""


def answers(model: type[BaseModel], more: dict[str, Any] | None = None) -> dict[str, Any]:
    """A route's keywords for a success of this shape."""
    found: dict[int | str, dict[str, Any]] = {200: {"model": model, "content": more or {}}}
    return {"responses": found, "response_model": None}
