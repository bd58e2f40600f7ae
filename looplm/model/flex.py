"""Attention over packed documents on a GPU: FlexAttention skips the blocks that no document reaches.

A dense mask takes S * S bytes a row, 4 GB at 64K tokens, and keeps the fast kernels away. On a CPU FlexAttention has
no backward pass (torch 2.13), and it does not know float64: there the dense mask stays.
"""

from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def packs_in_blocks(document_ids: Int[Tensor, "B S"], dtype: torch.dtype) -> bool:
    """Whether packed rows on this device take a :func:`document_block_mask` instead of a dense one."""
    return document_ids.device.type == "cuda" and dtype != torch.float64


def document_block_mask(document_ids: Int[Tensor, "B S"]) -> BlockMask:
    """Query i may read key j <= i of its own document: what `causal_mask(..., document_ids=)` says, by blocks.

    No tensor of S * S exists where it can be compiled, which is on a GPU.
    """
    num_rows, seq_len = document_ids.shape
    build = _compiled(create_block_mask) if document_ids.device.type == "cuda" else create_block_mask
    return build(
        # A lambda, since PyTorch counts the positional arguments, which a decorated function hides.
        lambda row, _head, query, key: (key <= query) & (document_ids[row, query] == document_ids[row, key]),
        num_rows, None, seq_len, seq_len, device=document_ids.device,
    )  # fmt: skip


def block_attention(
    q: Float[Tensor, "B H S d"], k: Float[Tensor, "B K S d"], v: Float[Tensor, "B K S d"], mask: BlockMask
) -> Float[Tensor, "B H S d"]:
    """softmax(q k^T / sqrt(d)) v under a block mask; K divides H."""
    # Only compiled is it a fused kernel: eager, it would hold all scores. Inside of a compiled layer it is compiled.
    inside = torch.compiler.is_compiling() or q.device.type != "cuda"
    attend = flex_attention if inside else _compiled(flex_attention)
    return attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])  # pyright: ignore[reportReturnType]


@cache
def _compiled(function: Any) -> Any:
    """One compilation for the whole process."""
    return torch.compile(function)
