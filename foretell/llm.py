"""The front door: a model by name, text in, text out."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Generator, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch

from foretell.answer import Delta, Follower, Result
from foretell.config import EngineConfig, SpeculationConfig
from foretell.engine.build import build_engine
from foretell.engine.calibrate import remember
from foretell.engine.detokenize import Detokenizer
from foretell.models.grammar import Grammars
from foretell.models.loader import LoadedModel
from foretell.progress import Advance, progress_bar
from foretell.prompts import (
    as_conversation,
    as_conversations,
    as_prompts,
    each_params,
    is_prompt,
    token_ids,
)
from foretell.sequence import SamplingParams, Sequence

Prompt = str | SequenceOf[int]
Message = dict[str, Any]


class LLM:
    """A target model, with or without a drafter, ready to answer.

    Args:
        model: a short name (``smollm2``), a hub name (``org/model``), a directory, a .gguf file,
            or a model that is loaded already.
        speculation: None, a `SpeculationConfig`, or its short form such as ``prompt-lookup:k=8``.
        weights: ``int8``, ``bf16``, ``f32`` or ``int4``.
        options: any other field of `EngineConfig`.

    Raises:
        ValueError: something is wrong with the model or an option; the message says what to do.
    """

    def __init__(
        self,
        model: str | LoadedModel = EngineConfig.model,
        *,
        speculation: SpeculationConfig | str | None = None,
        weights: str = EngineConfig.weights,
        **options: Any,
    ) -> None:
        if isinstance(speculation, str):
            speculation = SpeculationConfig.parse(speculation)
        unknown = set(options) - set(EngineConfig.__dataclass_fields__)
        if unknown:
            raise ValueError(
                f"unknown option {sorted(unknown)[0]!r}; options are "
                + ", ".join(EngineConfig.__dataclass_fields__)
            )
        loaded = None if isinstance(model, str) else model
        self.config = EngineConfig(
            model=str(model if isinstance(model, str) else model.path),
            speculation=speculation,
            weights=weights,  # type: ignore[arg-type]
            **options,
        )
        self.engine, self.target = build_engine(self.config, loaded)
        self.config = self.engine.config  # `auto` spelled out
        try:
            self.tokenizer = self.target.tokenizer
        except ValueError as error:  # token ids in, token ids out
            self.tokenizer, self._no_tokenizer = None, str(error)
        self._lock = threading.RLock()
        self._stepping = False
        self._ids = itertools.count()
        self._live: dict[str, object] = {}
        """Requests in flight, by id, and who asked for them."""

    # ---- asking

    def params(self, **given: Any) -> SamplingParams:
        """Sampling parameters as the model's maker recommends them (generation_config.json), with
        what is given in their place.

        Raises:
            ValueError: from `SamplingParams`.
        """
        return SamplingParams(**{**self.target.recommended, **given})

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        progress: bool | Advance = False,
    ) -> list[Result]:
        """Answers prompts, as text or token ids, all at once.

        Args:
            prompts: one or many.
            params: one for all, or one for each prompt; `params()` if None.
            speculate: False decodes plainly, whatever the engine's scheme.
            progress: show a bar on the terminal if it takes over two seconds; or who is told how
                many more answers are done.

        Returns:
            Answers in the order of the prompts, n for each.

        Raises:
            ValueError: a prompt or parameter cannot be served; nothing was started.
        """
        many = as_prompts(prompts)
        each = each_params(params, len(many), self.params())
        sequences = [
            sequence
            for prompt, own in zip(many, each, strict=True)
            for sequence in self.sequences(self._encode(prompt), own, speculate)
        ]
        return self._run(sequences, progress)

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        progress: bool = False,
    ) -> list[Result]:
        """Answers one conversation or many, through the model's chat template.

        Args:
            messages: ``{"role": ..., "content": ...}`` in order, or a list of such lists.

        Raises:
            ValueError: as `generate`; or no messages, or the template refuses them.
        """
        prompts = [self.chat_prompt(conversation) for conversation in as_conversations(messages)]
        return self.generate(prompts, params, speculate=speculate, progress=progress)

    def stream(
        self,
        prompt: Prompt | SequenceOf[Message],
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        request_id: str | None = None,
    ) -> Iterator[Delta]:
        """Answers one prompt or conversation and yields text as it comes.

        Leaving the iterator early aborts the request and frees its pages. Two requests in flight
        cannot have one request_id: the second raises ValueError at its first step.
        """
        ids = self._encode(prompt) if is_prompt(prompt) else self.chat_prompt(prompt)  # type: ignore[arg-type]
        (own,) = each_params(params, 1, self.params())
        sequences = self.sequences(ids, own, speculate, request_id)
        return self._stream(sequences)

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step. Safe from any thread."""
        self.engine.abort(request_id)

    def close(self) -> None:
        """Drops what is in flight, keeps what was learnt of drafts, and ends other ranks."""
        with self._lock:
            self.engine.drain()
            scheduler = self.engine.scheduler
            for sequence in [*scheduler.running, *scheduler.waiting]:
                self.engine.abort(sequence.request_id)
            self.engine.drain()
            self.remember()
            self.engine.runtime.close()

    def remember(self) -> None:
        """Keeps what was learnt of drafts: the next start goes on from there."""
        remember(self.engine)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def chat_prompt(
        self, messages: SequenceOf[Message], tools: SequenceOf[dict[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a conversation, up to where the answer begins; ``tools`` are functions that
        the model is told of, as OpenAI's API describes them."""
        if self.tokenizer is None:
            raise ValueError(f"{self._no_tokenizer}; use generate with token ids")
        return self.tokenizer.apply_chat_template(as_conversation(messages), tools)

    # ---- inside

    @cached_property
    def _grammars(self) -> Grammars:
        assert self.tokenizer is not None
        return Grammars(self.tokenizer, self.engine.runtime.vocab_size, self.engine.end_ids)

    def _encode(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{self._no_tokenizer}; give token ids")
            return self.tokenizer.encode(prompt)
        return token_ids(prompt)

    def sequences(
        self,
        ids: list[int],
        params: SamplingParams,
        speculate: bool,
        request_id: str | None = None,
    ) -> list[Sequence]:
        """The n sequences of one request, checked but not queued. Safe from any thread.

        Raises:
            ValueError: the prompt or a parameter cannot be served.
        """
        self.engine.admit(ids, params)
        if request_id is None:
            free = (f"request-{i}" for i in self._ids)
            request_id = next(name for name in free if name not in self._live)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        out: list[Sequence] = []
        for index in range(params.n):
            sequence = Sequence(
                request_id=request_id,
                tokens=list(ids),
                params=params,
                # Odd constant of a golden-ratio sequence: answers of one request never share noise.
                seed=(seed + index * 0x9E3779B97F4A7C15) % 2**64,
                index=index,
                speculate=speculate,
            )
            if self.tokenizer is not None:
                sequence.detokenizer = Detokenizer(
                    self.tokenizer, ids, params.stop, params.min_tokens
                )
            elif params.stop or params.grammar:
                raise ValueError("stop strings and grammars need a tokenizer: leave them out")
            if params.grammar is not None:
                sequence.grammar = self._grammars.make(params.grammar)
            out.append(sequence)
        return out

    def _run(self, sequences: list[Sequence], progress: bool | Advance) -> list[Result]:
        if isinstance(progress, bool):
            bar = progress_bar("answers", len(sequences), shown=progress)
        else:
            bar = nullcontext(progress)
        with self._flight(sequences), bar as advance:
            done = 0
            while done < len(sequences):
                self._step()
                now = sum(sequence.finished for sequence in sequences)
                advance(now - done)
                done = now
        return [Result.of(sequence) for sequence in sequences]

    def _stream(self, sequences: list[Sequence]) -> Iterator[Delta]:
        followers = [Follower(sequence) for sequence in sequences]
        with self._flight(sequences):
            while not all(follower.ended for follower in followers):
                self._step()
                for follower in followers:
                    if delta := follower.delta():
                        yield delta

    def _step(self) -> None:
        with self._lock, torch.inference_mode():
            self._stepping = True
            try:
                self.engine.step()
            finally:
                self._stepping = False
            self.engine.drain()  # aborts that came from within the step

    def _drain(self) -> None:
        """Ends what was aborted. The garbage collector may close a forgotten stream in the middle
        of a step, on the very thread that steps or on the one that it waits for: then the step
        sees to it when it is over."""
        if not self._lock.acquire(blocking=not self.engine.runtime.stream.here):
            return
        try:
            if not self._stepping:
                self.engine.drain()
        finally:
            self._lock.release()

    @contextmanager
    def _flight(self, sequences: list[Sequence]) -> Generator[None]:
        """Queues sequences, and aborts those that are unfinished in the end."""
        ids = {s.request_id for s in sequences}
        mine: set[str] = set()
        try:
            for name in ids:  # aborts go by id: two requests of one id would end each other
                if self._live.setdefault(name, sequences) is not sequences:
                    raise ValueError(f"request_id={name!r}: a request of that id is in flight")
                mine.add(name)
            for sequence in sequences:
                self.engine.add(sequence)
            yield
        finally:
            left = {s.request_id for s in sequences if not s.finished} & mine
            for name in left:
                self.engine.abort(name)
            if left:
                self._drain()
            for name in mine:
                del self._live[name]
