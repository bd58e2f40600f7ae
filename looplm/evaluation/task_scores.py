"""From what lm-eval has logged of every question to scores: categories, several samples, loss from loop to loop."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from looplm.errors import UserError
from looplm.evaluation.bootstrap import document_sums, resample_weights, standard_error
from looplm.evaluation.continuation import Continuation, Key
from looplm.evaluation.lm_eval_adapter import LoopLMAdapter
from looplm.evaluation.pass_at_k import pass_at_k

UNREAD = "[invalid]"
"""What lm-eval's filters make of an answer that they cannot read."""


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    task: str
    metric: str
    """With lm-eval's filter behind a comma, where it has one."""
    value: float
    stderr: float | None


@dataclass(frozen=True)
class SampleScore:
    """A score that several answers to a question give together."""

    kind: str
    """pass: share of questions with a right answer among n, without bias (arXiv 2107.03374). majority: score of the
    most frequent answer among n."""
    n: int
    value: float
    stderr: float | None


@dataclass(frozen=True, kw_only=True)
class LoopChange:
    """What one more loop does to the loss on right answers of questions with given answers."""

    loop: int
    """From this one to the next."""
    mean_nats: float
    """Per token; below 0 the loop helps."""
    stderr: float
    """Over questions."""
    worse_share: float
    """Of tokens."""
    worse_stderr: float
    num_tokens: int


def scores_of(task: str, metrics: Mapping[str, Any]) -> list[Score]:
    """lm-eval's "acc,none" and "acc_stderr,none" as pairs."""
    found = []
    for key, value in metrics.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = metrics.get(f"{metric}_stderr,{filtered}")
        name = metric if filtered == "none" else f"{metric},{filtered}"
        found.append(Score(task, name, float(value), float(error) if isinstance(error, int | float) else None))
    return found


def question_values(
    logged: Mapping[str, Sequence[Mapping[str, Any]]], metric: str, category_field: str | None
) -> tuple[list[float], list[str]]:
    """The metric of every question, and its category: a field of its document, or the subtask it belongs to.

    Empty where the metric is no number for each question (perplexities).
    """
    name, _, filtered = metric.partition(",")
    values, categories = [], []
    for task, questions in logged.items():
        for one in questions:
            if one["filter"] != (filtered or "none") or not isinstance(one.get(name), int | float):
                continue
            values.append(float(one[name]))
            if category_field is not None and category_field not in one["doc"]:
                fields = ", ".join(one["doc"])
                raise UserError(f"--category {category_field}: a document of {task} has no such field, but {fields}.")
            categories.append(task if category_field is None else str(one["doc"][category_field]))
    return values, categories


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error over questions; no error of one question."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


# --- Several samples of an answer -----------------------------------------------------------------------------------


def sampled_answers(task: Any, metric: str) -> list[list[tuple[str, float]]]:
    """For each question, every sampled answer as the task's filter reads it, and what it scores by itself.

    task: one of lm-eval's that has been asked with `repeats`.
    """
    name, _, filtered = metric.partition(",")
    filtered = filtered or "none"
    found: list[list[tuple[str, float]]] = [[] for _ in task.instances]
    for i in range(len(task.instances[0].resps)):
        singles = []
        for instance in task.instances:
            single = copy(instance)
            single.resps, single.filtered_resps = [instance.resps[i]], {}
            singles.append(single)
        for ensemble in task._filters:
            ensemble.apply(singles)
        for answers, single in zip(found, singles, strict=True):
            read = single.filtered_resps[filtered]
            answer = str(read) if filtered != "none" else final_answer(single.resps[0])
            answers.append((answer, float(task.process_results(single.doc, [read])[name])))
    return found


def final_answer(text: str) -> str:
    """What a text without a filter of its own ends on: its last box, else its last number, else all of it."""
    if boxed := re.findall(r"\\boxed\{([^{}]*)\}", text):
        return boxed[-1].strip()
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else text.strip()


def sample_scores(answers: Sequence[Sequence[tuple[str, float]]]) -> list[SampleScore]:
    """pass@n and majority of n, for n = 1, 2, 4, ... and all samples."""
    most = len(answers[0])
    found = []
    for n in sorted({most, *(2**i for i in range(most.bit_length()))}):
        passed = [pass_at_k(most, sum(score > 0 for _, score in each), n) for each in answers]
        voted = [
            math.fsum(majority(each[first : first + n]) for first in range(0, most - n + 1, n)) / (most // n)
            for each in answers
        ]
        found += [SampleScore("pass", n, *mean_and_error(passed)), SampleScore("majority", n, *mean_and_error(voted))]
    return found


def majority(answers: Sequence[tuple[str, float]]) -> float:
    """Score of the most frequent answer, the first of those alike; answers that could not be read have no vote."""
    readable = [one for one in answers if one[0] != UNREAD] or list(answers)
    winner, _ = Counter(answer for answer, _ in readable).most_common(1)[0]
    return next(score for answer, score in readable if answer == winner)


# --- From loop to loop ----------------------------------------------------------------------------------------------


def right_answers(adapter: LoopLMAdapter, logged: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Continuation]:
    """Every loop's view of the right answers of questions with given answers; none for tasks that generate."""
    keys: list[Key] = []
    for questions in logged.values():
        for one in questions:
            if one["filter"] != questions[0]["filter"]:
                continue  # the same question, read otherwise
            choices = one["arguments"]
            right = one["target"] if len(choices) > 1 else 0
            if not isinstance(right, int) or not 0 <= right < len(choices) or not scored_pair(choices[right]):
                continue
            context, continuation = choices[right]
            start, rest = adapter.pair(context, continuation)
            keys.append((tuple(start), tuple(rest)))
    return [kept for key in keys if (kept := adapter.batching.kept.get((adapter.setting.stage_one, key))) is not None]


def scored_pair(arguments: Any) -> bool:
    """Whether a request is a context with a continuation."""
    return len(arguments) == 2 and isinstance(arguments[1], str)


def loop_changes(answers: Sequence[Continuation]) -> list[LoopChange]:
    """Mean change of the loss and share of tokens made worse, with errors from resampled questions."""
    if len(answers) < 2:
        return []
    change = -torch.cat([one.logprobs for one in answers], dim=1).double().diff(dim=0)  # (R - 1, N)
    questions = torch.arange(len(answers)).repeat_interleave(torch.tensor([len(one.targets) for one in answers]))
    weights = resample_weights(len(answers), 1000, 0)
    tokens = document_sums(torch.ones(change.shape[1]), questions, len(answers))
    resampled = [
        (weights @ document_sums(values, questions, len(answers)).T) / (weights @ tokens)[:, None]
        for values in (change, (change > 0).double())
    ]
    errors, worse_errors = (standard_error(one).tolist() for one in resampled)
    return [
        LoopChange(
            loop=loop + 1, mean_nats=row.mean().item(), stderr=errors[loop],
            worse_share=(row > 0).double().mean().item(), worse_stderr=worse_errors[loop], num_tokens=len(row),
        )
        for loop, row in enumerate(change)
    ]  # fmt: skip
