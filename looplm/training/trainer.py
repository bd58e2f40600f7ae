"""The training loop: draw, forward, weigh the loops, backward, clip, judge, step, tell, save.

Nothing in a step depends on what was drawn before it: the depth is a function of (seed, step), rows come from a
stream that knows its position, and torch's generator is seeded from (seed, stage, step, rank) at every step of a run.
So a checkpoint holds no random state, and a resumed run is the straight run, bit for bit.
"""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.objectives.expected_loss import Metrics
from looplm.training.checkpoint import (
    checkpoint_name,
    damaged,
    list_checkpoints,
    load_tensors,
    quiet_alone,
    read_name,
    reason_of,
    tensors_of,
)
from looplm.training.depth import depth_of_step
from looplm.training.distributed import Ranks, gathered_no_more, shard
from looplm.training.divergence import DivergenceWatch, Verdict, what_to_do
from looplm.training.gate_alarm import GateAlarm
from looplm.training.gradients import measure_state_gradients
from looplm.training.held_out import HeldOut
from looplm.training.interrupt import Interrupted, StopSignals
from looplm.training.layer_wrapping import wrap_layers
from looplm.training.micro_batches import accumulate, agree, autocast, rows_of_forwards
from looplm.training.optimizer import OptimizerState, build_optimizer, carry_over, freeze_for
from looplm.training.pace import Pace
from looplm.training.recipe import CheckpointsRecipe
from looplm.training.rows import Batch, Rows
from looplm.training.saving import Saver
from looplm.training.schedule import learning_rate_share
from looplm.training.stage_recipe import StageRecipe
from looplm.training.steps import StepPlan
from looplm.training.telemetry import Record, Telemetry
from looplm.training.telemetry_device import peak_memory_bytes
from looplm.training.telemetry_record import depth_fields


class Trainer:
    """Runs one stage over one model, in one process or as one of many. Telemetry comes from the forward that trains.

    Args:
        model: on the device it is to be trained on; sharded here where there is a process group.
        rows: of which each step takes this rank's share.
        telemetry: of several ranks, one should have sinks.
        run_dir: where checkpoints go, and whether there are any. With it, SIGTERM and Ctrl-C finish the step, save
            and raise :class:`~looplm.training.interrupt.Interrupted`; without it, they do what they always do.
        seed: of the depths and whatever else a step draws.
        num_steps: where the stage's own length is in epochs; None to take it from the recipe.
        held_out, held_out_every: what is measured every so many steps, and after the last one.
        state_gradients_every: steps between measurements of the gradient entering each loop and layer.
        optimizer_state: what the stage before left (:func:`~looplm.training.optimizer.optimizer_state`); taken over
            if it trained the same parameters, unless the recipe wants fresh moments.
        stage_index: place of the stage in its run, 0-based; orders checkpoints.

    Raises UserError for a batch that the ranks cannot share and for checkpoints without a place. `run` raises it when
    the loss or gradient is not finite or jumps, and the recipe says to stop: the step is named, and the parameters are
    those before it.
    """

    def __init__(
        self,
        model: LoopLMForCausalLM,
        stage: StageRecipe,
        rows: Rows,
        telemetry: Telemetry,
        run_dir: Path | None = None,
        *,
        seed: int = 0,
        num_steps: int | None = None,
        checkpoints: CheckpointsRecipe | None = None,
        held_out: HeldOut | None = None,
        held_out_every: int | None = None,
        state_gradients_every: int | None = None,
        optimizer_state: OptimizerState | None = None,
        stage_index: int = 0,
    ) -> None:
        self.model, self.stage, self.rows, self.telemetry = model, stage, rows, telemetry
        self.seed, self.stage_index = seed, stage_index
        self.held_out, self.held_out_every = held_out, held_out_every
        self.state_gradients_every = state_gradients_every
        self.checkpoints = checkpoints or CheckpointsRecipe()
        self.ranks = Ranks.current()
        self.plan = StepPlan(stage, num_steps)
        self.plan.check_ranks(self.ranks.world_size)
        self.saver = self._saver(run_dir)
        self.step = self.tokens = 0
        """Optimizer steps done, those left out included, and tokens (positions) they have read on all ranks."""
        self.seconds = 0.0
        """Spent in this stage, before a resume too."""
        self.watch = DivergenceWatch(stage.divergence)
        self.pace = Pace(model.model.config, stage, self.ranks.device, self.ranks.world_size)
        self.alarm = GateAlarm(stage.objective)
        self._held_out_loss: float | None = None
        self._forward_rows = self._fit()
        """By this rank's rows of a step: those of one forward."""
        self._signals = StopSignals()
        self._asked_to_stop: int | None = None
        freeze_for(model, stage.objective, stage.freeze, stage.lora)
        shard(model, self.ranks)
        wrap_layers(model, stage.compile, stage.activation_checkpointing)
        self.optimizer = build_optimizer(model, stage.optimizer)
        if optimizer_state is not None and not stage.reset_optimizer:
            carry_over(model, self.optimizer, optimizer_state)

    def _saver(self, run_dir: Path | None) -> Saver | None:
        if run_dir is not None:
            return Saver(run_dir / "checkpoints", self.stage_index, self.checkpoints, self.ranks)
        if self.checkpoints.every is not None:
            raise UserError(
                f"Stage {self.stage.name!r} asks for a checkpoint every {self.checkpoints.every} steps, but there is "
                "no run directory to write it to."
            )
        return None

    # --- The run ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains from the current step to the end of the stage; leaves the model in eval mode, its layers bare.

        The last step is measured and saved too. Torch's global random state is left as it was.
        """
        self._refuse_a_later_checkpoint()
        self.model.train()
        with ExitStack() as stack:
            gpus = [self.ranks.device] if self.ranks.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=gpus))
            stack.enter_context(quiet_alone())
            stack.enter_context(self.telemetry.stage())
            if self.saver is not None:
                stack.enter_context(self.saver)
                self._signals = stack.enter_context(StopSignals())
            began = time.perf_counter() - self.seconds
            while self.step < self.plan.num_steps:
                seed_torch(step_seed(self.seed, self.stage_index, self.step, self.ranks.rank), self.ranks.device)
                result = self.train_step()
                self.seconds = time.perf_counter() - began
                if self._is_told(result):
                    self._tell(result)
                self._after_step()
            if self.saver is not None:
                self.saver.finish()
        self.model.eval()
        wrap_layers(self.model, False, "none")

    def _after_step(self) -> None:
        """Measures and saves where it is due, and leaves where that was asked."""
        last = self.step == self.plan.num_steps
        stop = self._asked_to_stop
        if last and (skips := self.watch.skips_in_a_row) > 1:
            # One bad batch may well be the last; a row of them is a model that gives no loss any more.
            raise UserError(self._stopped(Verdict("stop", f"its last {skips} steps were left out", setting=None)))
        if stop is None and self.held_out is not None and (last or is_due(self.held_out_every, self.step)):
            self._measure_held_out(self.held_out)
        if self.saver is None:
            return
        self._tell_of_failed_save()
        if stop is None and (last or is_due(self.checkpoints.every, self.step)):
            self._begin_save(self.saver)
        elif stop is not None:
            raise Interrupted(stop, self.step, self.save())

    def train_step(self) -> "StepResult":
        """One optimizer step.

        A loss or gradient that the recipe wants left out leaves parameters and optimizer untouched; the step counts.
        """
        began, step = time.perf_counter(), self.step
        num_loops = depth_of_step(self.stage, self.model.model.config.num_loops, self.seed, step)
        lr = self.stage.optimizer.lr * learning_rate_share(self.stage.schedule, step, self.plan.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()  # of what an interrupted step may have left
        batch = self._take(self.plan.rows_at(step) // self.ranks.world_size)
        measured = is_due(self.state_gradients_every, step + 1)
        with measure_state_gradients(self.model.model) if measured else nullcontext() as gradients:
            own = accumulate(
                self.model, batch, self.stage, self.ranks,
                num_loops=num_loops, micro_batch_rows=self._forward_rows[len(batch["input_ids"])],
            )  # fmt: skip
        metrics, self._asked_to_stop = agree(own, self._signals.received, self.ranks)
        grad_norm = self._clip()
        verdict = self.watch.judge(float(metrics["loss"]), grad_norm)
        if verdict.action in ("go", "warn"):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.step, self.tokens, self._held_out_loss = step + 1, self.plan.tokens_before(step + 1), None
        self.pace.add(time.perf_counter() - began, self.tokens - self.plan.tokens_before(step), num_loops)
        if verdict.action != "go":
            self._act_on(verdict)
        norms = None if gradients is None else gradients.norms(num_loops).tolist()
        return StepResult(metrics, grad_norm, lr, num_loops, norms)

    def _take(self, num_rows: int) -> Batch:
        batch = self.rows.take(num_rows)
        shape, wanted = tuple(batch["input_ids"].shape), (num_rows, self.stage.seq_len)
        if shape != wanted:
            raise UserError(
                f"Stage {self.stage.name!r} wants {wanted[0]} rows of seq_len {wanted[1]}, and the data gives "
                f"{' x '.join(map(str, shape))}."
            )
        return batch

    def _fit(self, before: dict[int, int] | None = None) -> dict[int, int]:
        """The rows of a forward for every size of the batch; those found `before` are kept where they fit."""
        sizes = [tokens // self.stage.seq_len // self.ranks.world_size for _, tokens in self.plan.levels]
        return rows_of_forwards(self.model.model.config, self.stage, sizes, self.ranks, before)

    def _clip(self) -> float:
        """Clips the whole gradient to the recipe's norm; returns the norm it had."""
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        norm = clip_grad_norm_(trainable, self.stage.optimizer.grad_clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _measure_held_out(self, held_out: HeldOut) -> None:
        with autocast(self.stage, self.ranks):
            measured = held_out.measure(self.model)
        gathered_no_more(self.model)
        depth = min(self.model.model.config.num_loops, held_out.max_loops)
        self._held_out_loss = measured.loop_losses[depth - 1]
        with self._telling():
            self.telemetry.log_held_out(self.stage.name, self.step, measured)
        if not math.isfinite(self._held_out_loss):
            # No step is to blame, so leaving steps out is no help.
            reason = f"held-out loss {self._held_out_loss} at {depth} loops"
            raise UserError(self._stopped(Verdict("stop", reason, setting=None)))

    # --- What is told -----------------------------------------------------------------------------------------------

    def _is_told(self, result: "StepResult") -> bool:
        first_or_last = self.step in (1, self.plan.num_steps)
        return first_or_last or is_due(self.stage.log_every, self.step) or result.state_gradients is not None

    def _tell(self, result: "StepResult") -> None:
        tokens_per_second, flops_utilisation = self.pace.take()
        record = Record(
            stage=self.stage.name,
            step=self.step,
            num_steps=self.plan.num_steps,
            tokens=self.tokens,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens_per_second=tokens_per_second,
            seconds=self.seconds,
            num_loops=result.num_loops,
            state_gradients=result.state_gradients,
            flops_utilisation=flops_utilisation,
            memory_bytes=peak_memory_bytes(self.ranks.device),
            num_skipped=self.watch.num_skipped,
            num_spikes=self.watch.num_spikes,
            **depth_fields(result.metrics),
        )
        with self._telling():
            self.telemetry.log(record)
        for warning in self.alarm.check(record):
            self._warn(warning)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"Stage {self.stage.name!r}, step {self.step}: telemetry could not be written: {error}. Make room, "
                "and resume from the last checkpoint."
            ) from error

    def _warn(self, message: str) -> None:
        with self._telling():
            self.telemetry.warn(self.stage.name, self.step, message)

    def _act_on(self, verdict: Verdict) -> None:
        """Warns of a step that was not plainly good; on "stop" saves the state before it and raises UserError."""
        if verdict.action == "warn":
            self._warn(f"Spike: {verdict.reason}.")
        elif verdict.action == "skip":
            self._warn(f"Left out: {verdict.reason}.")
        else:
            raise UserError(self._stopped(verdict))

    def _stopped(self, verdict: Verdict) -> str:
        """Saves a diverged run and says where it is left, and what can be done."""
        kept, checkpoints = "", []
        if self.saver is not None:
            kept = f", saved in {self.save(diverging=True)}; they may be spoilt already"
            checkpoints = [
                found for found in list_checkpoints(self.saver.root) if found.stage_index == self.stage_index
            ]
        return (
            f"Stage {self.stage.name!r} diverged at step {self.step}: {verdict.reason}. The parameters are those of "
            f"step {self.step - self.watch.skips_in_a_row}{kept}. {what_to_do(verdict, self.stage_index, checkpoints)}"
        )

    # --- Saving and resuming ----------------------------------------------------------------------------------------

    def save(self, *, diverging: bool = False) -> Path:
        """Writes all that resuming needs and returns where it is, once it is there.

        One saved while the run is `diverging`, or among steps left out, does not push sound ones out.

        Raises UserError without a run directory or on a full disk; checkpoints before it and the state in memory are
        as they were, and saving can be tried again.
        """
        if self.saver is None:
            raise UserError("This trainer has no run directory to save to.")
        with quiet_alone():
            self._begin_save(self.saver, diverging=diverging)
            self.saver.finish()
        return self.saver.root / self._name()

    def _name(self) -> str:
        return checkpoint_name(self.stage_index, self.stage.name, self.step)

    def _begin_save(self, saver: Saver, *, diverging: bool = False) -> None:
        progress = {
            "stage": self.stage.name,
            "stage_index": self.stage_index,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "held_out_loss": self._held_out_loss,
            "diverging": diverging or self.watch.skips_in_a_row > 0,
            "watch": self.watch.state_dict(),
            "alarm": self.alarm.state_dict(),
            "data": self.rows.state_dict(),
            "forward_rows": list(self._forward_rows.items()),
        }
        saver.start(self._name(), tensors_of(self.model, self.optimizer), progress)

    def _tell_of_failed_save(self) -> None:
        """A checkpoint lost on the way is no reason to lose the run: the next one may find room."""
        assert self.saver is not None
        failure = self.saver.take_failure()
        if failure is not None:
            self._warn(f"{failure} Training goes on without it.")

    def resume(self, directory: Path) -> None:
        """Continues from a checkpoint, bit for bit: parameters, optimizer, data position, what the watches have seen.

        It may have been written by any number of processes. What telemetry was told after it is taken back, since
        the resumed run tells it again. Raises UserError when there is no such checkpoint, or one of another stage,
        model or data, or one that is damaged.
        """
        checkpoint = read_name(directory)
        if checkpoint is None or not directory.is_dir():
            raise UserError(f"There is no checkpoint to resume at {directory}.")
        progress = checkpoint.progress()
        if (progress["stage_index"], progress["stage"]) != (self.stage_index, self.stage.name):
            raise UserError(
                f"The checkpoint {directory} is of stage {progress['stage_index']} ({progress['stage']}); this is "
                f"stage {self.stage_index} ({self.stage.name})."
            )
        try:
            self.rows.load_state_dict(progress["data"])
            self.watch.load_state_dict(progress["watch"])
            self.alarm.load_state_dict(progress["alarm"])
            forward_rows = dict(progress["forward_rows"])
        except UserError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(directory, f"in progress.json, {type(error).__name__}: {reason_of(error)}") from error
        with quiet_alone():
            load_tensors(directory, self.model, self.optimizer)
        self.step, self.tokens, self.seconds = progress["step"], progress["tokens"], progress["seconds"]
        self._held_out_loss = progress["held_out_loss"]
        self._forward_rows = self._fit(forward_rows)
        self.telemetry.rewind(self.stage.name, self.step)

    def _refuse_a_later_checkpoint(self) -> None:
        """One of a later step would be taken for this run's own: pruned against it, and resumed from."""
        if self.saver is None:
            return
        later = [
            checkpoint.directory
            for checkpoint in list_checkpoints(self.saver.root)
            if checkpoint.stage_index == self.stage_index and checkpoint.step > self.step
        ]
        if later:
            raise UserError(
                f"{self.saver.root} holds checkpoints of later steps ({', '.join(path.name for path in later)}), and "
                f"this run is at step {self.step}. Resume from the last of them, move them away, or choose another "
                "run directory."
            )


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step found."""

    metrics: Metrics
    """The objective's, over the tokens of all micro-batches and ranks."""
    grad_norm: float
    """Of the whole gradient, before clipping."""
    lr: float
    num_loops: int
    """Depth of its forward."""
    state_gradients: list[list[float]] | None
    """(R, L), in the steps that measure it."""


def is_due(every: int | None, step: int) -> bool:
    """Whether something done every so many steps comes after `step` of them."""
    return every is not None and step % every == 0


def step_seed(seed: int, stage_index: int, step: int, rank: int) -> int:
    """Where torch's generator starts in a step: other ranks hold other rows, and draw other numbers."""
    return int(np.random.SeedSequence(seed, spawn_key=(stage_index, step, rank)).generate_state(1, np.uint64)[0] >> 1)


def seed_torch(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the CPU and one GPU; on a machine without GPUs that keeps a stack trace for each kind of
    device that might come later, which takes longer than a small model's optimizer step."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
