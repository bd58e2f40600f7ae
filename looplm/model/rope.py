"""Rotary position embeddings, rotate-half form, as pure functions: no buffer that `.to(bfloat16)` could degrade."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rope_cos_sin(
    position_ids: Int[Tensor, "B S"], head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "B S d"], Float[Tensor, "B S d"]]:
    """Cosine and sine tables for `position_ids`, computed in float32 and cast to `dtype` at the end.

    They are the same for every loop and layer (Ouro: no loop embedding), so a forward computes them once.
    B may be 1 when every row has the same positions.
    """
    exponent = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / theta**exponent  # (d / 2,)
    angles = position_ids[..., None].float() * inv_freq  # (B, S, d / 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(
    x: Float[Tensor, "B S N d"], cos: Float[Tensor, "#B S d"], sin: Float[Tensor, "#B S d"]
) -> Float[Tensor, "B S N d"]:
    """Rotates each head of queries or keys by its position; halves are paired, not neighbours."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos[:, :, None] + rotated * sin[:, :, None]
