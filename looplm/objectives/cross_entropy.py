"""Cross entropy of every loop through one chunked LM head.

The head is applied to a few hundred tokens at a time and the gradient is formed on the spot, so neither
logits nor their gradient ever exist for a whole batch, and the backward pass does not run the head again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

IGNORE = -100
"""Label of a token that is not to be predicted, as in torch.nn.functional.cross_entropy."""

CHUNK_LOGITS = 2**24
"""Logits held at once: 64 MiB in float32."""


@runtime_checkable
class HasLoopStates(Protocol):
    """What an objective reads of a forward's output (:class:`~looplm.model.looped.LoopedOutput` or the shell's)."""

    @property
    def loop_hidden_states(self) -> Sequence[Tensor]: ...
    @property
    def gate_logits(self) -> Tensor: ...


@runtime_checkable
class HasHead(Protocol):
    """A model that lends its LM head's weight: `apply_head(fn, *args)` is `fn(weight, *args)`.

    Under FSDP2 that verb is a registered forward method: the weight is gathered once, however many chunks.
    """

    def apply_head(self, function: Callable[..., Any], *args: Any) -> Any: ...


def shift_labels(labels: Int[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """The token each position predicts: labels moved one to the left, IGNORE at the end."""
    return pad(labels[:, 1:], (0, 1), value=IGNORE)


def token_weights(
    targets: Int[Tensor, "B S"], num_tokens: int | Tensor | None, dtype: torch.dtype
) -> Float[Tensor, "B S"]:
    """1 / num_tokens where a token is predicted, else 0: sums over them are means over the global batch.

    num_tokens: tokens of all micro-batches and ranks together; those of `targets` when None. A batch without
    any weighs nothing, instead of 0 / 0.
    """
    mask = targets != IGNORE
    count = mask.sum() if num_tokens is None else torch.as_tensor(num_tokens)
    return mask.to(dtype) / count.clamp(min=1)


@dataclass
class _Chunked:
    """One sweep of the head over all loops: token losses, and the gradients if they are wanted."""

    weight: Tensor  # (V, D), in the dtype of the matrix products
    wide: torch.dtype  # dtype of the softmax and of all sums
    d_weight: Tensor | None  # (V, D) in `wide`

    def run(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """hidden (N, D), targets and weights (N,) -> losses (N,) and d(sum of weights * losses)/d hidden, or None."""
        size = max(1, CHUNK_LOGITS // self.weight.shape[0])
        parts = [
            self._chunk(*part)
            for part in zip(hidden.split(size), targets.split(size), weights.split(size), strict=True)
        ]
        losses = torch.cat([loss for loss, _ in parts])
        grads = [grad for _, grad in parts if grad is not None]
        return losses, torch.cat(grads) if grads else None

    def _chunk(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        narrow = hidden.to(self.weight.dtype)
        logits = (narrow @ self.weight.T).to(self.wide)  # (n, V)
        log_z = logits.logsumexp(-1)
        losses = log_z - logits.gather(-1, targets[:, None]).squeeze(-1)
        if self.d_weight is None:
            return losses, None
        # d loss / d logits = softmax - one-hot, in place: this is the largest tensor of the whole objective.
        d_logits = logits.sub_(log_z[:, None]).exp_()
        d_logits[torch.arange(len(targets), device=targets.device), targets] -= 1
        d_logits = d_logits.mul_(weights[:, None].to(self.wide)).to(self.weight.dtype)
        self.d_weight += d_logits.T @ narrow
        return losses, (d_logits @ self.weight).to(hidden.dtype)


class _WeightedCrossEntropy(torch.autograd.Function):
    """sum_i w_i CE_i and the CE_i; differentiable in the head weight, the hidden states and the w_i, once."""

    @staticmethod
    def forward(
        ctx: Any, grad_enabled: bool, head: Tensor, targets: Tensor, weights: Tensor, *hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        device, dtype = head.device.type, hidden[0].dtype
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
        wide = torch.promote_types(dtype, torch.float32)
        # needs_input_grad is told even under no_grad, where measuring a loss must not cost a backward pass.
        wanted = grad_enabled and any(ctx.needs_input_grad)
        sweep = _Chunked(head.to(narrow), wide, head.new_zeros(head.shape, dtype=wide) if wanted else None)
        kept = (targets != IGNORE).flatten().nonzero().squeeze(-1)  # masked tokens never meet the head
        losses = weights.new_zeros((len(hidden), targets.numel()), dtype=wide)
        grads = []
        for i, state in enumerate(hidden):
            flat = state.flatten(0, 1)
            found, grad = sweep.run(flat[kept], targets.flatten()[kept], weights[i].flatten()[kept])
            losses[i, kept] = found
            if grad is not None:
                grads.append(torch.zeros_like(flat).index_copy_(0, kept, grad).view_as(state))
        losses = losses.view_as(weights)
        ctx.head_dtype = head.dtype
        ctx.save_for_backward(losses, sweep.d_weight, *grads)
        ctx.mark_non_differentiable(losses)
        return (weights * losses).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grad = upstream[0]
        losses, d_weight, *d_hidden = ctx.saved_tensors
        d_head = (d_weight * grad).to(ctx.head_dtype) if ctx.needs_input_grad[1] else None
        return None, d_head, None, losses * grad, *(d * grad.to(d.dtype) for d in d_hidden)


def weighted_cross_entropy(
    head_weight: Float[Tensor, "V D"],
    loop_hidden_states: Sequence[Float[Tensor, "B S D"]],
    targets: Int[Tensor, "B S"],
    weights: Float[Tensor, "R B S"],
) -> tuple[Float[Tensor, ""], Float[Tensor, "R B S"]]:
    """sum over loops and tokens of weights * CE, and the CE of every loop and token, in nats.

    targets: the token each position predicts (:func:`shift_labels`), IGNORE where none. With equal weights
    1 / N it equals F.cross_entropy in value and gradient. The scalar is differentiable in the head weight,
    the hidden states and the weights (whose gradient is the CE); the token losses are detached, 0 where
    ignored, and float32 (float64 for float64 states). Not twice differentiable.
    """
    grad_enabled = torch.is_grad_enabled()
    return _WeightedCrossEntropy.apply(grad_enabled, head_weight, targets, weights, *loop_hidden_states)  # pyright: ignore
