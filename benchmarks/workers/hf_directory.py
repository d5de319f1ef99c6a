"""A GGUF's weights as a Hugging Face directory in bf16, for peers that read no GGUF."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from transformers import AutoTokenizer

from foretell.models.gguf import GGUF

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}


def write(source: Path, out: Path) -> Path:
    """Writes weights, config and tokenizer below ``out`` unless they are there; returns ``out``."""
    if (out / "config.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    gguf = GGUF(source)
    config = gguf.config
    tensors = {name: gguf.read(name).bfloat16().contiguous() for name in gguf.shapes}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(out)
    fields = {
        "architectures": [config.architecture],
        "model_type": ARCHITECTURES[config.architecture],
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    (out / "config.json").write_text(json.dumps(fields, indent=1))  # last: all else is whole
    return out
