"""Self-speculative decoding: a shallow loop drafts tokens that the rest of the loops test, all in one pass each.

Drafted positions keep their states and keys and go on from there, so that nothing drafted is computed twice. The
test is the standard one (Leviathan et al., arXiv 2211.17192; Ouro, 7.3): what comes out is distributed as without
drafting, and greedy text is the same token for token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from looplm.errors import UserError
from looplm.inference.packed import NativeLinear, PackedLinear
from looplm.inference.sampling import whole_numbers

MOST_ADAPTIVE = 8
"""Longest draft that an adaptive length comes to."""
PRIOR_DRAFTED, PRIOR_ACCEPTED = 4, 3
"""What an adaptive length starts from: three of four accepted."""


@dataclass(frozen=True)
class Speculation:
    """Draft from loop `draft_loops` (1 up to one below the depth), `draft_tokens` tokens at a time.

    draft_tokens: None adapts the length to the share of drafts accepted so far in this text and to what a pass and a
        read of the LM head cost.
    draft_vocab: tokens that may be drafted, so that a draft reads only their rows of the LM head. A number: that many
        of the lowest ids, which in a byte-pair vocabulary are the bytes and the earliest merges; or the ids
        themselves, such as the most frequent ones of some text. None: all. Nothing else may be drafted, anything may
        still come: the test of a draft makes up for it.

    A token that leaves at loop `draft_loops` or before is no draft but final. Raises UserError for a number below 1,
    and for ids that are none.
    """

    draft_loops: int = 1
    draft_tokens: int | None = None
    draft_vocab: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("draft_loops", "draft_tokens"):
            value = getattr(self, name)
            if value is None and name == "draft_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} is {value!r}; it must be a whole number from 1.")
        vocab = self.draft_vocab
        if vocab is None:
            return
        if isinstance(vocab, Integral):
            if isinstance(vocab, bool) or vocab < 1:
                raise UserError(f"draft_vocab is {vocab!r}; it must be a number of tokens from 1, or token ids.")
            object.__setattr__(self, "draft_vocab", int(vocab))
            return
        ids = tuple(sorted(set(whole_numbers("draft_vocab", vocab))))
        if not ids or ids[0] < 0:
            raise UserError(f"draft_vocab holds {'no token id' if not ids else ids[0]}; give token ids from 0.")
        object.__setattr__(self, "draft_vocab", ids)  # a tuple: equal settings are equal, and hashable


class DraftHead:
    """The LM head for a part of the vocabulary.

    linear: the rows of `token_ids`, in their order. Called with states, it gives logits of the whole vocabulary, those
    of all other tokens as low as a finite number can be: they are never drawn, and never the likeliest.
    """

    def __init__(self, linear: nn.Linear, token_ids: Sequence[int], vocab_size: int) -> None:
        self.linear, self.vocab_size = linear, vocab_size
        self.token_ids = torch.tensor(token_ids, device=linear.weight.device)

    def __call__(self, hidden: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        some = self.linear(hidden)
        logits = some.new_full((len(some), self.vocab_size), torch.finfo(some.dtype).min)
        return logits.index_copy_(1, self.token_ids, some)


class DraftHeads:
    """The heads that drafts are read with where `Speculation.draft_vocab` says so, each built once."""

    def __init__(self, lm_head: nn.Linear) -> None:
        self.lm_head = lm_head
        self.heads: dict[int | tuple[int, ...], DraftHead] = {}

    def head_for(self, speculation: Speculation | None) -> DraftHead | None:
        """None where drafts are read with the LM head. Raises UserError for tokens that the vocabulary has not got."""
        vocab = None if speculation is None else speculation.draft_vocab
        if vocab is None:
            return None
        token_ids = range(vocab) if isinstance(vocab, int) else tuple(vocab)
        size = self.lm_head.out_features
        if token_ids[-1] >= size:
            what = f"{vocab} tokens" if isinstance(vocab, int) else f"the token id {token_ids[-1]}"
            raise UserError(f"draft_vocab is {what}, more than the vocabulary of {size} has.")
        key = vocab if isinstance(vocab, int) else tuple(vocab)
        if key not in self.heads:
            self.heads[key] = DraftHead(rows_of(self.lm_head, token_ids), token_ids, size)
        return self.heads[key]

    def forget(self) -> None:
        """The weights have changed: heads are built anew for requests that come."""
        self.heads.clear()


def rows_of(lm_head: nn.Linear, token_ids: Sequence[int]) -> nn.Linear:
    """A linear layer of some rows of `lm_head`: a copy of its own, side by side, packed where the head is."""
    rows = torch.tensor(token_ids, device=lm_head.weight.device)
    some = nn.Linear(lm_head.in_features, len(rows), lm_head.bias is not None, device="meta")
    some.weight = nn.Parameter(lm_head.weight.detach()[rows], requires_grad=False)
    if lm_head.bias is not None:
        some.bias = nn.Parameter(lm_head.bias.detach()[rows], requires_grad=False)
    if isinstance(lm_head, PackedLinear | NativeLinear):
        some.__class__ = type(lm_head)
    if isinstance(some, NativeLinear) and isinstance(lm_head, NativeLinear):
        some.kernels = lm_head.kernels
    if isinstance(some, PackedLinear):
        some.pack()
    return some


class Costs(NamedTuple):
    """What drafting is weighed by: anything proportional to the time of one row, such as weights read."""

    core_pass: float
    head_read: float
    draft_read: float
    """Of the head that drafts are read with."""


def best_draft_tokens(draft_loops: int, max_loops: int, acceptance: float, costs: Costs) -> int:
    """The draft length with the most tokens for its cost, if each draft is accepted with probability `acceptance`."""

    def rate(tokens: int) -> float:
        kept = sum(acceptance**i for i in range(tokens + 1))
        passes = draft_loops * (tokens + 1) + max_loops - draft_loops
        return kept / (passes * costs.core_pass + tokens * costs.draft_read + costs.head_read)

    return max(range(1, MOST_ADAPTIVE + 1), key=rate)


def judge(
    token: int,
    draft: Float[Tensor, " V"] | None,
    target: Float[Tensor, " V"],
    generator: torch.Generator | None,
) -> int | None:
    """None when the drafted `token` stands; otherwise the token that comes instead.

    draft, target: the distributions, float64. Without randomness (`generator` None, `target` one-hot) a token stands
    if it is the likeliest. Otherwise it stands with probability min(1, target / draft), and what comes instead is
    drawn from max(0, target - draft), normalised.
    """
    if generator is None or draft is None:
        best = int(target.argmax())
        return None if token == best else best
    first, second = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    if first * draft[token].item() < target[token].item():
        return None
    rest = (target - draft).clamp(min=0).cumsum(-1)
    below = torch.tensor(second, dtype=rest.dtype, device=rest.device) * rest[-1]
    below = torch.minimum(below, torch.nextafter(rest[-1], torch.zeros_like(rest[-1])))
    return int(torch.searchsorted(rest, below, right=True).clamp(max=len(rest) - 1))
