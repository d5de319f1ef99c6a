"""What fitting a head takes: memory, disk and time, before anything is started.

Weights are counted on the network itself, built without memory. The rest is arithmetic that errs
on the large side: every token counts as wanted, and nothing overlaps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.filesize import decimal

from foretell.bench.roofline import GPUS
from foretell.models.config import ModelConfig
from foretell.models.frozen import FrozenTarget
from foretell.models.hub import resolve
from foretell.models.loader import open_source
from foretell.models.trainable_new import new_head
from foretell.spec.training import Rule
from foretell.train.fit_config import FitConfig, Machine
from foretell.train.metrics import span


@dataclass(frozen=True)
class Sizes:
    """A target. ``config`` has the sizes that a head takes over from it."""

    name: str
    config: ModelConfig
    parameters: float
    active: float  # that a token meets: fewer in a mixture of experts


def _preset(
    name: str, parameters: float, *shape: int, tied: bool = False, active: float | None = None
) -> Sizes:
    vocab, hidden, inner, layers, heads, kv_heads, dim = shape
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=vocab, hidden_size=hidden,
        intermediate_size=inner, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=dim, max_position_embeddings=131072, tie_embeddings=tied,
    )  # fmt: skip
    return Sizes(name, config, parameters, active or parameters)


PRESETS = {
    sizes.name: sizes
    for sizes in (
        _preset("llama-3.2-1b", 1.236e9, 128256, 2048, 8192, 16, 32, 8, 64, tied=True),
        _preset("llama-3.1-8b", 8.03e9, 128256, 4096, 14336, 32, 32, 8, 128),
        _preset("llama-3.1-70b", 70.55e9, 128256, 8192, 28672, 80, 64, 8, 128),
        # Its head is a dense layer with plain attention, of the width of its first layer.
        _preset("deepseek-v2-lite", 15.7e9, 102400, 2048, 10944, 27, 16, 16, 128, active=2.4e9),
    )
}
"""Targets by name, for looking ahead without their files."""


def sizes_of(target: str) -> Sizes:
    """Of a preset, or of a model on disk or in the hub.

    Raises:
        ValueError: there is no such model.
    """
    if target in PRESETS:
        return PRESETS[target]
    source, config = open_source(resolve(target))
    count = 0
    for shape in source.shapes.values():
        size = 1
        for dimension in shape:
            size *= dimension
        count += size
    return Sizes(target, config, float(count), float(count))


@dataclass(frozen=True)
class Estimate:
    """Bytes are of one rank unless said otherwise."""

    target: Sizes
    method: str
    weights: int  # parameters that are fitted
    taps: int
    steps: int  # draft tokens unrolled
    num_steps: int  # of the optimiser
    frozen_bytes: int  # embedding and output projection
    state_bytes: int  # weights, gradients, moments, running mean
    activation_bytes: int
    head_bytes: int  # of the head's file
    checkpoint_bytes: int  # of one checkpoint
    token_bytes: int  # of a stored token
    feature_bytes: int  # of all
    feature_flops: float
    fit_flops: float  # of all ranks
    feature_seconds: float
    fit_seconds: float

    @property
    def memory_bytes(self) -> int:
        return self.frozen_bytes + self.state_bytes + self.activation_bytes


def count_weights(sizes: Sizes, config: FitConfig, draft_size: int | None) -> tuple[int, int, int]:
    """Parameters that are fitted, elements of frozen tensors, and taps to be stored."""
    given = sizes.config
    with torch.device("meta"):
        embedding = torch.empty(given.vocab_size, given.hidden_size)
        tied = given.tie_embeddings
        target = FrozenTarget(
            config=given, path=Path(), embedding=embedding,
            lm_head=embedding if tied else torch.empty_like(embedding),
        )  # fmt: skip
        ids = None if draft_size is None else torch.arange(draft_size)
        head = new_head(
            config.method, target, norms=config.norms, draft_ids=ids, taps=config.read,
            num_layers=config.layers, num_heads=config.heads,
        )  # fmt: skip
    weights = sum(p.numel() for p in head.parameters() if p.requires_grad)
    frozen = embedding.numel() if config.method != "medusa" else 0
    if draft_size is not None or not tied or not frozen:
        frozen += (draft_size or given.vocab_size) * given.hidden_size
    return weights, frozen, len({*head.taps, -1})  # the teacher reads -1


def estimate(
    sizes: Sizes,
    config: FitConfig,
    rule: Rule,
    machine: Machine,
    *,
    tokens: float,
    bf16: bool,
    draft_size: int | None = None,
) -> Estimate:
    """Reckons a run.

    Args:
        tokens: of all texts.
        bf16: whether products are in bf16.
        draft_size: tokens of a reduced vocabulary; None: the target's.
    """
    model, ranks = sizes.config, machine.world
    weights, frozen, taps = count_weights(sizes, config, draft_size)
    known = draft_size or model.vocab_size
    hidden = model.hidden_size
    steps = config.heads if config.method == "medusa" else rule.steps
    shared = ranks if config.fsdp else 1  # ranks that the state is shared out among
    copies = 3 + bool(config.ema)  # gradients, two moments, mean
    state = 4 * weights * (1 + copies)
    if shared > 1:  # beside the shares: weights gathered, and gradients before they are shared out
        state = state // shared + 8 * weights
    element = 2 if bf16 else 4
    batch = max(config.batch_tokens, config.max_len)
    if config.method == "medusa":
        row = element * 4 * hidden * config.layers
    else:
        attention = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
        row = element * (8 * hidden + 2 * attention + 4 * model.intermediate_size) * config.layers
    # Kept of each draft token until the gradient: its law and the target's, in float32, and flags.
    laws = batch * known * (steps * (4 + 4 + 1) + element)
    passing = 3 * 4 * batch * known  # while one is judged
    activations = steps * batch * row + laws + passing + (2 * weights if bf16 else 0)

    token_bytes = 2 * taps * hidden + 4 + 1
    each = steps * (6 * weights + 4 * hidden * known) + 2 * hidden * known  # operations a token
    if config.method == "medusa":  # each head has its own weights
        each = 6 * weights + (4 * steps + 2) * hidden * known
    else:
        each += steps * 8 * config.max_len * model.num_heads * model.head_dim * config.layers
    learnt = tokens * (1 - config.held_out)
    per_epoch = max(1, round(learnt / batch / ranks))
    num_steps = config.num_steps(per_epoch)
    seen = num_steps * config.accumulate * ranks * batch
    flops, bandwidth = peaks(machine)
    moved = 30 * weights * num_steps / shared  # AdamW reads and writes all of its state
    moved += seen / ranks * steps * known * 4 * 10  # passes over laws
    reading = 2 * sizes.active + 2 * model.num_layers * config.max_len * hidden  # operations
    return Estimate(
        target=sizes,
        method=config.method,
        weights=weights,
        taps=taps,
        steps=steps,
        num_steps=num_steps,
        frozen_bytes=4 * frozen,
        state_bytes=state,
        activation_bytes=activations,
        head_bytes=4 * weights,
        checkpoint_bytes=4 * weights * (4 + bool(config.ema)),
        token_bytes=token_bytes,
        feature_bytes=int(tokens * token_bytes),
        feature_flops=tokens * reading,
        fit_flops=seen * each,
        feature_seconds=tokens * reading / flops / ranks,
        fit_seconds=seen * each / flops / ranks + moved / bandwidth,
    )


def peaks(machine: Machine) -> tuple[float, float]:
    """Operations and bytes of memory a second that a step reaches."""
    if machine.device == "cpu" and not (machine.flops and machine.bandwidth):
        flops, bandwidth = measured_peaks()
    else:
        bandwidth, flops = GPUS.get(machine.device.upper(), (0.0, 0.0))
        flops *= machine.utilisation
    return machine.flops or flops, machine.bandwidth or bandwidth


def measured_peaks(seconds: float = 0.2) -> tuple[float, float]:
    """Operations (in bf16 where it has them) and bytes of memory a second of this CPU."""
    from foretell.train.trainer import multiplies_bf16

    kind = torch.bfloat16 if multiplies_bf16(torch.device("cpu")) else torch.float32
    a, b = torch.randn(512, 1024).to(kind), torch.randn(1024, 1024).to(kind)
    source = torch.randn(1 << 24)  # 64 MiB
    sink = torch.empty_like(source)
    rates: list[float] = []
    for work, amount in (
        (lambda: torch.mm(a, b), 2.0 * 512 * 1024 * 1024),
        (lambda: sink.copy_(source), 2.0 * 4 * source.numel()),
    ):
        work()
        done, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            work()
            done += 1
        rates.append(amount * done / passed)
    return rates[0], rates[1]


def describe(e: Estimate, config: FitConfig, machine: Machine, tokens: float) -> str:
    """Lines for a terminal."""
    model, ranks = e.target.config, machine.world
    how = "FSDP" if config.fsdp else "DDP" if ranks > 1 else "one process"
    where = f"{ranks} x {machine.device}" if ranks > 1 else machine.device
    rows = {
        "target": f"{e.target.name}: {_count(e.target.parameters)} weights"
        + (f", {_count(e.target.active)} a token" if e.target.active < e.target.parameters else "")
        + f", hidden {model.hidden_size:,}, vocabulary {model.vocab_size:,}",
        "head": f"{e.method}: {e.weights:,} weights to fit, {size(e.head_bytes)} in float32",
        "features": f"{_count(tokens)} tokens at {e.token_bytes:,} bytes: "
        f"{size(e.feature_bytes)} on disk (none with features --online)",
        "memory": f"{size(e.memory_bytes)} a rank ({how}): state {size(e.state_bytes)}, "
        f"frozen {size(e.frozen_bytes)}, activations {size(e.activation_bytes)}",
        "checkpoint": f"{size(e.checkpoint_bytes)} and the head; {config.keep} are kept",
        "operations": f"features {e.feature_flops:.2e}, fit {e.fit_flops:.2e}",
        "time": f"on {where}: features about {span(e.feature_seconds)}, "
        f"fit about {span(e.fit_seconds)} for {e.num_steps:,} steps",
    }
    return "\n".join(f"{name:<11} {text}" for name, text in rows.items())


def size(count: float) -> str:
    """Bytes as people say them: 3.4 MB, 1.2 TB."""
    return decimal(int(count))


def _count(number: float) -> str:
    for unit, least in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= least:
            return f"{number / least:.3g}{unit}"
    return f"{number:.0f}"
