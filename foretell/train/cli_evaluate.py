"""Commands of `foretell train` for a finished head: evaluate, export, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.run import BenchConfig
from foretell.config import EngineConfig
from foretell.flags import from_fields
from foretell.train.settings import FORMATS, EvaluateConfig, Format

Run = Annotated[Path, typer.Option("--run", metavar="DIR", help="Where the files of this run lie.")]
Head = Annotated[
    Path | None,
    typer.Option(
        "--head", metavar="DIR", help="Another head than the run's own (fit/head, last checkpoint)."
    ),
]


@from_fields(
    EngineConfig,
    BenchConfig,
    EvaluateConfig,
    without=("speculation", "prefix_caching", "temperature"),
)
def evaluate(
    engine: EngineConfig,
    bench: BenchConfig,
    config: EvaluateConfig,
    run: Run,
    head: Head = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Held-out prompts as JSONL (Spec-Bench's form) in place of foretell's own.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="INTEGER", help="At most so many conversations of each category."
        ),
    ] = None,
) -> None:
    """Measure a head in the engine: acceptance, speed, and that the text is the same."""
    from rich.console import Console

    from foretell.train import evaluate as evaluating

    result = evaluating.evaluate(
        run, config, bench, engine, head=head, prompts=prompts, limit=limit
    )
    evaluating.show(result, Console())
    print(f"wrote {run / 'evaluation.json'}")
    if not result.valid:
        raise typer.Exit(1)


def export(
    run: Run,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The directory to write.")],
    form: Annotated[
        str, typer.Option("--format", metavar="NAME", help=f"One of {', '.join(FORMATS)}.")
    ] = "foretell",
    head: Head = None,
    model: Annotated[
        str, typer.Option(metavar="TEXT", help="The target, as elsewhere.")
    ] = EngineConfig.model,
    verifier: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="speculators: the target's hub name; --model if not given."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, metavar="INTEGER", help="speculators: draft tokens by default.")
    ] = 4,
    dtype: Annotated[
        str,
        typer.Option(metavar="TEXT", help="f32, f16 or bf16 weights; as they are if not given."),
    ] = "",
) -> None:
    """Write a head in a layout of its own or another engine's; nothing is left out silently."""
    from foretell.train import export as exporting
    from foretell.train.evaluate import find_head

    if form not in FORMATS:
        raise ValueError(f"format {form!r}: choose one of {', '.join(FORMATS)}")
    chosen: Format = form
    written = exporting.export(
        head or find_head(run),
        out,
        chosen,
        exporting.target_rows(model),
        verifier=verifier or model,
        architecture=exporting.architecture_of(model) if form == "speculators" else "",
        tokens=tokens,
        dtype=dtype,
    )
    size = sum(tensor.nbytes for tensor in written.tensors.values())
    print(f"wrote {out}: {written.method}, {len(written.tensors)} tensors, {size / 1e6:.1f} MB")
    for name in written.beside:
        print(
            f"{out / name} holds the tokens that it was trained on; this layout has no place for "
            "them: give the file to SGLang's --speculative-token-map, or to draft_vocab here"
        )


def report(run: Run) -> None:
    """Write report.html: training and evaluation in one page."""
    from foretell.train.report import write_report

    print(f"wrote {write_report(run)}")
