"""The loop: it learns, adds micro-batches exactly, trains what the stage says, and stops where the numbers end."""

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from looplm.errors import UserError
from looplm.objectives import expected_loss, gate_loss
from looplm.training import trainer as module
from looplm.training.optimizer import freeze_for
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer, cpu_has_bf16

GATE_STAGE: dict[str, Any] = {"name": "gate", "objective": {"kind": "gate_loss"}}


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Repeat:
    """The same batch over and over."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __iter__(self) -> "Repeat":
        return self

    def __next__(self) -> dict[str, Tensor]:
        return self.batch

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def train(model, stage, batches, run_dir: Path | None = None) -> Telemetry:
    telemetry = Telemetry()
    Trainer(model, stage, batches, telemetry, run_dir).run()
    return telemetry


def test_it_learns_one_batch_by_heart(make_model, make_stage):
    """At every loop, since the entropy term keeps the gate from settling on one. No two rows begin alike."""
    ids = torch.randint(17, (2, 12))
    ids[:, 0] = torch.tensor([1, 2])
    batch = {"input_ids": ids, "labels": ids, "document_ids": torch.zeros_like(ids)}
    stage = make_stage(num_steps=80, optimizer={"lr": 3e-2}, log_every=80)
    first, last = train(make_model(), stage, Repeat(batch)).records
    assert min(first.loop_losses) > 2.5
    assert max(last.loop_losses) < 0.1


@pytest.mark.parametrize(
    "objective", [{"kind": "expected_loss", "beta": 0.1, "smoothing": 0.05}, {"kind": "gate_loss"}]
)
def test_two_micro_batches_are_one_batch_of_twice_the_size(make_model, make_stage, make_batches, objective):
    """In float64 exactly, though the halves predict different numbers of tokens; clipping sees the whole gradient."""
    models, told = [], []
    for batch_size, micro_batches in ((4, 1), (2, 2), (1, 4)):
        model = make_model().double()
        stage = make_stage(
            num_steps=4, micro_batches=micro_batches, objective=objective, optimizer={"lr": 1e-2, "grad_clip": 0.1}
        )
        told.append(train(model, stage, make_batches(batch_size)).records)
        models.append(weights(model))
    for other, records in zip(models[1:], told[1:], strict=True):
        for name, expected in models[0].items():
            torch.testing.assert_close(
                other[name], expected, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
            )
        for mine, theirs in zip(records, told[0], strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.loss == pytest.approx(theirs.loss, abs=1e-12)
            assert mine.loop_losses == pytest.approx(theirs.loop_losses, abs=1e-12)
            assert mine.exit_pdf == pytest.approx(theirs.exit_pdf, abs=1e-12)
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-12)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (expected_loss, {"beta": 0.3}),
        (expected_loss, {"beta": 0.3, "smoothing": 0.2}),
        (gate_loss, {"label_shift": "paper"}),
        (gate_loss, {"label_shift": "next"}),
    ],
)
def test_telemetry_is_the_forward_that_trained(make_model, make_stage, make_batches, function, options):
    """The first record is what the untouched model makes of the first batch, under the stage's own objective."""
    model = make_model()
    stage = make_stage(objective={"kind": function.__name__, **options}, num_steps=1, schedule={"warmup_steps": 1})
    freeze_for(model, stage.objective)
    batch = next(make_batches())
    output = model.model(batch["input_ids"], document_ids=batch["document_ids"], num_loops=3)
    loss, metrics = function(model, output, batch["labels"], **options)
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    (record,) = train(model, stage, make_batches()).records
    assert record.loss == loss.item()
    assert record.loop_losses == metrics["loop_losses"].tolist()
    assert record.exit_pdf == metrics["exit_pdf"].tolist()
    assert record.entropy == metrics["entropy"].item()
    assert record.expected_loops == metrics["expected_loops"].item()
    assert record.tokens == int((batch["labels"][:, 1:] != -100).sum())
    assert record.grad_norm == pytest.approx(torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-5)
    assert (record.stage, record.step, record.num_steps, record.lr) == ("first", 1, 1, pytest.approx(1e-2))
    assert record.tokens_per_second > 0 and record.seconds > 0


def test_the_gradient_is_clipped_as_a_whole_and_told_as_it_was(make_model, make_stage, make_batches):
    """Adam's first moments after one step are (1 - beta_1) times the gradient that it was given."""
    trainer = Trainer(make_model(), make_stage(optimizer={"lr": 1e-2, "grad_clip": 0.01}), make_batches(), Telemetry())
    grad_norm = trainer.train_step()["grad_norm"]
    moments = torch.cat([state["exp_avg"].flatten() for state in trainer.optimizer.state.values()])
    assert grad_norm > 0.1
    assert moments.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_the_learning_rate_follows_the_schedule(make_model, make_stage, make_batches):
    stage = make_stage(schedule={"warmup_steps": 2, "final_share": 0.5})
    records = train(make_model(), stage, make_batches()).records
    expected = [0.5, 1, 1, 0.875, 0.625, 0.5]
    assert [record.lr for record in records] == pytest.approx([1e-2 * share for share in expected])


def test_records_come_at_the_first_every_nth_and_the_last_step(make_model, make_stage, make_batches):
    records = train(make_model(), make_stage(num_steps=8, log_every=3), make_batches()).records
    assert [record.step for record in records] == [1, 3, 6, 8]
    assert [r.tokens for r in records] == sorted(r.tokens for r in records)
    assert [r.seconds for r in records] == sorted(r.seconds for r in records)


def test_stage_two_leaves_the_language_model_as_it_was_bit_for_bit(make_model, make_stage, make_batches):
    """Weight decay included; the gradient of the language model is not even made."""
    model = make_model(tie_word_embeddings=False, injection="scalar", lora_rank=2)
    before = weights(model)
    stage = make_stage(**GATE_STAGE, optimizer={"lr": 0.1, "weight_decay": 0.5})
    (trainer := Trainer(model, stage, make_batches(), Telemetry())).run()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != name.startswith("model.early_exit_gate."), name
        assert parameter.grad is None
    assert len(trainer.optimizer.state) == 2


def test_stage_two_lowers_its_loss(make_model, make_stage, make_batches):
    stage = make_stage(**GATE_STAGE, num_steps=30, optimizer={"lr": 0.1}, log_every=30)
    first, last = train(make_model(), stage, Repeat(next(make_batches()))).records
    assert last.loss < first.loss - 0.02
    assert last.loop_losses == pytest.approx(first.loop_losses, abs=1e-6)


def test_one_loop_trains(make_model, make_stage, make_batches):
    model = make_model(num_loops=1)
    before = weights(model)
    records = train(model, make_stage(num_loops=1, optimizer={"lr": 1e-2, "weight_decay": 0}), make_batches()).records
    assert all(record.exit_pdf == [1.0] and record.entropy == 0 for record in records)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("early_exit_gate" in name), name


def test_a_stage_may_run_another_depth_than_the_model_s_own(make_model, make_stage, make_batches):
    records = train(make_model(num_loops=3), make_stage(num_loops=5, num_steps=1), make_batches()).records
    assert len(records[0].loop_losses) == 5


def test_bfloat16_is_near_float32_and_keeps_weights_and_moments_in_float32(make_model, make_stage, make_batches):
    told = {}
    for precision in ("fp32", "bf16"):
        model = make_model()
        trainer = Trainer(model, make_stage(precision=precision), make_batches(), Telemetry())
        trainer.run()
        told[precision] = [record.loss for record in trainer.telemetry.records]
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert {s["exp_avg"].dtype for s in trainer.optimizer.state.values()} == {torch.float32}
    assert told["bf16"] != told["fp32"]
    assert told["bf16"] == pytest.approx(told["fp32"], rel=0.02)


COMPILED = """
import torch
from looplm.hf.config import LoopLMConfig
from looplm.hf.modeling import LoopLMForCausalLM
from looplm.training.recipe import StageRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer

class Batches:
    def __iter__(self): return self
    def __next__(self):
        ids = torch.randint(17, (2, 12))
        return {"input_ids": ids, "labels": ids, "document_ids": (torch.arange(12) > 6).long().expand(2, 12)}

def trainer(compiled, **options):
    torch.manual_seed(0)
    model = LoopLMForCausalLM(LoopLMConfig(
        vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, num_loops=3, norm_placement="pre", **options
    ))
    stage = StageRecipe(
        name="one", num_steps=3, objective={"kind": "expected_loss", "beta": 0.05}, optimizer={"lr": 1e-2},
        num_loops=3, log_every=1, compile=compiled,
    )
    return Trainer(model, stage, Batches(), Telemetry())

model = trainer(True, num_prelude_layers=1, num_coda_layers=1).model.model
blocks = [*model.prelude, *model.layers, *model.coda]
assert len(blocks) == 3 and all(block._compiled_call_impl is not None for block in blocks)
told = []
for compiled in (False, True):
    run = trainer(compiled)
    run.run()
    told.append(torch.tensor([[*record.loop_losses, record.loss] for record in run.telemetry.records]))
assert len(told[0]) == 3
torch.testing.assert_close(told[1], told[0], rtol=0, atol=1e-5)
"""


@pytest.mark.slow
def test_compiled_is_eager_to_rounding():
    """In a process of its own, as in tests/model/test_compile.py; prelude, core and coda alike."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_it_says_whether_the_cpu_has_bfloat16():
    assert isinstance(cpu_has_bf16(), bool)


def test_the_model_is_left_in_evaluation_mode(make_model, make_stage, make_batches):
    model = make_model()
    trainer = Trainer(model, make_stage(), make_batches(), Telemetry())
    seen = []
    model.model.register_forward_pre_hook(lambda module, _args: seen.append(module.training))
    trainer.run()
    assert seen == [True] * 6 and not model.training


def poison_loss(monkeypatch: pytest.MonkeyPatch, at_call: int) -> None:
    """Not a number, though its gradient is: the loss itself must be looked at."""
    calls = itertools.count(1)

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        loss, metrics = expected_loss(*args, **kwargs)
        spoilt = math.nan if next(calls) == at_call else 0.0
        return loss + spoilt, {**metrics, "loss": metrics["loss"] + spoilt}

    monkeypatch.setattr(module, "expected_loss", poisoned)


def poison_gradient(model: torch.nn.Module, at_call: int) -> None:
    calls = itertools.count(1)
    norm = model.get_submodule("model.norm").weight
    norm.register_hook(lambda grad: grad * math.inf if next(calls) == at_call else grad)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_number_that_is_not_finite_stops_the_run_and_spoils_nothing(
    make_model, make_stage, make_batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, poison: str
):
    """The fourth step fails: the parameters are those of the third, the checkpoint that of the second."""
    good = [weights(model := make_model())]
    trainer = Trainer(model, make_stage(), make_batches(), Telemetry())
    for _ in range(3):
        trainer.train_step()
        good.append(weights(model))

    model = make_model()
    if poison == "loss":
        poison_loss(monkeypatch, at_call=4)
    else:
        poison_gradient(model, at_call=4)
    trainer = Trainer(model, make_stage(checkpoint_every=2), make_batches(), Telemetry(tmp_path), tmp_path)
    with pytest.raises(UserError, match=r"'first' diverged at step 4: loss (nan|.*norm (nan|inf))") as error:
        trainer.run()
    assert "The parameters are those of step 3." in str(error.value)
    assert f"The last checkpoint is {tmp_path / 'first.state'}." in str(error.value)
    assert trainer.step == 3
    assert [record.step for record in trainer.telemetry.records] == [1, 2, 3]
    assert all(torch.equal(value, good[3][name]) for name, value in weights(model).items())

    monkeypatch.undo()
    resumed = Trainer(model := make_model(), make_stage(), make_batches(), Telemetry(), tmp_path)
    resumed.resume()
    assert resumed.step == 2
    assert all(torch.equal(value, good[2][name]) for name, value in weights(model).items())
    # Going on from the third step, with no trace of the bad gradient.
    trainer.train_step()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_a_run_without_checkpoints_promises_none(make_model, make_stage, make_batches, monkeypatch):
    poison_loss(monkeypatch, at_call=1)
    with pytest.raises(UserError, match="diverged at step 1") as error:
        train(make_model(), make_stage(), make_batches())
    assert "checkpoint" not in str(error.value)


def test_a_step_begins_without_the_gradient_that_an_interrupted_one_left(make_model, make_stage, make_batches):
    models = [make_model(), make_model()]
    for parameter in models[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    for model in models:
        Trainer(model, make_stage(), make_batches(), Telemetry()).train_step()
    first, second = map(weights, models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def set_gate(model: torch.nn.Module, bias: float) -> None:
    with torch.no_grad():
        model.get_parameter("model.early_exit_gate.weight").zero_()
        model.get_parameter("model.early_exit_gate.bias").fill_(bias)


def test_a_collapsed_gate_raises_the_alarm_once(make_model, make_stage, make_batches, capsys):
    model = make_model()
    set_gate(model, 20.0)
    trainer = Trainer(model, make_stage(), make_batches(), Telemetry(console=Console(width=300)))
    trainer.run()
    shown = capsys.readouterr().out
    assert shown.count("The exit gate has collapsed onto loop 1: mean exit pdf 1.000, 0.000, 0.000.") == 1
    assert "first, step 1: The exit gate" in shown and "or a beta above 0.05." in shown


def test_the_alarm_is_raised_again_for_another_collapse(make_model, make_stage, make_batches, tmp_path):
    """And names no beta where there is none."""
    model = make_model()
    telemetry = Telemetry(tmp_path)
    trainer = Trainer(model, make_stage(**GATE_STAGE, optimizer={"lr": 1e-6}), make_batches(), telemetry)
    for bias in (-20.0, -20.0, 0.0, -20.0):
        set_gate(model, bias)
        trainer._tell(trainer.train_step(), pace=1.0)
    warnings = [line for line in telemetry.path.read_text().splitlines() if "collapsed onto loop 3" in line]
    assert ['"step": 1' in warnings[0], '"step": 4' in warnings[1]] == [True, True]
    assert len(warnings) == 2 and "beta" not in warnings[0]


def test_a_healthy_gate_raises_none(make_model, make_stage, make_batches, tmp_path):
    telemetry = Telemetry(tmp_path)
    Trainer(make_model(), make_stage(), make_batches(), telemetry).run()
    assert "warning" not in telemetry.path.read_text()
