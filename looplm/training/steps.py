"""How long a stage is and how its batch grows, step by step: pure arithmetic over whole numbers."""

import math
from bisect import bisect_right
from dataclasses import dataclass

from looplm.errors import UserError
from looplm.training.stage_recipe import BatchRamp, StageRecipe, batch_levels


@dataclass(frozen=True)
class _Span:
    """Steps in a row with batches of one size."""

    first_step: int
    first_token: int
    batch_tokens: int


class StepPlan:
    """The steps of one stage. Step n reads `rows_at(n)` rows, on all ranks together, after `tokens_before(n)` tokens.

    stage: its length and batch. num_steps: the length where it was worked out before, as for a stage given in
    epochs; None otherwise. rows_per_epoch: rows of one pass over the data, from which `epochs` follow.

    A stage in tokens or epochs ends with the first step that reaches them. Raises UserError for epochs over data
    of unknown length, and for a warmup or decay that does not fit into the steps.
    """

    def __init__(self, stage: StageRecipe, num_steps: int | None = None, *, rows_per_epoch: int | None = None) -> None:
        self.stage = stage
        self._spans = list(_spans(stage.batch_tokens))
        self._first_steps = [span.first_step for span in self._spans]
        if num_steps is None:
            num_steps = stage.num_steps
        if num_steps is None:
            num_steps = self._steps_to(_wanted_tokens(stage, rows_per_epoch))
        self.num_steps = num_steps
        _check_schedule(stage, num_steps)

    def batch_tokens_at(self, step: int) -> int:
        """Tokens that step (0-based) reads, on all ranks."""
        return self._span(step).batch_tokens

    def rows_at(self, step: int) -> int:
        """Rows that step (0-based) reads, on all ranks."""
        return self.batch_tokens_at(step) // self.stage.seq_len

    def tokens_before(self, step: int) -> int:
        """Tokens read once `step` steps are done."""
        span = self._span(step)
        return span.first_token + (step - span.first_step) * span.batch_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole stage: at least those asked for, rounded up to whole steps."""
        return self.tokens_before(self.num_steps)

    @property
    def levels(self) -> list[tuple[int, int]]:
        """(first step, tokens of a step) for each size of the batch that occurs."""
        return [(span.first_step, span.batch_tokens) for span in self._spans if span.first_step < self.num_steps]

    def check_ranks(self, num_ranks: int) -> None:
        """Raises UserError unless every step's rows divide evenly among `num_ranks` processes."""
        for _, tokens in self.levels:
            if tokens % (self.stage.seq_len * num_ranks):
                raise UserError(
                    f"Stage {self.stage.name}: a batch of {tokens:,} tokens is {tokens // self.stage.seq_len} rows of "
                    f"{self.stage.seq_len}, which {num_ranks} processes cannot share evenly; make batch_tokens a "
                    f"multiple of {self.stage.seq_len * num_ranks:,}."
                )

    def _span(self, step: int) -> _Span:
        return self._spans[bisect_right(self._first_steps, step) - 1]

    def _steps_to(self, tokens: int) -> int:
        """The first number of steps that reads at least `tokens`."""
        span = max((span for span in self._spans if span.first_token < tokens), key=lambda span: span.first_step)
        return span.first_step + _ceil_div(tokens - span.first_token, span.batch_tokens)


def _spans(batch: int | BatchRamp) -> list[_Span]:
    """The sizes of a batch in their order; the last one goes on for ever."""
    if isinstance(batch, int):
        return [_Span(0, 0, batch)]
    levels, spans = batch_levels(batch), []
    step = tokens = level = 0
    while level < batch.increments:
        spans.append(_Span(step, tokens, levels[level]))
        # A step has the size of the level that its first token lies in.
        steps = _ceil_div(_ceil_div((level + 1) * batch.over_tokens, batch.increments) - tokens, levels[level])
        step, tokens = step + steps, tokens + steps * levels[level]
        level = min(batch.increments, tokens * batch.increments // batch.over_tokens)
    return [*spans, _Span(step, tokens, batch.end)]


def _wanted_tokens(stage: StageRecipe, rows_per_epoch: int | None) -> int:
    if stage.tokens is not None:
        return stage.tokens
    assert stage.epochs is not None  # the schema asks for one of the three
    if rows_per_epoch is None:
        raise UserError(
            f"Stage {stage.name} lasts {stage.epochs:g} epochs, but the length of its data is not known (an endless "
            "or streamed source); give tokens or num_steps instead."
        )
    return max(1, math.ceil(stage.epochs * rows_per_epoch)) * stage.seq_len


def _check_schedule(stage: StageRecipe, num_steps: int) -> None:
    schedule = stage.schedule
    decay = schedule.decay_steps or 0
    if schedule.warmup_steps + decay > num_steps:
        decay_text = f" and decay_steps {decay}" if decay else ""
        raise UserError(
            f"Stage {stage.name} has {num_steps} step{'s' * (num_steps != 1)}; "
            f"warmup_steps {schedule.warmup_steps}{decay_text} do not fit into it. Shorten them or lengthen the stage."
        )


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
