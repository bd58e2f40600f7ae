"""Generation measured: full depth, early exit, self-speculation, growth with batch and context, memory.

Every speed is a ratio between sides that ran in turn in one process, medians of several, decoding alone.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import torch

from looplm.bench.dense_llama import LlamaSide, dense_llama
from looplm.bench.figures import Figure
from looplm.bench.generation import (
    Costs,
    DecodeSizes,
    Scripted,
    Side,
    core_bytes,
    drawn_depths,
    head_seconds,
    in_turn,
    lock_step,
    random_model,
    random_prompts,
    read_bandwidth,
    step_costs,
    step_seconds,
)
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.inference import Engine, ExitPolicy, FixedDepth, QuantileExit, SamplingParams, Speculation
from looplm.inference.memory import bytes_per_place, free_bytes
from looplm.inference.speculative import DraftHeads
from looplm.model.flops import CacheStrategy

MOST_ROWS = 32
"""Up to so many positions that are tested together, what a step costs is measured."""


def full_depth(model: LoopLMForCausalLM, sizes: DecodeSizes, batch_sizes: Sequence[int]) -> Iterator[Figure]:
    """All loops, against transformers' `generate` on a dense Llama that does the same work."""
    llama = dense_llama(sizes)
    for batch in batch_sizes:
        prompts = random_prompts(batch, sizes.prompt_tokens, sizes.vocab_size)
        ours = _side(
            Engine(model, max_batch=batch, share_prefixes=False), prompts, sizes, [FixedDepth(sizes.num_loops)] * batch
        )
        theirs = LlamaSide(llama, prompts, sizes.max_tokens)
        in_turn([ours, theirs], sizes.repeats)
        ratio = ours.tokens_per_second / theirs.tokens_per_second
        yield Figure(
            section="decode",
            what=f"batch {batch}, {sizes.dtype}",
            value=f"{ours.tokens_per_second:,.1f} tokens/s, transformers {theirs.tokens_per_second:,.1f}: "
            f"{ratio:.2f} x",
            number=ratio,
        )


def early_exit(
    model: LoopLMForCausalLM,
    sizes: DecodeSizes,
    batch_sizes: Sequence[int],
    prompts: Callable[[int], Sequence[Sequence[int]]],
    quantile: float | None = None,
    strategies: Sequence[CacheStrategy] = ("per_loop", "fill", "last"),
) -> Iterator[Figure]:
    """Early exit against full depth, and against waiting for the deepest row of a batch.

    prompts: as many as the batch, or several batches. quantile: the depths that the model's gate chooses; None: depths
    1 to 4 in the shares 40, 30, 20, 10 %.
    """
    for batch in batch_sizes:
        yield from _early_exit(model, sizes, batch, prompts(batch), quantile, strategies)


def _early_exit(
    model: LoopLMForCausalLM,
    sizes: DecodeSizes,
    batch: int,
    prompts: Sequence[Sequence[int]],
    quantile: float | None,
    strategies: Sequence[CacheStrategy],
) -> Iterator[Figure]:
    count = len(prompts)

    def side(name: CacheStrategy, exits: Callable[[], Sequence[ExitPolicy]]) -> Side:
        engine = Engine(model, max_batch=batch, kv_cache=name, share_prefixes=False)
        return Side(engine, prompts, sizes.max_tokens, exits)

    depths = drawn_depths(count, sizes.max_tokens, sizes.num_loops)
    if quantile is not None:
        exact = side("per_loop", lambda: [QuantileExit(quantile)] * count)
        exact.run()
        depths = exact.loops
    locked_depths = lock_step(depths, batch)

    def exits() -> Sequence[ExitPolicy]:
        return [Scripted(row) for row in depths] if quantile is None else [QuantileExit(quantile)] * count

    full = side("per_loop", lambda: [FixedDepth(sizes.num_loops)] * count)
    locked = side("per_loop", lambda: [Scripted(row) for row in locked_depths])
    early = {name: side(name, exits) for name in strategies}
    in_turn([full, locked, *early.values()], sizes.repeats)
    between = core_bytes(model)
    head = {rows: head_seconds(full.engine.runs.lm_head, rows, between) for rows in {batch, max(1, batch // 2)}}
    share = head[batch] * full.stats.head_reads / batch / full.median
    yield Figure(
        section="exit", what=f"batch {batch}: share of the head at full depth", value=f"{share:.1%}", number=share
    )
    for name, one in {"lock-step": locked, **early}.items():
        yield _saved(full, one, f"batch {batch}, {name}, {sizes.dtype}", name in ("fill", "last"), head)


def _saved(full: Side, side: Side, what: str, lossy: bool, head: dict[int, float]) -> Figure:
    """How much of what an early exit saves in work it saves in time."""
    batch = full.engine.max_batch
    speed = full.median / side.median
    passes = full.stats.weight_passes / side.stats.weight_passes
    loops = full.stats.token_loops / side.stats.token_loops
    promised = loops if lossy and batch > 1 else passes
    # Reads of the head cost the same a row on both sides; how many rows a read has differs.
    rows = min(head, key=lambda count: abs(count - side.stats.head_reads / side.stats.weight_passes))
    bare = (full.median - full.stats.head_reads / batch * head[batch]) / max(
        side.median - side.stats.head_reads / rows * head[rows], 1e-9
    )
    return Figure(
        section="exit",
        what=what,
        value=f"{speed:.2f} x as fast; {passes:.2f} x fewer passes, {loops:.2f} x fewer token-loops, mean depth "
        f"{side.stats.mean_loops:.2f}; "
        f"{speed / promised:.0%} of what is promised, {bare / promised:.0%} without the head",
        number=speed / promised,
    )


def speculation(
    model: LoopLMForCausalLM,
    sizes: DecodeSizes,
    draft_loops: int,
    lengths: Sequence[int | None],
    draft_vocab: int | None,
    prompts: Sequence[Sequence[int]],
) -> Iterator[Figure]:
    """Greedy text at full depth with and without drafts, one prompt at a time.

    A token may differ where two are equally likely but for rounding; how many texts do is said.
    """
    depths = [FixedDepth(model.config.num_loops)] * len(prompts)

    def side(length: int | None = None, *, drafts: bool = True) -> Side:
        engine = Engine(model, max_batch=1, share_prefixes=False)
        speculation = Speculation(draft_loops, length, draft_vocab) if drafts else None
        return Side(engine, prompts, sizes.max_tokens, lambda: depths, speculation)

    plain, sides = side(drafts=False), {length: side(length) for length in lengths}
    in_turn([plain, *sides.values()], sizes.repeats)
    alike = random_prompts(MOST_ROWS, sizes.prompt_tokens, sizes.vocab_size)
    brief = dataclasses.replace(sizes, max_tokens=min(sizes.max_tokens, 24))

    @functools.cache
    def costs(rows: int) -> Costs:
        return step_costs(model, brief, rows, alike)

    for length, one in sides.items():
        speed = plain.median / one.median
        predicted = plain.median / _predicted(model, one, draft_loops, draft_vocab, costs)
        same = sum(ours == theirs for ours, theirs in zip(one.token_ids, plain.token_ids, strict=True))
        yield Figure(
            section="speculative",
            what=f"draft loop {draft_loops}, {'adaptive' if length is None else length} tokens",
            value=f"{speed:.2f} x, predicted {predicted:.2f} x; {one.stats.acceptance:.0%} accepted; {same} of "
            f"{len(prompts)} texts have the same tokens",
            number=speed,
        )


def _predicted(
    model: LoopLMForCausalLM, side: Side, draft_loops: int, draft_vocab: int | None, costs: Callable[[int], Costs]
) -> float:
    """Seconds that the counts of `side` come to at the measured costs of steps over so many rows.

    At full depth every position that was fed passes all loops: the shallow ones alone, the others with those drafted
    beside it, where the head reads them once more together.
    """
    stats, num_loops = side.stats, model.config.num_loops
    positions = stats.token_loops / num_loops
    shallow = draft_loops * positions
    deep = max(stats.weight_passes - shallow, 1.0)
    rows = min((num_loops - draft_loops) * positions / deep, MOST_ROWS - 1.0)
    low = int(rows)
    at, above, share = costs(low), costs(low + 1), rows - low
    drafts, tests = stats.head_reads + stats.draft_head_reads - positions, deep / (num_loops - draft_loops)
    draft = costs(1).token
    if draft_vocab is not None:
        whole = side.engine.runs.lm_head
        brief = DraftHeads(whole).head_for(Speculation(draft_loops, None, draft_vocab))
        assert brief is not None
        between = core_bytes(model)
        draft += head_seconds(brief, 1, between) - head_seconds(whole, 1, between)
    deeper = at.loop + share * (above.loop - at.loop)
    test = at.token + share * (above.token - at.token)
    return shallow * costs(1).loop + deep * deeper + drafts * draft + tests * test


def growth(sizes: DecodeSizes, batch_sizes: Sequence[int], contexts: Sequence[int]) -> Iterator[Figure]:
    """Milliseconds that a token of a batch takes, with context and batch, beside what they should come to.

    That is what the shortest context takes, and for every position more the time memory needs to give its keys and
    values of all loops. Cells whose keys and values go over half of the free memory are left out.
    """
    model = random_model(sizes, max(contexts))
    place = bytes_per_place(model.model.config, "per_loop", sizes.num_loops, sizes.dtype_of())
    bandwidth, free = read_bandwidth(), free_bytes(torch.device("cpu"))
    yield Figure(
        section="batch", what="memory", value=f"{bandwidth / 1e9:.1f} GB/s; {place / 2**10:.0f} KiB a position",
        number=bandwidth,
    )  # fmt: skip
    shortest: dict[int, float] = {}
    for context in sorted(contexts):
        for batch in batch_sizes:
            what = f"context {context}, batch {batch}"
            if free is not None and 2 * place * batch * (context + sizes.max_tokens) > free:
                yield Figure(section="batch", what=what, value="left out: too large for this machine")
                continue
            engine = Engine(model, max_batch=batch, share_prefixes=False)
            prompts = random_prompts(batch, context, sizes.vocab_size)
            times = step_seconds(engine, prompts, sizes.max_tokens, sizes.num_loops)
            token = 1000 * statistics.median(times) / batch
            expected = shortest.setdefault(batch, token) + 1000 * (context - min(contexts)) * place / bandwidth
            yield Figure(
                section="batch",
                what=what,
                value=f"{token:.2f} ms a token, {expected:.2f} expected; {token * batch:.1f} a step",
                number=token,
            )


def memory(sizes: DecodeSizes, context: int) -> Iterator[Figure]:
    """Keys and values at the peak over prompt and text, as the engine counts what it holds."""
    model = random_model(sizes, context)
    (prompt,) = random_prompts(1, context, sizes.vocab_size)
    exact = None
    for strategy in get_args(CacheStrategy):
        engine = Engine(model, kv_cache=strategy)
        list(engine.generate([prompt], SamplingParams(max_tokens=sizes.max_tokens, ignore_eos=True)))
        exact = exact or engine.stats.cache_bytes
        ratio = engine.stats.cache_bytes / exact
        yield Figure(
            section="memory",
            what=f"{strategy}, context {context}",
            value=f"{engine.stats.cache_bytes / 2**20:,.2f} MiB of keys and values, {ratio:.3f} of per_loop; states "
            f"{engine.stats.state_bytes / 2**20:,.2f} MiB",
            number=ratio,
        )


def _side(engine: Engine, prompts: Sequence[Sequence[int]], sizes: DecodeSizes, exits: Sequence[FixedDepth]) -> Side:
    return Side(engine, prompts, sizes.max_tokens, lambda: exits)
