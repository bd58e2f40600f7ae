"""Rotary position embeddings, rotate-half form, as pure functions: no buffer that `.to(bfloat16)` could degrade."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.model.config import RopeScaling


def rope_cos_sin(
    position_ids: Int[Tensor, "B S"],
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Tensor, "B S d"], Float[Tensor, "B S d"]]:
    """Cosine and sine tables for `position_ids`, computed in float32 and cast to `dtype` at the end.

    They are the same for every loop and layer (Ouro: no loop embedding), so a forward computes them once.
    B may be 1 when every row has the same positions.
    """
    inv_freq = rope_frequencies(head_dim, theta, scaling, position_ids.device)  # (d / 2,)
    angles = position_ids[..., None].float() * inv_freq  # (B, S, d / 2)
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.attention_factor != 1.0:
        cos, sin = cos * scaling.attention_factor, sin * scaling.attention_factor
    return cos.to(dtype), sin.to(dtype)


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Float[Tensor, " half"]:
    """Radians per position of each pair of dimensions, float32, scaled as `scaling` says. See :class:`RopeScaling`."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    plain = 1.0 / theta**exponent  # (d / 2,)
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    assert scaling.original_max_position_embeddings is not None  # RopeScaling has checked it
    context = scaling.original_max_position_embeddings
    if scaling.rope_type == "llama3":
        turns = context * plain / (2 * math.pi)  # over the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        first, last = (
            _yarn_dimension(turns, head_dim, theta, context) for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first if last != first else 0.001
        kept = 1 - ((torch.arange(head_dim // 2, device=device, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _yarn_dimension(turns: float, head_dim: int, theta: float, context: int) -> float:
    """The (fractional) pair of dimensions that turns `turns` times over `context` positions (2309.00071, eq. 17)."""
    return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))


def apply_rope(
    x: Float[Tensor, "B S N d"], cos: Float[Tensor, "#B S d"], sin: Float[Tensor, "#B S d"]
) -> Float[Tensor, "B S N d"]:
    """Rotates each head of queries or keys by its position; halves are paired, not neighbours."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos[:, :, None] + rotated * sin[:, :, None]
