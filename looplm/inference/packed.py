"""A model laid out for this CPU: bfloat16 matrices packed once by oneDNN, layers on kernels of our own.

PyTorch packs bfloat16 weights at every product; packed once, the products are the same, bit for bit in what was tried,
and at one row take half the time. The packed matrices stand beside the model's own, which stay as they are, so that
the weights take twice the memory.
"""

import copy
import logging

import torch
from jaxtyping import Float
from torch import Tensor, nn

from looplm.errors import UserError
from looplm.inference.memory import free_bytes
from looplm.inference.native import Kernels, LayerArgs, Unavailable
from looplm.inference.native_block import NativeAttention, NativeBlock, NativeNorm, kernels_for
from looplm.inference.native_pass import NativeTransformer
from looplm.model.attention import Attention
from looplm.model.block import Block
from looplm.model.language_model import LoopLM
from looplm.model.looped import LoopedTransformer
from looplm.model.norm import RMSNorm

SMALLEST = 64
"""Fewer outputs than this are not worth packing: the exit gate."""

FEW_AT_HEAD = {torch.bfloat16: 16, torch.float32: 32, torch.float64: 32}
"""Rows up to which the head is a product of our own. In bfloat16 the library's is as fast from 4 rows on, and faster
at 16; but so far a row gets the same, to the last bit, beside any others."""

log = logging.getLogger(__name__)


class PackedLinear(nn.Linear):
    """A linear layer, with its parameters, that multiplies with a packed copy of its weight."""

    packed: Tensor
    source: tuple[int, int]

    def pack(self) -> None:
        """Packs the weight anew if it has changed since it was packed last."""
        source = identity(self.weight)
        if "source" not in self.__dict__ or self.source != source:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 1)
            self.source = source

    def forward(self, input: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        """The same as nn.Linear's. Without gradient."""
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")


class NativeLinear(nn.Linear):
    """A linear layer that multiplies a few rows with its weight in one kernel."""

    kernels: Kernels

    def forward(self, input: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        """The same as nn.Linear's. Without gradient."""
        few = input.dim() == 2 and len(input) <= FEW_AT_HEAD[input.dtype]
        return self.kernels.linear(input, self.weight, self.bias) if few else super().forward(input)


class NativePackedLinear(NativeLinear, PackedLinear):
    """The same, with a packed copy of the weight for more rows."""


class PackedModel:
    """A language model that computes the same in another way; all its parameters are those of `original`.

    pack: whether linear layers multiply with packed weights. kernels: what layers run on, None for PyTorch alone.
    """

    model: LoopedTransformer
    lm_head: nn.Linear

    def __init__(self, original: LoopLM, *, pack: bool, kernels: Kernels | None) -> None:
        self.pack, self.kernels = pack, kernels
        self.layers: list[PackedLinear] = []
        self.blocks: list[NativeBlock] = []
        model, lm_head = self._copy(original.model), self._copy(original.lm_head)
        assert isinstance(model, LoopedTransformer) and isinstance(lm_head, nn.Linear)
        if kernels is not None and type(lm_head) in NATIVE_HEAD and lm_head.weight.dtype in FEW_AT_HEAD:
            lm_head.__class__ = NATIVE_HEAD[type(lm_head)]
            assert isinstance(lm_head, NativeLinear)
            lm_head.kernels = kernels
        self.model, self.lm_head = model, lm_head
        self.refresh()

    def _copy(self, module: nn.Module) -> nn.Module:
        twin = copy.copy(module)
        # A dict of its own: what is added to the twin must not become an attribute of the model's layer.
        twin.__dict__ = dict(module.__dict__)
        if self.pack and type(module) is nn.Linear and module.out_features >= SMALLEST:
            twin.__class__ = PackedLinear
            assert isinstance(twin, PackedLinear)
            self.layers.append(twin)
        elif self.kernels is not None and type(module) in NATIVE:
            twin.__class__ = NATIVE[type(module)]
            assert isinstance(twin, NativeNorm | NativeAttention | NativeBlock | NativeTransformer)
            twin.kernels = self.kernels
        twin._modules = {name: child and self._copy(child) for name, child in module._modules.items()}
        if isinstance(twin, NativeBlock):
            attention = twin.self_attn
            assert isinstance(attention, NativeAttention)
            twin.args = attention.args = LayerArgs()
            self.blocks.append(twin)
        return twin

    def refresh(self) -> None:
        """Takes up what has been changed since: in place, as an optimizer or `load_state_dict` does, or replaced."""
        for layer in self.layers:
            layer.pack()
        for block in self.blocks:
            block.point()
        if isinstance(self.model, NativeTransformer):
            self.model.prepare()


NATIVE: dict[type[nn.Module], type[nn.Module]] = {
    RMSNorm: NativeNorm,
    Attention: NativeAttention,
    Block: NativeBlock,
    LoopedTransformer: NativeTransformer,
}
"""What stands for a module where there are kernels."""


NATIVE_HEAD: dict[type[nn.Module], type[NativeLinear]] = {
    nn.Linear: NativeLinear,
    PackedLinear: NativePackedLinear,
}


def identity(weight: Tensor) -> tuple[int, int]:
    """Where a weight lies and how often it has been written to; tensors made in inference mode do not count that."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def weights_identity(lm: LoopLM) -> tuple[tuple[int, int], ...]:
    """Of all weights: another value after any of them has been changed in place, or replaced."""
    return tuple(identity(weight) for weight in (*lm.model.parameters(), lm.lm_head.weight))


def kind_of(lm: LoopLM) -> tuple[torch.dtype, torch.device]:
    """What an engine lays out its memory for."""
    return lm.lm_head.weight.dtype, lm.lm_head.weight.device


def can_pack(lm: LoopLM) -> bool:
    """Whether packing helps here: bfloat16 on a CPU whose oneDNN multiplies it, in plain layers."""
    weights = [*lm.model.parameters(), lm.lm_head.weight]
    plain = all(p.device.type == "cpu" and p.dtype == torch.bfloat16 and not p.is_inference() for p in weights)
    return plain and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packed_model(lm: LoopLM, pack: bool | None, native: bool | None = None) -> PackedModel | None:
    """`lm` laid out for this CPU, or None to run it as it is. None for `pack`: where it helps and there is memory for
    it; for `native`: where kernels can be had.

    Raises UserError when one of the two is wanted and cannot be.
    """
    packs, kernels = _packs(lm, pack), _kernels(lm, native)
    return PackedModel(lm, pack=packs, kernels=kernels) if packs or kernels is not None else None


def _packs(lm: LoopLM, wanted: bool | None) -> bool:
    if wanted is False:
        return False
    possible = can_pack(lm)
    if wanted and not possible:
        raise UserError("pack_weights needs a bfloat16 model on a CPU with bfloat16 products; leave it out.")
    num_bytes = sum(p.nbytes for p in lm.model.parameters()) + lm.lm_head.weight.nbytes
    free = free_bytes(torch.device("cpu"))
    spare = free is None or free > 2 * num_bytes
    return possible and (wanted is True or spare)


def _kernels(lm: LoopLM, wanted: bool | None) -> Kernels | None:
    if wanted is False:
        return None
    try:
        return kernels_for(lm.model)
    except Unavailable as reason:
        if wanted:
            raise UserError(f"native_kernels cannot be had: {reason}.") from None
        log.info("Decoding on PyTorch alone, without kernels of this CPU: %s.", reason)
        return None
