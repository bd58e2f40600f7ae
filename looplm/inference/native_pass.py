"""A whole pass of the core over a few single positions in one call: states in, states and gate logits out.

Between layers there is nothing left for Python to do then, which at one row takes as long as a narrow layer itself.
"""

import ctypes
from collections.abc import Sequence

from torch import nn

from looplm.inference.kv_cache import SHARED
from looplm.inference.layout import Segment
from looplm.inference.memory import Memory
from looplm.inference.native import Kernels, PassArgs, address
from looplm.inference.native_block import FEW, NativeBlock, NativeNorm
from looplm.model.injection import LayerInjections
from looplm.model.looped import LoopedTransformer
from looplm.model.norm import RMSNorm

NARROW, MANY = 256, 128
"""Layers up to so wide pass so many rows in one call: what seven products would save, their seven calls cost."""


class NativeTransformer(LoopedTransformer):
    """The model of a packed copy, whose layers are :class:`~looplm.inference.native_block.NativeBlock`."""

    kernels: Kernels
    one_call: bool
    """Whether a pass over a few positions can be one call: nothing stands between or beside the layers."""
    pointed: "tuple[Memory, PassArgs, object] | None"
    """What the kernel is told about this model and the memory it was last run on."""

    def prepare(self) -> None:
        """Looks at the model anew: parameters may have been replaced."""
        plain = type(self.embed_tokens) is nn.Embedding and type(self.early_exit_gate) is nn.Linear
        plain = plain and all(_known(norm, self.config.rms_norm_eps) for norm in (self.norm, self.core_exit_norm))
        between = self.lora is not None or isinstance(self.injection, LayerInjections)
        self.one_call, self.pointed = plain and not between, None

    def takes(self, memory: Memory, segments: Sequence[Segment]) -> bool:
        """Whether a pass over `segments` is one call: for few positions, and caches that gather nothing on the way."""
        most = MANY if self.config.hidden_size <= NARROW else FEW[memory.dtype]
        few = sum(stop - start for _, _, start, stop in segments) <= most
        return few and self.one_call and (memory.cache.strategy not in SHARED or memory.cache.num_sets == 1)

    def run(self, memory: Memory, segments: Sequence[Segment], tokens: Sequence[Sequence[int]]) -> None:
        """The core, final norm and gate over `segments`; what they leave goes to `memory`, as `passes.core_pass` says.

        tokens: of the segments that start from the embeddings of these; empty for those that go on from their states.
        """
        rows: list[int] = []
        ids: list[int] = []
        for (slot, loop, start, stop), new in zip(segments, tokens, strict=True):
            for position in range(start, stop):
                rows += (slot, loop, position, position + 1)
            ids += new or [-1] * (stop - start)
        if self.injection is not None:
            self._bring_in_embeds(memory, segments)
        if self.pointed is None or self.pointed[0] is not memory:
            self.pointed = memory, *self._point(memory)
        self.kernels.core(self.pointed[1], memory.rows(rows), ids)

    def _bring_in_embeds(self, memory: Memory, segments: Sequence[Segment]) -> None:
        """What later loops read: their states with the input embeddings in it once more."""
        later = [(slot, position) for slot, loop, *run in segments if loop for position in range(*run)]
        if later:
            assert self.injection is not None and memory.embeds is not None
            slots, positions = zip(*later, strict=True)
            at = memory.table[slots, positions][:, None]  # (B, 1)
            memory.states[at] = self.injection(memory.embeds[at], memory.states[at])

    def _point(self, memory: Memory) -> tuple[PassArgs, object]:
        """Where everything lies; and what has to stay alive for it."""
        config, args = self.config, PassArgs()
        pointers = ctypes.c_void_p * len(self.layers)
        blocks = [layer for layer in self.layers if isinstance(layer, NativeBlock)]
        cache = memory.cache
        arrays = (
            pointers(*(ctypes.addressof(block.args) for block in blocks)),
            pointers(*(cache.keys[layer].data_ptr() for layer in cache.core)),
            pointers(*(cache.values[layer].data_ptr() for layer in cache.core)),
        )
        args.layers, args.keys, args.values = map(ctypes.addressof, arrays)
        norm, exit_norm, gate = self.norm, self.core_exit_norm, self.early_exit_gate
        args.norms, args.exit_norms = isinstance(norm, RMSNorm), isinstance(exit_norm, RMSNorm)
        args.norm = address(norm.weight) if isinstance(norm, RMSNorm) else None
        args.gate, args.gate_bias = gate.weight.data_ptr(), address(gate.bias)
        args.embed_tokens = self.embed_tokens.weight.data_ptr()
        args.states, args.hidden = memory.states.data_ptr(), memory.hidden.data_ptr()
        args.embeds, args.gate_logits = address(memory.embeds), memory.gate_logits.data_ptr()
        args.num_layers, args.hidden_size = len(blocks), config.hidden_size
        args.num_places = memory.gate_logits.shape[1]
        args.raw_state = config.loop_state == "raw"
        args.raw_hidden = config.num_coda_layers > 0 and config.coda_input == "raw"
        args.eps = config.rms_norm_eps
        return args, arrays


def _known(norm: nn.Module, eps: float) -> bool:
    """Whether the kernel computes this norm: the package's own, or none."""
    return type(norm) is nn.Identity or (type(norm) is NativeNorm and norm.eps == eps)
