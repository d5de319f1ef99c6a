"""Tiny random models of each architecture, as transformers makes and saves them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretell.attention import pool
from foretell.attention.base import Attention, Layout
from foretell.models.head import Head
from foretell.models.loader import LoadedModel
from foretell.runtime.kv import KVPool

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False, "head_dim": 32}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        "Llama",
        {"tie_word_embeddings": True, "hidden_size": 96, "num_attention_heads": 6},
    ),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 16, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}
DEEPSEEK: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("DeepseekV2", {"q_lora_rank": None, "routed_scaling_factor": 1.0}),
    "v2": (
        "DeepseekV2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "first_k_dense_replace": 2,
            "rope_scaling": {"mscale": 0.707, "mscale_all_dim": 0.707} | _YARN,
        },
    ),
    "v3": ("DeepseekV3", {"rope_scaling": {"mscale": 1.0, "mscale_all_dim": 1.0} | _YARN}),
    "v3-plain": (
        "DeepseekV3",
        {
            "norm_topk_prob": False,
            "rope_interleave": False,
            "q_lora_rank": None,
            "rope_scaling": {"mscale": 1.0, "mscale_all_dim": 0.5} | _YARN,
        },
    ),
}
"""Those with latent attention and experts."""


def make(kind: str, **changes: Any) -> Any:
    """A transformers model, random weights; biases and norms too, so that each one matters."""
    import transformers

    name, variant = {**KINDS, **DEEPSEEK}[kind]
    sizes = SIZES | (_LATENT if kind in DEEPSEEK else {})
    config = getattr(transformers, f"{name}Config")(
        **{**sizes, **variant, **changes}, attn_implementation="eager"
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("bias"):
                weight.normal_(std=0.1)
            elif "norm" in key:
                weight.uniform_(0.5, 1.5)
        for key, weight in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                weight.normal_(std=0.3)
    return model


def save(model: Any, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def save_with_mtp(path: Path, **changes: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """Writes a DeepSeek-V3 with its MTP module: the model without it, the decoder layer inside the
    module, and the tensors around that, by their names in there."""
    from safetensors.torch import load_file, save_file

    model = make("v3", num_hidden_layers=4, **changes)
    save(model, path)
    g, hidden = torch.Generator().manual_seed(2), model.config.hidden_size
    own = {
        f"{name}.weight": torch.rand(hidden, generator=g) + 0.5
        for name in ("enorm", "hnorm", "shared_head.norm")
    } | {"eh_proj.weight": torch.randn(hidden, 2 * hidden, generator=g) * hidden**-0.5}
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.layers.3.{name}": tensor for name, tensor in own.items()}
    # Copies, as in the published checkpoint.
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path / "config.json").read_text())
    settings |= {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(settings))
    layer = model.model.layers[3]
    model.model.layers = model.model.layers[:3]
    return model, layer, own


class Cache:
    """One sequence's pages, in an order that is not the text's, and rows over them."""

    def __init__(self, loaded: LoadedModel, attention: Attention, num_pages: int = 16) -> None:
        groups = {"target": loaded.config.kv_group(loaded.kv_dtype)}
        self.kv = KVPool(groups, num_pages, 8, torch.device("cpu")).layers["target"]
        self.loaded, self.attention = loaded, attention
        self.table = torch.arange(num_pages, dtype=torch.int32).flip(0)[None]

    def run(
        self,
        tokens: list[int],
        start: int,
        parents: list[int] | None = None,
        taps: tuple[int, ...] = (),
        outputs: list[int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [O, V] of tokens from position ``start`` on, of all unless ``outputs`` says which:
        a causal run, or a tree whose node 0 is the root at ``start``; and the tapped features."""
        layout = self._plan(len(tokens), start, parents)
        rows = _int32(range(len(tokens)) if outputs is None else outputs)
        return self.loaded.model.run(
            _int32(tokens), self.attention, layout, self.kv, rows, taps=taps
        )

    def run_head(self, head: Head, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and features [R, H] of a head's pairs from position 0 on; its layers are here."""
        layout, rows = self._plan(len(tokens), 0, None), _int32(range(len(tokens)))
        kv = self.kv[: len(head.layers)]
        return head.run(_int32(tokens), features, rows, self.attention, layout, kv)

    def _plan(self, n: int, start: int, parents: list[int] | None) -> Layout:
        cells = list(range(start, start + n))
        positions, prefix, words = cells, [c + 1 for c in cells], [0] * n
        if parents is not None:
            words, depth = [1], [0]
            for i in range(1, n):
                words.append(words[parents[i]] | 1 << i)
                depth.append(depth[parents[i]] + 1)
            positions, prefix = [start + d for d in depth], [start + 1] * n
        physical = [int(self.table[0, c // 8]) * 8 + c % 8 for c in cells]
        layout = Layout(
            positions=_int32(positions),
            cells=_int32(physical),
            row_seq=_int32([0] * n),
            prefix=_int32(prefix),
            ancestors=torch.tensor(words, dtype=torch.int64),
            base=_int32([start] * n),
            page_table=self.table,
            page_size=8,
        )
        self.attention.plan(layout)
        return layout


def _int32(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


@contextmanager
def every_thread(monkeypatch: Any, threads: int) -> Iterator[list[int]]:
    """Kernels use exactly so many threads, however busy the machine is; lists what each asked."""
    used: list[int] = []

    class All(pool.Crowd):
        def allowed(self, shares: int) -> int:
            used.append(shares)
            return shares

    with monkeypatch.context() as patch:
        patch.setattr(pool, "_crowd", All())
        patch.setattr(pool, "_num_threads", threads)
        yield used
