"""`foretell train`: one command a stage. Each can be killed and run again.

As in `foretell.cli`, nothing heavy is imported up here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from foretell.bench.cli import Limit, Prompts
from foretell.bench.run import BenchConfig
from foretell.config import EngineConfig
from foretell.flags import from_fields, option
from foretell.train.config import (
    FORMATS,
    EvaluateConfig,
    FeaturesConfig,
    Format,
    PrepareConfig,
    RegenerateConfig,
)
from foretell.train.fit_config import FitConfig, Machine

app = typer.Typer(
    help="Train a head for a model of your own, in stages: prepare, regenerate, features, "
    "draft-vocab if wanted, fit, evaluate, report, export.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Run = Annotated[Path, option("DIR", "Where the files of this run lie.", "--run")]
Head = Annotated[
    Path | None, option("DIR", "Another head than the run's own (fit/head, last checkpoint).")
]
Model = Annotated[str, option("TEXT", "The target.")]


@app.command()
@from_fields(PrepareConfig)
def prepare(
    config: PrepareConfig,
    run: Run,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="JSONL of prompts or conversations.")
    ],
) -> None:
    """Turn conversations into token ids, and say what was dropped and why."""
    from foretell.train import prepare as stage

    print(stage.prepare(config, run, files).table())
    print(f"wrote {run / 'samples.jsonl'}")


@app.command()
@from_fields(EngineConfig, RegenerateConfig, without=("prefix_caching",), max_num_seqs=32)
def regenerate(engine: EngineConfig, config: RegenerateConfig, run: Run) -> None:
    """Let the target answer the prompts itself. Run it again to go on after an interruption."""
    from foretell.train import regenerate as stage

    answers = stage.regenerate(engine, config, run)
    for index, reason in sorted(answers.failed.items()):
        print(f"row {index + 1} of samples.jsonl has no answer: {reason}")
    done = answers.num_rows - len(answers.failed)
    print(
        f"{done:,} of {answers.num_rows:,} rows answered, {answers.num_kept:,} of them before; "
        f"{answers.num_tokens:,} new tokens"
    )
    print(f"wrote {run / 'answers.jsonl'}")


@app.command()
@from_fields(
    EngineConfig, FeaturesConfig,
    without=("speculation", "prefix_caching", "max_model_len"), max_num_batched_tokens=1024,
)  # fmt: skip
def features(engine: EngineConfig, config: FeaturesConfig, run: Run) -> None:
    """Compute the target's hidden states. Run it again to go on after an interruption."""
    from foretell.train.estimate import size
    from foretell.train.features import compute_features, plan_features

    plan, llm = plan_features(engine, config, run)
    index = plan.index
    print(f"{len(plan.texts):,} texts of {index.source}, at most {index.max_len} tokens each")
    if plan.skipped:
        print(f"{plan.skipped:,} texts have no answer and are left out")
    if plan.left_out:
        print(f"{plan.left_out:,} texts do not fit into {config.max_disk} and are left out")
    if config.online:
        print("features are computed by fit; nothing is stored")
    else:
        print(
            f"{plan.num_left:,} tokens to compute, {size(plan.bytes_left)} to store at "
            f"{index.bytes_a_token:,} bytes a token; {index.num_texts:,} texts are there already"
        )
    compute_features(plan, llm, config.shard_bytes, run)
    print(f"wrote {run / 'features'}")


@app.command("draft-vocab")
def draft_vocab(
    run: Run,
    size: Annotated[
        list[int], option("INTEGER", "Tokens to keep; again to see what others cover.")
    ],
    model: Model = EngineConfig.model,
) -> None:
    """Rank tokens by how often the target says them, for heads with a small vocabulary."""
    from foretell.train.vocabulary import draft_vocabulary

    ranking = draft_vocabulary(run, model, size)
    for count in size:
        print(f"{count:>7,} tokens cover {ranking.coverage(count):.2%} of the answers' tokens")
    print(f"wrote {run / 'draft_vocab.json'} with {size[0]:,}")


@app.command()
@from_fields(FitConfig, Machine)
def fit(
    config: FitConfig,
    machine: Machine,
    run: Run,
    target: Annotated[
        str | None, option("TEXT", "The target; the one of the features if not given.")
    ] = None,
    restart: Annotated[
        bool, option("", "Begin anew: drop this run's checkpoints.", "--restart")
    ] = False,
    dry_run: Annotated[
        bool, option("", "Say what it takes in memory, disk and time, and end.", "--dry-run")
    ] = False,
) -> None:
    """Fit a head to the features. Run it again to go on after an interruption; torchrun starts it
    on several GPUs."""
    from foretell.train.fit import fit_head, plan

    if dry_run:
        print(plan(config, machine, run, target))
        return
    done = fit_head(config, run, target=target, restart=restart)
    if done is None:
        print("saved; run it again to go on", file=sys.stderr)
        raise typer.Exit(130)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"wrote {done}")


@app.command()
@from_fields(
    EngineConfig, BenchConfig, EvaluateConfig,
    without=("speculation", "prefix_caching", "temperature"),
)  # fmt: skip
def evaluate(
    engine: EngineConfig,
    bench: BenchConfig,
    config: EvaluateConfig,
    run: Run,
    head: Head = None,
    prompts: Prompts = None,
    limit: Limit = None,
) -> None:
    """Measure a head in the engine: acceptance, speed, and that the text is the same."""
    from rich.console import Console

    from foretell.train import evaluate as stage

    result = stage.evaluate(run, config, bench, engine, head=head, prompts=prompts, limit=limit)
    stage.show(result, Console())
    out = run / "evaluation.json"
    print(f"wrote {out}" if result.written else f"{out} is that of before")
    if not result.valid:
        raise typer.Exit(1)


@app.command()
def export(
    run: Run,
    out: Annotated[Path, option("DIR", "The directory to write.")],
    form: Annotated[str, option("NAME", f"One of {', '.join(FORMATS)}.", "--format")] = "foretell",
    head: Head = None,
    model: Model = EngineConfig.model,
    verifier: Annotated[
        str | None, option("TEXT", "speculators: the target's hub name; --model if not given.")
    ] = None,
    tokens: Annotated[int, option("INTEGER", "speculators: draft tokens by default.", min=1)] = 4,
    dtype: Annotated[
        str, option("TEXT", "f32, f16 or bf16 weights; as they are if not given.")
    ] = "",
) -> None:
    """Write a head in a layout of its own or another engine's; nothing is left out silently."""
    from foretell.models.hub import resolve
    from foretell.models.loader import open_source
    from foretell.train import export as stage
    from foretell.train.evaluate import find_head

    if form not in FORMATS:
        raise ValueError(f"format {form!r}: choose one of {', '.join(FORMATS)}")
    chosen: Format = form
    written = stage.export(
        head or find_head(run), out, chosen, stage.target_rows(model),
        verifier=verifier or model, tokens=tokens, dtype=dtype,
        architecture=open_source(resolve(model))[1].architecture,
    )  # fmt: skip
    size = sum(tensor.nbytes for tensor in written.tensors.values())
    print(f"wrote {out}: {written.method}, {len(written.tensors)} tensors, {size / 1e6:.1f} MB")
    for name in written.beside:
        print(
            f"{out / name} holds the tokens that it was trained on; this layout has no place for "
            "them: give the file to SGLang's --speculative-token-map, or to draft_vocab here"
        )


@app.command()
def report(run: Run) -> None:
    """Write report.html: training and evaluation in one page."""
    from foretell.train.report import write_report

    print(f"wrote {write_report(run)}")
