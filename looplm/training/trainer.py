"""The training loop: draw, forward, weigh the loops, backward, clip, step, tell."""

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.objectives import expected_loss, gate_loss
from looplm.objectives.cross_entropy import IGNORE
from looplm.training.checkpoint import load_state, save_state
from looplm.training.gate_alarm import gate_alarm
from looplm.training.optimizer import build_optimizer, freeze_for
from looplm.training.recipe import ExpectedLossRecipe, StageRecipe
from looplm.training.schedule import learning_rate_share
from looplm.training.telemetry import Record, Telemetry

Batch = dict[str, Tensor]


class BatchStream(Protocol):
    """Endless batches of input_ids, labels and document_ids, all (B, S), that can be resumed where they stood."""

    def __next__(self) -> Batch: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; without it bf16 autocast is slower than float32."""
    # There is no public query; these two are what PyTorch's own kernels ask.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


class Trainer:
    """Runs one stage over one model. Telemetry comes from the same forward that trains.

    Raises UserError when the loss or the gradient stops being finite, naming the step; the parameters are then
    still those before it, and the last checkpoint in `run_dir` is untouched.
    """

    def __init__(
        self,
        model: LoopLMForCausalLM,
        stage: StageRecipe,
        batches: BatchStream,
        telemetry: Telemetry,
        run_dir: Path | None = None,
    ) -> None:
        if stage.checkpoint_every is not None and run_dir is None:
            raise UserError(
                f"Stage {stage.name!r} asks for a checkpoint every {stage.checkpoint_every} steps, but there is no "
                "run directory to write it to."
            )
        self.model, self.stage, self.batches, self.telemetry = model, stage, batches, telemetry
        self.state_dir = run_dir / f"{stage.name}.state" if run_dir is not None else None
        self.step = self.tokens = 0
        self.seconds = 0.0
        """Spent in this stage, before a resume too."""
        self.alarmed = False
        freeze_for(model, stage.objective)
        self.optimizer = build_optimizer(model, stage.optimizer)
        if stage.compile:
            for layer in (*model.model.prelude, *model.model.layers, *model.model.coda):
                layer.compile()

    def run(self) -> None:
        """Trains from the current step to the end of the stage; leaves the model in eval mode."""
        self.model.train()
        began = time.perf_counter() - self.seconds
        window_seconds, window_tokens = self.seconds, self.tokens
        with self.telemetry.stage():
            while self.step < self.stage.num_steps:
                metrics = self.train_step()
                self.seconds = time.perf_counter() - began
                if self.step % self.stage.log_every == 0 or self.step in (1, self.stage.num_steps):
                    pace = (self.tokens - window_tokens) / (self.seconds - window_seconds)
                    window_seconds, window_tokens = self.seconds, self.tokens
                    self._tell(metrics, pace)
                every = self.stage.checkpoint_every
                if every is not None and self.step % every == 0:
                    self.save()
        self.model.eval()

    def train_step(self) -> dict[str, Tensor]:
        """One optimizer step. Returns the objective's metrics and `grad_norm`, `lr`."""
        lr = self.stage.optimizer.lr * learning_rate_share(self.stage.schedule, self.step, self.stage.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()  # of what an interrupted step may have left
        micro_batches = [next(self.batches) for _ in range(self.stage.micro_batches)]
        # The mean is over the tokens of the whole batch: a mean of micro-batch means would weigh them unevenly.
        num_tokens = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in micro_batches)
        total: dict[str, Tensor] = {}
        for batch in micro_batches:
            loss, metrics = self._objective(batch, num_tokens)
            loss.backward()
            total = {name: total[name] + value if total else value for name, value in metrics.items()}
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        grad_norm = clip_grad_norm_(trainable, self.stage.optimizer.grad_clip)
        if not math.isfinite(float(total["loss"])) or not math.isfinite(float(grad_norm)):
            raise UserError(self._diverged(total["loss"], grad_norm))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.tokens += num_tokens
        return {**total, "grad_norm": grad_norm, "lr": torch.tensor(lr)}

    def _objective(self, batch: Batch, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        device = self.model.device
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        bf16 = self.stage.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            output = self.model.model(
                batch["input_ids"], document_ids=batch["document_ids"], num_loops=self.stage.num_loops
            )
            recipe = self.stage.objective
            if isinstance(recipe, ExpectedLossRecipe):
                return expected_loss(
                    self.model, output, batch["labels"],
                    beta=recipe.beta, smoothing=recipe.smoothing, num_tokens=num_tokens,
                )  # fmt: skip
            return gate_loss(
                self.model, output, batch["labels"], label_shift=recipe.label_shift, num_tokens=num_tokens
            )

    def _tell(self, metrics: dict[str, Tensor], pace: float) -> None:
        record = Record(
            stage=self.stage.name,
            step=self.step,
            num_steps=self.stage.num_steps,
            tokens=self.tokens,
            loss=float(metrics["loss"]),
            loop_losses=metrics["loop_losses"].tolist(),
            exit_pdf=metrics["exit_pdf"].tolist(),
            entropy=float(metrics["entropy"]),
            expected_loops=float(metrics["expected_loops"]),
            lr=float(metrics["lr"]),
            grad_norm=float(metrics["grad_norm"]),
            tokens_per_second=pace,
            seconds=self.seconds,
        )
        self.telemetry.log(record)
        recipe = self.stage.objective
        alarm = gate_alarm(record.exit_pdf, recipe.beta if isinstance(recipe, ExpectedLossRecipe) else None)
        if alarm is not None and not self.alarmed:
            self.telemetry.warn(self.stage.name, self.step, alarm)
        self.alarmed = alarm is not None

    def _diverged(self, loss: Tensor, grad_norm: Tensor) -> str:
        kept = f" The last checkpoint is {self.state_dir}." if self.state_dir and self.state_dir.exists() else ""
        return (
            f"Stage {self.stage.name!r} diverged at step {self.step + 1}: loss {float(loss)}, gradient norm "
            f"{float(grad_norm)}. The parameters are those of step {self.step}.{kept} Lower the learning rate, "
            "lengthen the warmup, or look at the batch."
        )

    def save(self) -> None:
        """Writes all that resuming needs, atomically. Raises UserError without a run directory or on a full disk."""
        if self.state_dir is None:
            raise UserError("This trainer has no run directory to save to.")
        save_state(self.state_dir, self._state())

    def resume(self) -> None:
        """Continues from the last `save`, bit for bit: parameters, optimizer, data position, random state.

        What telemetry was told after that save is taken back, since the resumed run tells it again. Raises
        UserError when there is no such state, or one of another model, optimizer or data.
        """
        if self.state_dir is None:
            raise UserError("This trainer has no run directory to resume from.")
        state = self._state()
        load_state(self.state_dir, state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["data"])
        torch.set_rng_state(state["rng"])
        progress = state["progress"]
        self.step, self.tokens, self.seconds = progress["step"], progress["tokens"], progress["seconds"]
        self.alarmed = progress["alarmed"]
        self.telemetry.rewind(self.stage.name, self.step)

    def _state(self) -> dict[str, Any]:
        if not self.optimizer.state:
            _materialise(self.optimizer)
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "data": self.batches.state_dict(),
            "rng": torch.get_rng_state(),
            "progress": {
                "step": self.step,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "alarmed": self.alarmed,
            },
        }


def _materialise(optimizer: torch.optim.Optimizer) -> None:
    """Creates an optimizer's state as it is before the first step, so that it can be saved and loaded into."""
    # A step of zero gradient at zero learning rate makes it; it must not count as one in Adam's bias correction.
    lrs = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for parameter_state in optimizer.state.values():
        parameter_state["step"].zero_()
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
