"""What two ways of generating are measured on: a model, prompts, scripted depths, and decoding alone timed in turn."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from looplm.errors import UserError
from looplm.hf.config import LoopLMConfig
from looplm.hf.load import load
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.inference import Engine, EngineStats, ExitPolicy, FixedDepth, SamplingParams, Speculation
from looplm.inference.exit_policy import Need, Signals
from looplm.inference.speculative import DraftHead
from looplm.model.config import LoopedConfig

SHARES = (0.4, 0.3, 0.2, 0.1)
"""Of tokens that leave at loops 1 to 4, where depths are scripted."""


@dataclass(kw_only=True, frozen=True)
class DecodeSizes:
    """What is generated with. The default is a core of 19 M parameters on four loops."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_layers: int = 6
    num_loops: int = 4
    head_dim: int = 64
    vocab_size: int = 8192
    dtype: str = "bf16"
    prompt_tokens: int = 32
    max_tokens: int = 48
    repeats: int = 5

    def model_config(self, context: int = 0) -> LoopedConfig:
        """The looped model, with room for `context` positions beside the text."""
        heads = max(1, self.hidden_size // self.head_dim)
        return LoopedConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=self.hidden_size // heads,
            num_loops=self.num_loops,
            max_position_embeddings=max(context, self.prompt_tokens) + self.max_tokens + 1,
        )

    def dtype_of(self) -> torch.dtype:
        """The torch dtype. Raises UserError for another word than bf16 or fp32."""
        known = {"bf16": torch.bfloat16, "fp32": torch.float32}
        if self.dtype not in known:
            raise UserError(f"--dtype is {self.dtype!r}; choose bf16 or fp32.")
        return known[self.dtype]


SMOKE = DecodeSizes(
    hidden_size=32, intermediate_size=48, num_layers=1, vocab_size=64, prompt_tokens=4, max_tokens=6, repeats=2
)


def random_model(sizes: DecodeSizes, context: int = 0) -> LoopLMForCausalLM:
    """A model from random weights, the same ones each time."""
    torch.manual_seed(0)
    model = LoopLMForCausalLM(LoopLMConfig.from_model_config(sizes.model_config(context)))
    return model.to(sizes.dtype_of()).eval()  # pyright: ignore[reportArgumentType]


def model_for(sizes: DecodeSizes, checkpoint: str | None) -> tuple[LoopLMForCausalLM, DecodeSizes]:
    """A trained checkpoint, a directory or a hub name, with its sizes; random weights of `sizes` where there is none.

    A prompt takes at most a quarter of the checkpoint's context. Raises UserError when the text goes over it then.
    """
    if checkpoint is None:
        return random_model(sizes), sizes
    model = load(checkpoint, dtype=str(sizes.dtype_of()).removeprefix("torch."))
    config = model.model.config
    prompt_tokens = min(sizes.prompt_tokens, config.max_position_embeddings // 4)
    if prompt_tokens + sizes.max_tokens > config.max_position_embeddings:
        raise UserError(
            f"--max-tokens {sizes.max_tokens} is more than the context of {checkpoint} leaves: "
            f"{config.max_position_embeddings - prompt_tokens}."
        )
    fields = ("hidden_size", "intermediate_size", "num_loops", "head_dim", "vocab_size")
    return model, dataclasses.replace(
        sizes,
        num_layers=config.num_hidden_layers,
        prompt_tokens=prompt_tokens,
        **{name: getattr(config, name) for name in fields},
    )


def random_prompts(count: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Prompts that share nothing."""
    draw = random.Random(0)
    return [[draw.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(count)]


@dataclass
class Scripted:
    """An exit policy that gives the tokens of one text depths that were drawn beforehand. One for each request."""

    needs: ClassVar[Need] = "nothing"
    depths: Sequence[int]
    done: int = 0

    def max_loops(self, trained_loops: int) -> int:
        """All trained loops."""
        return trained_loops

    def exits(self, signals: Signals, trained_loops: int) -> bool:
        """True at the scripted loop of this token."""
        leaves = signals.loop >= min(self.depths[self.done], trained_loops)
        self.done += leaves
        return leaves


def drawn_depths(count: int, max_tokens: int, num_loops: int) -> list[list[int]]:
    """The loop of each token of `count` texts, in the shares of `SHARES`."""
    draw = random.Random(1)
    loops = range(1, min(num_loops, len(SHARES)) + 1)
    return [draw.choices(loops, SHARES[: len(loops)], k=max_tokens) for _ in range(count)]


def lock_step(depths: Sequence[Sequence[int]], batch: int) -> list[list[int]]:
    """All texts of a batch as deep as the deepest, token by token: an engine that waits until every row has left."""
    locked: list[list[int]] = []
    for first in range(0, len(depths), batch):
        rows = depths[first : first + batch]
        locked += [[max(column) for column in zip(*rows, strict=True)]] * len(rows)
    return locked


@dataclass
class Side:
    """One way of generating: decoding is timed from the step at which all prompts of a batch are in."""

    engine: Engine
    prompts: Sequence[Sequence[int]]
    """The engine's `max_batch` of them run at one time, batch after batch."""
    max_tokens: int
    exits: Callable[[], Sequence[ExitPolicy]]
    speculation: Speculation | None = None
    seconds: list[float] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    token_ids: list[list[int]] = field(default_factory=list)
    loops: list[list[int]] = field(default_factory=list)

    def run(self) -> None:
        """Generates once; keeps time and counts of decoding alone."""
        self.stats, self.token_ids, self.loops = EngineStats(), [], []
        self.seconds.append(0.0)
        asked, batch = list(zip(self.prompts, self.exits(), strict=True)), self.engine.max_batch
        for first in range(0, len(asked), batch):
            self._run_batch(asked[first : first + batch])

    def _run_batch(self, asked: Sequence[tuple[Sequence[int], ExitPolicy]]) -> None:
        engine, sampling = self.engine, SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        requests = [engine.submit(prompt, sampling, exit, speculation=self.speculation)[0] for prompt, exit in asked]
        while any(r.finish_reason is None and (r.prefilling or r.slot < 0) for r in requests):
            engine.step()
        engine.stats = self.stats  # from here on they count
        began = time.perf_counter()
        while engine.num_unfinished:
            engine.step()
        self.seconds[-1] += time.perf_counter() - began
        engine.stats = EngineStats()
        self.token_ids += [request.token_ids for request in requests]
        self.loops += [request.loops for request in requests]

    @property
    def median(self) -> float:
        """Seconds of the median run; the first one warms up."""
        return statistics.median(self.seconds[1:])

    @property
    def tokens_per_second(self) -> float:
        return self.stats.generated_tokens / self.median


def in_turn(sides: Sequence[Any], repeats: int) -> None:
    """Runs every side once to warm up and `repeats` times more, one after another."""
    for _ in range(repeats + 1):
        for side in sides:
            side.run()


def head_seconds(head: nn.Linear | DraftHead, rows: int, between: int, repeats: int = 20) -> float:
    """Seconds of one read of a head, such as an engine's `runs.lm_head`, for `rows` rows; the median of several.

    between: bytes of weights that are read between two reads, as a core's are: they may leave nothing of the head in
    the caches of the CPU.
    """
    linear = head.linear if isinstance(head, DraftHead) else head
    hidden = torch.randn(rows, linear.in_features).to(linear.weight)
    others = torch.ones(between // 4)
    seconds = []
    with torch.inference_mode():
        for _ in range(repeats):
            others.sum()
            began = time.perf_counter()
            head(hidden)
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def core_bytes(model: LoopLMForCausalLM) -> int:
    """Bytes of weights that a pass of the core reads."""
    return sum(parameter.nbytes for parameter in model.model.layers.parameters())


class Costs(NamedTuple):
    """Seconds of one step for some rows, with everything that belongs to it, Python included."""

    loop: float
    """Of one loop more for all rows."""
    token: float
    """Of all that a token takes beside its loops: reading the head, choosing, handing out."""


def step_costs(model: LoopLMForCausalLM, sizes: DecodeSizes, rows: int, prompts: Sequence[Sequence[int]]) -> Costs:
    """From texts of depth 1 and of full depth, `rows` at a time."""
    engine, loops = Engine(model, max_batch=rows, share_prefixes=False), model.config.num_loops
    sides = [Side(engine, prompts[:rows], sizes.max_tokens, lambda n=n: [FixedDepth(n)] * rows) for n in (1, loops)]
    in_turn(sides, 3)
    in_turn(sides, min(100, int(0.5 / sum(side.median for side in sides))))  # runs of milliseconds: many of them
    shallow, deep = (side.median / (sizes.max_tokens - 1) for side in sides)
    loop = (deep - shallow) / (loops - 1)
    return Costs(loop, shallow - loop)


def step_seconds(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, loops: int) -> list[float]:
    """Seconds that each new token of the whole batch takes, all loops, after the first few.

    Prompts are not computed, their keys and values are some numbers: what those are makes no difference to time.
    """
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    requests = [engine.submit(prompt, sampling, FixedDepth(loops))[0] for prompt in prompts]
    engine._take_memory()
    memory = engine._memory
    assert memory is not None
    engine._scheduler.admit(memory, 0.0)
    for stored in (*memory.cache.keys, *memory.cache.values):
        stored.fill_(0.01)  # or the system would give all of them one page of zeros
    for request in requests:
        request.filled = [len(request.prompt_token_ids) - 1] * loops
    while any(request.prefilling for request in requests):
        engine.step()
    seconds = []
    while engine.num_unfinished:
        began = time.perf_counter()
        for _ in range(loops):
            engine.step()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes a second that this machine's threads read from memory, the best of several."""
    numbers = torch.ones(2**26)  # 256 MiB: more than caches hold
    best = 0.0
    for _ in range(repeats):
        began = time.perf_counter()
        numbers.sum()
        best = max(best, numbers.nbytes / (time.perf_counter() - began))
    return best
