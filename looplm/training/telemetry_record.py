"""The figures of one optimizer step, and how the objectives' metrics become them."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from looplm.objectives.expected_loss import Metrics, histogram_quantiles

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Shares of the tokens at which a record's quantiles lie."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One optimizer step, as its own forward computed it. What has a default is missing in older files."""

    stage: str
    step: int
    """Optimizer steps done."""
    num_steps: int
    tokens: int
    """Tokens of this stage so far."""
    loss: float
    loop_losses: list[float]
    """Nats per token at every loop."""
    exit_pdf: list[float]
    """Mean over tokens."""
    entropy: float
    """Mean over tokens of H(exit pdf), nats."""
    expected_loops: float
    """Mean over tokens of the mean of the exit pdf."""
    lr: float
    grad_norm: float
    tokens_per_second: float
    seconds: float
    """Since the stage began."""
    num_loops: int | None = None
    """Depth of this step's forward, where it may differ from step to step."""
    exit_pdf_quantiles: list[list[float]] | None = None
    """(R, 5): of each loop's exit probability over tokens, at QUANTILES."""
    expected_loops_quantiles: list[float] | None = None
    """(5,): of the tokens' expected loops, at QUANTILES."""
    continue_label: list[float] | None = None
    """Stage II: mean label of loops 2..R."""
    routed_share: list[float] | None = None
    """Routing: share of the tokens trained at each loop."""
    state_gradients: list[list[float]] | None = None
    """(R, L): norm of the loss's gradient in the state entering each (loop, layer), in the steps that measure it."""
    flops_utilisation: float | None = None
    """Model FLOPs of the last steps over what the devices could have done; None where their peak is not known."""
    memory_bytes: int | None = None
    """Peak of this process: device memory on CUDA, resident memory on CPU."""
    num_skipped: int = 0
    """Steps of this stage left out so far, for a loss or gradient that was not finite or jumped."""
    num_spikes: int = 0
    """Steps of this stage so far whose loss jumped."""


def depth_fields(metrics: Metrics) -> dict[str, Any]:
    """The fields of a :class:`Record` that an objective's metrics hold, summed over micro-batches and ranks."""
    loops = metrics["exit_pdf"].numel()
    fields: dict[str, Any] = {
        name: _plain(metrics[name])
        for name in ("loss", "loop_losses", "exit_pdf", "entropy", "expected_loops", "continue_label", "routed_share")
        if name in metrics
    }
    fields["exit_pdf_quantiles"] = _plain(histogram_quantiles(metrics["exit_pdf_histogram"], QUANTILES))
    of_loops = histogram_quantiles(metrics["expected_loops_histogram"], QUANTILES, low=1.0, high=float(loops))
    return {**fields, "expected_loops_quantiles": _plain(of_loops)}


def _plain(value: Tensor) -> Any:
    return value.tolist()


def scalars(record: Record) -> dict[str, float]:
    """Every figure of a record under a name of its own, as trackers want them; loops and layers count from 1."""
    named: dict[str, float | None] = {
        name: getattr(record, name)
        for name in (
            "loss", "entropy", "expected_loops", "lr", "grad_norm", "tokens_per_second",
            "num_loops", "flops_utilisation", "memory_bytes", "num_skipped", "num_spikes",
        )
    }  # fmt: skip
    for loop, (loss, share) in enumerate(zip(record.loop_losses, record.exit_pdf, strict=True), start=1):
        named[f"loop_loss/{loop}"], named[f"exit_pdf/{loop}"] = loss, share
    for loop, values in enumerate(record.exit_pdf_quantiles or (), start=1):
        named |= {f"exit_pdf_quantile/{loop}/{at:g}": value for at, value in zip(QUANTILES, values, strict=True)}
    for at, value in zip(QUANTILES, record.expected_loops_quantiles or (), strict=False):
        named[f"expected_loops_quantile/{at:g}"] = value
    for loop, share in enumerate(record.routed_share or (), start=1):
        named[f"routed_share/{loop}"] = share
    for loop, label in enumerate(record.continue_label or (), start=2):
        named[f"continue_label/{loop}"] = label
    for loop, layers in enumerate(record.state_gradients or (), start=1):
        named |= {f"state_gradient/{loop}/{layer}": norm for layer, norm in enumerate(layers, start=1)}
    return {name: float(value) for name, value in named.items() if value is not None}
