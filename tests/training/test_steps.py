"""The closed form of a stage's steps against counting them one by one."""

import random

import pytest

from looplm.errors import UserError
from looplm.training.stage_recipe import (
    BatchRamp,
    ExpectedLossRecipe,
    OptimizerRecipe,
    ScheduleRecipe,
    StageRecipe,
    batch_levels,
)
from looplm.training.steps import StepPlan


def stage(**fields: object) -> StageRecipe:
    return StageRecipe.model_validate(
        {"name": "s", "seq_len": 4, "objective": ExpectedLossRecipe(beta=0.1), "optimizer": OptimizerRecipe(lr=1.0)}
        | fields
    )


def counted(batch: int | BatchRamp, num_steps: int) -> list[int]:
    """Tokens before each of the steps, by the definition."""
    tokens, before = 0, []
    for _ in range(num_steps + 1):
        before.append(tokens)
        if isinstance(batch, int):
            size = batch
        else:
            level = next((i for i in range(batch.increments)
                          if tokens < (i + 1) * batch.over_tokens / batch.increments), batch.increments)  # fmt: skip
            size = batch_levels(batch)[level]
        tokens += size
    return before


@pytest.mark.parametrize("seed", range(40))
def test_ramps_against_counting(seed: int) -> None:
    draw = random.Random(seed)
    increments = draw.randint(1, 6)
    start = 4 * draw.randint(1, 20)
    ramp = BatchRamp(
        start=start,
        end=start + 4 * increments * draw.randint(0, 9),
        over_tokens=draw.randint(1, 2000),
        increments=increments,
    )
    plan = StepPlan(stage(batch_tokens=ramp, num_steps=200))
    before = counted(ramp, 200)
    assert [plan.tokens_before(i) for i in range(201)] == before
    assert [plan.rows_at(i) * 4 for i in range(200)] == [b - a for a, b in zip(before, before[1:], strict=False)]
    wanted = draw.randint(1, 5000)
    by_tokens = StepPlan(stage(batch_tokens=ramp, tokens=wanted))
    assert by_tokens.num_steps == next(i for i, tokens in enumerate(counted(ramp, 2000)) if tokens >= wanted)
    assert by_tokens.num_tokens >= wanted > by_tokens.tokens_before(by_tokens.num_steps - 1)


def test_the_steps_of_the_two_stage_recipe() -> None:
    # Closing the Loop 3.5: 100,000 and 47,684 steps of 2,097,152 tokens are 209.7B and 100.0B.
    plan = StepPlan(stage(seq_len=4096, batch_tokens=2_097_152, tokens=209_715_200_000))
    assert (plan.num_steps, plan.rows_at(0), plan.num_tokens) == (100_000, 512, 209_715_200_000)
    assert StepPlan(stage(seq_len=4096, batch_tokens=2_097_152, num_steps=47_684)).num_tokens == 100_000_595_968


def test_epochs_are_passes_over_rows() -> None:
    epochs = stage(batch_tokens=12, epochs=1.5)
    assert StepPlan(epochs, rows_per_epoch=10).num_steps == 5  # 15 rows, 3 a step
    assert StepPlan(epochs, rows_per_epoch=11).num_steps == 6  # 16.5 rows
    assert StepPlan(epochs, num_steps=7).num_steps == 7
    with pytest.raises(UserError, match=r"1\.5 epochs.*not known"):
        StepPlan(epochs)


def test_levels_that_occur() -> None:
    ramp = BatchRamp(start=4, end=8, over_tokens=8, increments=1)
    assert StepPlan(stage(batch_tokens=ramp, num_steps=4)).levels == [(0, 4), (2, 8)]
    assert StepPlan(stage(batch_tokens=ramp, num_steps=2)).levels == [(0, 4)]


def test_ranks_share_every_batch_evenly() -> None:
    plan = StepPlan(stage(batch_tokens=BatchRamp(start=8, end=12, over_tokens=16, increments=1), num_steps=9))
    plan.check_ranks(1)
    with pytest.raises(UserError, match=r"12 tokens is 3 rows of 4, which 2 processes.*multiple of 8"):
        plan.check_ranks(2)
    StepPlan(stage(batch_tokens=BatchRamp(start=8, end=12, over_tokens=16, increments=1), num_steps=2)).check_ranks(2)


@pytest.mark.parametrize(
    ("schedule", "fits"),
    [(ScheduleRecipe(warmup_steps=5), True), (ScheduleRecipe(warmup_steps=6), False),
     (ScheduleRecipe(kind="wsd", warmup_steps=2, decay_steps=3), True),
     (ScheduleRecipe(kind="wsd", warmup_steps=2, decay_steps=4), False)],
)  # fmt: skip
def test_a_schedule_longer_than_the_stage(schedule: ScheduleRecipe, fits: bool) -> None:
    five_steps = stage(batch_tokens=8, tokens=40, schedule=schedule)
    if fits:
        assert StepPlan(five_steps).num_steps == 5
        return
    with pytest.raises(UserError, match="Stage s has 5 steps; warmup_steps .* do not fit"):
        StepPlan(five_steps)
