"""How the input embedding e enters loops 2..R again: not at all, by a scalar gate, by addition, by concatenation.

"Closing the Loop" (appendix E) tries four kinds of concatenation and does not say which; these are the natural ones,
alike but for one thing: where the matrix starts, a norm before it, one a loop or one a layer.
"""

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
    """x_r = W [h; e]: Huginn's adapter (arXiv 2502.05171).

    W starts at [I, 0], i.e. as no injection; under `concat_random` like any other matrix. Under `concat_norm` an
    RMSNorm each makes h and e of one size before.
    """

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        hidden, normed = config.hidden_size, config.injection == "concat_norm"
        self.starts_neutral = config.injection != "concat_random"
        self.state_norm = RMSNorm(hidden, config.rms_norm_eps) if normed else nn.Identity()
        self.embeds_norm = RMSNorm(hidden, config.rms_norm_eps) if normed else nn.Identity()
        self.proj = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, embeds: Float[Tensor, "B S D"], state: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        return self.proj(torch.cat((self.state_norm(state), self.embeds_norm(embeds)), dim=-1))


class LayerInjections(nn.Module):
    """The concat injection before every layer of the core, each with a matrix of its own."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ConcatInjection(config) for _ in range(config.num_hidden_layers))


def build_injection(config: LoopedConfig) -> nn.Module | None:
    """The module for `config.injection`, or None for "none"."""
    if config.injection == "none":
        return None
    if config.injection == "scalar":
        return ScalarInjection(config)
    if config.injection == "add":
        return AddInjection()
    return LayerInjections(config) if config.injection == "concat_layers" else ConcatInjection(config)
