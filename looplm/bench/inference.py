"""Generation measured: full depth, early exit, self-speculation, growth with batch and context, memory.

Every speed is a ratio between sides that ran in turn in one process, medians of several, decoding alone.
"""

from collections.abc import Iterator, Sequence
from typing import get_args

from looplm.bench.dense_llama import LlamaSide, dense_llama
from looplm.bench.figures import Figure
from looplm.bench.generation import (
    DecodeSizes,
    Scripted,
    Side,
    head_seconds,
    in_turn,
    random_model,
    random_prompts,
    scripts,
)
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.inference import Engine, FixedDepth, SamplingParams, Speculation
from looplm.model.flops import CacheStrategy


def full_depth(sizes: DecodeSizes, batch_sizes: Sequence[int]) -> Iterator[Figure]:
    """All loops, against transformers' `generate` on a dense Llama that does the same work."""
    model, llama = random_model(sizes), dense_llama(sizes)
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
    sizes: DecodeSizes, batch_sizes: Sequence[int], strategies: Sequence[CacheStrategy] = ("per_loop", "fill", "last")
) -> Iterator[Figure]:
    """Depths 1 to 4 in the shares 40, 30, 20, 10 %, against full depth and against waiting for the deepest row."""
    model = random_model(sizes)
    for batch in batch_sizes:
        prompts = random_prompts(batch, sizes.prompt_tokens, sizes.vocab_size)
        full = _side(
            Engine(model, max_batch=batch, share_prefixes=False), prompts, sizes, [FixedDepth(sizes.num_loops)] * batch
        )
        locked = _scripted(Engine(model, max_batch=batch, share_prefixes=False), prompts, sizes, lock_step=True)
        early = {
            name: _scripted(Engine(model, max_batch=batch, kv_cache=name, share_prefixes=False), prompts, sizes)
            for name in strategies
        }
        in_turn([full, locked, *early.values()], sizes.repeats)
        head = head_seconds(model, batch) / (full.median / (sizes.max_tokens - 1))
        yield Figure(
            section="exit", what=f"batch {batch}: share of the head at full depth", value=f"{head:.1%}", number=head
        )
        for name, side in {"lock-step": locked, **early}.items():
            speed = full.median / side.median
            passes = full.stats.weight_passes / side.stats.weight_passes
            loops = full.stats.token_loops / side.stats.token_loops
            promised = passes if name in ("per_loop", "lock-step") or batch == 1 else loops
            yield Figure(
                section="exit",
                what=f"batch {batch}, {name}, {sizes.dtype}",
                value=f"{speed:.2f} x as fast; {passes:.2f} x fewer passes, {loops:.2f} x fewer token-loops; "
                f"{speed / promised:.0%} of what is promised",
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
    for length, side in sides.items():
        speed = plain.median / side.median
        head = head_seconds(model, 1)
        a_pass = max(plain.median - plain.stats.head_reads * head, 1e-9) / plain.stats.weight_passes
        predicted = plain.median / (side.stats.weight_passes * a_pass + side.stats.head_reads * head)
        same = "the same tokens" if side.token_ids == plain.token_ids else "tokens differ (rounding)"
        yield Figure(
            section="speculative",
            what=f"draft loop {draft_loops}, {'adaptive' if length is None else length} tokens",
            value=f"{speed:.2f} x, predicted {predicted:.2f} x; {side.stats.acceptance:.0%} accepted; {same}",
            number=speed,
        )


def growth(sizes: DecodeSizes, batch_sizes: Sequence[int], contexts: Sequence[int]) -> Iterator[Figure]:
    """Milliseconds a token of the batch takes, with context and batch."""
    model = random_model(sizes, max(contexts))
    for context in contexts:
        for batch in batch_sizes:
            prompts = random_prompts(batch, context, sizes.vocab_size)
            side = _side(
                Engine(model, max_batch=batch, share_prefixes=False),
                prompts,
                sizes,
                [FixedDepth(sizes.num_loops)] * batch,
            )
            in_turn([side], sizes.repeats)
            milliseconds = 1000 * side.median / (sizes.max_tokens - 1)
            yield Figure(
                section="batch",
                what=f"context {context}, batch {batch}",
                value=f"{milliseconds:.2f} ms a step, {milliseconds / batch:.2f} a token",
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


def _scripted(
    engine: Engine, prompts: Sequence[Sequence[int]], sizes: DecodeSizes, *, lock_step: bool = False
) -> Side:
    def exits() -> list[Scripted]:
        return scripts(len(prompts), sizes.max_tokens, sizes.num_loops, lock_step=lock_step)

    return Side(engine, prompts, sizes.max_tokens, exits)
