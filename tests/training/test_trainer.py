"""The loop: it learns, adds micro-batches exactly, trains what the stage says, and stops where the numbers end."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from looplm.errors import UserError
from looplm.objectives import expected_loss, gate_loss, geometric_prior, last_loop_loss, routing_loss
from looplm.training.held_out import HeldOutRecord
from looplm.training.optimizer import freeze_for, optimizer_state
from looplm.training.recipe import CheckpointsRecipe
from looplm.training.telemetry import Telemetry
from looplm.training.trainer import Trainer, step_seed

from .runs import SEQ_LEN, run_stage, weights

GATE_STAGE: dict[str, Any] = {"name": "gate", "objective": {"kind": "gate_loss"}}


class Repeat:
    """The same rows over and over."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def take(self, num_rows: int) -> dict[str, Tensor]:
        return {name: rows[:num_rows] for name, rows in self.batch.items()}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_it_learns_one_batch_by_heart(make_model, make_stage):
    """At every loop, since the entropy term keeps the gate from settling on one. No two rows begin alike."""
    ids = torch.randint(17, (2, 12))
    ids[:, 0] = torch.tensor([1, 2])
    batch = {"input_ids": ids, "labels": ids, "document_ids": torch.zeros_like(ids)}
    stage = make_stage(num_steps=80, optimizer={"lr": 3e-2}, log_every=80)
    first, last = run_stage(make_model(), stage, Repeat(batch)).records
    assert min(first.loop_losses) > 2.5
    assert max(last.loop_losses) < 0.1


@pytest.mark.parametrize(
    "objective", [{"kind": "expected_loss", "beta": 0.1, "smoothing": 0.05}, {"kind": "gate_loss"}]
)
def test_one_batch_of_eight_rows_is_eight_of_one(make_model, make_stage, make_rows, objective):
    """In float64 exactly, though each row predicts another number of tokens; clipping sees the whole gradient."""
    models, told = [], []
    for micro_batch_rows in (8, 3, 1):
        model = make_model().double()
        stage = make_stage(
            num_steps=4, batch_tokens=8 * SEQ_LEN, micro_batch_rows=micro_batch_rows, objective=objective,
            optimizer={"lr": 1e-2, "grad_clip": 0.1},
        )  # fmt: skip
        told.append(run_stage(model, stage, make_rows()).records)
        models.append(weights(model))
    for other, records in zip(models[1:], told[1:], strict=True):
        for name, expected in models[0].items():
            torch.testing.assert_close(
                other[name], expected, rtol=0, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
            )
        for mine, theirs in zip(records, told[0], strict=True):
            assert mine.tokens == theirs.tokens
            for figure in ("loss", "loop_losses", "exit_pdf", "entropy", "grad_norm", "exit_pdf_quantiles"):
                torch.testing.assert_close(getattr(mine, figure), getattr(theirs, figure), rtol=0, atol=1e-12)


def test_a_batch_that_predicts_nothing_in_one_part_counts_the_others(make_model, make_stage, make_rows):
    batch = make_rows().take(2)
    batch["labels"][1] = -100
    stage = make_stage(num_steps=1, micro_batch_rows=1)
    (told,) = run_stage(make_model(), stage, Repeat(batch)).records
    (alone,) = run_stage(make_model(), make_stage(num_steps=1, batch_tokens=SEQ_LEN), Repeat(batch)).records
    assert told.loss == pytest.approx(alone.loss, abs=1e-6) and told.grad_norm == pytest.approx(alone.grad_norm, 1e-5)


OBJECTIVES = [
    (expected_loss, {"kind": "expected_loss", "beta": 0.3}, {"beta": 0.3}),
    (expected_loss, {"kind": "expected_loss", "beta": 0.3, "smoothing": 0.2}, {"beta": 0.3, "smoothing": 0.2}),
    (
        expected_loss,
        {"kind": "expected_loss", "beta": 0.3, "prior": {"kind": "geometric", "stop": 0.4}},
        {"beta": 0.3, "prior": geometric_prior(3, 0.4).float()},
    ),
    (expected_loss, {"kind": "expected_loss", "beta": 0.3, "gate_only": True}, {"beta": 0.3}),
    (last_loop_loss, {"kind": "last_loop"}, {}),
    (gate_loss, {"kind": "gate_loss", "label_shift": "paper"}, {"label_shift": "paper"}),
    (gate_loss, {"kind": "gate_loss", "label_shift": "next"}, {"label_shift": "next"}),
]


@pytest.mark.parametrize(("function", "objective", "options"), OBJECTIVES)
def test_telemetry_is_the_forward_that_trained(make_model, make_stage, make_rows, function, objective, options):
    """The first record is what the untouched model makes of the first batch, under the stage's own objective."""
    model = make_model()
    stage = make_stage(objective=objective, num_steps=1, schedule={"warmup_steps": 1})
    freeze_for(model, stage.objective)
    batch = make_rows().take(2)
    output = model.model(batch["input_ids"], document_ids=batch["document_ids"], num_loops=3)
    loss, metrics = function(model, output, batch["labels"], **options)
    gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    (record,) = run_stage(model, stage, make_rows()).records
    assert record.loss == loss.item()
    assert record.loop_losses == metrics["loop_losses"].tolist()
    assert record.exit_pdf == metrics["exit_pdf"].tolist()
    assert record.entropy == metrics["entropy"].item()
    assert record.expected_loops == metrics["expected_loops"].item()
    assert record.tokens == 2 * SEQ_LEN
    assert record.grad_norm == pytest.approx(torch.cat([g.flatten() for g in gradients]).norm().item(), rel=1e-5)
    assert (record.stage, record.step, record.num_steps, record.lr) == ("first", 1, 1, pytest.approx(1e-2))
    assert record.tokens_per_second > 0 and record.seconds > 0


def test_routing_runs_as_many_loops_as_its_curriculum_allows(make_model, make_stage, make_rows):
    stage = make_stage(objective={"kind": "routing", "phase_steps": 2, "gate_weight": 0.3})
    records = run_stage(make_model(), stage, make_rows()).records
    assert [record.num_loops for record in records] == [1, 1, 2, 2, 3, 3]
    model, batch = make_model(), make_rows().take(2)
    output = model.model(batch["input_ids"], document_ids=batch["document_ids"], num_loops=1)
    assert records[0].loss == routing_loss(model, output, batch["labels"], gate_weight=0.3)[0].item()


def test_the_gradient_is_clipped_as_a_whole_and_told_as_it_was(make_model, make_stage, make_rows):
    """Adam's first moments after one step are (1 - beta_1) times the gradient that it was given."""
    trainer = Trainer(make_model(), make_stage(optimizer={"lr": 1e-2, "grad_clip": 0.01}), make_rows(), Telemetry())
    grad_norm = trainer.train_step().grad_norm
    moments = torch.cat([state["exp_avg"].flatten() for state in trainer.optimizer.state.values()])
    assert grad_norm > 0.1
    assert moments.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_the_learning_rate_follows_the_schedule(make_model, make_stage, make_rows):
    stage = make_stage(schedule={"warmup_steps": 2, "final_share": 0.5})
    records = run_stage(make_model(), stage, make_rows()).records
    expected = [0.5, 1, 1, 0.875, 0.625, 0.5]
    assert [record.lr for record in records] == pytest.approx([1e-2 * share for share in expected])


def test_records_come_at_the_first_every_nth_and_the_last_step(make_model, make_stage, make_rows):
    records = run_stage(make_model(), make_stage(num_steps=8, log_every=3), make_rows()).records
    assert [record.step for record in records] == [1, 3, 6, 8]
    assert [r.tokens for r in records] == sorted(r.tokens for r in records)
    assert [r.seconds for r in records] == sorted(r.seconds for r in records)


def test_stage_two_leaves_the_language_model_as_it_was_bit_for_bit(make_model, make_stage, make_rows):
    """Weight decay included; the gradient of the language model is not even made."""
    model = make_model(tie_word_embeddings=False, injection="scalar", lora_rank=2)
    before = weights(model)
    stage = make_stage(**GATE_STAGE, optimizer={"lr": 0.1, "weight_decay": 0.5})
    (trainer := Trainer(model, stage, make_rows(), Telemetry())).run()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != name.startswith("model.early_exit_gate."), name
        assert parameter.grad is None
    assert len(trainer.optimizer.state) == 2


def test_stage_two_lowers_its_loss(make_model, make_stage, make_rows):
    stage = make_stage(**GATE_STAGE, num_steps=30, optimizer={"lr": 0.1}, log_every=30)
    first, last = run_stage(make_model(), stage, Repeat(make_rows().take(2))).records
    assert last.loss < first.loss - 0.02
    assert last.loop_losses == pytest.approx(first.loop_losses, abs=1e-6)


def test_one_loop_trains(make_model, make_stage, make_rows):
    model = make_model(num_loops=1)
    before = weights(model)
    records = run_stage(model, make_stage(num_loops=1, optimizer={"lr": 1e-2, "weight_decay": 0}), make_rows()).records
    assert all(record.exit_pdf == pytest.approx([1.0]) and record.entropy == 0 for record in records)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("early_exit_gate" in name), name


def test_a_stage_may_run_another_depth_than_the_model_s_own(make_model, make_stage, make_rows):
    records = run_stage(make_model(num_loops=3), make_stage(num_loops=5, num_steps=1), make_rows()).records
    assert len(records[0].loop_losses) == 5


def test_bfloat16_is_near_float32_and_keeps_weights_and_moments_in_float32(make_model, make_stage, make_rows):
    told = {}
    for precision in ("fp32", "bf16"):
        model = make_model()
        trainer = Trainer(model, make_stage(precision=precision), make_rows(), Telemetry())
        trainer.run()
        told[precision] = [record.loss for record in trainer.telemetry.records]
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert {s["exp_avg"].dtype for s in trainer.optimizer.state.values()} == {torch.float32}
    assert told["bf16"] != told["fp32"]
    assert told["bf16"] == pytest.approx(told["fp32"], rel=0.02)


def test_the_model_is_left_in_evaluation_mode(make_model, make_stage, make_rows):
    model = make_model()
    trainer = Trainer(model, make_stage(), make_rows(), Telemetry())
    seen = []
    model.model.register_forward_pre_hook(lambda module, _args: seen.append(module.training))
    trainer.run()
    assert seen == [True] * 6 and not model.training


def test_a_step_begins_without_the_gradient_that_an_interrupted_one_left(make_model, make_stage, make_rows):
    models = [make_model(), make_model()]
    for parameter in models[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    for model in models:
        Trainer(model, make_stage(), make_rows(), Telemetry()).train_step()
    first, second = map(weights, models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_collapsed_gate_raises_the_alarm_once(make_model, make_stage, make_rows, capsys):
    model = make_model()
    with torch.no_grad():
        model.model.early_exit_gate.weight.zero_()
        model.model.early_exit_gate.bias.fill_(20.0)
    trainer = Trainer(model, make_stage(), make_rows(), Telemetry(console=Console(width=300)))
    trainer.run()
    shown = capsys.readouterr().out
    assert shown.count("The exit gate has collapsed onto loop 1: mean exit pdf 1.000, 0.000, 0.000.") == 1
    assert "first, step 1: The exit gate" in shown


def test_a_healthy_gate_raises_none(make_model, make_stage, make_rows, tmp_path):
    telemetry = Telemetry(tmp_path)
    Trainer(make_model(), make_stage(), make_rows(), telemetry).run()
    assert telemetry.path is not None and "warning" not in telemetry.path.read_text()


def test_the_depth_may_be_drawn_anew_each_step_from_the_seed_alone(make_model, make_stage, make_rows):
    stage = make_stage(num_steps=12, num_loops={"kind": "uniform", "min": 1, "max": 4})
    drawn = [
        [record.num_loops for record in run_stage(make_model(), stage, make_rows(), seed=seed).records]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {1, 2, 3, 4}
    records = run_stage(make_model(), stage, make_rows(), seed=1).records
    assert [len(record.loop_losses) for record in records] == drawn[0]


def test_truncation_to_all_loops_is_the_full_gradient_and_to_one_is_not(make_model, make_stage, make_rows):
    full, all_loops, one = (
        run_stage(make_model(), make_stage(backprop_loops=loops), make_rows()).records for loops in (None, 3, 1)
    )
    assert [record.loss for record in all_loops] == [record.loss for record in full]
    assert one[0].loss == full[0].loss and one[0].grad_norm != full[0].grad_norm


def test_state_gradients_come_at_their_own_steps_and_change_no_figure(make_model, make_stage, make_rows):
    stage = make_stage(log_every=10)
    plain = run_stage(make_model(), stage, make_rows()).records
    measured = run_stage(make_model(), stage, make_rows(), state_gradients_every=2).records
    assert [record.step for record in measured] == [1, 2, 4, 6]
    assert [record.state_gradients is not None for record in measured] == [False, True, True, True]
    assert [len(row) for row in measured[1].state_gradients] == [1, 1, 1]
    assert measured[-1].loss == pytest.approx(plain[-1].loss, abs=1e-5), "to rounding: sums are in another order"


class Measures:
    """Stands for the held-out text: loss by depth as it is told to find."""

    max_loops = 4

    def __init__(self, *losses: float) -> None:
        self.losses, self.steps_seen = list(losses), []

    def measure(self, model: torch.nn.Module) -> HeldOutRecord:
        at_depth = self.losses.pop(0)
        return HeldOutRecord(loop_losses=[9.0, 9.0, at_depth, 0.0], bits_per_byte=[1.0] * 4, num_tokens=7)


def test_held_out_text_is_measured_when_due_and_at_the_end(make_model, make_stage, make_rows):
    stage = make_stage(num_steps=5)
    telemetry = run_stage(make_model(), stage, make_rows(), held_out=Measures(3.0, 2.0, 1.0), held_out_every=2)
    assert [(at, found.loop_losses[2]) for at, found in telemetry.held_out.items()] == [
        (("first", 2), 3.0), (("first", 4), 2.0), (("first", 5), 1.0),
    ]  # fmt: skip


def test_the_best_checkpoint_at_the_model_s_depth_is_kept(make_model, make_stage, make_rows, tmp_path: Path):
    """Among those that were measured at their own step."""
    options = {"held_out": Measures(3.0, 1.0, 2.0, 2.5), "held_out_every": 2}
    checkpoints = CheckpointsRecipe(every=1, keep_last=2)
    stage = make_stage(num_steps=7)
    run_stage(make_model(), stage, make_rows(), tmp_path, checkpoints=checkpoints, **options)
    kept = sorted(int(path.name[-8:]) for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [4, 6, 7]


def test_moments_go_on_in_the_next_stage_unless_it_wants_fresh_ones(make_model, make_stage, make_rows):
    first = Trainer(make_model(), make_stage(), make_rows(), Telemetry())
    first.run()
    state = optimizer_state(first.model, first.optimizer)
    for options, steps in (({}, 6.0), ({"reset_optimizer": True}, 0.0), (GATE_STAGE, 0.0)):
        stage = make_stage(**options)
        following = Trainer(first.model, stage, make_rows(), Telemetry(), optimizer_state=state)
        assert {float(s["step"]) for s in following.optimizer.state.values()} == {steps}


def test_the_batch_may_ramp(make_model, make_stage, make_rows):
    ramp = {"start": SEQ_LEN, "end": 3 * SEQ_LEN, "over_tokens": 6 * SEQ_LEN, "increments": 2}
    rows = make_rows()
    trainer = Trainer(make_model(), make_stage(batch_tokens=ramp, num_steps=7), rows, Telemetry())
    trainer.run()
    taken = [record.tokens // SEQ_LEN for record in trainer.telemetry.records]
    assert taken == [trainer.plan.tokens_before(step) // SEQ_LEN for step in range(1, 8)] and taken[0] == 1
    assert taken[-1] - taken[-2] == 3 and rows.state_dict()["position"] == taken[-1]


def test_rows_of_another_length_are_a_user_error(make_model, make_stage, make_rows):
    trainer = Trainer(make_model(), make_stage(), make_rows(seq_len=8), Telemetry())
    with pytest.raises(UserError, match="wants 2 rows of seq_len 12, and the data gives 2 x 8"):
        trainer.run()


def test_checkpoints_need_a_place(make_model, make_stage, make_rows):
    with pytest.raises(UserError, match="checkpoint every 5 steps, but there is no run directory"):
        Trainer(make_model(), make_stage(), make_rows(), Telemetry(), checkpoints=CheckpointsRecipe(every=5))


def test_a_run_leaves_the_global_random_state_alone_and_steps_start_from_their_own(make_model, make_stage, make_rows):
    drawn: list[float] = []
    for seed in (1, 1, 2):
        trainer = Trainer(make_model(), make_stage(num_steps=2), make_rows(), Telemetry(), seed=seed)
        trainer.model.model.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(()).item()))
        before = torch.get_rng_state()
        trainer.run()
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
    assert drawn[:2] == drawn[2:4] != drawn[4:] and drawn[0] != drawn[1]
    seeds = [step_seed(seed, *place) for seed in (0, 1) for place in itertools.product((0, 1), (0, 1), (0, 1))]
    assert len(set(seeds)) == 16 and all(0 <= seed < 2**63 for seed in seeds)
