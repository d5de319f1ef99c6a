"""The routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import foretell
from foretell.config import ServerConfig, parse_memory
from foretell.llm import LLM
from foretell.sequence import SamplingParams, Sequence
from foretell.server import schema
from foretell.server.answers import Answering, EventStream
from foretell.server.bridge import Bridge
from foretell.server.errors import (
    ApiError,
    bad_request,
    check_text,
    of_http,
    of_invalid_body,
    of_value_error,
)
from foretell.server.guard import Guard
from foretell.server.messages import text_of
from foretell.server.metrics import ServerMetrics
from foretell.server.protocol import (
    Asked,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from foretell.server.reply import Shape
from foretell.server.static import add_page
from foretell.server.tools import Calls


class Service:
    """A model behind routes.

    Args:
        llm: with a tokenizer; nobody else may use it while the app runs.
        config: limits.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        assert llm.tokenizer is not None
        self.llm, self.tokenizer, self.config = llm, llm.tokenizer, config
        self.name = config.served_model_name or Path(llm.config.model).name
        self.bridge = Bridge(llm, config.max_queue)
        speculation = llm.config.speculation
        loaded = (speculation, *speculation.also) if speculation else ()
        self.schemes = [scheme.method.replace("_", "-") for scheme in loaded]
        self.metrics = ServerMetrics(llm.engine, self.schemes or ["none"])
        self.started = int(time.time())

    # ---- what a request asks for

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"model={name!r} is not served here; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def chat_ids(self, request: ChatRequest | TokenizeRequest) -> list[int]:
        messages = [message.for_template() for message in request.messages or []]
        tools = request.offered if isinstance(request, ChatRequest) else []
        try:
            return self.llm.chat_prompt(messages, tools)
        except ValueError as error:
            raise bad_request(str(error), "messages") from None

    @property
    def calls(self) -> Calls:
        """How the model calls tools."""
        try:
            return Calls(self.tokenizer)
        except ValueError as error:
            raise bad_request(f"tools: {error}; leave them out", "tools") from None

    def ids_of(self, prompt: Any) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def sequences(
        self, request: Asked, prompts: list[list[int]], params: SamplingParams, name: str
    ) -> list[Sequence]:
        """Checked answers of each prompt in turn, n for each."""
        if (answers := len(prompts) * params.n) > (most := self.bridge.most):
            raise bad_request(f"n: {answers} answers in one request; at most {most}", "n")
        prediction = self._prediction(request)
        scheme = self._scheme(request)
        try:
            made = [
                sequence
                for ids in prompts
                for sequence in self.llm.sequences(ids, params, request.speculation.enabled, name)
            ]
        except ValueError as error:
            refusal = of_value_error(error)
            if refusal.param == "grammar" and isinstance(request, ChatRequest):
                field = "tools" if request.offered else "response_format"
                field = "grammar" if request.grammar and not request.offered else field
                refusal = bad_request(f"{field}: {str(error).partition(': ')[2]}", field)
            raise refusal from None
        for sequence in made:
            sequence.k, sequence.prediction = request.speculation.k, prediction
            sequence.scheme = scheme
            sequence.trace = [] if request.speculation.trace else None
        return made

    @property
    def scheme(self) -> str:
        """All schemes as one name."""
        return "+".join(self.schemes) or "none"

    def _scheme(self, request: Asked) -> int | None:
        """Number of the scheme that is to draft; None: whichever pays."""
        asked, engine = request.speculation, self.llm.engine
        method = asked.method and asked.method.replace("_", "-")
        if method not in (None, *self.schemes):
            message = f"speculation.method={asked.method!r}: this server runs {self.scheme!r}"
            raise bad_request(message, "speculation.method")
        if asked.k is not None and asked.k > engine.k:
            message = f"speculation.k={asked.k}: this server drafts at most {engine.k}"
            raise bad_request(message, "speculation.k")
        return None if method is None else self.schemes.index(method)

    def _prediction(self, request: Asked) -> list[int]:
        if request.prediction is None:
            return []
        drafter = self.llm.engine.drafter
        if drafter is None or not drafter.needs.prediction:
            message = (
                f"prediction: this server's scheme ({self.scheme}) drafts from nothing that is "
                "sent along; leave it out, or start the server with --speculation prompt-lookup"
            )
            raise bad_request(message, "prediction")
        ids = self.tokenizer.encode(text_of(request.prediction.content), add_special=False)
        if len(ids) > (most := self.llm.engine.runtime.max_model_len):
            message = f"prediction: {len(ids)} tokens, and no answer here has more than {most}"
            raise bad_request(message, "prediction")
        return ids

    # ---- answering

    async def answer(self, http: Request, request: ChatRequest | CompletionRequest) -> Response:
        self.check_model(request.model)
        chat = isinstance(request, ChatRequest)
        name = f"{'chatcmpl' if chat else 'cmpl'}-{http.state.request_id}-{time.monotonic_ns():x}"
        # Templates and tokenizers take their time over long prompts: the loop goes on meanwhile.
        sequences, num_prompts = await asyncio.to_thread(self.prepare, request, name)
        calls = self.calls if isinstance(request, ChatRequest) and request.offered else None
        flight = self.bridge.submit(sequences, self.config.request_timeout)
        answering = Answering(
            self.llm,
            self.metrics,
            flight,
            Shape(chat, name, self.name),
            num_prompts=num_prompts,
            report=request.speculation.told,
            calls=calls,
            notes=http.state.notes,
        )
        if not request.stream:
            return await answering.whole(http)
        options = request.stream_options
        return EventStream(answering, with_usage=options is not None and options.include_usage)

    def prepare(
        self, request: ChatRequest | CompletionRequest, name: str
    ) -> tuple[list[Sequence], int]:
        if isinstance(request, ChatRequest):
            if request.offered and (must := request.must_call):
                many = request.parallel_tool_calls
                request = request.model_copy(update={"grammar": self.calls.grammar(must, many)})
            prompts = [self.chat_ids(request)]
        else:
            prompts = [self.ids_of(prompt) for prompt in request.prompts]
        params = request.sampling(self.llm.target.recommended)
        return self.sequences(request, prompts, params, name), len(prompts)

    def health(self) -> dict[str, Any]:
        scheduler, cache = self.llm.engine.scheduler, self.llm.engine.cache
        return {
            "status": self.bridge.stopped or "ok",
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_pages": cache.num_pages,
            "kv_pages_free": cache.num_free,
        }

    def model(self) -> dict[str, Any]:
        how: dict[str, Any] | None = None
        if (own := self.llm.config.speculation) is not None:
            how = {"method": self.scheme, "k": self.llm.engine.k, "verification": own.verification}
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "foretell",
            "max_model_len": self.llm.engine.runtime.max_model_len,
            "sampling": dict(self.llm.target.recommended),
            "speculation": how,
        }


def create_app(llm: LLM, config: ServerConfig) -> FastAPI:
    """An ASGI application that serves one model. It owns ``llm`` from its start to its end.

    Raises:
        ValueError: the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise ValueError("this model comes without a tokenizer, and a server answers with text")
    service = Service(llm, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.bridge.start()
        yield
        await service.bridge.stop()

    # Its pages of documentation would load scripts from elsewhere; the schema is enough.
    app = FastAPI(
        title="foretell",
        version=foretell.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=schema.ERRORS,
        dependencies=[Depends(check_text)],
    )
    app.state.service = service
    _add_errors(app)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(
        Guard,
        api_key=config.api_key,
        max_body=int(parse_memory(config.max_body)),
        host=config.host,
        metrics=service.metrics,
    )

    @app.post("/v1/chat/completions", **schema.answers(schema.CHAT, schema.EVENTS))
    async def chat_completions(http: Request, request: ChatRequest) -> Response:
        """Answers a conversation."""
        return await service.answer(http, request)

    @app.post("/v1/completions", **schema.answers(schema.COMPLETION, schema.EVENTS))
    async def completions(http: Request, request: CompletionRequest) -> Response:
        """Goes on from a text, or from each of several."""
        return await service.answer(http, request)

    @app.get("/v1/models", **schema.answers(schema.MODELS))
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [service.model()]}

    @app.get("/v1/models/{name:path}", **schema.answers(schema.MODEL))
    async def one_model(name: str) -> dict[str, Any]:
        """The one model that is served."""
        service.check_model(name)
        return service.model()

    @app.post("/tokenize", **schema.answers(schema.TOKENS))
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text or of a conversation."""
        service.check_model(request.model)
        if request.messages is not None:
            ids = await asyncio.to_thread(service.chat_ids, request)
        else:
            encode, special = service.tokenizer.encode, request.add_special_tokens
            ids = await asyncio.to_thread(encode, request.prompt or "", special)
        length = llm.engine.runtime.max_model_len
        return {"tokens": ids, "count": len(ids), "max_model_len": length}

    @app.post("/detokenize", **schema.answers(schema.PROMPT))
    async def detokenize(request: DetokenizeRequest) -> dict[str, Any]:
        """Text of token ids, special ones included."""
        service.check_model(request.model)
        vocab = llm.engine.runtime.vocab_size
        for token in request.tokens:
            if token >= vocab:
                message = f"tokens: {token} is not in the vocabulary (0 to {vocab - 1})"
                raise bad_request(message, "tokens")
        return {"prompt": service.tokenizer.decode(request.tokens, skip_special=False)}

    @app.get("/health", responses={code: {"model": schema.HEALTH} for code in (200, 503)})
    async def health() -> JSONResponse:
        """200 while requests are taken, else 503."""
        return JSONResponse(service.health(), 503 if service.bridge.stopped else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    add_page(app)
    return app


def _add_errors(app: FastAPI) -> None:
    def ours(error: Exception, request: Request) -> ApiError:
        name = request.state.request_id
        message = f"the server made a mistake; its log says more under request id {name}"
        return ApiError(500, message, code="internal_error")

    def add(kind: type[Exception], told: Callable[[Any, Request], ApiError]) -> None:
        @app.exception_handler(kind)
        async def answer(request: Request, error: Exception) -> JSONResponse:
            return told(error, request).response()

    add(ApiError, lambda error, _: error)
    add(RequestValidationError, lambda error, _: of_invalid_body(error))
    add(HTTPException, of_http)
    add(Exception, ours)
