"""Self-speculative decoding: a shallow loop drafts tokens that the rest of the loops test, all in one pass each.

Drafted positions keep their states and keys and go on from there, so that nothing drafted is computed twice. The
test is the standard one (Leviathan et al., arXiv 2211.17192; Ouro, 7.3): what comes out is distributed as without
drafting, and greedy text is the same token for token.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from looplm.errors import UserError

MOST_ADAPTIVE = 8
"""Longest draft that an adaptive length comes to."""
PRIOR_DRAFTED, PRIOR_ACCEPTED = 4, 3
"""What an adaptive length starts from: three of four accepted."""


@dataclass(frozen=True)
class Speculation:
    """Draft from loop `draft_loops` (1 up to one below the depth), `draft_tokens` tokens at a time.

    draft_tokens: None adapts the length to the share of drafts accepted so far in this text and to what a pass and a
        read of the LM head cost.

    A token that leaves at loop `draft_loops` or before is no draft but final. Raises UserError below 1.
    """

    draft_loops: int = 1
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("draft_loops", "draft_tokens"):
            value = getattr(self, name)
            if value is None and name == "draft_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} is {value!r}; it must be a whole number from 1.")


class Costs(NamedTuple):
    """What drafting is weighed by: anything proportional to the time of one row, such as weights read."""

    core_pass: float
    head_read: float


def best_draft_tokens(draft_loops: int, max_loops: int, acceptance: float, costs: Costs) -> int:
    """The draft length with the most tokens for its cost, if each draft is accepted with probability `acceptance`."""

    def rate(tokens: int) -> float:
        kept = sum(acceptance**i for i in range(tokens + 1))
        passes = draft_loops * (tokens + 1) + max_loops - draft_loops
        return kept / (passes * costs.core_pass + (tokens + 1) * costs.head_read)

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
