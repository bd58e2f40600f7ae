"""Think-at-Hard's online mask: each token is trained at the first loop that already predicts it.

A token that is right at loop r has nothing to learn from the loops after it, and training it there pushes them to
undo what is done. So token i gets its language-model gradient through one cross entropy alone, that of

    d*(i) = the first loop r <= active_loops whose argmax is the target, else active_loops

while `active_loops` grows by one each phase of a curriculum (Closing the Loop, appendix J; untested there).

What the gate learns meanwhile the paper leaves open. Here it is taught to leave at d*(i), by the negative log
likelihood of d*(i) under the exit distribution; as in Stage I, that gradient reaches the states the gate reads too.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from looplm.model.gate import log_exit_pdf
from looplm.objectives.cross_entropy import (
    CHUNK_LOGITS,
    IGNORE,
    HasHead,
    HasLoopStates,
    shift_labels,
    token_weights,
    weighted_cross_entropy,
)
from looplm.objectives.expected_loss import Metrics, depth_metrics


def routing_loss(
    model: HasHead,
    output: HasLoopStates,
    labels: Int[Tensor, "B S"],
    *,
    active_loops: int | None = None,
    gate_weight: float = 0.1,
    num_tokens: int | Tensor | None = None,
) -> tuple[Float[Tensor, ""], Metrics]:
    """mean over tokens of CE at d* - gate_weight log p_{d*}.

    active_loops: loops of the curriculum's present phase; the output's own when None. Deeper ones are left out of
        loss and metrics, and the last active loop takes all that is left of the exit distribution.
    gate_weight: 0 leaves the gate as it is, for Stage II to train.
    labels, num_tokens and metrics as in :func:`~looplm.objectives.expected_loss.expected_loss`, and
        `routed_share` (R,), the share of tokens with d* = r.
    """
    states, gate_logits = output.loop_hidden_states[:active_loops], output.gate_logits[:active_loops]
    targets = shift_labels(labels)
    losses, correct = model.apply_head(read_loops, states, targets)
    chosen = first_correct(correct)  # (B, S)
    routed = torch.zeros_like(losses).scatter_(0, chosen[None], 1.0)  # (R, B, S), one-hot over loops
    per_token = token_weights(targets, num_tokens, losses.dtype)
    # The state at d* alone goes through the head again, with gradient: one cross entropy a token, not R.
    index = chosen[None, ..., None].expand(1, *states[0].shape)
    state = torch.stack(tuple(states)).gather(0, index)[0]  # (B, S, D)
    lm, _ = model.apply_head(weighted_cross_entropy, [state], targets, per_token[None])
    leave = -(routed * log_exit_pdf(gate_logits)).sum(0)
    loss = lm + gate_weight * (leave * per_token).sum()
    metrics = {"loss": loss.detach(), **depth_metrics(losses, gate_logits.detach(), per_token)}
    return loss, {**metrics, "routed_share": (routed * per_token).sum((1, 2))}


def first_correct(correct: Bool[Tensor, "R B S"]) -> Int[Tensor, "B S"]:
    """0-based index of the first loop that is right, the last loop where none is."""
    # argmax of booleans is the first True; a row of falses is completed by a True at the end.
    settled = torch.cat((correct[:-1], torch.ones_like(correct[-1:])))
    return settled.byte().argmax(0)


@torch.no_grad()
def read_loops(
    head_weight: Float[Tensor, "V D"], states: Sequence[Float[Tensor, "B S D"]], targets: Int[Tensor, "B S"]
) -> tuple[Float[Tensor, "R B S"], Bool[Tensor, "R B S"]]:
    """Cross entropy in nats, and whether the argmax is the target, at every loop and token; 0 and False if ignored.

    A chunk of tokens at a time, in the dtypes of :func:`~looplm.objectives.cross_entropy.weighted_cross_entropy`.
    """
    device, dtype = head_weight.device.type, states[0].dtype
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
    wide = torch.promote_types(dtype, torch.float32)
    weight = head_weight.to(narrow)
    kept = (targets != IGNORE).flatten().nonzero().squeeze(-1)
    losses = targets.new_zeros((len(states), targets.numel()), dtype=wide)
    correct = torch.zeros_like(losses, dtype=torch.bool)
    for i, state in enumerate(states):
        for rows in kept.split(max(1, CHUNK_LOGITS // len(weight))):
            logits = (state.flatten(0, 1)[rows].to(narrow) @ weight.T).to(wide)  # (n, V)
            wanted = targets.flatten()[rows]
            losses[i, rows] = logits.logsumexp(-1) - logits.gather(-1, wanted[:, None])[:, 0]
            correct[i, rows] = logits.argmax(-1) == wanted
    shape = (len(states), *targets.shape)
    return losses.view(shape), correct.view(shape)
