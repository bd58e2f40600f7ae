"""Held-out loss at every depth during a run, also beyond the trained one: one forward a batch gives them all."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from looplm.data.evaluation_windows import EvaluationWindows
from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.objectives.cross_entropy import IGNORE, shift_labels, weighted_cross_entropy


@dataclass(frozen=True, kw_only=True)
class HeldOutRecord:
    """What one pass over the held-out text found at depths 1, 2, ..."""

    loop_losses: list[float]
    """Nats per predicted token."""
    bits_per_byte: list[float]
    """Of the documents' UTF-8 text, which makes tokenizers comparable."""
    num_tokens: int
    """Predicted tokens."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out windows to measure a model on, `batch_rows` at a time, at depths 1 to `max_loops`.

    Raises UserError for a depth or batch below 1.
    """

    windows: EvaluationWindows
    max_loops: int
    batch_rows: int = 8

    def __post_init__(self) -> None:
        if self.max_loops < 1 or self.batch_rows < 1:
            raise UserError(
                f"max_loops is {self.max_loops} and batch_rows {self.batch_rows}; held-out evaluation needs at least "
                "one loop and one row."
            )

    @torch.no_grad()
    def measure(self, model: LoopLMForCausalLM) -> HeldOutRecord:
        """Measures every depth; the model comes back in the mode, training or not, that it came in.

        With a process group every rank calls this, takes its share of the batches and gets the whole's figures.
        The model runs as it stands, in its own dtype: wrap the call in `torch.autocast` for bfloat16.
        """
        was_training = model.training
        model.eval()
        try:
            nats = torch.zeros(self.max_loops, dtype=torch.float64)
            for batch in self._own_batches():
                batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
                # One registered verb: a sharded model is gathered once a batch, not once for trunk and head each.
                nats += model.within(sum_of_losses, batch, self.max_loops)
        finally:
            model.train(was_training)
        if dist.is_initialized():
            shared = nats.to(model.device)
            dist.all_reduce(shared)
            nats = shared.cpu()
        num_tokens, num_bytes = self.windows.num_predicted_tokens, int(self.windows.document_bytes.sum())
        return HeldOutRecord(
            loop_losses=(nats / num_tokens).tolist(),
            bits_per_byte=(nats / math.log(2) / num_bytes).tolist(),
            num_tokens=num_tokens,
        )

    def _own_batches(self) -> Iterator[dict[str, Tensor]]:
        """This rank's batches, as many as every other rank has: a forward of a sharded model takes all of them."""
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        batches = list(self.windows.batches(self.batch_rows))
        for first in range(0, len(batches), world_size):
            if first + rank < len(batches):
                yield batches[first + rank]
            else:  # nothing left for this rank: it keeps the others company with a batch that predicts nothing
                yield batches[-1] | {"labels": torch.full_like(batches[-1]["labels"], IGNORE)}


def sum_of_losses(model: LoopLMForCausalLM, batch: dict[str, Tensor], num_loops: int) -> Tensor:
    """Nats of a batch's predicted tokens summed, at every loop: (R,) float64, on the CPU."""
    mask, targets = batch["attention_mask"], shift_labels(batch["labels"])
    # Without padding plain causal attention does, and takes the fast kernel.
    output = model.model(batch["input_ids"], None if mask.all() else mask, num_loops=num_loops)
    weights = torch.zeros((num_loops, *targets.shape), device=targets.device)
    _, losses = model.apply_head(weighted_cross_entropy, output.loop_hidden_states, targets, weights)
    return losses.cpu().double().sum((1, 2))
