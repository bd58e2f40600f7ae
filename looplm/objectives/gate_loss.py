"""Stage II: teach the gate alone when another loop still lowers the loss."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from looplm.errors import UserError
from looplm.objectives.cross_entropy import HasHead, HasLoopStates, shift_labels, token_weights, weighted_cross_entropy
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

    Ouro, eq. 5-6. Raises UserError when the hidden states carry a gradient, since only the gate may learn,
    and for a single loop, after which there is nothing to decide.

    label_shift: "paper" lets hazard_r see what loop r itself gained over loop r - 1; "next" gives the same
        label to hazard_{r-1}, the one that decides whether loop r runs (r = 2..R either way).
    labels, num_tokens and metrics as in :func:`~looplm.objectives.expected_loss.expected_loss`, and
        `continue_label` (R - 1,), the mean label.
    """
    if len(output.loop_hidden_states) < 2:
        raise UserError("gate_loss compares each loop with the one before: run the model with num_loops of 2 or more.")
    if any(state.requires_grad for state in output.loop_hidden_states):
        raise UserError(
            "gate_loss trains the gate alone: freeze the language model first, all of it but early_exit_gate "
            "(looplm.training.optimizer.freeze_for does)."
        )
    targets = shift_labels(labels)
    with torch.no_grad():
        zero = torch.zeros_like(output.gate_logits)
        _, losses = model.apply_head(weighted_cross_entropy, output.loop_hidden_states, targets, zero)
        gain = (losses[:-1] - losses[1:]).clamp(min=0)  # (R - 1, B, S): loop r over loop r - 1, r = 2..R
        label = torch.sigmoid(SLOPE * (gain - MARGIN))
    logits = output.gate_logits.to(label.dtype)
    per_token = token_weights(targets, num_tokens, label.dtype)
    # The label is the chance to go on, 1 - hazard = sigmoid(-logit).
    chosen = logits[1:] if label_shift == "paper" else logits[:-1]
    bce = binary_cross_entropy_with_logits(-chosen, label, reduction="none")
    loss = (bce.sum(0) / len(logits) * per_token).sum()
    metrics = {"loss": loss.detach(), **depth_metrics(losses, logits, per_token)}
    return loss, {**metrics, "continue_label": (label * per_token).sum((1, 2))}
