"""What loops add by kind of question: (score at R - score at 1) / score at 1, as in Table 15 of Ouro (2510.25741)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from looplm.evaluation.setting import FIXED
from looplm.evaluation.task_scores import mean_and_error
from looplm.evaluation.task_sweep import TaskResult

ALL = "all"


@dataclass(frozen=True, kw_only=True)
class CategoryGain:
    """The questions of one category."""

    category: str
    num_questions: int
    by_loop: tuple[tuple[int, float, float | None], ...]
    """Depth, score, standard error."""
    gain: float | None
    """Relative, from depth 1 to `to_loop`; None where the score at depth 1 is 0."""
    gain_stderr: float | None
    """Over questions, the same at both depths."""
    to_loop: int


def category_gains(results: Sequence[TaskResult], trained_loops: int) -> list[CategoryGain]:
    """Of one task's results: all questions, then each category by falling gain. Empty without two depths from 1 on.

    The gain is that of the trained depth, or of the deepest within it that was measured.
    """
    plain = [one for one in results if one.rule == FIXED and one.kv_cache == "per_loop" and one.values]
    by_depth = {int(one.level): one for one in plain if one.max_gen_toks == plain[0].max_gen_toks}
    deepest = max((depth for depth in by_depth if depth <= trained_loops), default=1)
    if 1 not in by_depth or deepest == 1:
        return []
    names = list(dict.fromkeys(by_depth[1].categories))
    found = [_gain(by_depth, deepest, name) for name in names]
    found.sort(key=lambda one: -math.inf if one.gain is None else one.gain, reverse=True)
    return [_gain(by_depth, deepest, None), *(found if len(found) > 1 else [])]


def _gain(by_depth: dict[int, TaskResult], deepest: int, category: str | None) -> CategoryGain:
    def values(depth: int) -> list[float]:
        one = by_depth[depth]
        return [
            value for value, own in zip(one.values, one.categories, strict=True) if category is None or own == category
        ]

    first, last = values(1), values(deepest)
    (base, _), (top, _) = mean_and_error(first), mean_and_error(last)
    gain = (top - base) / base if base else None
    error = None
    if gain is not None:
        # Delta method: the ratio's error is that of the mean of (last - ratio * first) / base.
        _, error = mean_and_error([(b - (1 + gain) * a) / base for a, b in zip(first, last, strict=True)])
    return CategoryGain(
        category=ALL if category is None else category, num_questions=len(first),
        by_loop=tuple((depth, *mean_and_error(values(depth))) for depth in sorted(by_depth)),
        gain=gain, gain_stderr=error, to_loop=deepest,
    )  # fmt: skip
