"""The model's layers on the kernels of `native`, for passes over single positions; all else runs as it does without.

These stand in a copy of the model (:mod:`looplm.inference.packed`), with the parameters of the model's own layers.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from looplm.inference.kv_cache import CacheView
from looplm.inference.native import Kernels, LayerArgs, Unavailable, address
from looplm.model.attention import Attention, AttentionContext
from looplm.model.block import MLP, Block
from looplm.model.cache import LoopIndex
from looplm.model.looped import LoopedTransformer
from looplm.model.lora import LoraSlices, project
from looplm.model.norm import RMSNorm

FEW = {torch.bfloat16: 32, torch.float32: 128, torch.float64: 128}
"""Rows up to which a layer in one call, which reads every weight once, beats seven matrix products and what is between
them."""


class NativeNorm(RMSNorm):
    """RMSNorm in one kernel."""

    kernels: Kernels

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """The same as RMSNorm's. Without gradient."""
        return self.kernels.norm(x, self.weight, self.eps)


class NativeAttention(Attention):
    """Attention that reads keys and values where they lie."""

    kernels: Kernels
    args: LayerArgs

    def forward(
        self, x: Float[Tensor, "B S D"], context: AttentionContext, loop_idx: LoopIndex, lora: LoraSlices
    ) -> Float[Tensor, "B S D"]:
        """The same as Attention's. Without gradient."""
        view = context.cache
        if not isinstance(view, CacheView) or view.rows is None:
            return super().forward(x, context, loop_idx, lora)
        q, k, v = (project(getattr(self, name), x, lora.get(name)) for name in ("q_proj", "k_proj", "v_proj"))
        out = self.kernels.attend(self.args, view.rows, q, k, v, *view.stored(self.layer_idx))
        view.gather(self.layer_idx)
        return project(self.o_proj, out, lora.get("o_proj"))


class NativeBlock(Block):
    """A layer that a few rows pass in one call."""

    kernels: Kernels
    args: LayerArgs

    def point(self) -> None:
        """Notes where the parameters lie; again when any of them has been replaced."""
        attention, mlp = self.self_attn, self.mlp
        norms = (
            self.input_layernorm, self.input_layernorm_2,
            self.post_attention_layernorm, self.post_attention_layernorm_2,
        )  # fmt: skip
        linears = (
            attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
            mlp.gate_proj, mlp.up_proj, mlp.down_proj,
        )  # fmt: skip
        before, after = (isinstance(norm, RMSNorm) for norm in norms[:2])
        args = self.args
        args.norms[:] = [_scale(norm) for norm in norms]
        args.weights[:] = [linear.weight.data_ptr() for linear in linears]
        args.biases[:] = [address(linear.bias) for linear in linears]
        args.q_norm, args.k_norm = _scale(attention.q_norm), _scale(attention.k_norm)
        args.hidden, args.wide, args.head_dim = (
            mlp.gate_proj.in_features,
            mlp.gate_proj.out_features,
            attention.head_dim,
        )
        args.heads = attention.q_proj.out_features // attention.head_dim
        args.kv_heads = attention.k_proj.out_features // attention.head_dim
        args.norms_before, args.norms_after, args.norms_the_sum = before, after, self.norms_the_sum
        args.norms_qk = isinstance(attention.q_norm, RMSNorm)
        args.eps = next((norm.eps for norm in norms if isinstance(norm, RMSNorm)), 0.0)
        args.qk_eps = attention.q_norm.eps if isinstance(attention.q_norm, RMSNorm) else 0.0

    def forward(
        self, x: Float[Tensor, "B S D"], context: AttentionContext, loop_idx: LoopIndex, lora: LoraSlices
    ) -> Float[Tensor, "B S D"]:
        """The same as Block's. Without gradient."""
        view = context.cache
        if not isinstance(view, CacheView) or view.rows is None or lora or len(x) > FEW[x.dtype]:
            return super().forward(x, context, loop_idx, lora)
        layer = self.self_attn.layer_idx
        out = self.kernels.layer(self.args, view.rows, x, *view.stored(layer))
        view.gather(layer)
        return out


def _scale(norm: nn.Module) -> int | None:
    return address(norm.weight) if isinstance(norm, RMSNorm) else None


def kernels_for(model: LoopedTransformer) -> Kernels:
    """The kernels that `model` can run on. Raises Unavailable, with the reason, when there are none."""
    weights = list(model.parameters())
    dtypes = {weight.dtype for weight in weights}
    if any(weight.device.type != "cpu" for weight in weights):
        raise Unavailable("the model is not on a CPU")
    if len(dtypes) > 1 or not all(weight.is_contiguous() for weight in weights):
        raise Unavailable("its parameters are of several dtypes, or not stored row by row")
    plain = (Block, Attention, MLP, nn.Linear, RMSNorm, nn.Identity)
    for block in (*model.prelude, *model.layers, *model.coda):
        for module in block.modules():
            if type(module) not in plain:
                raise Unavailable(f"its layers hold a {type(module).__name__}")
        if len({norm.eps for norm in block.children() if isinstance(norm, RMSNorm)}) > 1:
            raise Unavailable("the norms of a layer have several eps")
    if any(changed(module) for module in model.modules()):
        raise Unavailable("something has been put before its layers: a hook, or a compiled or wrapped forward")
    return Kernels(dtypes.pop())


def changed(module: nn.Module) -> bool:
    """Whether a call of `module` is more, or other, than its class says."""
    own = "forward" in module.__dict__ or "run_core" in module.__dict__ or "_compiled_call_impl" in module.__dict__
    return own or bool(module._forward_hooks or module._forward_pre_hooks)


def reads_in_place(model: LoopedTransformer) -> bool:
    """Whether the layers of `model` read single positions where they lie."""
    return isinstance(model.layers[0], NativeBlock)
