"""A rank's part of a model: what is read of it, and what the parts together compute."""

from __future__ import annotations

import math

import pytest
import torch

from foretell.attention.cpu import CpuAttention
from foretell.models.checkpoint import Cut, Safetensors
from foretell.models.gguf import GGUF
from foretell.models.loader import load
from foretell.models.sharding import Shard, Sliced
from foretell.runtime.kv import KVPool
from tests.models import test_gguf
from tests.models.test_deepseek import to_fp8
from tests.models.tiny import DEEPSEEK, KINDS, Cache, make, save
from tests.runtime.ranks import ThreadRanks, on_threads

TOKENS = list(range(3, 23))
PARENTS = [-1, 0, 0, 1, 1, 2]


def run(loaded):
    """A prompt, then a tree on its last token: logits and features."""
    cache, config = Cache(loaded, CpuAttention()), loaded.model.config
    pool = KVPool({"target": config.kv_group(torch.float32)}, 16, 8, torch.device("cpu"))
    cache.kv = pool.layers["target"]
    prompt = cache.run(TOKENS, 0, taps=(0, -1))
    tree = cache.run([4, 5, 6, 7, 8, 9], len(TOKENS), PARENTS, taps=(0, -1))
    return [*prompt, *tree]


def whole_and_parts(path, world, weights="f32"):
    whole = load(str(path), weights, progress=False)

    def part(ranks):
        loaded = load(str(path), weights, progress=False, ranks=ranks)
        assert loaded.model.config == Shard(whole.config, ranks.rank, world).config
        return run(loaded)

    return run(whole), on_threads(world, part)


@pytest.mark.parametrize("kind", [*KINDS, *DEEPSEEK])
@pytest.mark.parametrize("world", [2, 4])
def test_parts_compute_what_the_whole_does(kind, world, tmp_path):
    if kind == "smollm2" and world == 4:
        world = 3  # its six heads; and two KV heads that three ranks cannot share
        model = make(kind, num_key_value_heads=3)
    else:
        model = make(kind)
    one, parts = whole_and_parts(save(model, tmp_path), world)
    for ours, theirs in zip(parts[0], one, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for follower in parts[1:]:  # the same hidden states, bit for bit, and no logits
        assert follower[0].shape == (len(TOKENS), 0)
        assert torch.equal(follower[1], parts[0][1])


@pytest.mark.parametrize("kind_of", [test_gguf.Type.F16, test_gguf.Type.Q8_0])
def test_gguf_parts(kind_of, tmp_path):
    path = test_gguf.write(make("llama"), "llama", tmp_path / "m.gguf", kind_of)
    one, parts = whole_and_parts(path, 2)
    torch.testing.assert_close(parts[0][0], one[0], rtol=1e-4, atol=1e-4)


def test_gguf_cuts_are_parts_of_the_tensor(tmp_path):
    """Borders of blocks and between them, rows of whole heads, and vectors."""
    path = test_gguf.write(make("llama-biased"), "llama", tmp_path / "m.gguf", test_gguf.Type.Q8_0)
    source, block = GGUF(path), "model.layers.0."
    for name, cut in (
        (f"{block}mlp.down_proj.weight", Cut(1, 32, 64)),
        (f"{block}mlp.down_proj.weight", Cut(1, 20, 75)),
        (f"{block}self_attn.q_proj.weight", Cut(0, 16, 48)),
        (f"{block}self_attn.k_proj.weight", Cut(0, 16, 32)),
        (f"{block}input_layernorm.weight", Cut(0, 3, 9)),
    ):
        assert torch.equal(source.read(name, cut), cut.of(source.read(name))), (name, cut)


class Counting:
    """A safetensors file that counts the numbers it is asked for."""

    def __init__(self, handle, read: list[int]) -> None:
        self.handle, self.read = handle, read

    def __getattr__(self, name):
        return getattr(self.handle, name)

    def get_tensor(self, name):
        return self._count(self.handle.get_tensor(name))

    def get_slice(self, name):
        part = self.handle.get_slice(name)
        take = lambda where: self._count(part[where])  # noqa: E731
        return type("Slice", (), {
            "get_shape": part.get_shape, "__getitem__": lambda _, where: take(where)
        })()  # fmt: skip

    def _count(self, tensor):
        self.read.append(tensor.numel())
        return tensor


@pytest.mark.parametrize("kind", ["llama-biased", "v3", "v3 in 8 bits"])
def test_a_rank_reads_its_own_slices_only(kind, tmp_path, monkeypatch):
    """Of what is divided, and no tensor as a whole on the way there."""
    path = save(make(kind.split()[0], vocab_size=512, q_lora_rank=None, num_experts_per_tok=2)
                if "v3" in kind else make(kind), tmp_path)  # fmt: skip
    if "8" in kind:
        to_fp8(path)
    read, handle = list[int](), Safetensors._handle
    monkeypatch.setattr(Safetensors, "_handle", lambda *all: Counting(handle(*all), read))
    loaded, sizes = load(str(path), "f32", progress=False), []
    whole, held = sum(read), []
    for rank in range(2):
        read.clear()
        source = Sliced(Safetensors(path), Shard(loaded.config, rank, 2))
        held.append(sum(math.prod(shape) for shape in source.shapes.values()))
        load(str(path), "f32", progress=False, ranks=ThreadRanks(rank, 2, [], None))
        sizes.append(sum(read))
    scales = whole / 64 if "8" in kind else 0
    assert all(size <= mine + scales for size, mine in zip(sizes, held, strict=True))
    assert max(sizes) < (0.55 if kind == "llama-biased" else 0.75) * whole, (sizes, whole)


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        (3, {}, "num_heads=4 does not divide by it; 2, 4 would do"),
        (2, {"intermediate_size": 95}, "intermediate_size=95 does not divide"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 96},
         "num_kv_heads=6 neither divides by it nor divides it; 2, 3, 6, 12 would do"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_by_name(world, changes, message, tmp_path):
    path = save(make("qwen2", **changes), tmp_path)
    with pytest.raises(ValueError, match=message):
        on_threads(world, lambda ranks: load(str(path), "f32", progress=False, ranks=ranks))
