"""Passes of the core as CUDA graphs: at small batch a GPU runs its kernels faster than Python can launch them.

A pass over rows of one shape is captured once, on buffers that stay where they are, and replayed for every later pass
of that shape, whatever loops its rows stand at. Shapes are padded to a few sizes; a row of padding writes where nobody
reads and reads what is never written. Embedding, prelude, final norm, gate, head and all decisions stay outside: they
are a few kernels each, and the decisions need the CPU.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from looplm.errors import UserError
from looplm.inference.kv_cache import CacheView, KVCache, Places
from looplm.model.attention import AttentionContext
from looplm.model.cache import LoopIndex
from looplm.model.language_model import LoopLM
from looplm.model.looped import LoopedTransformer

WIDEST = 8
"""Columns of the widest pass that is captured. Wider ones, chunks of prompts, keep a GPU busy as they are."""
FEWEST_KEYS = 64
MOST_GRAPHS = 64
"""Graphs that are kept; the least recently used go first."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Takes work on tensors that stay where they are; returns what does the same work on them again. May do it itself."""


class Shape(NamedTuple):
    """Of a captured pass: B, S and M."""

    rows: int
    columns: int
    keys: int

    @classmethod
    def around(cls, rows: int, columns: int, keys: int) -> "Shape":
        """The smallest shape that is captured and has room for these."""
        # Eight sizes an octave: no more than an eighth of the keys is padding.
        step = max(FEWEST_KEYS // 8, 2 ** ((keys - 1).bit_length() - 4))
        return cls(1 << (rows - 1).bit_length(), columns, max(FEWEST_KEYS, -(-keys // step) * step))


class CapturedPass:
    """One application of the core on buffers of its own. Captured while they hold nothing but padding."""

    def __init__(self, model: LoopedTransformer, cache: KVCache, shape: Shape, capture: Capture) -> None:
        rows, columns, keys = shape
        config, weight = model.config, model.embed_tokens.weight
        self.model, self.cache = model, cache
        self.state = weight.new_zeros(rows, columns, config.hidden_size)
        self.embeds = self.state if model.injection is None else torch.zeros_like(self.state)
        self.cos = weight.new_zeros(rows, columns, config.head_dim)
        self.sin = torch.zeros_like(self.cos)
        self.loops = torch.zeros(rows, dtype=torch.long, device=weight.device)
        self.write = self.loops.new_full((rows, columns), cache.trash_place)
        self.read = self.loops.new_full((rows, keys), cache.zero_place)
        self.mask = torch.zeros(rows, 1, columns, keys, dtype=torch.bool, device=weight.device)
        self.mask[..., 0] = True  # a row without any key would be NaN
        self.out = torch.zeros_like(self.state)
        self.replay = capture(self._run)

    def _run(self) -> None:
        view = self.cache.view(Places(self.write, self.read, None), self.loops)
        context = AttentionContext(self.cos, self.sin, self.mask, view)
        self.out.copy_(self.model.run_core(self.state, self.loops, self.embeds, context))

    def __call__(
        self, state: Float[Tensor, "B S D"], loop_idx: LoopIndex, embeds: Float[Tensor, "B S D"],
        context: AttentionContext, places: Places,
    ) -> Float[Tensor, "B S D"]:  # fmt: skip
        """What `run_core` gives, in memory of its own."""
        rows, columns = state.shape[:2]
        read = places.read
        if read is None:
            assert places.run is not None
            read = torch.arange(places.run.start, places.run.stop, device=state.device)[None]
        keys = read.shape[1]
        self.state[:rows] = state
        if self.embeds is not self.state:
            self.embeds[:rows] = embeds
        self.cos[:rows], self.sin[:rows] = context.cos, context.sin
        self.loops[:rows] = loop_idx
        self.write.fill_(self.cache.trash_place)
        self.write[:rows] = places.write
        self.read.fill_(self.cache.zero_place)
        self.read[:rows, :keys] = read
        self.mask[..., 1:] = False
        if isinstance(context.mask, Tensor):
            self.mask[:rows, :, :, :keys] = context.mask
        else:  # plainly causal, ending with the last key
            ones = torch.ones(columns, keys, dtype=torch.bool, device=state.device)
            self.mask[:rows, :, :, :keys] = ones.tril(keys - columns)
        self.replay()
        return self.out[:rows].clone()


class CoreGraphs:
    """Stands for `run_core` of a model: replays passes of the engine that have been captured, and captures others."""

    def __init__(self, model: LoopedTransformer, capture: Capture) -> None:
        self.model, self.capture = model, capture
        self.cache: KVCache | None = None
        self.passes: OrderedDict[Shape, CapturedPass] = OrderedDict()

    def __call__(
        self, state: Float[Tensor, "B S D"], loop_idx: LoopIndex, embeds: Float[Tensor, "B S D"],
        context: AttentionContext,
    ) -> Float[Tensor, "B S D"]:  # fmt: skip
        """See :meth:`looplm.model.looped.LoopedTransformer.run_core`."""
        view = context.cache
        if not isinstance(view, CacheView) or state.shape[1] > WIDEST:
            return self.model.run_core(state, loop_idx, embeds, context)
        if view.cache is not self.cache:
            self.forget()  # they write to keys that are not there any more
            self.cache = view.cache
        places = view.places
        keys = places.read.shape[1] if places.read is not None else places.run.stop - places.run.start  # type: ignore[union-attr]
        shape = Shape.around(state.shape[0], state.shape[1], keys)
        if shape not in self.passes:
            if len(self.passes) == MOST_GRAPHS:
                self.passes.popitem(last=False)
            self.passes[shape] = CapturedPass(self.model, view.cache, shape, self.capture)
        self.passes.move_to_end(shape)
        return self.passes[shape](state, loop_idx, embeds, context, places)

    def forget(self) -> None:
        """Drops all graphs: weights or keys have moved."""
        self.passes.clear()
        self.cache = None


class GraphedModel:
    """A language model whose core is replayed; all else, parameters included, is that of `original`."""

    def __init__(self, original: LoopLM, capture: Capture) -> None:
        self.graphs = CoreGraphs(original.model, capture)
        self.model, self.lm_head = copy.copy(original.model), original.lm_head
        self.model.__dict__["run_core"] = self.graphs


def capture_on(device: torch.device) -> Capture:
    """Captures as CUDA graphs on `device`."""
    # One pool of scratch for all: they run one after another, and what they give is copied out of it.
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], None]) -> Replay:
        with torch.cuda.device(device):
            # Libraries set themselves up at their first call, which cannot be captured, on a stream of its own.
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                run()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                run()
        return graph.replay

    return capture


def graphed_model(lm: LoopLM, wanted: bool | None) -> GraphedModel | None:
    """`lm` on CUDA graphs, or None to run it as it is. `wanted` None: on a CUDA device.

    Raises UserError when it is wanted and cannot be.
    """
    device = lm.model.embed_tokens.weight.device
    if wanted and device.type != "cuda":
        raise UserError(f"cuda_graphs needs a model on a CUDA device, not on {device}; leave it out.")
    return GraphedModel(lm, capture_on(device)) if device.type == "cuda" and wanted is not False else None
