"""The commands that measure and prove. As in `foretell.cli`, nothing heavy is imported up here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.certify_config import CertifyConfig
from foretell.bench.run import BenchConfig
from foretell.config import EngineConfig
from foretell.flags import from_fields, option
from foretell.terminal import get_model, say_wrote

_SCHEME = "SCHEME[:NAME=VALUE,...]"
Prompts = Annotated[
    Path | None, option("FILE", "Prompts as JSONL (Spec-Bench's form) in place of foretell's own.")
]
Limit = Annotated[
    int | None, option("INTEGER", "At most so many conversations of each category.", min=1)
]
Json = Annotated[Path | None, option("FILE", "Write everything measured to this file.", "--json")]
TraceFile = Annotated[
    Path | None,
    option(
        "FILE", "Write each step and its phases as trace events, for ui.perfetto.dev.", "--trace"
    ),
]


@from_fields(EngineConfig, BenchConfig, without=("speculation", "prefix_caching"))
def bench(
    engine: EngineConfig,
    config: BenchConfig,
    speculation: Annotated[
        list[str] | None,
        option(
            _SCHEME,
            "Scheme to compare with plain decoding; again for more. "
            "prompt-lookup and draft-model:weights=int4 if not given.",
        ),
    ] = None,
    prompts: Prompts = None,
    limit: Limit = None,
    json_file: Json = None,
    markdown: Annotated[bool, option("", "Tables in Markdown.", "--markdown")] = False,
    trace: TraceFile = None,
    report: Annotated[
        Path | None, option("FILE", "Write plots and numbers as one page of HTML.")
    ] = None,
    break_even: Annotated[
        bool, option("", "Measure 1, 2, 4, 8, 16 conversations at once too.", "--break-even")
    ] = False,
) -> None:
    """Measure schemes against plain decoding. They take turns, prompt by prompt."""
    get_model(engine.model)
    from foretell.bench.command import bench as measure

    same_text = measure(
        speculation or (), config, engine, prompts=prompts, limit=limit, json=json_file,
        as_markdown=markdown, trace=trace, report=report, break_even=break_even,
    )  # fmt: skip
    if not same_text:
        raise typer.Exit(1)


@from_fields(
    EngineConfig, CertifyConfig,
    without=("prefix_caching", "max_num_seqs", "crossed"), speculation="prompt-lookup:k=8",
)  # fmt: skip
def certify(
    engine: EngineConfig,
    config: CertifyConfig,
    prompts: Prompts = None,
    quick: Annotated[
        bool, option("", "A first look: 3 prompts, each setting once, short answers.", "--quick")
    ] = False,
    json_file: Json = None,
    html: Annotated[Path | None, option("FILE", "Write the certificate, one page of HTML.")] = None,
) -> None:
    """Prove that speculation changes nothing.

    On your own model, draft and prompts; status 0 if it holds, 1 if not.
    """
    get_model(engine.model)
    from foretell.bench.certify import certify as prove

    config = config.quick() if quick else config
    holds = prove(engine, config, prompts=prompts, json=json_file, html=html)
    say_wrote(json_file, html)
    if not holds:
        raise typer.Exit(1)


@from_fields(EngineConfig, BenchConfig, without=("speculation", "prefix_caching", "batch"))
def advise(
    engine: EngineConfig,
    config: BenchConfig,
    prompts: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROMPTS",
            help="JSONL of your own prompts or logged conversations; the package's if not given.",
            show_default=False,
        ),
    ] = None,
    speculation: Annotated[
        list[str] | None,
        option(_SCHEME, "Scheme to look at; again for more. All that need nothing if not given."),
    ] = None,
    sample: Annotated[int, option("INTEGER", "Conversations that are asked.", min=1)] = 8,
    batch: Annotated[
        list[int] | None,
        option("INTEGER", "Conversations at once; again for more. 1, 4 and 16.", min=1),
    ] = None,
    predict: Annotated[
        str | None,
        option(
            "gpu=NAME,target=SIZE,tp=N",
            "Extrapolate to other hardware, for example gpu=H100,target=70B,tp=8.",
        ),
    ] = None,
) -> None:
    """Say which scheme pays for your prompts here, or none."""
    from foretell.bench.roofline import parse_hardware

    hardware = parse_hardware(predict) if predict else None
    get_model(engine.model)
    from foretell.bench import advise as advisor

    advisor.advise(
        speculation or (), config, engine, prompts=prompts, sample=sample,
        batches=sorted(set(batch or advisor.BATCHES)), predict=hardware,
    )  # fmt: skip
