"""Any head's directory that the engine serves, read whole: its config and its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from foretell.models.checkpoint import Checkpoint
from foretell.models.head_reader import open_tensors, root_of, settings_of

Tensors = dict[str, Tensor]
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings"),
    *("attention_bias", "mlp_bias", "torch_dtype", "bos_token_id", "eos_token_id"),
)
SPECULATORS = {
    "fusion_fc.weight": "fc.weight",
    "fusion_fc.bias": "fc.bias",
    "pre_lm_head_layernorm.weight": "norm.weight",
}
_LAYER = (
    r"(layers\.\d+|midlayer)\.(self_attn\.([qkvo]_proj|[qk]_norm)|mlp\.(gate|up|down)_proj"
    r"|(input|post_attention)_layernorm|hidden_norm)\.(weight|bias)"
)
_KNOWN = {
    "eagle": rf"{_LAYER}|fc\.(weight|bias)|((embedding|hidden_states)_layernorm|norm|embed_tokens)"
    r"\.weight|fuse_(down|up)\.weight|fc_norm\.\d\.weight|d2t|t2d",
    "eagle3": rf"{_LAYER}|(fc|norm|lm_head|embed_tokens|fc_norm\.\d|input_norm)\.weight|d2t|t2d",
    "medusa": r"\d+\.\d+\.(linear\.)?(weight|bias)|token_map|lm_head\.weight",
    "mtp": r".*",
}


@dataclass(frozen=True)
class HeadFiles:
    """A head's config and tensors under the names of its scheme's first layout: EAGLE's,
    EAGLE-3's (``midlayer.``), an MTP module's own, and Medusa's state dict."""

    method: str
    settings: dict[str, Any]
    tensors: Tensors
    beside: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Further files of its directory."""

    @property
    def sizes(self) -> dict[str, Any]:
        """The decoder's sizes, as a Llama config has them."""
        return {name: self.settings[name] for name in _SIZES if name in self.settings}


def method_of(path: Path) -> str:
    """The scheme that serves a head, told by its tensors.

    Raises:
        ValueError: it is no head.
    """
    shapes = open_tensors(path).shapes
    names = [re.sub(r"^(model|medusa_heads?)\.", "", name) for name in shapes]
    if any(re.search(r"(^|\.)(eh_proj|input_proj)\.weight$|^mtp\.", name) for name in names):
        return "mtp"
    if any(re.match(r"0\.0\.linear\.|blocks\.0\.", name) for name in names):
        return "medusa"
    if any(re.match(r"midlayer\.|layers\.0\.hidden_norm\.", name) for name in names):
        return "eagle3"
    if "fc.weight" in names or "fusion_fc.weight" in names:
        return "eagle"
    raise ValueError(f"{path}: no head of a known scheme (eagle, eagle3, mtp, medusa) is here")


def read_head(path: Path) -> HeadFiles:
    """Reads a head's directory whole.

    Raises:
        ValueError: it cannot be read, holds NaN, or its config and its tensors disagree.
    """
    method, settings = method_of(path), settings_of(path)
    names = Checkpoint(open_tensors(path))
    take: Callable[[str], Tensor] = lambda name: (  # noqa: E731
        names.take_any if name.endswith(("d2t", "t2d", "token_map")) else names.take
    )(name, *names.shape(name))
    root = "" if method == "mtp" else root_of(names)
    found = {name.removeprefix(root): take(name) for name in sorted(names)}
    files = HeadFiles(method, settings, _first_layout(method, found))
    for name in files.tensors:
        if not re.fullmatch(_KNOWN[method], name):
            raise ValueError(f"{path}: a head of {method} has no place for tensor {name}")
    if method != "medusa":
        _check_sizes(path, files)
    return files


def _first_layout(method: str, found: Tensors) -> Tensors:
    """Tensors by the names of a scheme's first layout."""
    if method == "eagle":
        renamed = {name.replace("transformer.", "layers.0.", 1): t for name, t in found.items()}
        return {SPECULATORS.get(name, name): tensor for name, tensor in renamed.items()}
    if method == "eagle3":
        return {re.sub(r"^layers\.0\.", "midlayer.", name): t for name, t in found.items()}
    if method == "medusa":
        return _medusa_state({re.sub(r"^medusa_heads?\.", "", n): t for n, t in found.items()})
    return found


def _medusa_state(found: Tensors) -> Tensors:
    depth = len({name for name in found if re.fullmatch(r"blocks\.0\.layers\.\d+\.weight", name)})
    out: Tensors = {}
    for name, tensor in found.items():
        if match := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
            name = f"{match[1]}.{match[2]}.linear.{match[3]}"
        elif match := re.fullmatch(r"lm_heads\.(\d+)\.weight", name):
            name = f"{match[1]}.{depth}.weight"
        out[name] = tensor
    return out


def _check_sizes(path: Path, files: HeadFiles) -> None:
    """
    Raises:
        ValueError: the config's sizes are not those of the tensors.
    """
    sizes, block = files.sizes, next(n for n in files.tensors if n.endswith("q_proj.weight"))
    prefix = block.removesuffix("self_attn.q_proj.weight")
    if "hidden_size" not in sizes or "num_attention_heads" not in sizes:
        if files.method == "mtp":  # inside of its target's checkpoint or beside its config
            return
        raise ValueError(f"{path}: config.json lacks hidden_size or num_attention_heads")
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    dim = sizes.get("head_dim") or hidden // heads
    expected = {
        "self_attn.q_proj": heads * dim,
        "self_attn.k_proj": (sizes.get("num_key_value_heads") or heads) * dim,
        "self_attn.o_proj": hidden,
        "mlp.down_proj": hidden,
    }
    if "intermediate_size" in sizes and files.method != "mtp":
        expected["mlp.gate_proj"] = sizes["intermediate_size"]
    for name, size in expected.items():
        rows = len(files.tensors[f"{prefix}{name}.weight"])
        if rows != size:
            raise ValueError(f"{path}: {prefix}{name} has {rows} rows, config.json makes it {size}")
