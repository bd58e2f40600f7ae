"""Which token comes next: sampling parameters, and pure functions from logits to tokens.

Every request draws from a generator of its own, one number a token, so that its draws never depend on its
batch-mates, on the device or on the order in which requests are served. Nor does its text: exactly in float64; in
float32 and bfloat16 wherever the margin of choice exceeds rounding.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looplm.errors import UserError

SEED_LIMIT = 2**63
MOST_AT_ONCE = 2**16
"""Requests of a batch, and samples of a prompt: each takes some memory before anything runs."""
SAMPLE_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Odd and far from small: sample j of one seed is not sample 0 of a neighbouring seed."""


@dataclass(kw_only=True, frozen=True)
class SamplingParams:
    """How one prompt is continued. Raises UserError for an impossible value."""

    max_tokens: int = 64
    """Most tokens to generate, at least 1."""
    temperature: int | float = 0
    """0: the likeliest token (greedy), and the filters below have no effect. Otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: int | float = 1
    """Of those, keep the fewest that hold this share of the probability."""
    min_p: int | float = 0
    """Of those, keep the ones at least this fraction as likely as the likeliest."""
    repetition_penalty: int | float = 1
    """Logits of tokens that stand in the prompt or the text so far are divided by this where positive and multiplied
    where negative (CTRL, arXiv 1909.05858); before temperature, and for greedy text too. 1 changes nothing."""
    seed: int | None = None
    """Same seed, same text. None takes one from torch's global generator."""
    stop: Sequence[str] = ()
    """A string, or several, that end the text; neither they nor what follows are part of it."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the text, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    n: int = 1
    """Independent samples per prompt."""
    logprobs: bool = False
    """Whether results carry the log-probability of each generated token."""
    prompt_logprobs: bool = False
    """Whether results carry the log-probability of each prompt token but the first. Such a prompt is computed whole,
    also where a part of it has been computed before."""

    def __post_init__(self) -> None:
        # Tuples: two equal parameter sets are equal, and hashable.
        object.__setattr__(self, "stop", texts("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(whole_numbers("stop_token_ids", self.stop_token_ids)))
        ranges: tuple[tuple[str, type, int | float, int | float], ...] = (
            ("max_tokens", Integral, 1, math.inf),
            ("temperature", Real, 0, 1e6),
            ("top_k", Integral, 0, math.inf),
            ("top_p", Real, 0, 1),
            ("min_p", Real, 0, 1),
            ("repetition_penalty", Real, 1e-6, 1e6),
            ("n", Integral, 1, MOST_AT_ONCE),
        )
        for name, kind, low, high in ranges:
            check_number(name, getattr(self, name), kind, low, high)
        if self.seed is not None:
            check_number("seed", self.seed, Integral, 0, SEED_LIMIT - 1)
        if not all(self.stop):
            raise UserError("stop holds an empty string, which would end every text at once; leave it out.")


def check_number(name: str, value: object, kind: type, low: int | float, high: int | float) -> None:
    """Raises UserError unless `value` is a number of `kind` (`numbers.Integral` or `Real`) from `low` to `high`."""
    fits = isinstance(value, kind) and not isinstance(value, bool | Fraction)
    if not fits or not low <= value <= high:  # type: ignore[operator]
        noun = "a whole number" if kind is Integral else "a number"
        upper = "" if high == math.inf else f" to {high}"
        raise UserError(f"{name} is {value!r}; it must be {noun} from {low}{upper}.")


def texts(name: str, value: object) -> tuple[str, ...]:
    """A string, or each of several. Raises UserError for anything else."""
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, Iterable) or isinstance(several, bytes | bytearray):
        raise UserError(f"{name} is {value!r}; give a string, or a list of strings.")
    several = tuple(several)
    for one in several:
        if not isinstance(one, str):
            raise UserError(f"{name} holds {one!r}; it must hold strings.")
        check_text(name, one)
    return several


def check_text(name: str, text: str) -> None:
    """Raises UserError for a string with half of a surrogate pair, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} is not valid Unicode text at character {error.start}; bytes that are not UTF-8 become such text."
        ) from None


def whole_numbers(name: str, value: object) -> list[int]:
    """Token ids as plain numbers. Raises UserError for anything but a list of whole numbers."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray):
        raise UserError(f"{name} is {value!r}; give a list of token ids.")
    numbers: list[int] = []
    for one in value:
        if not isinstance(one, Integral) or isinstance(one, bool):
            raise UserError(f"{name} has {one!r} where a token id should be; token ids are whole numbers.")
        numbers.append(int(one))
    return numbers


def make_generator(params: SamplingParams, sample: int = 0) -> torch.Generator:
    """The source of randomness of one request: sample `sample` of `params.n`."""
    seed = torch.randint(SEED_LIMIT - 1, ()).item() if params.seed is None else params.seed
    return torch.Generator().manual_seed(int(seed + sample * SAMPLE_SEED_STRIDE) % SEED_LIMIT)


def filtered_probabilities(logits: Float[Tensor, "N V"], params: SamplingParams) -> Float[Tensor, "N V"]:
    """The distribution that is drawn from: temperature, then top-k, top-p and min-p, each renormalised. float64."""
    wide = logits.double()
    # Shifted first, so that a tiny temperature gives -inf where it should and never inf - inf.
    scaled = (wide - wide.amax(-1, keepdim=True)) / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        weakest = scaled.topk(params.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < weakest, -math.inf)
    probs = scaled.softmax(-1)
    if params.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        # A token is dropped when those before it hold the share already; the likeliest always stays.
        dropped = ordered.cumsum(-1) - ordered >= params.top_p
        dropped[:, 0] = False
        probs = probs.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs / probs.sum(-1, keepdim=True)


def draw(probs: Float[Tensor, "N V"], uniform: Float[Tensor, " N"]) -> Int[Tensor, " N"]:
    """Inverse of the cumulative distribution at `uniform` in [0, 1); never a token of probability 0."""
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1]
    # Strictly below the total: rounding up to it would point past the last possible token.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


def penalised(logits: Float[Tensor, " V"], penalty: float, token_ids: Sequence[int]) -> Float[Tensor, " V"]:
    """`logits` with the repetition penalty for `token_ids`. See :class:`SamplingParams`."""
    if penalty == 1 or not token_ids:
        return logits
    seen = torch.tensor(sorted(set(token_ids)), device=logits.device)
    values = logits[seen]
    return logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))


def sample(
    logits: Float[Tensor, "N V"], params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> Int[Tensor, " N"]:
    """The next token of every row. Rows of temperature 0 take the likeliest and need no generator."""
    return sample_with_probs(logits, params, generators)[0]


def sample_with_probs(
    logits: Float[Tensor, "N V"], params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> tuple[Int[Tensor, " N"], dict[int, Tensor]]:
    """The next token of every row, and for rows that are drawn the distribution they were drawn from, (V,) float64."""
    tokens = logits.argmax(-1)
    drawn_from: dict[int, Tensor] = {}
    rows_alike: dict[tuple[int | float, ...], list[int]] = {}
    for row, p in enumerate(params):
        if p.temperature > 0:
            rows_alike.setdefault((p.temperature, p.top_k, p.top_p, p.min_p), []).append(row)
    for rows in rows_alike.values():
        probs = filtered_probabilities(logits[rows], params[rows[0]])
        uniform = [torch.rand((), generator=generators[row], dtype=torch.float64) for row in rows]
        tokens[rows] = draw(probs, torch.stack(uniform).to(probs.device))
        drawn_from.update(zip(rows, probs, strict=True))
    return tokens, drawn_from


def widened(logits: Float[Tensor, "*batch V"]) -> Float[Tensor, "*batch V"]:
    """In float32 or wider. On a CPU comparing bfloat16 numbers takes many times as long as widening them first."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def token_logprobs(logits: Float[Tensor, "N V"], tokens: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Log-probability of `tokens` under the model itself, before temperature and filters; float32 or wider."""
    return widened(logits).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def all_finite(logits: Float[Tensor, "N V"]) -> Bool[Tensor, " N"]:
    """False for rows of a broken model: nothing can be drawn from them."""
    # In a third of the time that asking each of them takes: 0 times what is not finite is NaN.
    return (logits * 0).sum(-1) == 0
