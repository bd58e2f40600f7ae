"""Dense layers tied into one shared layer, with per-loop LoRA banks for what sets them apart.

Relaxed Recursive Transformers (2410.20672), initialisation by average: W' is the mean of the tied matrices, and
loop r's bank the truncated SVD of W_r - W', b = U S, a = V^T.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from looplm.model.config import LoopedConfig
from looplm.model.lora import projection_sizes

_READS = {
    "input_layernorm.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm.weight": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Norm of a pre-norm layer -> the projections that read it."""


def fold_layers(layers: Sequence[dict[str, Tensor]], config: LoopedConfig) -> dict[str, Tensor]:
    """Core weights and LoRA banks from R * L dense layers; layer l at loop r stands for dense layer r * L + l.

    layers: tensors by their path inside a layer. A loop has no norm vectors of its own, so those before the
    projections are multiplied into their columns, where the banks carry the difference; q/k norms and biases are
    averaged. Returns tensors by their names in a checkpoint, in the dtype of the dense ones.
    """
    num_layers, rank = config.num_hidden_layers, config.lora_rank
    scale, names = config.lora_alpha / rank, projection_sizes(config)
    weights: dict[str, Tensor] = {}
    for idx in range(num_layers):
        tied = [absorb_norms(layer) for layer in layers[idx::num_layers]]  # one a loop
        for path, example in tied[0].items():
            wide = torch.stack([layer[path].to(torch.promote_types(example.dtype, torch.float32)) for layer in tied])
            shared = wide.mean(0)
            weights[f"model.layers.{idx}.{path}"] = shared.to(example.dtype)
            name = path.removesuffix(".weight").rpartition(".")[2]
            if path.endswith(".weight") and name in names:
                # From the mean as it is stored, so that the bank makes up for its rounding too.
                banks = [low_rank(matrix, rank) for matrix in wide - shared.to(example.dtype)]
                weights[f"model.lora.{idx}.{name}.a"] = torch.stack([a for _, a in banks]).to(example.dtype)
                weights[f"model.lora.{idx}.{name}.b"] = torch.stack([b / scale for b, _ in banks]).to(example.dtype)
    return weights


def absorb_norms(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same layer with its norm vectors at one: W diag(w) N(x) = W (w * N(x))."""
    layer = dict(layer)
    for norm, projections in _READS.items():
        for projection in projections:
            layer[f"{projection}.weight"] = layer[f"{projection}.weight"] * layer[norm]
        layer[norm] = torch.ones_like(layer[norm])
    return layer


def low_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """b (out, rank) and a (rank, in) whose product is the best approximation of `matrix` (out, in) of that rank.

    A rank above the smaller side is filled up with zeros in b and random rows in a, which can learn.
    """
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    kept = min(rank, len(s))
    b = matrix.new_zeros(matrix.shape[0], rank)
    b[:, :kept] = u[:, :kept] * s[:kept]
    if rank <= len(s):
        return b, v[:rank]
    spare = torch.randn(rank - kept, matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix)
    return b, torch.cat((v, spare / matrix.shape[1] ** 0.5))
