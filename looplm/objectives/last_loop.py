"""The cross entropy after the last loop alone: the loops before it are free, the gate learns nothing.

How recurrent-depth models without a gate are trained (Huginn, arXiv 2502.05171, with a depth drawn at every step and a
truncated backward pass). Ouro does not say whether its synthetic experiments (6.1, 6.2) use this or Stage I.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from looplm.objectives.cross_entropy import HasHead, HasLoopStates, shift_labels, token_weights, weighted_cross_entropy
from looplm.objectives.expected_loss import Metrics, depth_metrics


def last_loop_loss(
    model: HasHead, output: HasLoopStates, labels: Int[Tensor, "B S"], *, num_tokens: int | Tensor | None = None
) -> tuple[Float[Tensor, ""], Metrics]:
    """mean over tokens of the cross entropy after the output's last loop.

    labels, num_tokens and metrics as in :func:`~looplm.objectives.expected_loss.expected_loss`; the losses of the
    loops before are measured only, without gradient.
    """
    states, targets = output.loop_hidden_states, shift_labels(labels)
    per_token = token_weights(targets, num_tokens, output.gate_logits.dtype)
    loss, losses = model.apply_head(weighted_cross_entropy, states[-1:], targets, per_token[None])
    if len(states) > 1:
        with torch.no_grad():
            unused = per_token.expand(len(states) - 1, *per_token.shape)
            _, before = model.apply_head(weighted_cross_entropy, states[:-1], targets, unused)
        losses = torch.cat([before, losses])
    return loss, {"loss": loss.detach(), **depth_metrics(losses, output.gate_logits, per_token)}
