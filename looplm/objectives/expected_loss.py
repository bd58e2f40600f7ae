"""Stage I: the expected loss over exit loops, less beta times the entropy of the exit distribution."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.model.gate import exit_entropy, exit_pdf, expected_loops, log_exit_pdf
from looplm.objectives.cross_entropy import HasHead, HasLoopStates, shift_labels, token_weights, weighted_cross_entropy

Metrics = dict[str, Tensor]
"""Detached means over the tokens counted by `num_tokens`; those of micro-batches and ranks add up to the whole's."""

HISTOGRAM_BINS = 100
"""Bins of the histograms in the metrics: quantiles over tokens are right to a hundredth of their range."""


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

    Metrics: `loss` and those of :func:`depth_metrics`.
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
    """What every objective reports of depth; per_token as in :func:`~looplm.objectives.cross_entropy.token_weights`.

    `loop_losses` (R,) in nats, `exit_pdf` (R,), `entropy` in nats, `expected_loops`, all means over tokens; and two
    histograms, shares of the tokens in HISTOGRAM_BINS even bins (:func:`histogram_quantiles` reads them):
    `exit_pdf_histogram` (R, bins) of p_r over 0..1, `expected_loops_histogram` (bins,) of E[r] over 1..R.
    """
    pdf, loops = exit_pdf(gate_logits), expected_loops(gate_logits)
    above_one = (loops - 1) / max(1, len(pdf) - 1)  # E[r] on 0..1
    return {
        "loop_losses": (losses * per_token).sum((1, 2)),
        "exit_pdf": (pdf * per_token).sum((1, 2)),
        "entropy": (exit_entropy(gate_logits) * per_token).sum(),
        "expected_loops": (loops * per_token).sum(),
        "exit_pdf_histogram": _histogram(pdf, per_token),
        "expected_loops_histogram": _histogram(above_one[None], per_token)[0],
    }


def _histogram(values: Float[Tensor, "n B S"], per_token: Float[Tensor, "B S"]) -> Float[Tensor, "n bins"]:
    """Shares of the predicted tokens by value, 0..1 in even bins, for each of n values a token has."""
    bins = (values * HISTOGRAM_BINS).long().clamp(0, HISTOGRAM_BINS - 1).flatten(1)  # (n, B * S)
    # Integers are counted, so that the order of the additions, which is open on a GPU, changes nothing.
    counted = (per_token > 0).long().flatten().expand_as(bins)
    counts = bins.new_zeros((len(values), HISTOGRAM_BINS)).scatter_add_(1, bins, counted)
    return counts * per_token.max()


def histogram_quantiles(
    histogram: Float[Tensor, "*n bins"], quantiles: Sequence[float], low: float = 0.0, high: float = 1.0
) -> Float[Tensor, "*n q"]:
    """Quantiles of what was counted into even bins from `low` to `high`, right to one bin; evenly spread within it."""
    cumulative = histogram.double().cumsum(-1)
    wanted = torch.tensor(quantiles, dtype=torch.float64, device=histogram.device) * cumulative[..., -1:]
    last = histogram.shape[-1] - 1
    index = torch.searchsorted(cumulative, wanted.contiguous()).clamp(max=last)  # first bin that reaches the quantile
    share = histogram.double().gather(-1, index)
    before = cumulative.gather(-1, index) - share
    inside = ((wanted - before) / share.clamp(min=torch.finfo(torch.float64).tiny)).clamp(0, 1)
    return low + (high - low) * (index + inside) / (last + 1)
