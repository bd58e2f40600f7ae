"""The learning rate as a pure function of the step."""

import math

from looplm.training.stage_recipe import ScheduleRecipe


def learning_rate_share(schedule: ScheduleRecipe, step: int, num_steps: int) -> float:
    """Share of the peak learning rate at `step` (0-based) of `num_steps`: linear warmup, then the schedule's kind.

    The first step already learns, at 1 / warmup_steps. A cosine is at its peak in the step after the warmup and at
    `final_share` in the last one (at its peak if these are the same). WSD (warmup, stable, decay) stays at the peak
    until its last `decay_steps`, whose last one is at `final_share`.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "wsd":
        assert schedule.decay_steps is not None  # the schema asks for it
        decayed = max(0, step + 1 - (num_steps - schedule.decay_steps))
        return 1.0 - (1.0 - schedule.final_share) * min(1.0, decayed / schedule.decay_steps)
    span = max(1, num_steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    return schedule.final_share + (1 - schedule.final_share) * 0.5 * (1 + math.cos(math.pi * progress))
