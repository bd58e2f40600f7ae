"""Per-loop LoRA banks: one low-rank correction for every loop, layer and projection (Closing the Loop, 4.4)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from looplm.model.cache import LoopIndex
from looplm.model.config import LoopedConfig

LoraSlices = dict[str, tuple[Tensor, Tensor]]
"""Projection name -> (a, b) of one loop, (rank, in) and (out, rank), or with a leading B when rows differ."""


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The matrices of a layer."""


def projection_sizes(config: LoopedConfig) -> dict[str, tuple[int, int]]:
    """Projection name -> (in, out) of the seven matrices of a layer."""
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    keys, wide = config.num_key_value_heads * config.head_dim, config.intermediate_size
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, wide),
        "up_proj": (hidden, wide),
        "down_proj": (wide, hidden),
    }


class LoraBank(nn.Module):
    """The R corrections of one projection: a is (R, rank, in), b is (R, out, rank) and starts at zero."""

    def __init__(self, num_loops: int, rank: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(num_loops, rank, in_features))
        self.b = nn.Parameter(torch.zeros(num_loops, out_features, rank))

    def forward(self, loop_idx: LoopIndex) -> tuple[Tensor, Tensor]:
        """a and b of one loop, or of each row's."""
        return self.a[loop_idx], self.b[loop_idx]


class LayerLora(nn.ModuleDict):
    """The banks of one core layer, by projection name.

    Held outside the layer and passed in as slices: a compiled layer then has one graph for all loops,
    and a sharded model gathers the banks with its root, not with each layer.
    """

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(
            {
                name: LoraBank(config.num_loops, config.lora_rank, in_features, out_features)
                for name, (in_features, out_features) in projection_sizes(config).items()
            }
        )
        self.scale = config.lora_alpha / config.lora_rank
        self.last_loop = config.num_loops - 1

    def forward(self, loop_idx: LoopIndex) -> LoraSlices:
        """The slices of one loop, or of each row's loop. Loops beyond the trained R use the last bank."""
        last = self.last_loop
        loop_idx = min(loop_idx, last) if isinstance(loop_idx, int) else loop_idx.clamp(max=last)
        slices = {name: bank(loop_idx) for name, bank in self.items()}
        return {name: (a, self.scale * b) for name, (a, b) in slices.items()}


def project(
    linear: nn.Module, x: Float[Tensor, "B S I"], lora: tuple[Tensor, Tensor] | None
) -> Float[Tensor, "B S O"]:
    """linear(x), plus b(a(x)) where a correction is given. `linear` is nn.Linear, or what PEFT puts around it."""
    out = linear(x)
    if lora is None:
        return out
    a, b = lora
    return out + x @ a.mT @ b.mT
