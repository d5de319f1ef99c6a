"""`foretell train`: one command a stage. Each can be killed and run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretell.config import EngineConfig
from foretell.flags import from_fields
from foretell.train.cli_evaluate import evaluate, export, report
from foretell.train.cli_fit import fit
from foretell.train.config import FeaturesConfig, PrepareConfig, RegenerateConfig

app = typer.Typer(
    help="Train a head for a model of your own, in stages: prepare, regenerate, features, "
    "draft-vocab if wanted, fit, evaluate, report, export.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Run = Annotated[Path, typer.Option("--run", metavar="DIR", help="Where the files of this run lie.")]


@app.command("prepare")
@from_fields(PrepareConfig)
def prepare_command(
    config: PrepareConfig,
    run: Run,
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="JSONL of prompts or conversations."),
    ],
) -> None:
    """Turn conversations into token ids, and say what was dropped and why."""
    from foretell.train.prepare import prepare

    print(prepare(config, run, files).table())
    print(f"wrote {run / 'samples.jsonl'}")


@app.command("regenerate")
@from_fields(EngineConfig, RegenerateConfig, without=("prefix_caching",), max_num_seqs=32)
def regenerate_command(engine: EngineConfig, config: RegenerateConfig, run: Run) -> None:
    """Let the target answer the prompts itself. Run it again to go on after an interruption."""
    from foretell.train.regenerate import regenerate

    answers = regenerate(engine, config, run)
    for index, reason in sorted(answers.failed.items()):
        print(f"row {index + 1} of samples.jsonl has no answer: {reason}")
    done = answers.num_rows - len(answers.failed)
    print(
        f"{done:,} of {answers.num_rows:,} rows answered, {answers.num_kept:,} of them before; "
        f"{answers.num_tokens:,} new tokens"
    )
    print(f"wrote {run / 'answers.jsonl'}")


@app.command("features")
@from_fields(
    EngineConfig,
    FeaturesConfig,
    without=("speculation", "prefix_caching", "max_model_len"),
    max_num_batched_tokens=1024,
)
def features_command(engine: EngineConfig, config: FeaturesConfig, run: Run) -> None:
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
def vocabulary_command(
    run: Run,
    size: Annotated[
        list[int],
        typer.Option(metavar="INTEGER", help="Tokens to keep; again to see what others cover."),
    ],
    model: Annotated[str, typer.Option(metavar="TEXT", help="The target.")] = EngineConfig.model,
) -> None:
    """Rank tokens by how often the target says them, for heads with a small vocabulary."""
    from foretell.train.vocabulary import draft_vocabulary

    ranking = draft_vocabulary(run, model, size)
    for count in size:
        print(f"{count:>7,} tokens cover {ranking.coverage(count):.2%} of the answers' tokens")
    print(f"wrote {run / 'draft_vocab.json'} with {size[0]:,}")


app.command("fit")(fit)
app.command("evaluate")(evaluate)
app.command("export")(export)
app.command("report")(report)
