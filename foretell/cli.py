"""The command line. Its flags are the fields of the configuration dataclasses.

Nothing heavy is imported up here: `foretell --help` and `foretell pull` answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import foretell
from foretell import terminal
from foretell.bench.cli import TraceFile, advise, bench, certify
from foretell.config import EngineConfig, ServerConfig
from foretell.flags import from_fields, option
from foretell.sequence import FinishReason, SamplingParams
from foretell.terminal import Screen, get_model

if TYPE_CHECKING:
    from foretell.answer import Result
    from foretell.llm import LLM

app = typer.Typer(
    help="LLM inference built around speculative decoding: faster, and the same text.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags on a terminal of 80 columns
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(foretell.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        option(
            "", "Print the version and exit.", "--version", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


ShowDraft = Annotated[bool, option("", "Mark the tokens that the draft guessed.", "--show-draft")]
System = Annotated[str | None, option("TEXT", "System message of the conversation.")]


@app.command()
@from_fields(EngineConfig, SamplingParams, speculation="auto")
def generate(
    engine: EngineConfig,
    sampling: SamplingParams,
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Prompts; - reads one from standard input."),
    ] = None,
    file: Annotated[
        list[Path] | None, option("FILE", "Read a prompt from a text file.", "--file", "-f")
    ] = None,
    as_chat: Annotated[
        bool | None,
        option(
            "",
            "Through the chat template, or the bare text. Chat where the model has one.",
            "--chat/--raw",
            show_default=False,
        ),
    ] = None,
    system: System = None,
    show_draft: ShowDraft = False,
    stats: Annotated[bool, option("", "Speed and acceptance on stderr.", "--stats")] = False,
    as_json: Annotated[
        bool, option("", "One JSON object a line, with statistics.", "--json")
    ] = False,
    trace: TraceFile = None,
) -> None:
    """Answer one prompt or many. Sampling that is not given is as the model's maker recommends."""
    if system and as_chat is False:
        raise ValueError("--system goes through the chat template: leave out --raw")
    texts = terminal.read_prompts(prompts or [], file or [])
    _check_show_draft(show_draft, engine)
    llm = _open(engine)
    context.call_on_close(llm.remember)
    sampling = _recommended(llm, sampling, context)
    assert llm.tokenizer is not None
    if as_chat is None:
        as_chat = llm.tokenizer.has_chat_template
    if as_chat:
        start = [{"role": "system", "content": system}] if system else []
        ids = [llm.chat_prompt([*start, {"role": "user", "content": text}]) for text in texts]
    else:
        ids = [llm.tokenizer.encode(text) for text in texts]
    screen = Screen(show_draft=show_draft)
    if show_draft and not as_json:
        screen.note(screen.legend())
    with terminal.traced(llm, trace):
        if len(ids) == 1 and sampling.n == 1 and not as_json:
            results = [terminal.stream(llm, ids[0], sampling, screen, "answer")]
        else:
            results = llm.generate(ids, sampling, progress=sys.stderr.isatty())
    for i, result in enumerate(results):
        if as_json:
            print(json.dumps(_as_json(texts[i // sampling.n], result), ensure_ascii=False))
        elif len(results) > 1:
            print(f"==> prompt {i // sampling.n + 1}, answer {result.index + 1} <==")
            screen.answer(llm, result)
        if stats:
            screen.note(terminal.stats_line(result.stats))
    _exit_on_failure(results)


@app.command("chat")
@from_fields(
    EngineConfig,
    SamplingParams,
    without=("n", "logprobs", "prompt_logprobs"),
    speculation="auto",
)
def chat_command(
    engine: EngineConfig,
    sampling: SamplingParams,
    context: typer.Context,
    system: System = None,
    show_draft: ShowDraft = False,
) -> None:
    """Talk to a model in the terminal. Ctrl-C stops an answer, Ctrl-D leaves. Sampling that is not
    given is as the model's maker recommends."""
    _check_show_draft(show_draft, engine)
    llm = _open(engine)
    context.call_on_close(llm.remember)
    terminal.chat(llm, _recommended(llm, sampling, context), Screen(show_draft=show_draft), system)


app.command("bench")(bench)
app.command("advise")(advise)
app.command("certify")(certify)


@app.command()
@from_fields(EngineConfig, ServerConfig, speculation="auto")
def serve(engine: EngineConfig, server: ServerConfig, trace: TraceFile = None) -> None:
    """Serve a model over HTTP, as OpenAI's API. The page at / shows speculation at work."""
    key = server.api_key or os.environ.get("FORETELL_API_KEY") or None
    server = dataclasses.replace(server, api_key=key)
    if server.replicas > 1 or server.max_replicas:
        from foretell.server.ray_run import serve as run_replicas

        if trace:
            raise ValueError("--trace is of one engine: leave out --replicas and --max-replicas")
        _check(engine)
        run_replicas(engine, server)
        return
    from foretell.server.run import serve as run

    llm = _open(engine)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what ends a server once it has drained
    with terminal.traced(llm, trace):
        run(llm, server)


@app.command()
def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A short name (smollm2) or a hub name (org/model)."),
    ],
) -> None:
    """Download a model into the cache directory and check it."""
    from foretell.models.hub import resolve

    print(resolve(model))


@app.command()
@from_fields(EngineConfig, speculation="prompt-lookup:k=8")
def demo(
    engine: EngineConfig,
    repeats: Annotated[int, option("INTEGER", "Timed runs of each kind.", min=1)] = 3,
) -> None:
    """Answer a prompt plainly and speculatively: one text, two speeds."""
    from foretell.demo import show

    if engine.speculation is None:
        raise ValueError("the demo compares with speculation: give --speculation a scheme")
    if not show(_open(engine), engine.speculation, repeats):
        raise typer.Exit(1)


@app.command(
    add_help_option=False,
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def train(context: typer.Context) -> None:
    """Train a head for a model of your own, in stages."""
    from foretell.train.cli import app as stages

    status = typer.main.get_command(stages).main(
        args=context.args or ["--help"], prog_name="foretell train", standalone_mode=False
    )
    raise typer.Exit(int(status or 0))


# ---- helpers


def _open(config: EngineConfig) -> LLM:
    gc.disable()  # nothing imported or loaded here is garbage, and looking costs 0.2 s
    try:
        llm = _load(config)
    finally:
        gc.freeze()  # nor later: the next full collection would look through all of it
        gc.enable()
    if llm.tokenizer is None:
        raise ValueError(f"{config.model} comes without a tokenizer: use foretell.LLM with ids")
    return llm


def _check(config: EngineConfig) -> None:
    """The scheme's options are known, and the model is on disk."""
    if config.speculation is not None:
        from foretell.drafters import check

        check(config.speculation)
    get_model(config.model)


def _load(config: EngineConfig) -> LLM:
    _check(config)
    status = contextlib.nullcontext()
    if sys.stderr.isatty():
        from rich.console import Console

        status = Console(stderr=True).status(f"loading {config.model}")
    with status:
        from foretell.llm import LLM

        return LLM(**config.options())


def _recommended(llm: LLM, given: SamplingParams, context: typer.Context) -> SamplingParams:
    """Parameters with the model's own in place of those that nobody gave."""
    source = context.get_parameter_source
    silent = (name for name in llm.target.recommended if str(source(name)).endswith("DEFAULT"))
    return dataclasses.replace(given, **{name: llm.target.recommended[name] for name in silent})


def _check_show_draft(show_draft: bool, config: EngineConfig) -> None:
    if show_draft and config.speculation is None:
        raise ValueError(
            "--show-draft needs a draft: add for example --speculation prompt-lookup:k=8"
        )


def _exit_on_failure(results: list[Result]) -> None:
    for result in results:
        if result.error:
            print(f"foretell: {result.error}", file=sys.stderr)
    if any(result.error for result in results):
        raise typer.Exit(1)
    if any(result.finish_reason == FinishReason.ABORT for result in results):
        raise typer.Exit(130)


def _as_json(prompt: str, result: Result) -> dict[str, Any]:
    fields = dataclasses.asdict(result)
    names = (
        *("num_prompt_tokens", "num_cached_tokens", "num_tokens", "num_passes", "tau"),
        *("drafted", "accepted", "drafted_by_position", "accepted_by_position"),
        *("tokens_per_second", "ttft", "itl"),
    )
    return {"prompt": prompt, **fields, "stats": {n: getattr(result.stats, n) for n in names}}


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit status: 2 and one line for a mistake."""
    command = typer.main.get_command(app)
    try:
        status = command.main(
            args=list(arguments) or ["--help"], prog_name="foretell", standalone_mode=False
        )
        sys.stdout.flush()
    except typer.Abort:
        return _complain("interrupted", 130)
    except BrokenPipeError:  # the reader of a pipe has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ValueError as error:
        return _complain(str(error), 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}", 2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # a mistake of ours: show it all
            raise
        return _complain(f"{error.format_message()} (see foretell --help)", 2)  # type: ignore[attr-defined]
    return _complain("interrupted", 130) if status == 130 else int(status or 0)


def _complain(message: str, status: int) -> int:
    print(f"foretell: {' '.join(message.split())}", file=sys.stderr)
    return status


def entry() -> None:
    """The `foretell` command. SIGTERM does what Ctrl-C does: what was measured is kept, no file is
    left half. Servers and training have their own handlers."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
