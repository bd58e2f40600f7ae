"""Losses and gradients that are no numbers, or jump: what a run does with such a step, and with its checkpoints."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from looplm.errors import UserError
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.objectives import expected_loss
from looplm.training import forward as module
from looplm.training.checkpoint import latest_checkpoint, list_checkpoints
from looplm.training.held_out import HeldOut, HeldOutRecord
from looplm.training.recipe import CheckpointsRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

from .runs import SEQ_LEN, run_stage, weights


def poison_loss(
    monkeypatch: pytest.MonkeyPatch, at_call: int, spoilt: float = math.nan, *, for_good: bool = False
) -> None:
    """Not a number, though its gradient is: the loss itself must be looked at. `for_good`: at every later call too."""
    calls = itertools.count(1)

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        loss, metrics = expected_loss(*args, **kwargs)
        call = next(calls)
        extra = spoilt if call == at_call or (for_good and call > at_call) else 0.0
        return loss + extra, {**metrics, "loss": metrics["loss"] + extra}

    monkeypatch.setattr(module, "expected_loss", poisoned)


def poison_gradient(model: torch.nn.Module, at_call: int) -> None:
    calls = itertools.count(1)
    norm = model.get_submodule("model.norm").weight
    norm.register_hook(lambda grad: grad * math.inf if next(calls) == at_call else grad)


def after_three_steps(make_model, make_stage, make_rows) -> dict[str, Tensor]:
    trainer = Trainer(model := make_model(), make_stage(), make_rows(), Telemetry())
    for _ in range(3):
        trainer.train_step()
    return weights(model)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_number_that_is_not_finite_stops_the_run_and_spoils_nothing(
    make_model, make_stage, make_rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: str
):
    """The fourth step fails: parameters are those of the third, in memory and in the checkpoint that is left."""
    good = after_three_steps(make_model, make_stage, make_rows)
    model = make_model()
    if poison == "loss":
        poison_loss(monkeypatch, at_call=4)
    else:
        poison_gradient(model, at_call=4)
    checkpoints = CheckpointsRecipe(every=2)
    trainer = Trainer(model, make_stage(), make_rows(), Telemetry(tmp_path), tmp_path, checkpoints=checkpoints)
    with pytest.raises(UserError, match=r"'first' diverged at step 4: loss (nan|.*norm (nan|inf))") as error:
        trainer.run()
    saved = latest_checkpoint(tmp_path)
    assert saved is not None and f"are those of step 3, saved in {saved.directory};" in str(error.value)
    assert [record.step for record in trainer.telemetry.records] == [1, 2, 3]
    assert all(torch.equal(value, good[name]) for name, value in weights(model).items())

    monkeypatch.undo()
    resumed = Trainer(model := make_model(), make_stage(), make_rows(), Telemetry(), tmp_path)
    resumed.resume(saved.directory)
    assert all(torch.equal(value, good[name]) for name, value in weights(model).items())
    assert resumed.rows.state_dict() == trainer.rows.state_dict(), "behind the bad batch"
    # Going on from the third step's parameters, with no trace of the bad gradient.
    resumed.train_step()
    trainer.train_step()
    for name, value in weights(model).items():
        assert torch.isfinite(value).all() and torch.equal(value, trainer.model.get_parameter(name)), name


@pytest.mark.parametrize("divergence", [{"on_nan": "stop"}, {"on_nan": "skip", "max_skips": 3}])
def test_stops_and_skips_push_no_sound_checkpoint_out(
    make_model, make_stage, make_rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, divergence: dict[str, Any]
):
    """Spoilt from the fifth step on, and resumed again and again: what was saved before stays, and is named."""
    poison_loss(monkeypatch, at_call=5, for_good=True)
    for attempt in range(4):
        trainer = Trainer(
            make_model(), make_stage(num_steps=20, divergence=divergence), make_rows(), Telemetry(), tmp_path,
            checkpoints=CheckpointsRecipe(every=1, keep_last=2),
        )  # fmt: skip
        if attempt:
            latest = latest_checkpoint(tmp_path)
            assert latest is not None
            trainer.resume(latest.directory)
        with pytest.raises(UserError, match="diverged at step") as error:
            trainer.run()
        kept = list_checkpoints(tmp_path / "checkpoints")
        assert [found.step for found in kept] == [3, 4, trainer.step]
        said = str(error.value)
        assert "are those of step 4, saved in" in said and "may be spoilt already" in said
        assert f"go back: delete {kept[-1].directory}, and --resume goes on from 0-first-00000004" in said
        assert ("stages.0.divergence.on_nan=skip" in said) == (divergence["on_nan"] == "stop")
        assert "new run in another directory (--out)" in said


def test_a_run_without_a_directory_promises_no_checkpoint(make_model, make_stage, make_rows, monkeypatch):
    poison_loss(monkeypatch, at_call=1)
    with pytest.raises(UserError, match="diverged at step 1") as error:
        run_stage(make_model(), make_stage(), make_rows())
    assert "saved" not in str(error.value)


def test_a_skipped_step_leaves_parameters_and_moments_alone_and_is_told(
    make_model, make_stage, make_rows, monkeypatch, tmp_path: Path
):
    poison_loss(monkeypatch, at_call=4)
    telemetry = Telemetry(tmp_path, tensorboard=False)
    trainer = Trainer(make_model(), make_stage(divergence={"on_nan": "skip"}), make_rows(), telemetry)
    for _ in range(3):
        trainer.train_step()
    before = weights(trainer.model)
    moments = {p: {k: v.clone() for k, v in state.items()} for p, state in trainer.optimizer.state.items()}
    trainer.train_step()
    assert all(torch.equal(value, before[name]) for name, value in weights(trainer.model).items())
    for parameter, state in trainer.optimizer.state.items():
        assert all(torch.equal(value, moments[parameter][key]) for key, value in state.items())
    assert (trainer.step, trainer.tokens) == (4, 8 * SEQ_LEN)
    trainer.run()
    assert [record.num_skipped for record in telemetry.records] == [1, 1]
    assert '"step": 4, "warning": "Left out: loss nan' in (tmp_path / "telemetry.jsonl").read_text()
    assert any(not torch.equal(value, before[name]) for name, value in weights(trainer.model).items())


@pytest.mark.parametrize(("policy", "told"), [("warn", "Spike: loss"), ("skip", "Left out: loss")])
def test_a_spike_follows_its_policy(make_model, make_stage, make_rows, monkeypatch, tmp_path: Path, policy, told):
    poison_loss(monkeypatch, at_call=10, spoilt=50.0)
    telemetry = Telemetry(tmp_path, tensorboard=False)
    stage = make_stage(num_steps=12, divergence={"on_spike": policy, "window": 8})
    trainer = Trainer(make_model(), stage, make_rows(), telemetry)
    trainer.run()
    assert f'"step": 10, "warning": "{told}' in (tmp_path / "telemetry.jsonl").read_text()
    assert (telemetry.records[-1].num_spikes, telemetry.records[-1].num_skipped) == (1, int(policy == "skip"))


class Ruined(HeldOut):
    """Measures what a model with weights of 1e10 gives."""

    def measure(self, model: LoopLMForCausalLM) -> HeldOutRecord:
        found = super().measure(model)
        return dataclasses.replace(found, loop_losses=[math.nan] * len(found.loop_losses))


def test_a_held_out_loss_that_is_no_number_ends_the_run(make_model, make_stage, make_rows, windows, tmp_path: Path):
    """Whatever becomes of steps: no model that cannot be measured is called done, and skipping is no way out."""
    stage = make_stage(num_steps=4, divergence={"on_nan": "skip"})
    trainer = Trainer(
        make_model(), stage, make_rows(), Telemetry(), tmp_path, held_out=Ruined(windows, 2), held_out_every=2
    )
    with pytest.raises(UserError, match="diverged at step 2: held-out loss nan at 2 loops.*a lower learning") as error:
        trainer.run()
    assert "skip" not in str(error.value)


@pytest.mark.parametrize("at_call", [3, 5])
def test_a_stage_that_ends_among_steps_left_out_is_not_done(
    make_model, make_stage, make_rows, monkeypatch, tmp_path: Path, at_call: int
):
    """A single bad batch may be the last one; a row of them ends the run."""
    poison_loss(monkeypatch, at_call=at_call, for_good=True)
    stage = make_stage(num_steps=5, divergence={"on_nan": "skip"})
    trainer = Trainer(make_model(), stage, make_rows(), Telemetry(), tmp_path)
    if at_call == 5:
        trainer.run()
        return
    with pytest.raises(
        UserError, match="diverged at step 5: its last 3 steps were left out.*those of step 2, saved in"
    ):
        trainer.run()
    saved = latest_checkpoint(tmp_path)
    assert saved is not None and saved.is_diverging()
