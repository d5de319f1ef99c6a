"""Answers on a terminal: streamed, optionally coloured by who supplied each token, and the chat."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from foretell.sequence import FinishReason, SamplingParams, Stats

if TYPE_CHECKING:  # torch comes in with it, and --help must not wait for torch
    from foretell.answer import Result
    from foretell.llm import LLM

# What could move the cursor or change the terminal, should a model write it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DRAFT, _DIM, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


class Screen:
    """Writes answers to a stream.

    Args:
        show_draft: mark what the draft guessed: in colour on a terminal, in [brackets] elsewhere.
        out: where answers go.
    """

    def __init__(self, *, show_draft: bool = False, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.show_draft = show_draft
        self.is_terminal = self.out.isatty()
        self.colour = (
            self.is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )

    def legend(self) -> str:
        """One line that says what the marks mean."""
        mark = f"{_DRAFT}green{_PLAIN}" if self.colour else "[in brackets]"
        return f"{mark}: guessed by the draft and accepted; the rest: written by the target"

    def write(self, text: str, from_draft: bool = False) -> None:
        if self.is_terminal:
            text = _CONTROL.sub("\ufffd", text)
        if from_draft and self.show_draft and text:
            text = f"{_DRAFT}{text}{_PLAIN}" if self.colour else f"[{text}]"
        self.out.write(text)
        self.out.flush()

    def note(self, text: str) -> None:
        """A line that is not part of an answer; on stderr, so that piped answers stay clean."""
        dim = self.colour and sys.stderr.isatty()
        print(f"{_DIM}{text}{_PLAIN}" if dim else text, file=sys.stderr, flush=True)

    def answer(self, llm: LLM, result: Result) -> None:
        """A finished answer as a whole."""
        self.pieces(Origins(llm.tokenizer, result.prompt_token_ids), result)
        self.write("\n")

    def pieces(self, origins: Origins, part: Any) -> None:
        """A part of an answer (Delta or Result), piece by piece."""
        for text, drafted in origins.split(part.text, part.token_ids, part.from_draft):
            self.write(text, drafted)


class Origins:
    """Which characters of an answer the draft supplied.

    Text comes later than its tokens (a character may need several, a stop string is held back), so
    tokens are turned into characters here once more, each with its origin.
    """

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        from foretell.engine.detokenize import Detokenizer

        self._detokenizer = Detokenizer(tokenizer, prompt) if tokenizer else None
        self._drafted: list[bool] = []
        self._shown = 0

    def split(
        self, text: str, token_ids: list[int], from_draft: list[bool]
    ) -> Iterator[tuple[str, bool]]:
        """Takes what is new, yields the new text in runs of one origin."""
        for token, drafted in zip(token_ids, from_draft, strict=True):
            if self._detokenizer is not None:
                self._detokenizer.push(token)
                self._drafted += [drafted] * (len(self._detokenizer.text) - len(self._drafted))
        missing = self._shown + len(text) - len(self._drafted)
        # Half a character at the very end becomes text without a further token.
        self._drafted += [bool(from_draft and from_draft[-1])] * max(0, missing)
        marks = self._drafted[self._shown : self._shown + len(text)]
        self._shown += len(text)
        for drafted, run in itertools.groupby(zip(text, marks, strict=True), lambda pair: pair[1]):
            yield "".join(character for character, _ in run), drafted


def stats_line(stats: Stats) -> str:
    """Speed of one answer in one line."""
    parts = [f"{stats.num_tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s"]
    if stats.drafted:
        share = stats.accepted / stats.drafted
        parts.append(f"τ {stats.tau:.2f}")
        parts.append(f"accepted {stats.accepted} of {stats.drafted} drafted ({share:.0%})")
    parts.append(f"first token {stats.ttft:.2f} s")
    return " · ".join(parts)


def stream(
    llm: LLM, prompt: list[int], params: SamplingParams, screen: Screen, request_id: str
) -> Result:
    """Shows one answer as it comes. The first Ctrl-C ends the answer, a second one the program."""
    origins = Origins(llm.tokenizer, prompt)
    result = None
    with _ctrl_c(lambda: llm.abort(request_id)):
        for delta in llm.stream(prompt, params, request_id=request_id):
            screen.pieces(origins, delta)
            result = delta.result or result
    assert result is not None
    screen.write("\n")
    return result


def chat(llm: LLM, params: SamplingParams, screen: Screen, system: str | None) -> None:
    """A conversation until /exit or end of input."""
    start = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, str]] = list(start)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - line editing and history for input()
        screen.note("/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops")
    if screen.show_draft:
        screen.note(screen.legend())
    for turn in itertools.count():
        line = _ask()
        if line is None or line == "/exit":
            return
        if line == "/reset":
            messages = list(start)
            screen.note("forgotten")
            continue
        if line.startswith("/"):
            screen.note(f"no command {line.split()[0]}: there are /reset and /exit")
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        try:
            prompt = llm.chat_prompt(messages)
            result = stream(llm, prompt, params, screen, f"turn-{turn}")
        except ValueError as error:  # too long for the context, say: the session goes on
            messages.pop()
            screen.note(f"foretell: {error} (/reset starts afresh)")
            continue
        if result.error:
            messages.pop()
            screen.note(f"foretell: {result.error}")
            continue
        messages.append({"role": "assistant", "content": result.text})
        stopped = " · stopped" if result.finish_reason == FinishReason.ABORT else ""
        screen.note(f"{stats_line(result.stats)}{stopped}\n")


def _ask() -> str | None:
    """The next line typed; None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None
        except KeyboardInterrupt:
            print()


@contextmanager
def _ctrl_c(abort: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls `abort` once; the engine then ends the step it is in and stays consistent."""

    def once(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        abort()

    previous = signal.signal(signal.SIGINT, once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def read_prompts(prompts: list[str], files: list[Path]) -> list[str]:
    """Prompts as given, from standard input (-) and from files.

    Raises:
        ValueError: there is none, or one that is empty or no text.
    """
    if not prompts and not files:
        piped = "" if sys.stdin.isatty() else sys.stdin.read()
        if not piped:
            raise ValueError("no prompt: give one in quotes, --file FILE, or - for standard input")
        return [piped]
    texts = [sys.stdin.read() if prompt == "-" else prompt for prompt in prompts]
    for path in files:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"{path}: not UTF-8 text") from None
    if any(not text for text in texts):
        raise ValueError("a prompt is empty: write something for the model to go on from")
    return texts


def get_model(model: str) -> None:
    """Downloads the model now, where its bar has the terminal to itself."""
    from foretell.models.hub import resolve

    resolve(model)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", "torch.quantize_per_tensor")  # nothing a user can act on


@contextmanager
def traced(llm: LLM, path: Path | None) -> Iterator[None]:
    """Writes the engine's steps to a trace meanwhile, where a path is given."""
    if path is None:
        yield
        return
    from foretell.engine.trace import Trace

    with Trace(path) as trace:
        llm.engine.metrics.trace_to(trace.track("engine"))
        if llm.config.halves:
            llm.target.model.listeners = trace.track("first half"), trace.track("second half")
        yield
    if trace.whole:
        say_wrote(path)


def say_wrote(*paths: Path | None) -> None:
    """On stderr: tables on stdout may be on their way into a file."""
    for path in paths:
        if path is not None:
            print(f"wrote {path}", file=sys.stderr)
