"""Forward and backward over one step's rows, part by part and rank by rank, with sums that are those of the whole."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from looplm.hf.modeling import LoopLMForCausalLM
from looplm.model.config import LoopedConfig
from looplm.objectives.cross_entropy import IGNORE
from looplm.objectives.expected_loss import Metrics
from looplm.training.distributed import Ranks, defer_reduction
from looplm.training.forward import weigh_loops
from looplm.training.memory import fit_micro_batch_rows
from looplm.training.rows import Batch
from looplm.training.stage_recipe import StageRecipe

NUM_SIGNALS = 65
"""Signal numbers lie below."""


def rows_of_forwards(
    config: LoopedConfig,
    stage: StageRecipe,
    step_rows: Iterable[int],
    ranks: Ranks,
    before: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """By a rank's rows of a step, the rows of one forward: the recipe's, or as many as fit into this rank's memory.

    before: what the run had found when it was saved, perhaps on another machine. It is kept where it fits, since other
        parts add up in another order. Raises UserError where a single row does not fit.
    """
    memory, dense_mask = ranks.memory_bytes(), ranks.device.type != "cuda"
    if stage.micro_batch_rows is not None:
        return dict.fromkeys(step_rows, stage.micro_batch_rows)

    def fit(rows: int) -> int:
        if memory is None:
            return rows
        return fit_micro_batch_rows(config, stage, rows, memory, ranks.world_size, dense_mask=dense_mask)

    found = {}
    for rows in step_rows:
        earlier = (before or {}).get(rows)
        found[rows] = earlier if earlier is not None and fit(earlier) == earlier else fit(rows)
    return found


def accumulate(
    model: LoopLMForCausalLM, batch: Batch, stage: StageRecipe, ranks: Ranks, *, num_loops: int, micro_batch_rows: int
) -> Metrics:
    """Adds to the parameters the gradient of this rank's rows, and sums it over ranks; returns the rank's metrics.

    Loss and metrics are means over the predicted tokens of the whole step: what the ranks get adds up to them.
    Gradients travel once, with the last part.
    """
    # A mean of the parts' means would weigh their tokens unevenly.
    predicted = (batch["labels"][:, 1:] != IGNORE).sum().to(ranks.device)
    num_predicted = int(ranks.sum(predicted))
    num_rows = len(batch["input_ids"])
    total: Metrics = {}
    for first in range(0, num_rows, micro_batch_rows):
        last = first + micro_batch_rows
        part = {name: rows[first:last].to(ranks.device) for name, rows in batch.items()}
        defer_reduction(model, last < num_rows)
        with autocast(stage, ranks):
            loss, metrics = model.within(weigh_loops, part, stage, num_loops, num_predicted)
        loss.backward()
        total = {name: total[name] + value if total else value for name, value in metrics.items()}
    return total


def autocast(stage: StageRecipe, ranks: Ranks) -> AbstractContextManager[object]:
    """The precision of a stage's matrix products."""
    return torch.autocast(ranks.device.type, torch.bfloat16) if stage.precision == "bf16" else nullcontext()


def agree(metrics: Metrics, received: int | None, ranks: Ranks) -> tuple[Metrics, int | None]:
    """Sums metrics over ranks and, in the same exchange, tells all of them of a signal that any has received."""
    if ranks.world_size == 1:
        return metrics, received
    flags = torch.zeros(NUM_SIGNALS, dtype=torch.float64, device=ranks.device)
    if received is not None:
        flags[received] = 1.0
    shared = ranks.sum(torch.cat([flags, *(value.double().flatten() for value in metrics.values())]))
    asked = shared[:NUM_SIGNALS].nonzero()
    parts = shared[NUM_SIGNALS:].split([value.numel() for value in metrics.values()])
    summed = {
        name: part.view_as(value).to(value.dtype) for (name, value), part in zip(metrics.items(), parts, strict=True)
    }
    return summed, int(asked[0]) if len(asked) else None
