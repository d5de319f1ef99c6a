"""Reads a draft head's files: settings, sizes and tensors, each one accounted for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.config import Weights
from foretell.models.checkpoint import Checkpoint, Safetensors, Source, TorchFile, join, read_json
from foretell.models.config import ModelConfig
from foretell.models.layer import Layer
from foretell.models.linear import Embedding, Linear, PackedEmbedding, make_linear
from foretell.models.loader import LoadedModel
from foretell.models.sharding import GatheredLinear, PartEmbedding, Ranks, Shard, Sliced

_STATE_DICTS = ("pytorch_model.bin", "medusa_lm_head.pt")


def open_tensors(path: Path) -> Source:
    """The tensors of a head's directory: safetensors, else a state dict.

    Raises:
        ValueError: neither is there.
    """
    if not path.is_dir():
        raise ValueError(f"{path}: a head is a directory with config.json and its tensors")
    if any(path.glob("*.safetensors")):
        return Safetensors(path)
    for name in _STATE_DICTS:
        if (path / name).exists():
            return TorchFile(path / name)
    raise ValueError(f"{path}: neither *.safetensors nor {' nor '.join(_STATE_DICTS)} here")


class Reader:
    """Takes a head's tensors in one weight format.

    Args:
        zero_centred: norms hold their weight minus one (Qwen3-Next).
    """

    def __init__(self, source: Source, weights: Weights, *, zero_centred: bool = False) -> None:
        self.checkpoint = Checkpoint(source)
        self.weights: Weights = weights
        self.path = source.path
        self._centre = 1.0 if zero_centred else 0.0

    def split(self, config: ModelConfig, ranks: Ranks | None) -> ModelConfig:
        """From now on only this rank's slices are read, where there are ranks; sizes of its part.

        Raises:
            ValueError: something does not divide by the number of ranks.
        """
        if ranks is None:
            return config
        shard = Shard(config, ranks.rank, ranks.world)
        self.checkpoint.narrow(lambda source: Sliced(source, shard))
        return shard.config

    def norm(self, name: str, size: int) -> Tensor:
        return self.checkpoint.take(f"{name}.weight", size).float() + self._centre

    def linear(self, names: Mapping[str, int], inputs: int, *, bias: bool = False) -> Linear:
        """One product for several of the same input: names and their outputs."""
        take = self.checkpoint.take
        weight = [take(f"{name}.weight", size, inputs) for name, size in names.items()]
        biases = [take(f"{name}.bias", size) for name, size in names.items() if bias]
        return make_linear(self.weights, join(weight), join(biases).float() if biases else None)

    def layer(
        self, prefix: str, config: ModelConfig, *, wide: bool = False, norm: bool = True
    ) -> Layer:
        """A decoder layer. Biases and q/k norms are there where their tensors are, or where the
        config insists.

        Args:
            wide: its attention reads embedding and feature side by side.
            norm: it has an input norm of its own.
        """
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        have = self.checkpoint

        def block(name: str, outputs: dict[str, int], inputs: int, insists: bool = False) -> Linear:
            names = {f"{prefix}{name}.{part}_proj": size for part, size in outputs.items()}
            bias = insists or any(f"{full}.bias" in have for full in names)
            return self.linear(names, inputs, bias=bias)

        def head_norm(name: str) -> Tensor | None:
            full = f"{prefix}self_attn.{name}_norm"
            there = config.qk_norm or f"{full}.weight" in have
            return self.norm(full, dim) if there else None

        return Layer(
            input_norm=self.norm(f"{prefix}input_layernorm", hidden) if norm else None,
            qkv=block(
                "self_attn",
                {"q": q, "k": kv, "v": kv},
                2 * hidden if wide else hidden,
                config.attention_bias,
            ),
            o=block("self_attn", {"o": hidden}, q),
            post_norm=self.norm(f"{prefix}post_attention_layernorm", hidden),
            gate_up=block("mlp", {"gate": inner, "up": inner}, hidden),
            down=block("mlp", {"down": hidden}, inner),
            q_norm=head_norm("q"),
            k_norm=head_norm("k"),
        )


def draft_ids(draft_vocab: str, path: Path, vocab_size: int) -> Tensor | None:
    """Target ids that a head may propose (FR-Spec, 2502.14856), None for all.

    Args:
        draft_vocab: a .json or .pt file with a list of ids, or a count: that many of the most
            frequent, which the head's own ``token_ranking.json`` lists in order.

    Raises:
        ValueError: no such file, or not a list of the target's token ids.
    """
    if not draft_vocab:
        return None
    count = int(draft_vocab) if draft_vocab.isdecimal() else None
    file = path / "token_ranking.json" if count else Path(draft_vocab).expanduser()
    if not file.is_file():
        remedy = "; name a file of token ids instead of a count" if count else ""
        raise ValueError(f"draft_vocab={draft_vocab}: {file} is missing{remedy}")
    try:
        listed = (
            torch.load(file, weights_only=True)
            if file.suffix == ".pt"
            else json.loads(file.read_text(encoding="utf-8"))
        )
        ids = torch.as_tensor(listed, dtype=torch.int64).flatten()
    except Exception as error:
        raise ValueError(f"{file}: not a list of token ids ({error})") from None
    ids = ids[:count].sort().values
    if not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(f"{file}: must list different token ids from 0 to {vocab_size - 1}")
    return ids


def settings_of(path: Path) -> dict[str, Any]:
    """config.json in one layer: speculators nest the decoder's, others some of EAGLE-3's."""
    settings = read_json(path / "config.json")
    out: dict[str, Any] = {}
    for name in ("transformer_layer_config", "eagle_config"):
        nested = settings.get(name) or {}
        if not isinstance(nested, dict):
            raise ValueError(f"{path / 'config.json'}: {name} must be an object")
        out |= nested
    return out | settings


def sizes(
    settings: dict[str, Any], path: Path, target: LoadedModel, num_layers: int
) -> ModelConfig:
    """The head's own sizes and RoPE. Its layers are counted: configs are known to be wrong."""
    left_out = ("architectures", "sliding_window", "layer_types", "quantization_config")
    own = {key: value for key, value in settings.items() if key not in left_out}
    if own.get("model_type") not in ("llama", "mistral", "qwen2", "qwen3"):
        own["model_type"] = "llama"
    vocab = own.setdefault("vocab_size", target.config.vocab_size)
    own.setdefault("max_position_embeddings", target.config.max_position_embeddings)
    if vocab != target.config.vocab_size:
        raise ValueError(
            f"{path}: made for a vocabulary of {vocab!r}, "
            f"the target's is {target.config.vocab_size}"
        )
    try:
        config = ModelConfig.from_hf(own | {"num_hidden_layers": num_layers})
    except KeyError as error:
        raise ValueError(f"{path}: the config lacks {error}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None
    bias = bool(settings.get("attention_bias") or settings.get("qkv_bias"))
    return replace(config, attention_bias=bias, qk_norm=False)


def root_of(names: Checkpoint) -> str:
    """Prefix that some exporters put before every tensor of the network."""
    return "model." if any(name.startswith("model.") for name in names) else ""


def count_layers(names: Checkpoint, root: str) -> int:
    pattern = re.compile(re.escape(root) + r"layers\.(\d+)\.")
    found = {int(match[1]) for name in names if (match := pattern.match(name))}
    return max(found | {0}) + 1


def rows_of(
    weight: Tensor, ids: Tensor | None, wanted: Tensor | None, vocab_size: int
) -> tuple[Tensor, Tensor | None]:
    """Those rows of an output projection [Vd, H] that are wanted and there, and their ids.

    Args:
        ids: [Vd] the tokens of the rows; None: all, in order.
        wanted: [N] the tokens to keep; None: all that are there.

    Raises:
        ValueError: nothing would be left.
    """
    if wanted is None:
        return weight, ids
    place = torch.full((vocab_size,), -1)
    place[torch.arange(vocab_size) if ids is None else ids] = torch.arange(len(weight))
    wanted = wanted[place[wanted] >= 0]
    if not len(wanted):
        raise ValueError("draft_vocab lists none of the tokens that the head knows")
    return weight[place[wanted]], wanted


def ascending(ids: Tensor | None) -> Tensor | None:
    """Rows of the target's own matrix, in its order."""
    return None if ids is None else ids.sort().values


def shared(target: LoadedModel, ids: Tensor | None, ranks: Ranks | None = None) -> dict[str, Any]:
    """The target's embedding and its lm_head, or those rows of it.

    Args:
        ids: ascending.
        ranks: those that a head is spread over, as the target is; others need the two whole.
    """
    model: Any = target.model
    embedding, lm_head = target.ends if ranks is None else (model.embedding, model.lm_head)
    return {"embedding": embedding, "lm_head": lm_head if ids is None else lm_head.rows(ids)}


def own_embedding(
    weights: Weights, table: Tensor, config: ModelConfig, ranks: Ranks | None
) -> Embedding:
    """Of a head's own table [V, H]."""
    if ranks is None:
        return PackedEmbedding(make_linear(weights, table))
    shard = Shard(config, ranks.rank, ranks.world)
    rows = table.split(shard.vocab)[shard.rank]
    return PartEmbedding(PackedEmbedding(make_linear(weights, rows)), shard)


def own_projection(weights: Weights, weight: Tensor, ranks: Ranks | None) -> Linear:
    """Of a head's own matrix [Vd, H]."""
    if ranks is None:
        return make_linear(weights, weight)
    parts = weight.tensor_split(ranks.world)
    return GatheredLinear(make_linear(weights, parts[ranks.rank]), [*map(len, parts)], ranks)
