"""Generation measured: full depth, early exit, self-speculation, growth with batch and context, memory.

Every speed is a ratio between sides that ran in turn in one process, medians of several, decoding alone.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import torch

from looplm.bench.dense_llama import LlamaSide, dense_llama
from looplm.bench.figures import Figure
from looplm.bench.generation import (
    DecodeSizes,
    Side,
    head_seconds,
    in_turn,
    pass_seconds,
    random_model,
    random_prompts,
    read_bandwidth,
    scripts,
    step_seconds,
)
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.inference import Engine, ExitPolicy, FixedDepth, QuantileExit, SamplingParams, Speculation
from looplm.inference.memory import bytes_per_place, free_bytes
from looplm.model.flops import CacheStrategy


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
    strategies: Sequence[CacheStrategy] = ("per_loop", "fill", "last"),
    quantile: float | None = None,
) -> Iterator[Figure]:
    """Depths 1 to 4 in the shares 40, 30, 20, 10 %, against full depth and against waiting for the deepest row.

    quantile: the depths that the model's gate chooses instead; they cannot be made to wait.
    """
    for batch in batch_sizes:
        yield from _early_exit(model, sizes, batch, strategies, quantile)


def _early_exit(
    model: LoopLMForCausalLM,
    sizes: DecodeSizes,
    batch: int,
    strategies: Sequence[CacheStrategy],
    quantile: float | None,
) -> Iterator[Figure]:
    prompts = random_prompts(batch, sizes.prompt_tokens, sizes.vocab_size)

    def side(name: CacheStrategy, exits: Callable[[], Sequence[ExitPolicy]]) -> Side:
        engine = Engine(model, max_batch=batch, kv_cache=name, share_prefixes=False)
        return Side(engine, prompts, sizes.max_tokens, exits)

    def exits(lock_step: bool = False) -> Sequence[ExitPolicy]:
        if quantile is not None:
            return [QuantileExit(quantile)] * batch
        return scripts(batch, sizes.max_tokens, sizes.num_loops, lock_step=lock_step)

    full = side("per_loop", lambda: [FixedDepth(sizes.num_loops)] * batch)
    locked = {} if quantile is not None else {"lock-step": side("per_loop", lambda: exits(True))}
    early = {name: side(name, exits) for name in strategies}
    in_turn([full, *locked.values(), *early.values()], sizes.repeats)
    head = {rows: head_seconds(full.engine, rows) for rows in {batch, max(1, batch // 2)}}
    share = head[batch] * (sizes.max_tokens - 1) / full.median
    yield Figure(
        section="exit", what=f"batch {batch}: share of the head at full depth", value=f"{share:.1%}", number=share
    )
    for name, one in {**locked, **early}.items():
        lossy = name not in ("per_loop", "lock-step")
        yield _saved(full, one, f"batch {batch}, {name}, {sizes.dtype}", lossy, head)


def _saved(full: Side, side: Side, what: str, lossy: bool, head: dict[int, float]) -> Figure:
    """How much of what an early exit saves in work it saves in time."""
    batch = len(full.prompts)
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
        value=f"{speed:.2f} x as fast; {passes:.2f} x fewer passes, {loops:.2f} x fewer token-loops; "
        f"{speed / promised:.0%} of what is promised, {bare / promised:.0%} without the head",
        number=speed / promised,
    )


def speculation(
    model: LoopLMForCausalLM, sizes: DecodeSizes, draft_loops: int, lengths: Sequence[int | None]
) -> Iterator[Figure]:
    """Greedy text at full depth with and without drafts, at batch 1; tokens must be the same in float64."""
    prompts = random_prompts(1, sizes.prompt_tokens, model.config.vocab_size)
    depth = FixedDepth(model.config.num_loops)
    plain = _side(Engine(model, share_prefixes=False), prompts, sizes, [depth])
    sides = {length: _side(Engine(model, share_prefixes=False), prompts, sizes, [depth]) for length in lengths}
    for length, side in sides.items():
        side.speculation = Speculation(draft_loops, length)
    in_turn([plain, *sides.values()], sizes.repeats)
    costs = {rows: pass_seconds(model, sizes, rows) for rows in range(1, 2 + max(n or 1 for n in lengths))}
    for length, side in sides.items():
        speed = plain.median / side.median
        predicted = plain.median / _predicted(side, model.config.num_loops, draft_loops, costs)
        same = "the same tokens" if side.token_ids == plain.token_ids else "tokens differ (rounding)"
        yield Figure(
            section="speculative",
            what=f"draft loop {draft_loops}, {'adaptive' if length is None else length} tokens",
            value=f"{speed:.2f} x, predicted {predicted:.2f} x; {side.stats.acceptance:.0%} accepted; {same}",
            number=speed,
        )


def _predicted(side: Side, num_loops: int, draft_loops: int, costs: dict[int, float]) -> float:
    """Seconds that the counts of `side` come to at the measured costs of a pass over so many rows.

    At full depth every position that was fed passes all loops: the shallow ones alone, the others with those drafted
    beside it, where the head reads them once more together.
    """
    stats, engine = side.stats, side.engine
    positions = stats.token_loops / num_loops
    shallow = draft_loops * positions
    deep = max(stats.weight_passes - shallow, 1.0)
    rows = min((num_loops - draft_loops) * positions / deep, float(max(costs)))
    low = int(rows)
    cost = costs[low] + (rows - low) * (costs[min(low + 1, max(costs))] - costs[low])
    drafts, tests = stats.head_reads - positions, deep / (num_loops - draft_loops)
    head = drafts * head_seconds(engine, 1) + tests * head_seconds(engine, max(1, round(rows)))
    return shallow * costs[1] + deep * cost + head


def growth(sizes: DecodeSizes, batch_sizes: Sequence[int], contexts: Sequence[int]) -> Iterator[Figure]:
    """Milliseconds a token of the batch takes, with context and batch, beside what they should come to.

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
            milliseconds = 1000 * statistics.median(times)
            first = shortest.setdefault(batch, milliseconds)
            expected = first + 1000 * batch * (context - min(contexts)) * place / bandwidth
            yield Figure(
                section="batch",
                what=what,
                value=f"{milliseconds:.2f} ms a step, {milliseconds / batch:.2f} a token; {expected:.2f} ms expected",
                number=milliseconds,
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
