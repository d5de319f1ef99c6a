"""What requests look like: OpenAI's fields, and foretell's own beside them.

A field that is not served is refused by its name, never ignored. Where OpenAI's clients send a
field that asks for nothing (``"store": false``), that value is let through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from foretell.sequence import SamplingParams
from foretell.server.errors import bad_request, of_value_error
from foretell.server.messages import Message, NamedTool, Strict, TextPart, Tool

MAX_N = 128
TokenId = Annotated[int, Field(ge=0)]


class Prediction(Strict):
    type: Literal["content"] = "content"
    content: str | list[TextPart]


class StreamOptions(Strict):
    asks_for_nothing: ClassVar = {"include_obfuscation": (False,)}
    include_usage: bool = False


class Speculation(Strict):
    """How this request speculates. The text is the same whatever stands here."""

    enabled: bool = True
    method: str | None = None
    """Only the scheme that the server runs."""
    k: int | None = Field(default=None, ge=1, le=63)
    """Fewer draft tokens a step than the server's own k."""
    report: bool = False
    """Add to each chunk of a stream which pieces of text the draft supplied."""
    trace: bool = False
    """Add the draft tree of each step as well."""

    @property
    def told(self) -> bool:
        return self.report or self.trace


class Asked(Strict):
    """What chat and plain completions have in common."""

    asks_for_nothing: ClassVar = {
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
    }
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Taken, as OpenAI's clients send it; it shapes nothing."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_token_ids: list[TokenId] | None = None
    allowed_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    speculation: Speculation = Speculation()
    prediction: Prediction | None = None
    """What the answer will probably say: drafted from, and never more than that."""

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token, bias in (value or {}).items():
            if not re.fullmatch(r"[0-9]{1,18}", token) or not -100 <= bias <= 100:
                raise bad_request(
                    f"logit_bias: {token!r}: {bias}: must be numbers from -100 to 100 by token id",
                    "logit_bias",
                )
        return value

    @model_validator(mode="after")
    def _go_together(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is for stream=true; leave it out", "stream_options")
        if self.speculation.told and not self.stream:
            name = "report" if self.speculation.report else "trace"
            message = f"speculation.{name} is for stream=true; leave it out"
            raise bad_request(message, f"speculation.{name}")
        return self

    def params(self, recommended: Mapping[str, Any], **more: Any) -> SamplingParams:
        """As the engine wants it.

        Args:
            recommended: of the model, for what the request does not say.
            more: fields that chat and completions name differently.

        Raises:
            ApiError: a value is out of range.
        """
        given = {
            name: value
            for name in SamplingParams.__dataclass_fields__
            if (value := getattr(self, name, None)) is not None
        }
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        try:
            return SamplingParams(**{**recommended, **given, **more})
        except ValueError as error:
            raise of_value_error(error) from None


class JsonSchema(Strict):
    name: str
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """The schema is always obeyed."""


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "response_format.json_schema goes with type json_schema"
            raise bad_request(message, "response_format.json_schema")
        return self

    @property
    def grammar(self) -> str | None:
        if self.json_schema is not None:
            return json.dumps(self.json_schema.json_schema)
        return '{"type": "object"}' if self.type == "json_object" else None


class ChatRequest(Asked):
    asks_for_nothing: ClassVar = Asked.asks_for_nothing | {
        "modalities": (["text"],),
        "audio": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none",),
        "prompt_cache_key": (),
        "safety_identifier": (),
    }
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _chat_goes_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise bad_request("tool_choice needs tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and not self.must_call:
            name = self.tool_choice.function.name
            raise bad_request(f"tool_choice: {name!r} is not among the tools", "tool_choice")
        if self.offered and (self.grammar or self.form):
            message = "response_format and grammar do not go with tools: give one of them"
            raise bad_request(message, "tools")
        return self

    @property
    def form(self) -> str | None:
        return self.response_format.grammar if self.response_format else None

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that the model is told of, as its chat template wants them."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools or []]

    @property
    def must_call(self) -> list[dict[str, Any]]:
        """Functions of which one has to be called; none where the model may choose."""
        functions = [tool["function"] for tool in self.offered]
        if isinstance(self.tool_choice, NamedTool):
            return [f for f in functions if f["name"] == self.tool_choice.function.name]
        return functions if self.tool_choice == "required" else []

    def sampling(self, recommended: Mapping[str, Any]) -> SamplingParams:
        # Both names may come: the newer one counts. None is up to the context limit.
        tokens = self.max_completion_tokens or self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        if self.form is not None and self.grammar is not None:
            raise bad_request("response_format and grammar say the same: give one", "grammar")
        form = self.form or self.grammar
        return self.params(recommended, max_tokens=tokens, logprobs=logprobs, grammar=form)


class CompletionRequest(Asked):
    asks_for_nothing: ClassVar = Asked.asks_for_nothing | {
        "echo": (False,),
        "suffix": ("",),
        "best_of": (1,),
    }
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @field_validator("prompt")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not value:
            raise bad_request("the prompt is empty: give a text or token ids", "prompt")
        return value

    def sampling(self, recommended: Mapping[str, Any]) -> SamplingParams:
        # 16 as OpenAI's default is
        return self.params(recommended, max_tokens=self.max_tokens or 16)

    @property
    def prompts(self) -> list[Any]:
        """Texts or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return list(self.prompt) if isinstance(self.prompt[0], str | list) else [self.prompt]


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[TokenId]
