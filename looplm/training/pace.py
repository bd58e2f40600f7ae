"""How fast training is: tokens and model FLOPs a second since the last record."""

from dataclasses import dataclass

import torch

from looplm.model.config import LoopedConfig
from looplm.training.depth import head_passes
from looplm.training.stage_recipe import StageRecipe, trains_gate_alone
from looplm.training.telemetry_device import peak_flops, step_flops


@dataclass
class Pace:
    """Sums over training steps; evaluation and saving between them do not count."""

    config: LoopedConfig
    stage: StageRecipe
    device: torch.device
    num_devices: int
    _seconds: float = 0.0
    _tokens: int = 0
    _flops: float = 0.0

    def add(self, seconds: float, num_tokens: int, num_loops: int) -> None:
        """One step over `num_tokens` positions of all ranks, at a depth."""
        self._seconds += seconds
        self._tokens += num_tokens
        seq_len = self.stage.seq_len
        flops = step_flops(
            self.config,
            num_tokens,
            seq_len=seq_len,
            num_loops=num_loops,
            backprop_loops=self.stage.backprop_loops,
            gate_only=trains_gate_alone(self.stage.objective),
            head_passes=head_passes(self.stage.objective, num_loops),
        )
        if self.stage.lora is not None:  # half of the backward pass is the gradients of weights, which are frozen
            flops = (
                flops + step_flops(self.config, num_tokens, seq_len=seq_len, num_loops=num_loops, gate_only=True)
            ) / 2
        self._flops += flops

    def take(self) -> tuple[float, float | None]:
        """Tokens per second, and the share of the devices' peak FLOPs (None where that is unknown); starts anew."""
        peak = peak_flops(self.device, self.stage.precision)
        used = None if peak is None else self._flops / (self._seconds * peak * self.num_devices)
        tokens_per_second = self._tokens / self._seconds
        self._seconds, self._tokens, self._flops = 0.0, 0, 0.0
        return tokens_per_second, used
