"""Stage II: teach the gate alone when another loop still lowers the loss."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from looplm.objectives.cross_entropy import IGNORE, HasHead, HasLoopStates, shift_labels, weighted_cross_entropy
from looplm.objectives.expected_loss import Metrics, depth_metrics

SLOPE, MARGIN = 50.0, 0.005
"""Continue-label: sigmoid(SLOPE * (improvement - MARGIN)), improvement in nats (Ouro, eq. 5)."""

LabelShift = Literal["paper", "next"]


def gate_loss(
    model: HasHead,
    output: HasLoopStates,
    labels: Int[Tensor, "B S"],
    *,
    label_shift: LabelShift = "paper",
    num_tokens: int | Tensor | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """mean over tokens of (1 / R) sum_r BCE(1 - hazard_r, sigmoid(50 (max(0, L_{r-1} - L_r) - 0.005))), r = 2..R.

    Ouro, eq. 5-6. The language model must be frozen, so that only the gate learns: raises ValueError when
    the hidden states carry a gradient.

    label_shift: "paper" lets hazard_r see what loop r itself gained over loop r - 1; "next" gives the same
        label to hazard_{r-1}, the one that decides whether loop r runs (r = 2..R either way).
    labels, num_tokens and metrics as in :func:`~looplm.objectives.expected_loss.expected_loss`, and
        `continue_label` (R - 1,), the mean label.
    """
    if any(state.requires_grad for state in output.loop_hidden_states):
        raise ValueError("gate_loss trains the gate alone: freeze the language model first (requires_grad_(False)).")
    targets = shift_labels(labels)
    mask = targets != IGNORE
    with torch.no_grad():
        zero = torch.zeros_like(output.gate_logits)
        _, losses = model.apply_head(weighted_cross_entropy, output.loop_hidden_states, targets, zero)
        gain = (losses[:-1] - losses[1:]).clamp(min=0)  # (R - 1, B, S): loop r over loop r - 1, r = 2..R
        label = torch.sigmoid(SLOPE * (gain - MARGIN))
    logits = output.gate_logits.to(label.dtype)
    per_token = mask.to(label.dtype) / (mask.sum().clamp(min=1) if num_tokens is None else num_tokens)
    # The label is the chance to go on, 1 - hazard = sigmoid(-logit).
    chosen = logits[1:] if label_shift == "paper" else logits[:-1]
    bce = binary_cross_entropy_with_logits(-chosen, label, reduction="none")
    loss = (bce.sum(0) / len(logits) * per_token).sum()
    metrics = {"loss": loss.detach(), **depth_metrics(losses, logits, per_token)}
    return loss, {**metrics, "continue_label": (label * per_token).sum((1, 2))}
