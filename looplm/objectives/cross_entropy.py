"""Cross entropy of every loop through one chunked LM head.

The head is applied to a few hundred tokens at a time and the gradient is formed on the spot, so neither
logits nor their gradient ever exist for a whole batch, and the backward pass does not run the head again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

IGNORE = -100
"""Label of a token that is not to be predicted, as in torch.nn.functional.cross_entropy."""

CHUNK_LOGITS = 2**24
"""Logits held at once, at least: 32 MiB in bfloat16. See `rows_in_chunk`."""

TILE_LOGITS = {"cpu": 2**21}
"""Logits whose softmax is taken at once: few enough to stay in a CPU's cache through all passes over them."""

DEVICE_TILE_LOGITS = 2**25
"""The same on a device, where a kernel should be large: 128 MiB in float32."""


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

    Under FSDP2 it is called inside a registered forward method (the shell's `within`): the weight is gathered once,
    however many chunks.
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


def rows_in_chunk(num_vocab: int, hidden_size: int, narrow: torch.dtype, wide: torch.dtype) -> int:
    """Tokens that meet the head at once: their logits take as much memory as the head's gradient, or a little.

    Each chunk adds to that gradient, V * D numbers however few its tokens: with many small chunks this traffic
    would cost as much as the matrix products.
    """
    return max(CHUNK_LOGITS // num_vocab, hidden_size * wide.itemsize // narrow.itemsize, 1)


class _Head:
    """Takes the head over chunks of tokens: their losses, and the gradients if they are wanted.

    All large memory is taken once and used for every chunk of every loop.
    """

    def __init__(self, weight: Tensor, wide: torch.dtype, wants_gradients: bool, num_tokens: int) -> None:
        """weight: (V, D), in the dtype of the matrix products. wide: dtype of the softmax and of all sums."""
        self.weight, self.wide = weight, wide
        num_vocab, hidden_size = weight.shape
        self.num_rows = rows_in_chunk(num_vocab, hidden_size, weight.dtype, wide)
        tile = TILE_LOGITS.get(weight.device.type, DEVICE_TILE_LOGITS)
        self.tile_rows = max(1, tile // num_vocab)
        held = max(1, min(self.num_rows, num_tokens))
        self.logits = weight.new_empty(held, num_vocab)
        same = weight.dtype == wide
        self.tile = None if same else weight.new_empty(min(self.tile_rows, held), num_vocab, dtype=wide)
        self.d_weight = torch.zeros_like(weight, dtype=wide) if wants_gradients else None
        self.product = None if same or not wants_gradients else torch.empty_like(weight)

    def run(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """hidden (N, D), targets and weights (N,) -> losses (N,) and d(sum of weights * losses)/d hidden, or None."""
        narrow = hidden.to(self.weight.dtype)
        losses = torch.empty_like(weights, dtype=self.wide)
        d_hidden = torch.empty_like(narrow) if self.d_weight is not None else None
        # Chunks of even size: a small last one would be slow.
        parts = max(1, math.ceil(len(hidden) / self.num_rows))
        places = zip(*(x.tensor_split(parts) for x in (narrow, targets, weights.to(self.wide), losses)), strict=True)
        grads = d_hidden.tensor_split(parts) if d_hidden is not None else [None] * parts
        for (states, labels, shares, found), grad in zip(places, grads, strict=True):
            logits = torch.mm(states, self.weight.T, out=self.logits[: len(states)])
            found.copy_(self._losses(logits, labels, shares))
            if grad is not None:
                self._add_to_d_weight(logits, states)
                torch.mm(logits, self.weight, out=grad)
        return losses, None if d_hidden is None else d_hidden.to(hidden.dtype)

    def _losses(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Losses (n,) from logits (n, V), which become d(sum of weights * losses)/d logits if it is wanted."""
        size = self.tile_rows
        return torch.cat(
            [
                self._tile_losses(*part)
                for part in zip(logits.split(size), targets.split(size), weights.split(size), strict=True)
            ]
        )

    def _tile_losses(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        tile = logits if self.tile is None else self.tile[: len(logits)].copy_(logits)
        top = tile.amax(-1, keepdim=True)
        chosen = tile.gather(-1, targets[:, None])
        total = tile.sub_(top).exp_().sum(-1, keepdim=True)
        losses = (top + total.log() - chosen).squeeze(-1)
        if self.d_weight is not None:
            # d loss / d logits = softmax - one-hot.
            tile.mul_(weights[:, None] / total).scatter_add_(-1, targets[:, None], -weights[:, None])
            if tile is not logits:
                logits.copy_(tile)
        return losses

    def _add_to_d_weight(self, d_logits: Tensor, hidden: Tensor) -> None:
        assert self.d_weight is not None
        if self.tile is None:
            self.d_weight.addmm_(d_logits.T, hidden)
            return
        product = torch.mm(d_logits.T, hidden, out=self.product)
        # By way of the tile: an addition of two dtypes would make a wide copy of the narrow one.
        wide = self.tile.flatten()
        size = len(wide)
        for total, part in zip(self.d_weight.flatten().split(size), product.flatten().split(size), strict=True):
            total += wide[: len(part)].copy_(part)


class _WeightedCrossEntropy(torch.autograd.Function):
    """sum_i w_i CE_i and the CE_i; differentiable in the head weight, the hidden states and the w_i, once."""

    @staticmethod
    def forward(
        ctx: Any, grad_enabled: bool, head: Tensor, targets: Tensor, weights: Tensor, *hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        device, dtype = head.device.type, hidden[0].dtype
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
        wide = torch.promote_types(dtype, torch.float32)
        # needs_input_grad is told even under no_grad, where measuring a loss must not cost a backward pass; nor must
        # it where only the weights learn, whose gradient is the losses (a frozen model with a gate to train).
        of_head, of_hidden = ctx.needs_input_grad[1], any(ctx.needs_input_grad[4:])
        wanted = grad_enabled and (of_head or of_hidden)
        kept = (targets != IGNORE).flatten().nonzero().squeeze(-1)  # masked tokens never meet the head
        sweep = _Head(head.to(narrow), wide, wanted, len(kept))
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
        of_states = [d * grad.to(d.dtype) for d in d_hidden] or [None] * len(ctx.needs_input_grad[4:])
        return None, d_head, None, losses * grad, *of_states


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
