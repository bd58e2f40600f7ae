"""RMSNorm, the only normalisation a LoopLM uses."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn


def normalize(x: Float[Tensor, "*batch D"], eps: float) -> Float[Tensor, "*batch D"]:
    """x / sqrt(mean(x^2) + eps) over the last dimension, statistics in float32 or wider, in the dtype of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class _ScaledNorm(torch.autograd.Function):
    """weight * normalize(x), keeping x alone for the backward pass: the residual stream holds it anyway.

    Autograd on its own would keep the normed state too, in float32, twice a layer and loop.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        normed = normalize(x, eps)
        return normed if weight is None else weight * normed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
        normed = wide * scale
        d_weight = None
        if weight is not None:
            d_weight = (grad * normed.to(x.dtype)).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
            grad = grad * weight
        d_normed = grad.to(x.dtype).to(wide.dtype)
        d_wide = scale * (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True))
        return d_wide.to(x.dtype), d_weight, None


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
        # A compiler chooses itself what to keep; without gradients there is nothing to keep.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _ScaledNorm.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]
        normed = normalize(x, self.eps)
        return normed if self.weight is None else self.weight * normed
