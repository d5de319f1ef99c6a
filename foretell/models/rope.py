"""Rotary position embeddings (Su et al. 2021) and the ways to stretch them.

Every entry of the table is a function of its position alone, so a token's rotation cannot depend
on how it was computed. `dynamic` scaling (NTK by sequence length) is the one kind where
transformers lets the sequence's current length change all rotations; here the length is fixed
once, at the context limit that the model was loaded with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretell.models.config import ModelConfig
from foretell.spec.tree import MAX_NODES


def frequencies(config: ModelConfig, max_model_len: int | None = None) -> tuple[Tensor, float]:
    """Inverse frequencies [D/2] float32 and the factor that multiplies cos and sin.

    Args:
        max_model_len: context limit, which only `dynamic` depends on: beyond
            max_position_embeddings it sets how far frequencies are stretched.

    Follows bloc97 (dynamic NTK), kaiokendev (linear), Peng et al. 2023 (YaRN, section 3.2 and 3.4)
    and Llama 3.1 (wavelengths beyond the original context divided by the factor, a ramp between).
    """
    scaling, dim, base = config.rope_scaling, config.rope_dim, config.rope_theta
    kind = scaling["rope_type"]
    factor = float(scaling.get("factor") or 1.0)
    if kind == "dynamic":
        limit = config.max_position_embeddings
        length = max(max_model_len or limit, limit)
        base *= (factor * length / limit - (factor - 1)) ** (dim / (dim - 2))
    inverse = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if kind == "linear":
        return inverse / factor, 1.0
    if kind == "llama3":
        return _llama3(inverse, factor, scaling), 1.0
    if kind == "yarn":
        return _yarn(inverse, factor, config), _yarn_attention(factor, scaling)
    return inverse, 1.0


def _llama3(inverse: Tensor, factor: float, scaling: dict[str, float]) -> Tensor:
    low, high = (
        scaling.get("low_freq_factor", 1.0),
        scaling.get("high_freq_factor", 4.0),
    )
    context = scaling["original_max_position_embeddings"]
    turns = context / (2 * math.pi / inverse)  # how often a frequency turns within the context
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    return torch.where(turns < low, inverse / factor, torch.where(turns > high, inverse, between))


def _yarn(inverse: Tensor, factor: float, config: ModelConfig) -> Tensor:
    scaling, dim = config.rope_scaling, config.rope_dim
    context = scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 * (low == high)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp)


def _yarn_attention(factor: float, scaling: dict[str, float]) -> float:
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return _mscale(factor, over) / _mscale(factor, under) if over and under else _mscale(factor)


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def latent_scale(config: ModelConfig) -> float:
    """What multiplies the scores of latent attention: DeepSeek has YaRN's factor (mscale_all_dim)
    here, squared, as it is for the unrotated dimensions too."""
    assert config.mla is not None
    factor, weight = config.rope_scaling.get("factor"), config.rope_scaling.get("mscale_all_dim")
    stretched = _mscale(factor, weight) if factor and weight else 1.0
    return (config.mla.nope_dim + config.mla.rope_dim) ** -0.5 * stretched**2


class Rope:
    """Tables of cos and sin, grown on demand: no position is ever read out of bounds.

    Args:
        config: the model's.
        factors: [D/2] float32, frequencies are divided by them (GGUF's rope_freqs).
        max_model_len: context limit, see `frequencies`.
        device: where the tables lie. On a GPU they are whole from the start, or positions would
            have to be read from it.
    """

    __slots__ = ("_device", "_inverse", "_scale", "_whole", "cos", "sin")

    def __init__(
        self,
        config: ModelConfig,
        factors: Tensor | None = None,
        max_model_len: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._inverse, self._scale = frequencies(config, max_model_len)
        self._whole = device is not None and device.type != "cpu"
        if factors is not None:
            self._inverse = self._inverse / factors.float().cpu()
        self._device = device
        longest = config.max_position_embeddings
        size = longest + MAX_NODES + 1 if self._whole else min(longest, 2048)
        self.cos, self.sin = self._entries(0, size)  # [P, D/2]

    def cover(self, positions: Tensor) -> None:
        """Makes the tables long enough for positions [R]."""
        if len(positions) and not self._whole:
            self.reserve(max(positions.tolist()) + 1)

    def reserve(self, num_positions: int, *, whole: bool = False) -> None:
        """Makes entries for positions 0 .. num_positions - 1.

        Args:
            whole: none lies behind them, so that `cover` need not read positions from the device.
        """
        self._whole = self._whole or whole
        have = len(self.cos)
        if num_positions > have:
            cos, sin = self._entries(have, max(num_positions, 2 * have))
            self.cos = torch.cat([self.cos, cos.to(self.cos)])
            self.sin = torch.cat([self.sin, sin.to(self.sin)])

    def _entries(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        # The angle is a float32 product as in transformers; its cos and sin are taken in float64
        # and rounded, so that an entry does not depend on where in the table's growth it was made.
        angles = torch.arange(start, end, dtype=torch.float32)[:, None] * self._inverse
        angles = angles.double()
        cos, sin = (angles.cos() * self._scale).float(), (angles.sin() * self._scale).float()
        return cos.to(device=self._device), sin.to(device=self._device)
