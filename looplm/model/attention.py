"""Grouped-query attention with rotary positions, on PyTorch's scaled_dot_product_attention."""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from looplm.model.autocast import matmul_input
from looplm.model.cache import KVCache, LoopIndex
from looplm.model.config import LoopedConfig
from looplm.model.flex import block_attention
from looplm.model.lora import LoraSlices, project
from looplm.model.norm import RMSNorm
from looplm.model.rope import apply_rope


@dataclass(frozen=True)
class AttentionContext:
    """What every layer of a pass shares, whatever the loop."""

    cos: Float[Tensor, "#B S d"]
    sin: Float[Tensor, "#B S d"]
    mask: Bool[Tensor, "#B 1 S M"] | BlockMask | None = None
    """None: plainly causal over this pass's own positions. A block mask: packed documents on a GPU."""
    cache: KVCache | None = None


class Attention(nn.Module):
    """softmax(q k^T / sqrt(d)) v with H query heads on K key-value heads; biases and q/k norm as the config asks."""

    def __init__(self, config: LoopedConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, d = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * d, config.num_key_value_heads * d
        self.layer_idx, self.head_dim = layer_idx, d
        self.grouped = config.num_attention_heads != config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, hidden, bias=config.attention_output_bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self, x: Float[Tensor, "B S D"], context: AttentionContext, loop_idx: LoopIndex, lora: LoraSlices
    ) -> Float[Tensor, "B S D"]:
        x = matmul_input(x)
        q = project(self.q_proj, x, lora.get("q_proj")).unflatten(-1, (-1, self.head_dim))  # (B, S, H, d)
        k = project(self.k_proj, x, lora.get("k_proj")).unflatten(-1, (-1, self.head_dim))  # (B, S, K, d)
        v = project(self.v_proj, x, lora.get("v_proj")).unflatten(-1, (-1, self.head_dim))
        # Under autocast q_norm and RoPE widen to float32; the product goes back to the projections' dtype.
        q = apply_rope(self.q_norm(q), context.cos, context.sin).to(v.dtype)
        k = apply_rope(self.k_norm(k), context.cos, context.sin).to(v.dtype)
        if context.cache is not None:
            k, v = context.cache.update(k, v, self.layer_idx, loop_idx)  # (B, M, K, d)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if isinstance(context.mask, BlockMask):
            out = block_attention(q, k, v, context.mask)
        else:
            causal = context.mask is None and x.shape[1] > 1
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=context.mask, is_causal=causal, enable_gqa=self.grouped
            )
        return project(self.o_proj, out.transpose(1, 2).flatten(-2), lora.get("o_proj"))
