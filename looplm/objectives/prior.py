"""Distributions over exit loops that the exit distribution may be drawn towards (Ouro, appendix A).

    expected_loss(..., beta=0.1, prior=geometric_prior(4, stop=0.5))     # beta KL(p || prior) for -beta H(p)

The paper does not say what becomes of the geometric prior's tail beyond the last loop; here the R terms are
renormalised to sum to 1. (The alternative, the whole tail on the last loop, would ask for depth at small `stop`
and have a mode at the end that no geometric distribution has.)
"""

import torch
from jaxtyping import Float
from torch import Tensor

from looplm.errors import UserError


def uniform_prior(num_loops: int) -> Float[Tensor, " R"]:
    """1 / R each, float64. KL(p || uniform) = ln R - H(p): the default of the expected loss up to a constant."""
    return torch.full((num_loops,), 1 / num_loops, dtype=torch.float64)


def geometric_prior(num_loops: int, stop: float) -> Float[Tensor, " R"]:
    """Proportional to (1 - stop)^(r - 1) stop over r = 1..R, float64: a constant hazard `stop`, cut off after R.

    Ouro's eta is 1 - stop. Raises UserError unless 0 < stop < 1.
    """
    if not 0 < stop < 1:
        raise UserError(f"stop is {stop}; the geometric prior's chance to leave at a loop lies between 0 and 1.")
    # The factor `stop` cancels; so does the size of the whole, which is why this cannot underflow to 0 / 0.
    powers = (1 - stop) ** torch.arange(num_loops, dtype=torch.float64)
    return powers / powers.sum()
