"""Losses and gradients that must not reach the optimizer: not finite, or far above what the last steps had."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Literal

from looplm.training.checkpoint import Checkpoint
from looplm.training.stage_recipe import DivergenceRecipe

LEAST_DEVIATION = 1e-3
"""A loss that hardly moves has no spread to speak of: at least this share of its mean counts as one deviation."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of a step."""

    action: Literal["go", "warn", "skip", "stop"]
    reason: str = ""
    """What was seen, with the figures; empty for "go"."""
    setting: Literal["on_nan", "on_spike", "max_skips"] | None = "on_nan"
    """The field of :class:`DivergenceRecipe` that decided; None where none can, since the parameters are ruined."""


class DivergenceWatch:
    """Judges every step by its loss and gradient norm, before the optimizer sees it (:class:`DivergenceRecipe`).

    A spike needs a full window of accepted steps before it. Skipped steps do not enter the window; those that were
    only warned of do, so a loss that has moved for good is not reported for ever.
    """

    def __init__(self, recipe: DivergenceRecipe) -> None:
        self.recipe = recipe
        self.losses: deque[float] = deque(maxlen=recipe.window)
        self.skips_in_a_row = self.num_skipped = self.num_spikes = 0
        """Steps left out in a row and in all, and steps whose loss jumped, whatever became of them."""

    def judge(self, loss: float, grad_norm: float) -> Verdict:
        """The verdict on a step; it counts. One that stops the run is left out as well."""
        verdict = self._verdict(loss, grad_norm)
        if verdict.action in ("go", "warn"):
            self.losses.append(loss)
            self.skips_in_a_row = 0
            return verdict
        self.skips_in_a_row += 1
        self.num_skipped += 1
        if verdict.action == "skip" and self.skips_in_a_row > self.recipe.max_skips:
            reason = f"{verdict.reason}, after {self.recipe.max_skips} skipped steps in a row"
            return Verdict("stop", reason, "max_skips")
        return verdict

    def _verdict(self, loss: float, grad_norm: float) -> Verdict:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return Verdict(self.recipe.on_nan, f"loss {loss}, gradient norm {grad_norm}")
        if self.recipe.on_spike == "ignore" or len(self.losses) < self.recipe.window:
            return Verdict("go")
        mean = fmean(self.losses)
        deviation = max(pstdev(self.losses), LEAST_DEVIATION * abs(mean))
        if loss <= mean + self.recipe.spike_sigmas * deviation:
            return Verdict("go")
        self.num_spikes += 1
        return Verdict(
            self.recipe.on_spike,
            f"loss {loss:.4f} is {(loss - mean) / deviation:.1f} standard deviations above the mean {mean:.4f} of the "
            f"last {self.recipe.window} steps",
            "on_spike",
        )

    def state_dict(self) -> dict[str, Any]:
        """The window, as JSON holds it."""
        return {
            "losses": list(self.losses),
            "skips_in_a_row": self.skips_in_a_row,
            "num_skipped": self.num_skipped,
            "num_spikes": self.num_spikes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state; of a longer window the latest losses are kept."""
        self.losses = deque(state["losses"], maxlen=self.recipe.window)
        self.skips_in_a_row = state["skips_in_a_row"]
        self.num_skipped, self.num_spikes = state["num_skipped"], state["num_spikes"]


def what_to_do(verdict: Verdict, stage_index: int, checkpoints: list[Checkpoint]) -> str:
    """What can be done after a stop: go on without such steps, go back, or train anew with other values.

    `checkpoints` are those of the stage, the one saved by the stop among them; none without a run directory.
    """
    ways = []
    going_on = "--resume with" if checkpoints else "train with"
    field = f"stages.{stage_index}.divergence"
    if verdict.setting in ("on_nan", "on_spike"):
        ways.append(f"{going_on} {field}.{verdict.setting}=skip, which leaves such steps out")
    elif verdict.setting == "max_skips" and not checkpoints:
        ways.append(f"{going_on} a greater {field}.max_skips")
    sound = [checkpoint for checkpoint in checkpoints if not checkpoint.is_diverging()]
    if sound:
        later = [str(found.directory) for found in checkpoints if found > sound[-1]]
        ways.append(
            f"go back: delete {' and '.join(later)}, and --resume goes on from {sound[-1].directory.name}, which was "
            "saved before (if that one is spoilt too, delete it as well)"
        )
    place = " in another directory (--out)" if checkpoints else ""
    ways.append(f"begin a new run{place} with a lower learning rate, a longer warmup or other data")
    return "What can be done: " + "; or ".join(ways) + "."
