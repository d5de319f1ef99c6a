"""From a name to a model that runs: finds the files, and converts their tensors the first time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.config import Weights, weight_format
from foretell.models.checkpoint import Safetensors, Source, read_json
from foretell.models.config import ModelConfig
from foretell.models.convert import assemble, convert, convert_ends, ends
from foretell.models.converted_file import converted
from foretell.models.decoder import Decoder
from foretell.models.gguf import GGUF
from foretell.models.hub import resolve
from foretell.models.linear import PackedEmbedding, PackedLinear
from foretell.models.recommended import recommended
from foretell.models.sharding import Ranks, Shard, Sliced
from foretell.models.tokenizer import Tokenizer
from foretell.progress import progress_bar


@dataclass(frozen=True)
class LoadedModel:
    """A model with what belongs to it."""

    model: Decoder
    config: ModelConfig
    path: Path
    weights: Weights
    recommended: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling parameters that its maker recommends."""

    @property
    def is_whole(self) -> bool:
        """Is all of it here, or only one rank's part?"""
        return self.model.config.num_heads == self.config.num_heads

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.model.norm.device

    @cached_property
    def ends(self) -> tuple[PackedEmbedding, PackedLinear]:
        """Embedding and output projection as a whole, for heads that share them. Of a model that
        is spread over ranks they are read here once more: a draft runs on one rank."""
        embedding, lm_head = self.model.embedding, self.model.lm_head
        if isinstance(embedding, PackedEmbedding) and isinstance(lm_head, PackedLinear):
            return embedding, lm_head
        source, config = open_source(self.path)
        tensors = converted(
            self.path, f"{self.weights}.ends", source.files,
            lambda: convert_ends(source, config, self.weights),
        )  # fmt: skip
        return ends(config, self.weights, _on(self.device, tensors))

    @property
    def kv_dtype(self) -> torch.dtype:
        """Keys and values are kept in bfloat16, but for f32 weights."""
        return torch.float32 if self.weights == "f32" else torch.bfloat16

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read on first use.

        Raises:
            ValueError: the model comes without one.
        """
        return Tokenizer.load(self.path)


def load(
    spec: str,
    weights: str = "int8",
    *,
    max_model_len: int | None = None,
    accept: Callable[[ModelConfig], None] = lambda config: None,
    progress: bool = True,
    ranks: Ranks | None = None,
    device: torch.device | None = None,
) -> LoadedModel:
    """Loads a model, or this rank's part of one.

    Args:
        spec: a short name (smollm2), a hub name (org/model), a directory or a .gguf file.
        weights: int8, bf16, f32 or int4: what the tensors are turned into, once (converted_file).
        max_model_len: context limit; only models with `dynamic` RoPE scaling depend on it.
        accept: called before any weight is read; refuses by a ValueError.
        progress: show a bar on stderr where converting takes over two seconds.
        ranks: those that the model is spread over; only this one's slices are read.
        device: where it is to lie, if not on the CPU.

    Raises:
        ValueError: nothing there, an unsupported model, or a tensor that is missing, left over,
            there twice or of another shape; or it does not divide by the number of ranks.
    """
    path = resolve(spec)
    kind = weight_format(weights)
    source, config = open_source(path)
    wishes = recommended(path, _generation(path, source))
    for end in config.eos_token_ids:
        if not 0 <= end < config.vocab_size:
            raise ValueError(
                f"{path}: eos_token_id {end} is not in the vocabulary (0 to "
                f"{config.vocab_size - 1}); correct it in the model's config"
            )
    accept(config)
    part, name, parallel = config, str(kind), None
    if ranks is not None:
        shard = Shard(config, ranks.rank, ranks.world)
        source, part, parallel = Sliced(source, shard), shard.config, (shard, ranks)
        name = f"{kind}.{ranks.rank}of{ranks.world}"
    with progress_bar("converting weights", config.num_layers + 1, shown=progress) as advance:
        tensors = converted(path, name, source.files, lambda: convert(source, part, kind, advance))
    model = assemble(part, kind, _on(device, tensors), max_model_len, parallel)
    return LoadedModel(model, config, path, kind, wishes)


def _on(device: torch.device | None, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: tensor.to(device=device) for name, tensor in tensors.items()}


def open_source(path: Path) -> tuple[Source, ModelConfig]:
    """A directory's or a .gguf file's tensors and config.

    Raises:
        ValueError: as `load`.
    """
    if path.suffix == ".gguf":
        source = GGUF(path)
        return source, replace(source.config, eos_token_ids=source.end_token_ids())
    settings = read_json(path / "config.json")
    try:
        config = ModelConfig.from_hf(settings)
    except KeyError as error:
        raise ValueError(f"{path / 'config.json'} lacks {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / 'config.json'}: {error}") from None
    source = Safetensors(path)
    ends = _generation(path, source).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends] if ends is not None else []
    if not all(type(end) is int for end in (*config.eos_token_ids, *ends)):
        raise ValueError(f"{path}: eos_token_id must be a token id or a list of them")
    ids = tuple(dict.fromkeys([*config.eos_token_ids, *ends]))
    return source, replace(config, eos_token_ids=ids)


def _generation(path: Path, source: Source) -> Mapping[str, Any]:
    """What the model says about how to generate with it."""
    if isinstance(source, GGUF):
        return source.metadata
    file = path / "generation_config.json"
    return read_json(file) if file.exists() else {}
