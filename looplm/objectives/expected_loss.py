"""Stage I: the expected loss over exit loops, less beta times the entropy of the exit distribution."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.model.gate import exit_entropy, exit_pdf, expected_loops, log_exit_pdf
from looplm.objectives.cross_entropy import HasHead, HasLoopStates, shift_labels, token_weights, weighted_cross_entropy

Metrics = dict[str, Tensor]
"""Detached means over the tokens counted by `num_tokens`; those of micro-batches and ranks add up to the whole's."""


def expected_loss(
    model: HasHead,
    output: HasLoopStates,
    labels: Int[Tensor, "B S"],
    *,
    beta: float,
    smoothing: float = 0.0,
    prior: Float[Tensor, " R"] | None = None,
    num_tokens: int | Tensor | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """mean over tokens of sum_r p_r L_r - beta H(p), the gradient running through p too (Ouro, eq. 4).

    labels: unshifted, IGNORE (-100) where a token is not to be predicted.
    smoothing: eps of the smoothed loss, whose language-model weights are (1 - eps) p + eps / R while the
        regulariser keeps p, so that no loop goes untrained (Closing the Loop 4.2).
    prior: with a distribution over loops, beta KL(p || prior) replaces -beta H(p); the uniform prior
        differs from the default by the constant beta ln R (Ouro, appendix A).
    num_tokens: predicted tokens of the global batch, all micro-batches and ranks; this call's when None.

    Metrics: `loss`, `loop_losses` (R,), `exit_pdf` (R,), `entropy` in nats, `expected_loops`.
    """
    targets = shift_labels(labels)
    pdf = exit_pdf(output.gate_logits)
    per_token = token_weights(targets, num_tokens, pdf.dtype)  # (B, S)
    weights = ((1 - smoothing) * pdf + smoothing / len(pdf)) * per_token
    lm, losses = model.apply_head(weighted_cross_entropy, output.loop_hidden_states, targets, weights)
    entropy = exit_entropy(output.gate_logits)
    if prior is None:
        penalty = -entropy
    else:
        shape = (-1,) + (1,) * (pdf.ndim - 1)
        penalty = (pdf * (log_exit_pdf(output.gate_logits) - prior.to(pdf).log().view(shape))).sum(0)
    loss = lm + beta * (penalty * per_token).sum()
    return loss, {"loss": loss.detach(), **depth_metrics(losses, output.gate_logits, per_token)}


@torch.no_grad()
def depth_metrics(
    losses: Float[Tensor, "R B S"], gate_logits: Float[Tensor, "R B S"], per_token: Float[Tensor, "B S"]
) -> Metrics:
    """What both stages report of depth; per_token as in :func:`~looplm.objectives.cross_entropy.token_weights`."""
    return {
        "loop_losses": (losses * per_token).sum((1, 2)),
        "exit_pdf": (exit_pdf(gate_logits) * per_token).sum((1, 2)),
        "entropy": (exit_entropy(gate_logits) * per_token).sum(),
        "expected_loops": (expected_loops(gate_logits) * per_token).sum(),
    }
