"""What the exit gate of a text model is worth: quality at every mean depth, on the recipe's held-out text."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from looplm.data.evaluation_windows import evaluation_windows
from looplm.evaluation.exit_curve import cross_entropy_at, loops_at
from looplm.evaluation.record import DepthRecord, record
from looplm.model.language_model import LoopLM
from looplm.training.recipe import RunRecipe
from looplm.training.run import sample_documents

THRESHOLDS = np.linspace(0, 1, 41)
POINTS_A_LOOP = 4


def frontier_figures(model: LoopLM, tokenizer: PreTrainedTokenizerBase, recipe: RunRecipe) -> dict[str, Any]:
    """Accuracy by loop, and accuracy and nats a token over mean depth when tokens leave by the gate.

    `frontier_accuracy` and `frontier_loss` are curves over mean depths 1 to R, straight between thresholds, as a coin
    between two of them gives (looplm.evaluation.exit_area); the areas are their means over depth. Empty where the
    recipe holds nothing out.
    """
    evaluation, stage = recipe.evaluation, recipe.stages[-1]
    if evaluation is None or stage.data is None:
        return {}
    documents = sample_documents(evaluation.data, stage.data, tokenizer, evaluation.max_tokens)
    windows = evaluation_windows(documents, tokenizer, evaluation.seq_len or stage.seq_len)
    found = record(model, windows.batches(evaluation.batch_rows), windows.document_bytes)
    accuracy = (found.predictions == found.targets).double().mean(1).tolist()
    figures: dict[str, Any] = {"accuracy": accuracy[-1], "accuracy_by_loop": accuracy}
    if found.num_loops == 1:
        return figures
    depth, right, nats = gate_frontier(found)
    x = np.linspace(1, found.num_loops, POINTS_A_LOOP * (found.num_loops - 1) + 1)
    for name, y in (("accuracy", right), ("loss", nats)):
        line = np.interp(x, depth, y)
        figures[f"frontier_{name}"] = {"x": x.tolist(), "y": line.tolist()}
        figures[f"frontier_{name}_area"] = float(np.trapezoid(line, x) / (found.num_loops - 1))
    return figures


def gate_frontier(found: DepthRecord) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean depth, accuracy and nats a token at each of THRESHOLDS and at both ends, by rising depth."""
    points = []
    for threshold in THRESHOLDS:
        loops = loops_at(found, float(threshold), found.num_loops)
        points.append(_point(found, loops))
    points.append(_point(found, torch.ones_like(found.targets)))
    points.append(_point(found, torch.full_like(found.targets, found.num_loops)))
    depth, right, nats = np.array(sorted(points)).T
    return depth, right, nats


def _point(found: DepthRecord, loops: torch.Tensor) -> tuple[float, float, float]:
    right = found.predictions.gather(0, loops[None] - 1)[0] == found.targets
    nats = cross_entropy_at(found, loops)
    return float(loops.double().mean()), float(right.double().mean()), float(nats.double().mean())
