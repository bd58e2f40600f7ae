"""The exit gate's arithmetic, from gate logits onwards, in log space: one function each, used everywhere.

With hazard lambda_r = sigmoid(gate logit of loop r), the chance to leave after loop r having come so far:

    survival  S_r = prod_{j <= r} (1 - lambda_j)
    exit pdf  p_r = lambda_r S_{r-1} for r < R,  p_R = S_{R-1}: the last gate value is not used
    exit cdf  c_r = 1 - S_r for r < R,           c_R = 1

(Ouro, section 3). Input is (R, ...) gate logits in any float dtype; output is float32, or float64 for
float64 logits: in bfloat16 a cumulative sum reaches 1 early and tokens leave that should not.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid


def _widen(gate_logits: Tensor) -> Tensor:
    return gate_logits.to(torch.promote_types(gate_logits.dtype, torch.float32))


def hazard(gate_logits: Float[Tensor, "R *batch"]) -> Float[Tensor, "R *batch"]:
    """lambda_r, the conditional exit probability of every loop."""
    return torch.sigmoid(_widen(gate_logits))


def log_survival(gate_logits: Float[Tensor, "R *batch"]) -> Float[Tensor, "R *batch"]:
    """log S_r, of every loop, the last loop's own gate value included."""
    return logsigmoid(-_widen(gate_logits)).cumsum(0)


def survival(gate_logits: Float[Tensor, "R *batch"]) -> Float[Tensor, "R *batch"]:
    """S_r, the probability that no gate up to and including loop r has let the token leave."""
    return log_survival(gate_logits).exp()


def log_exit_pdf(gate_logits: Float[Tensor, "R *batch"]) -> Float[Tensor, "R *batch"]:
    """log p_r; finite for finite logits."""
    logits = _widen(gate_logits)
    before = log_survival(logits[:-1])  # log S_1 .. log S_{R-1}
    before = torch.cat((torch.zeros_like(logits[:1]), before))  # log S_0 = 0
    # The last loop takes what is left: its own hazard counts as 1.
    leave = torch.cat((logsigmoid(logits[:-1]), torch.zeros_like(logits[:1])))
    return before + leave


def exit_pdf(gate_logits: Float[Tensor, "R *batch"]) -> Float[Tensor, "R *batch"]:
    """p_r, the probability to leave after loop r; sums to 1 over loops. R = 1 gives 1."""
    return log_exit_pdf(gate_logits).exp()


def exit_cdf(gate_logits: Float[Tensor, "R *batch"]) -> Float[Tensor, "R *batch"]:
    """c_r, the probability to have left by loop r; exactly 1 at the last loop, and non-decreasing."""
    left = -torch.expm1(log_survival(gate_logits[:-1]))
    return torch.cat((left, torch.ones_like(_widen(gate_logits[:1]))))


def exit_cdf_of_one(gate_logits: Sequence[float]) -> float:
    """c_r of a single token, from its first r < R gate logits, in float64: a few numbers are not worth tensors."""
    # logsigmoid(-x) = -(max(x, 0) + log(1 + exp(-|x|)))
    return -math.expm1(-sum(max(x, 0.0) + math.log1p(math.exp(-abs(x))) for x in gate_logits))


def exit_entropy(gate_logits: Float[Tensor, "R *batch"]) -> Float[Tensor, "*batch"]:
    """H(p) in nats, at most ln R; differentiable also where some p_r underflows to 0."""
    log_pdf = log_exit_pdf(gate_logits)
    return -(log_pdf.exp() * log_pdf).sum(0)


def expected_loops(gate_logits: Float[Tensor, "R *batch"]) -> Float[Tensor, "*batch"]:
    """E[r] under the exit pdf, between 1 and R."""
    # E[r] = 1 + sum of S_r over r < R. Unlike sum r p_r it cannot round out of [1, R], and it is no matrix
    # product, which autocast would run in bfloat16.
    return 1 + survival(gate_logits[:-1]).sum(0)
