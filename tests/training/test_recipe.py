"""Recipes: what they refuse. A typo must never become a default."""

from typing import Any

import pytest
from pydantic import ValidationError

from looplm.errors import UserError
from looplm.strict import parse
from looplm.training.stage_recipe import BatchRamp, ExpectedLossRecipe, GateLossRecipe, StageRecipe, batch_levels


def fields(**overrides: Any) -> dict[str, Any]:
    small: dict[str, Any] = {
        "name": "a stage-1.5",
        "num_steps": 5,
        "seq_len": 8,
        "batch_tokens": 16,
        "objective": {"kind": "expected_loss", "beta": 0.1},
        "optimizer": {"lr": 1e-3},
        "num_loops": 2,
    }
    return small | overrides


def stage(**overrides: Any) -> StageRecipe:
    return StageRecipe(**fields(**overrides))


def test_a_recipe_survives_json():
    written = stage(
        objective={"kind": "gate_loss", "label_shift": "next"},
        schedule={"kind": "wsd", "decay_steps": 2},
        batch_tokens={"start": 8, "end": 24, "over_tokens": 100, "increments": 2},
        num_loops={"kind": "poisson_lognormal", "mean": 3, "max": 9},
    )
    assert StageRecipe.model_validate_json(written.model_dump_json()) == written


def test_the_kind_chooses_the_objective():
    assert stage().objective == ExpectedLossRecipe(beta=0.1)
    assert stage(objective={"kind": "gate_loss"}).objective == GateLossRecipe()


def test_optimizer_defaults_are_ouro_s():
    optimizer = stage().optimizer
    assert (optimizer.betas, optimizer.weight_decay, optimizer.grad_clip) == ((0.9, 0.95), 0.1, 1.0)


def test_a_ramp_grows_in_even_increments():
    ramp = BatchRamp(start=4_194_304, end=8_388_608, over_tokens=100)
    assert batch_levels(ramp) == [4_194_304, 5_242_880, 6_291_456, 7_340_032, 8_388_608]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"num_step": 5}, "num_step: unknown key; did you mean num_steps?"),
        ({"optimizer": {"lr": 1e-3, "learning_rate": 1e-3}}, "optimizer.learning_rate: unknown key"),
        ({"objective": {"kind": "gate_loss", "beta": 0.1}}, "objective.beta: unknown key"),
        ({"objective": {"kind": "expected_los", "beta": 0.1}}, "objective: kind is 'expected_los'; did you mean"),
        ({"objective": {"kind": "expected_loss"}}, "objective.beta: is missing"),
        ({"objective": {"kind": "expected_loss", "beta": -0.1}}, "objective.beta: is -0.1; it must be at least 0"),
        (
            {"objective": {"kind": "expected_loss", "beta": 0.1, "smoothing": 1.0}},
            "smoothing: is 1.0; it must be below 1",
        ),
        ({"objective": {"kind": "routing", "phase_steps": 0}}, "phase_steps: is 0; it must be above 0"),
        (
            {"objective": {"kind": "expected_loss", "beta": 0, "prior": {"stop": 1}}},
            "prior.stop: is 1; it must be below",
        ),
        ({"optimizer": {"lr": -1e-3}}, "optimizer.lr: is -0.001; it must be above 0"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr: is nan; it must be a finite number"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: is inf; it must be a finite number"),
        ({"optimizer": {"lr": 1e-3, "betas": (0.9, 1.0)}}, "optimizer.betas.1: is 1.0; it must be below 1"),
        ({"optimizer": {"lr": 1e-3, "weight_decay": -0.1}}, "weight_decay: is -0.1; it must be at least 0"),
        ({"optimizer": {"lr": 1e-3, "grad_clip": 0}}, "grad_clip: is 0; it must be above 0"),
        ({"schedule": {"kind": "linear"}}, "schedule.kind: is 'linear'; choose one of constant, cosine, wsd"),
        ({"schedule": {"final_share": 1.5}}, "final_share: is 1.5; it must be at most 1"),
        ({"schedule": {"warmup_steps": 6}}, "warmup_steps 6 is longer than the stage (5)"),
        ({"schedule": {"kind": "wsd"}}, "decay_steps belongs to kind: wsd, which needs it"),
        ({"schedule": {"kind": "cosine", "decay_steps": 2}}, "decay_steps belongs to kind: wsd"),
        ({"schedule": {"kind": "wsd", "warmup_steps": 3, "decay_steps": 3}}, "are longer than the stage (5)"),
        ({"objective": {"kind": "gate_loss"}, "num_loops": 1}, "gate_loss needs num_loops of 2 or more"),
        (
            {"objective": {"kind": "gate_loss"}, "num_loops": {"kind": "uniform", "min": 1, "max": 4}},
            "gate_loss needs",
        ),
        ({"num_steps": 0}, "num_steps: is 0; it must be above 0"),
        ({"num_steps": None}, "give exactly one of tokens, num_steps and epochs"),
        ({"tokens": 100}, "give exactly one of tokens, num_steps and epochs"),
        ({"num_loops": 0}, "num_loops: is 0; it must be above 0"),
        ({"num_loops": {"kind": "uniform", "min": 3, "max": 2}}, "num_loops: min 3 is above max 2"),
        ({"backprop_loops": 0}, "backprop_loops: is 0; it must be above 0"),
        ({"seq_len": 1}, "seq_len: is 1; it must be above 1"),
        ({"batch_tokens": 12}, "batch_tokens 12 is not a multiple of seq_len 8"),
        (
            {"batch_tokens": {"start": 8, "end": 20, "over_tokens": 9, "increments": 1}},
            "batch_tokens 20 is not a multiple",
        ),
        ({"batch_tokens": {"start": 16, "end": 8, "over_tokens": 9}}, "batch_tokens: end 8 is below start 16"),
        ({"batch_tokens": {"start": 8, "end": 24, "over_tokens": 9, "increments": 3}}, "3 increments do not divide"),
        ({"micro_batch_rows": 0}, "micro_batch_rows: is 0; it must be above 0"),
        ({"precision": "fp16"}, "precision: is 'fp16'; did you mean bf16?"),
        ({"upcycle": {"num_layers": 4, "order": "stack"}}, "upcycle.order: is 'stack'; did you mean stacked?"),
        ({"name": "../elsewhere"}, "name: is '../elsewhere'; a name is made of letters, digits"),
        ({"name": "a "}, "name: is 'a '; a name is made of letters, digits, underscores, spaces, dots and dashes"),
        ({"name": "a" * 101}, "has at most 100 characters"),
        ({"name": ""}, "name: is ''; a name is made of"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_is_unknown_or_impossible_is_refused(overrides: dict[str, Any], complaint: str):
    with pytest.raises(UserError) as error:
        parse(StageRecipe, fields(**overrides), "stage")
    assert complaint in str(error.value) and str(error.value).startswith("stage: ")


def test_a_recipe_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        stage().num_steps = 7  # pyright: ignore[reportAttributeAccessIssue]
