"""GGUF files (llama.cpp's format) as a source of tensors under Hugging Face's names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretell.models.config import ModelConfig

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
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
    "<end_of_turn>", "</s>",
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
        import gguf

        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except FileNotFoundError:
            raise ValueError(f"{path} is missing") from None
        except Exception as error:  # the reader meets damaged files with whatever comes up
            reason = " ".join(str(error).split())[:120]
            raise ValueError(f"{path}: not a complete GGUF file ({reason})") from None
        self._tensors: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for tensor in self._reader.tensors:
            name = hf_name(tensor.name)
            if name in self._tensors:
                raise ValueError(f"{path}: tensor {tensor.name} is there twice")
            self._tensors[name] = tensor
            self.shapes[name] = tuple(int(size) for size in reversed(tensor.shape))
        self.metadata = self._metadata()
        names = {tensor.name for tensor in self._reader.tensors}
        self.config = ModelConfig.from_gguf(self.metadata, names)
        self._permuted = self.metadata["general.architecture"] == "llama"

    def _metadata(self) -> dict[str, Any]:
        import gguf

        out: dict[str, Any] = {}
        for key, field in self._reader.fields.items():
            long = field.types[:1] == [gguf.GGUFValueType.ARRAY] and len(field.data) > 1024
            if not long:
                out[key] = field.contents()
        out["num_tokens"] = self.shapes.get("model.embed_tokens.weight", (0,))[0]
        return out

    def end_token_ids(self) -> tuple[int, ...]:
        """The stated end of text, then control tokens whose names mean an end, as llama.cpp."""
        found = list(self.config.eos_token_ids)
        fields = self._reader.fields
        tokens, kinds = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
        if tokens is not None and kinds is not None:
            control = np.flatnonzero(np.array(kinds.contents()) == _CONTROL)
            found += [
                int(i)
                for i in control
                if bytes(tokens.parts[tokens.data[i]]).decode(errors="replace") in _END_OF_TURN
            ]
        return tuple(dict.fromkeys(found))

    def read(self, name: str) -> Tensor:
        """Float32, rows of q and k in Hugging Face's order."""
        import gguf

        tensor = self._tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(
                f"{self.path}: tensor {tensor.name} is {tensor.tensor_type.name}, which cannot be "
                "read; use a file in Q8_0, Q4_K_M, Q4_0, Q4_1, F16 or BF16"
            ) from None
        out = torch.from_numpy(np.array(values, dtype=np.float32)).view(self.shapes[name])
        if self._permuted and (heads := self._heads(name)):
            # llama.cpp keeps the two halves of a head's rotary pairs side by side.
            out = out.view(heads, -1, 2, *out.shape[1:]).transpose(1, 2).reshape(out.shape)
        return out

    def _heads(self, name: str) -> int:
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else 0
