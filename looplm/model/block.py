"""One transformer layer: attention and SwiGLU, each in a residual branch with norms where the placement says."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import silu

from looplm.model.attention import Attention, AttentionContext
from looplm.model.autocast import matmul_input
from looplm.model.cache import LoopIndex
from looplm.model.config import LoopedConfig
from looplm.model.lora import LoraSlices, project
from looplm.model.norm import RMSNorm


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, keeping these two for the backward pass and not silu(gate) as well."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return silu(gate) * up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_silu, d_up = grad * up, grad * silu(gate)
        if torch.is_grad_enabled():  # the kernel has no derivative of its own
            share = torch.sigmoid(gate)
            return d_silu * share * (1 + gate * (1 - share)), d_up
        return torch.ops.aten.silu_backward(d_silu, gate), d_up


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, wide, bias=config.mlp_bias)
        self.down_proj = nn.Linear(wide, hidden, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "B S D"], lora: LoraSlices) -> Float[Tensor, "B S D"]:
        x = matmul_input(x)
        gate = project(self.gate_proj, x, lora.get("gate_proj"))
        up = project(self.up_proj, x, lora.get("up_proj"))
        # A compiler chooses itself what to keep; without gradients there is nothing to keep.
        keeps = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        wide = _SwiGLU.apply(gate, up) if keeps else silu(gate) * up
        return project(self.down_proj, wide, lora.get("down_proj"))


class Block(nn.Module):
    """A layer under one of five norm placements (Ouro 3; Closing the Loop 3.3):

    ouro: x + N2(F(N1 x)); pre and magic: x + F(N1 x); post: N2(x + F x); sandwich: N2(x + F(N1 x)).
    """

    def __init__(self, config: LoopedConfig, layer_idx: int) -> None:
        super().__init__()
        placement = config.norm_placement

        def norm(used: bool) -> nn.Module:
            scale = placement != "magic"
            return RMSNorm(config.hidden_size, config.rms_norm_eps, learned_scale=scale) if used else nn.Identity()

        before, after = placement != "post", placement not in ("pre", "magic")
        self.norms_the_sum = placement in ("post", "sandwich")
        self.input_layernorm, self.input_layernorm_2 = norm(before), norm(after)
        self.self_attn = Attention(config, layer_idx)
        self.post_attention_layernorm, self.post_attention_layernorm_2 = norm(before), norm(after)
        self.mlp = MLP(config)

    def add(self, x: Tensor, branch: Tensor, norm: nn.Module) -> Tensor:
        """The residual add, with the second norm on the branch or on the sum."""
        return norm(x + branch) if self.norms_the_sum else x + norm(branch)

    def forward(
        self, x: Float[Tensor, "B S D"], context: AttentionContext, loop_idx: LoopIndex, lora: LoraSlices
    ) -> Float[Tensor, "B S D"]:
        x = self.add(x, self.self_attn(self.input_layernorm(x), context, loop_idx, lora), self.input_layernorm_2)
        return self.add(x, self.mlp(self.post_attention_layernorm(x), lora), self.post_attention_layernorm_2)
