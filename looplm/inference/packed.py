"""Matrices laid out for this CPU: bfloat16 weights packed once by oneDNN, where PyTorch packs them at every product.

The products are the same, bit for bit in what was tried, and at one row take half the time. The packed matrices stand
beside the model's own, which stay as they are, so that the weights take twice the memory.
"""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from looplm.errors import UserError
from looplm.inference.memory import free_bytes
from looplm.inference.passes import LanguageModel
from looplm.model.looped import LoopedTransformer

SMALLEST = 64
"""Fewer outputs than this are not worth packing: the exit gate."""


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


class PackedModel:
    """A language model whose linear layers are packed; all else, parameters included, is that of `original`."""

    model: LoopedTransformer
    lm_head: nn.Linear

    def __init__(self, original: LanguageModel) -> None:
        self.layers: list[PackedLinear] = []
        model, lm_head = self._copy(original.model), self._copy(original.lm_head)
        assert isinstance(model, LoopedTransformer) and isinstance(lm_head, nn.Linear)
        self.model, self.lm_head = model, lm_head

    def _copy(self, module: nn.Module) -> nn.Module:
        twin = copy.copy(module)
        if type(module) is nn.Linear and module.out_features >= SMALLEST:
            twin.__class__ = PackedLinear
            assert isinstance(twin, PackedLinear)
            # A dict of its own: the packed copy must not become an attribute of the model's layer.
            twin.__dict__ = dict(module.__dict__)
            twin.pack()
            self.layers.append(twin)
            return twin
        twin._modules = {name: child and self._copy(child) for name, child in module._modules.items()}
        return twin

    def refresh(self) -> None:
        """Packs what has been changed in place since, as an optimizer or `load_state_dict` does."""
        for layer in self.layers:
            layer.pack()


def identity(weight: Tensor) -> tuple[int, int]:
    """Where a weight lies and how often it has been written to; tensors made in inference mode do not count that."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def weights_identity(lm: LanguageModel) -> tuple[tuple[int, int], ...]:
    """Of all weights: another value after any of them has been changed in place, or replaced."""
    return tuple(identity(weight) for weight in (*lm.model.parameters(), lm.lm_head.weight))


def can_pack(lm: LanguageModel) -> bool:
    """Whether packing helps here: bfloat16 on a CPU whose oneDNN multiplies it, in plain layers."""
    weights = [*lm.model.parameters(), lm.lm_head.weight]
    plain = all(p.device.type == "cpu" and p.dtype == torch.bfloat16 and not p.is_inference() for p in weights)
    return plain and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packed_model(lm: LanguageModel, wanted: bool | None) -> PackedModel | None:
    """`lm` packed, or None to run it as it is. `wanted` None: where it helps and there is memory for it.

    Raises UserError when it is wanted and cannot be.
    """
    if wanted is False:
        return None
    possible = can_pack(lm)
    if wanted and not possible:
        raise UserError("pack_weights needs a bfloat16 model on a CPU with bfloat16 products; leave it out.")
    num_bytes = sum(p.nbytes for p in lm.model.parameters()) + lm.lm_head.weight.nbytes
    free = free_bytes(torch.device("cpu"))
    spare = free is None or free > 2 * num_bytes
    return PackedModel(lm) if possible and (wanted or spare) else None
