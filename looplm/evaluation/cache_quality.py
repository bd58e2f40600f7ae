"""What a cache strategy costs in quality: held-out text decoded token by token, each fed with the right token.

A forward pass over a text cannot tell, nor can the log-probabilities of a prompt: a prompt goes through each loop as
a whole and reads the keys of that loop. Only positions that are decoded read what a strategy has kept (Ouro, 5.4.2
and table 14). So a text is cut: what stands before the cut is the prompt, and what follows is decoded by the engine
itself, batched and with early exit as ever, its own choices replaced by the text's.

The paper's second question is whether the prompt may be read from one set too. Its prompt is then decoded as well,
all but the first token, so that every position reads of earlier ones only what is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.data.evaluation_windows import EvaluationWindows
from looplm.errors import UserError
from looplm.evaluation.bootstrap import NUM_RESAMPLES, Interval, document_sums, percentile_interval, resample_weights
from looplm.inference import Engine, ExitPolicy, Preview, Redirect, SamplingParams, Screen
from looplm.model.flops import CacheStrategy, cache_bytes_per_token
from looplm.model.language_model import LoopLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LN2 = 0.6931471805599453


@dataclass(kw_only=True, frozen=True)
class Continuations:
    """Texts of one length, each with the same number of tokens to be predicted at its end."""

    token_ids: Int[Tensor, "W S"]
    num_scored: int
    """Tokens at the end of each text that are scored."""
    document_ids: Int[Tensor, " W"]
    num_bytes: Int[Tensor, " W"]
    """UTF-8 bytes of the scored tokens of each text."""

    @property
    def num_before(self) -> int:
        """Tokens of each text that stand before the scored ones."""
        return self.token_ids.shape[1] - self.num_scored


@dataclass(kw_only=True, frozen=True)
class ForcedDecoding:
    """What the model said of each scored token when it was decoded."""

    nats: Float[Tensor, "W N"]
    """Cross entropy of the right token at the loop the position left at."""
    right: Tensor
    """(W, N) bool: whether the likeliest token was the right one."""
    loops: Int[Tensor, "W N"]
    """The loop, 1 to R, each was read out at."""


@dataclass(kw_only=True, frozen=True)
class CachePoint:
    """One strategy, with the prompt read exactly or decoded like the rest. Intervals are over documents."""

    strategy: CacheStrategy
    prompt_shares: bool
    """Whether the prompt, too, is read from what is kept."""
    bytes_per_token: int
    """Keys and values of a decoded position."""
    bits_per_byte: float
    increase_bits_per_byte: Interval
    """Above the exact cache, at the same exits: above 0, the strategy costs quality."""
    accuracy: float
    mean_loops: float
    """Claimed depth."""


def continuations(
    windows: EvaluationWindows,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    num_texts: int,
    num_before: int,
    num_scored: int,
) -> Continuations:
    """The beginnings of `num_texts` windows, spread evenly over those that are long enough.

    Raises UserError when none is, or for a number below 1.
    """
    for name, value in (("num_texts", num_texts), ("num_before", num_before), ("num_scored", num_scored)):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1.")
    length = num_before + num_scored
    long_enough = (windows.lengths >= length).nonzero()[:, 0]
    # In the order of the documents, so that even steps visit as many of them as there are.
    long_enough = long_enough[windows.document_index[long_enough].argsort(stable=True)]
    if not len(long_enough):
        raise UserError(f"No held-out text has {length} tokens; give longer texts, or score fewer tokens.")
    chosen = long_enough[torch.linspace(0, len(long_enough) - 1, min(num_texts, len(long_enough))).round().long()]
    token_ids = windows.input_ids[chosen, :length]

    def size(ids: list[int]) -> int:
        return len(str(tokenizer.decode(ids)).encode())

    num_bytes = [size(text) - size(text[:num_before]) for text in token_ids.tolist()]
    return Continuations(
        token_ids=token_ids,
        num_scored=num_scored,
        document_ids=windows.document_index[chosen].unique(return_inverse=True)[1],
        num_bytes=torch.tensor(num_bytes),
    )


def decode_forced(
    engine: Engine, token_ids: Int[Tensor, "W S"], num_scored: int, num_prompt: int, exit: ExitPolicy
) -> ForcedDecoding:
    """Decodes each text from position `num_prompt` on, fed with its own tokens; scores the last `num_scored`.

    Every token leaves where `exit` says. Raises UserError when the model breaks down, and for a prompt that is empty
    or reaches into the scored tokens.
    """
    num_texts, length = token_ids.shape
    if not 1 <= num_prompt <= length - num_scored:
        raise UserError(f"A prompt of {num_prompt} tokens does not fit before {num_scored} of {length} tokens.")
    texts = token_ids.tolist()
    nats = torch.zeros(num_texts, num_scored, dtype=torch.float64)
    right = torch.zeros(num_texts, num_scored, dtype=torch.bool)

    def force(preview: Preview) -> Redirect:
        position = num_prompt + len(preview.token_ids)
        token, column = texts[preview.index][position], position - (length - num_scored)
        if column >= 0:
            nats[preview.index, column] = -preview.logprobs[token].item()
            right[preview.index, column] = int(preview.logprobs.argmax()) == token
        return Redirect([token])

    # A screen of the deepest loop sees each token where it leaves, at whatever loop that is.
    screen = Screen(force, loops=exit.max_loops(engine.model.model.config.num_loops))
    prompts = [text[:num_prompt] for text in texts]
    sampling = SamplingParams(max_tokens=length - num_prompt, ignore_eos=True)
    loops: list[list[int]] = []
    for result in engine.generate(prompts, sampling, exit, screen=screen):
        if result.finish_reason != "length":
            raise UserError(f"Text {result.index} could not be scored: {result.error}")
        loops.append(result.loops[-num_scored:])
    return ForcedDecoding(nats=nats, right=right, loops=torch.tensor(loops))


def cache_quality(
    lm: LoopLM,
    texts: Continuations,
    exit: ExitPolicy,
    strategies: Sequence[CacheStrategy] = get_args(CacheStrategy),
    *,
    prompts: Sequence[bool] = (False, True),
    max_batch: int = 32,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[CachePoint, ...]:
    """Every strategy at the exits of `exit`, for each of `prompts`: read exactly (False), or decoded too (True).

    The exact cache stands first, since the others are compared with it; a decoded prompt is the same to it as one
    that was read. Raises UserError as :func:`decode_forced` does, and below two documents.
    """
    weights = resample_weights(int(texts.document_ids.max()) + 1, num_resamples, seed)
    config = lm.model.config
    exact: ForcedDecoding | None = None
    points: list[CachePoint] = []
    for prompt_shares in prompts:
        for strategy in dict.fromkeys(("per_loop", *strategies)):
            if strategy == "per_loop" and exact is not None:
                found = exact
            else:
                say(f"{strategy}, prompt {'decoded' if prompt_shares else 'read'}")
                engine = Engine(lm, kv_cache=strategy, max_batch=max_batch, share_prefixes=False)
                num_prompt = 1 if prompt_shares else texts.num_before
                found = decode_forced(engine, texts.token_ids, texts.num_scored, num_prompt, exit)
            exact = exact or found
            bits, resampled = _bits_per_byte(texts, found.nats, weights)
            base, resampled_base = _bits_per_byte(texts, exact.nats, weights)
            points.append(
                CachePoint(
                    strategy=strategy,
                    prompt_shares=prompt_shares,
                    bytes_per_token=cache_bytes_per_token(
                        config,
                        strategy,
                        dtype_bytes=lm.lm_head.weight.element_size(),
                        num_loops=exit.max_loops(config.num_loops),
                    ).decode,
                    bits_per_byte=bits.item(),
                    increase_bits_per_byte=percentile_interval((bits - base).item(), resampled - resampled_base),
                    accuracy=found.right.double().mean().item(),
                    mean_loops=found.loops.double().mean().item(),
                )
            )
    return tuple(points)


def _bits_per_byte(
    texts: Continuations, nats: Float[Tensor, "W N"], weights: Float[Tensor, "Q M"]
) -> tuple[Float[Tensor, ""], Float[Tensor, " Q"]]:
    """Of all scored tokens, and in every resample of the documents."""
    bits = document_sums(nats.sum(1) / LN2, texts.document_ids, weights.shape[1])
    size = document_sums(texts.num_bytes.double(), texts.document_ids, weights.shape[1])
    return bits.sum() / size.sum(), (weights @ bits) / (weights @ size)
