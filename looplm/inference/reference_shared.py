"""Slow oracles of the strategies that approximate: `fill`, `last`, `mean`, `first`, straight from their definitions.

Nothing is thrown away or overwritten here: for every layer and position the keys and values of all executed loops are
remembered, and what a query may read is worked out anew each time by `kept`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from looplm.inference.exit_policy import ExitPolicy, FixedDepth, decides_per_position, exit_loops
from looplm.inference.reference import ReferenceResult, pick
from looplm.inference.sampling import SamplingParams, make_generator, token_logprobs
from looplm.model.attention import AttentionContext
from looplm.model.cache import LoopIndex
from looplm.model.flops import CacheStrategy
from looplm.model.language_model import LoopLM
from looplm.model.mask import causal_mask
from looplm.model.rope import rope_cos_sin

KeyValue = tuple[Tensor, Tensor]


def kept(strategy: CacheStrategy, executed: Sequence[KeyValue], loop_idx: int) -> KeyValue:
    """What loop `loop_idx` (0-based) reads of an earlier position whose executed loops have left `executed`."""
    if strategy in ("per_loop", "fill"):
        return executed[min(loop_idx, len(executed) - 1)]
    if strategy == "last":
        return executed[-1]
    if strategy == "first":
        return executed[0]
    keys, values = zip(*executed, strict=True)
    return torch.stack(keys).mean(0), torch.stack(values).mean(0)


class Remembered:
    """A :class:`~looplm.model.cache.KVCache` of one sequence that never forgets."""

    def __init__(self, lm: LoopLM, strategy: CacheStrategy) -> None:
        config = lm.model.config
        self.strategy: CacheStrategy = strategy
        first_core = config.num_prelude_layers
        self.core = range(first_core, first_core + config.num_hidden_layers)
        self.executed: list[list[list[KeyValue]]] = [[] for _ in range(config.num_layers)]
        self.start = self.stop = 0
        """The positions that pass now."""

    def update(
        self, keys: Float[Tensor, "B S K d"], values: Float[Tensor, "B S K d"], layer: int, loop_idx: LoopIndex
    ) -> tuple[Float[Tensor, "B M K d"], Float[Tensor, "B M K d"]]:
        """Stores keys and values of positions `start` to `stop` and returns what each position is read as."""
        assert isinstance(loop_idx, int)
        loops = self.executed[layer]
        loops += [[] for _ in range(self.stop - len(loops))]
        for offset, position in enumerate(range(self.start, self.stop)):
            loops[position][loop_idx:] = [(keys[0, offset], values[0, offset])]
        read = [
            loops[position][loop_idx]
            if position >= self.start or layer not in self.core
            else kept(self.strategy, loops[position], loop_idx)
            for position in range(self.stop)
        ]
        return torch.stack([k for k, _ in read])[None], torch.stack([v for _, v in read])[None]

    def leave(self, position: int, loop: int) -> None:
        """The position has left after `loop` loops: what is deeper was never executed."""
        for layer in self.core:
            del self.executed[layer][position][loop:]


def context(lm: LoopLM, memory: Remembered, start: int, stop: int) -> AttentionContext:
    """What a pass over positions `start` to `stop` shares."""
    config, weight = lm.model.config, lm.model.embed_tokens.weight
    memory.start, memory.stop = start, stop
    index = torch.arange(start, stop)[None]
    cos, sin = rope_cos_sin(index, config.head_dim, config.rope_theta, weight.dtype, config.position_scaling)
    return AttentionContext(cos, sin, causal_mask(index, stop), memory)


def run(
    lm: LoopLM, memory: Remembered, tokens: Sequence[int], start: int, num_loops: int
) -> tuple[Float[Tensor, "R 1 S D"], Float[Tensor, "R 1 S"]]:
    """All loops over new positions; the hidden states and gate logits of every loop."""
    shared = context(lm, memory, start, start + len(tokens))
    embeds = lm.model.encode(torch.tensor([list(tokens)]), shared)
    results = list(lm.model.loops(embeds, num_loops, shared))
    return torch.stack([r.hidden for r in results]), torch.stack([r.gate_logits for r in results])


def coda_logits(lm: LoopLM, memory: Remembered, hidden: Float[Tensor, "1 S D"], start: int) -> Tensor:
    """(1, V) after the last of the positions from `start` on, which are read out as `hidden`."""
    shared = context(lm, memory, start, start + hidden.shape[1])
    return lm.lm_head(lm.model.run_coda(hidden, 0, shared)[:, -1])


@torch.inference_mode()
def generate(
    lm: LoopLM,
    parts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    exit: ExitPolicy,
    strategy: CacheStrategy,
) -> ReferenceResult:
    """Continues a prompt in `parts` to `max_tokens`, under one of the strategies."""
    deepest, trained = exit.max_loops(lm.model.config.num_loops), lm.model.config.num_loops
    generator, memory = make_generator(sampling), Remembered(lm, strategy)
    text: list[int] = []
    readouts: list[Tensor] = []
    for part in parts:
        hidden, gate_logits = run(lm, memory, part, len(text), deepest)
        policy = exit if decides_per_position(exit) else FixedDepth(deepest)
        loops = exit_loops(policy, gate_logits, trained, hidden=hidden)[0]
        readouts += [hidden[loop - 1, 0, i] for i, loop in enumerate(loops.tolist())]
        text += part
    num_prompt, tokens, depths, logprobs = len(text), [], [], []
    if lm.model.coda and num_prompt > 1:
        coda_logits(lm, memory, torch.stack(readouts[:-1])[None], 0)
    hidden, gate_logits = hidden[:, :, -1:], gate_logits[:, :, -1:]
    while True:
        position = len(text) - 1
        each = torch.stack([coda_logits(lm, memory, hidden[i], position) for i in range(deepest)])
        loop = int(exit_loops(exit, gate_logits[:, :, 0], trained, hidden=hidden[:, :, 0], logits=each))
        logits = coda_logits(lm, memory, hidden[loop - 1], position)
        if tokens:
            memory.leave(position, loop)
        token = pick(logits[0], sampling, generator, text)
        logprobs += token_logprobs(logits, torch.tensor([token])).tolist()
        tokens.append(token)
        depths.append(loop)
        text.append(token)
        if len(tokens) == sampling.max_tokens:
            return ReferenceResult(token_ids=tokens, loops=depths, logprobs=logprobs, prompt_logprobs=[])
        hidden, gate_logits = run(lm, memory, [token], len(text) - 1, deepest)
