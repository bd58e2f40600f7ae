"""How the input embedding e enters loops 2..R again: not at all, by a scalar gate, by addition, by concatenation."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from looplm.model.config import LoopedConfig
from looplm.model.norm import RMSNorm

SCALAR_START = 4.6
"""Start of the scalar's logit: w = sigmoid(4.6) = 0.990 (Closing the Loop 4.1)."""


class ScalarInjection(nn.Module):
    """x_r = w e + (1 - w) N_in(h), w = sigmoid(logit), one learned scalar (Closing the Loop 4.1).

    N_in is an RMSNorm whose vector starts at the embeddings' root mean square, so that state and embedding
    meet at one size; the paper leaves it open, and its parameter count has just room for it.
    """

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.full((1,), SCALAR_START))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embeds: Float[Tensor, "B S D"], state: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        # In the state's dtype at the end: under autocast the float32 norm vector would widen a bfloat16 state.
        # 1 - w is taken from the logit: in bfloat16 w = 0.99 has two digits and 1 - w would be a fifth off.
        weight, rest = torch.sigmoid(self.logit), torch.sigmoid(-self.logit)
        return (weight * embeds + rest * self.norm(state)).to(state.dtype)


class AddInjection(nn.Module):
    """x_r = h + e (HRM-Text's additive injection)."""

    def forward(self, embeds: Float[Tensor, "B S D"], state: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        return state + embeds


class ConcatInjection(nn.Module):
    """x_r = W [h; e], W starting at [I, 0], i.e. as no injection (Huginn's adapter, started neutral)."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, embeds: Float[Tensor, "B S D"], state: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        return self.proj(torch.cat((state, embeds), dim=-1))


def build_injection(config: LoopedConfig) -> nn.Module | None:
    """The module for `config.injection`, or None for "none"."""
    if config.injection == "scalar":
        return ScalarInjection(config)
    if config.injection == "add":
        return AddInjection()
    return ConcatInjection(config) if config.injection == "concat" else None
