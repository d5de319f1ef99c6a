"""GGUF files (llama.cpp's format) as a source of tensors under Hugging Face's names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.models.checkpoint import Cut
from foretell.models.config import ModelConfig
from foretell.models.gguf_header import Array, Entry, Header

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_END_OF_TURN = {
    b"<|im_end|>", b"<|endoftext|>", b"<|eot_id|>", b"<|eom_id|>", b"<|end_of_text|>", b"<|end|>",
    b"<end_of_turn>", b"</s>",
}  # fmt: skip
_CONTROL = 3
"""Token type of control tokens in GGUF."""


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor; an unknown one keeps its own."""
    if name in _OUTER:
        return _OUTER[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.{match[3]}"
    return name


class GGUF:
    """One .gguf file. Tensors are dequantised one at a time, when they are read.

    Raises:
        ValueError: not a complete GGUF file, a tensor twice, or an unsupported architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [path]
        try:
            self._header = header = Header(path)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).split())  # a damaged name may hold anything
            raise ValueError(f"{path}: not a complete GGUF file ({reason})") from None
        self._tensors: dict[str, Entry] = {}
        for tensor in header.tensors:
            name = hf_name(tensor.name)
            if name in self._tensors:
                raise ValueError(f"{path}: tensor {tensor.name} is there twice")
            self._tensors[name] = tensor
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        vocab = self.shapes.get("model.embed_tokens.weight", (0,))[0]
        self.metadata: dict[str, Any] = {**header.metadata, "num_tokens": vocab}
        try:
            self.config = ModelConfig.from_gguf(
                self.metadata, {tensor.name for tensor in header.tensors}
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        except (TypeError, ArithmeticError) as error:  # values of other types than they should be
            raise ValueError(f"{path}: its metadata makes no sense ({error})") from None
        self._permuted = self.metadata["general.architecture"] == "llama"

    def end_token_ids(self) -> tuple[int, ...]:
        """The stated end of text, then control tokens whose names mean an end, as llama.cpp."""
        found = list(self.config.eos_token_ids)
        tokens, kinds = (self.metadata.get(f"tokenizer.ggml.{n}") for n in ("tokens", "token_type"))
        if isinstance(tokens, Array) and isinstance(kinds, Array):
            names, types = self._header.values(tokens), self._header.values(kinds)
            pairs = enumerate(zip(names, types, strict=False))
            found += [i for i, (name, kind) in pairs if kind == _CONTROL and name in _END_OF_TURN]
        return tuple(dict.fromkeys(found))

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """Float32, rows of q and k in Hugging Face's order. A part of these is whole heads."""
        import gguf

        tensor = self._tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        data, inside = self._header.tensor_data(tensor), None
        if cut is not None and cut.axis < len(tensor.shape) - 1:
            data = data[cut.start : cut.stop]
        elif cut is not None:  # whole blocks of each row, and of those what is wanted
            size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
            first, last = cut.start // size, -(-cut.stop // size)
            data = np.ascontiguousarray(data[..., first * num_bytes : last * num_bytes])
            inside = Cut(len(tensor.shape) - 1, cut.start - first * size, cut.stop - first * size)
        try:
            values = gguf.quants.dequantize(data, kind)
        except NotImplementedError:
            raise ValueError(
                f"{self.path}: tensor {tensor.name} is {kind.name}, which cannot be "
                "read; use a file in Q8_0, Q4_K_M, Q4_0, Q4_1, F16 or BF16"
            ) from None
        out = torch.from_numpy(np.require(values, np.float32, "W")).view(*data.shape[:-1], -1)
        if inside is not None:
            out = inside.of(out)
        if self._permuted and (".q_proj." in name or ".k_proj." in name):
            # llama.cpp keeps the two halves of a head's rotary pairs side by side.
            heads = len(out) // self.config.head_dim
            out = out.view(heads, -1, 2, *out.shape[1:]).transpose(1, 2).reshape(out.shape)
        return out
