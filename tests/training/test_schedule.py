"""The learning rate at the corners of a stage."""

import pytest

from looplm.training.schedule import learning_rate_share
from looplm.training.stage_recipe import ScheduleRecipe


def shares(schedule: ScheduleRecipe, num_steps: int) -> list[float]:
    return [learning_rate_share(schedule, step, num_steps) for step in range(num_steps)]


def test_warmup_is_linear_and_learns_from_the_first_step():
    schedule = ScheduleRecipe(kind="constant", warmup_steps=4)
    assert shares(schedule, 7) == [0.25, 0.5, 0.75, 1, 1, 1, 1]


def test_cosine_falls_from_the_peak_to_the_final_share():
    schedule = ScheduleRecipe(kind="cosine", warmup_steps=2, final_share=0.2)
    # 0.2 + 0.8 * (1 + cos(pi k / 4)) / 2
    assert shares(schedule, 7) == pytest.approx([0.5, 1, 1, 0.8828427, 0.6, 0.3171573, 0.2])


def test_cosine_without_warmup_begins_at_the_peak():
    assert shares(ScheduleRecipe(final_share=0.0), 3) == pytest.approx([1, 0.5, 0])


def test_wsd_stays_at_the_peak_and_falls_linearly_at_the_end():
    schedule = ScheduleRecipe(kind="wsd", warmup_steps=2, decay_steps=4, final_share=0.2)
    assert shares(schedule, 9) == pytest.approx([0.5, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_wsd_may_be_all_warmup_and_decay():
    assert shares(ScheduleRecipe(kind="wsd", warmup_steps=1, decay_steps=2, final_share=0), 3) == [1, 0.5, 0]


@pytest.mark.parametrize("kind", ["constant", "cosine"])
@pytest.mark.parametrize(("warmup_steps", "num_steps"), [(3, 3), (2, 3), (0, 1), (1, 1)])
def test_a_stage_that_ends_with_its_warmup_ends_at_the_peak(kind, warmup_steps: int, num_steps: int):
    schedule = ScheduleRecipe(kind=kind, warmup_steps=warmup_steps)
    assert shares(schedule, num_steps)[-1] == 1


def test_beyond_the_stage_it_stays_where_it_ended():
    for schedule in (ScheduleRecipe(final_share=0.1), ScheduleRecipe(kind="wsd", decay_steps=3, final_share=0.1)):
        assert learning_rate_share(schedule, 50, 10) == pytest.approx(0.1)
