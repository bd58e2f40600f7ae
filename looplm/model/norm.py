"""RMSNorm, the only normalisation a LoopLM uses."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times a learned vector unless `learned_scale` is off (then "FRMS").

    The statistics are computed in float32 (float64 for float64 input) and the result is cast back
    *before* the weight multiply, as the released Ouro code does: in bfloat16 the order shows.
    """

    def __init__(self, size: int, eps: float, learned_scale: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size)) if learned_scale else None

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return normed if self.weight is None else self.weight * normed
