"""Recipes: what they refuse. A typo must never become a default."""

from typing import Any

import pytest
from pydantic import ValidationError

from looplm.training.recipe import ExpectedLossRecipe, GateLossRecipe, StageRecipe


def stage(**overrides: Any) -> StageRecipe:
    small: dict[str, Any] = {
        "name": "a stage-1.5",
        "num_steps": 5,
        "objective": {"kind": "expected_loss", "beta": 0.1},
        "optimizer": {"lr": 1e-3},
        "num_loops": 2,
    }
    return StageRecipe(**(small | overrides))


def test_a_recipe_survives_json():
    written = stage(
        objective={"kind": "gate_loss", "label_shift": "next"}, schedule={"kind": "constant"}, checkpoint_every=2
    )
    assert StageRecipe.model_validate_json(written.model_dump_json()) == written


def test_the_kind_chooses_the_objective():
    assert stage().objective == ExpectedLossRecipe(beta=0.1)
    assert stage(objective={"kind": "gate_loss"}).objective == GateLossRecipe()


def test_optimizer_defaults_are_ouro_s():
    optimizer = stage().optimizer
    assert (optimizer.betas, optimizer.weight_decay, optimizer.grad_clip) == ((0.9, 0.95), 0.1, 1.0)


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"num_step": 5}, "num_step\n.*Extra inputs are not permitted"),
        ({"optimizer": {"lr": 1e-3, "learning_rate": 1e-3}}, "optimizer.learning_rate\n.*Extra"),
        ({"objective": {"kind": "gate_loss", "beta": 0.1}}, "objective.gate_loss.beta\n.*Extra"),
        ({"objective": {"kind": "expected_los", "beta": 0.1}}, "expected_los"),
        ({"objective": {"kind": "expected_loss"}}, "beta\n.*Field required"),
        ({"objective": {"kind": "expected_loss", "beta": -0.1}}, "beta\n.*greater than or equal to 0"),
        ({"objective": {"kind": "expected_loss", "beta": 0.1, "smoothing": 1.0}}, "smoothing\n.*less than 1"),
        ({"optimizer": {"lr": -1e-3}}, "optimizer.lr\n.*greater than 0"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr\n.*finite"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr\n.*finite"),
        ({"optimizer": {"lr": 1e-3, "betas": (0.9, 1.0)}}, r"betas\.1\n.*less than 1"),
        ({"optimizer": {"lr": 1e-3, "weight_decay": -0.1}}, "weight_decay\n.*greater than or equal to 0"),
        ({"optimizer": {"lr": 1e-3, "grad_clip": 0}}, "grad_clip\n.*greater than 0"),
        ({"schedule": {"kind": "linear"}}, "schedule.kind\n.*'constant' or 'cosine'"),
        ({"schedule": {"final_share": 1.5}}, "final_share\n.*less than or equal to 1"),
        ({"schedule": {"warmup_steps": 6}}, r"warmup_steps 6 is longer than the stage \(5\)"),
        ({"objective": {"kind": "gate_loss"}, "num_loops": 1}, "gate_loss needs num_loops of 2 or more"),
        ({"num_steps": 0}, "num_steps\n.*greater than 0"),
        ({"num_loops": 0}, "num_loops\n.*greater than 0"),
        ({"micro_batches": 0}, "micro_batches\n.*greater than 0"),
        ({"precision": "fp16"}, "precision\n.*'fp32' or 'bf16'"),
        ({"name": "../elsewhere"}, "name\n.*pattern"),
        ({"name": ""}, "name\n.*pattern"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_what_is_unknown_or_impossible_is_refused(overrides: dict[str, Any], complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        stage(**overrides)


def test_a_recipe_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        stage().num_steps = 6
