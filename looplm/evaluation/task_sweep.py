"""Tasks of lm-eval at many settings of one model: scores with standard errors, the depth really used, resumable.

A file for each task and setting, written when it is done: a sweep that was interrupted goes on with the next one. All
settings of a task come in turn, so that log-likelihoods of one forward serve all depths and thresholds.
"""

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from lm_eval.evaluator import evaluate as lm_evaluate
from lm_eval.tasks import TaskManager

from looplm.errors import UserError
from looplm.evaluation.continuation import Key, joined, spread_exits
from looplm.evaluation.lm_eval_adapter import LoopLMAdapter, Work
from looplm.evaluation.setting import Setting, policy_of, rule_of
from looplm.evaluation.task_plan import TaskChoice, TaskPlan, load_choice, task_manager
from looplm.evaluation.task_scores import (
    LoopChange,
    SampleScore,
    Score,
    loop_changes,
    mean_and_error,
    question_values,
    right_answers,
    sample_scores,
    sampled_answers,
    scores_of,
)
from looplm.inference import FixedDepth
from looplm.model.flops import CacheStrategy

BOOTSTRAP_ITERS = 1000
"""For metrics of lm-eval without a closed standard error."""
MOST_LEVEL_TEXTS = 200
"""Answers on which thresholds are chosen."""


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """One task under one setting."""

    task: str
    setting: str
    rule: str
    level: float
    """Depth, threshold or epsilon of the rule."""
    kv_cache: CacheStrategy
    max_gen_toks: int | None
    metric: str
    """The one that tables and plots show."""
    value: float
    stderr: float | None
    mean_loops: float | None
    """Loop that a token was read out at, over all scored and generated tokens."""
    prompt_flops: float
    """A question's, read once; without attention scores."""
    decode_flops: float
    """Of one answer to it."""
    num_questions: int
    cut_prompts: int
    """Prompts that lost their beginning to the length of the context."""
    seconds: float
    scores: tuple[Score, ...]
    """All that lm-eval gives, subtasks included."""
    values: tuple[float, ...]
    """The metric of each question, in order; the mean over samples where there are several."""
    categories: tuple[str, ...]
    """Of each question."""
    samples: tuple[SampleScore, ...]
    loop_changes: tuple[LoopChange, ...]

    @property
    def flops(self) -> float:
        """Of a question and one answer."""
        return self.prompt_flops + self.decode_flops


@dataclass(frozen=True)
class Curve:
    """Rules whose levels are chosen on the answers of each task, to spread the mean depth evenly."""

    rules: tuple[str, ...] = ()
    """Of gate, hidden-diff and kl."""
    points: int = 4


class Sweep:
    """Everything that scoring one plan needs, and where its files are."""

    def __init__(self, adapter: LoopLMAdapter, plan: TaskPlan, out: Path, say: Callable[[str], None] = print) -> None:
        self.adapter, self.plan, self.out, self.say = adapter, plan, out, say
        self._manager: TaskManager | None = None
        self._loaded: dict[str, Any] | None = None

    def run(self, settings: Sequence[Setting], curve: Curve | None = None) -> list[TaskResult]:
        """Scores every task under every setting; those that are there are taken from their files.

        Raises UserError for a task that lm-eval does not know, and for files of another plan.
        """
        for choice in self.plan.tasks:
            self.plan.of_task(choice)  # or a file that cannot be read would be found after the first task
        found = []
        for choice in self.plan.tasks:
            found += self._task(choice, settings, curve or Curve())
            self.adapter.batching.kept.clear()
        return found

    def _task(self, choice: TaskChoice, settings: Sequence[Setting], curve: Curve) -> list[TaskResult]:
        folder = self.out / file_name(choice.task)
        folder.mkdir(parents=True, exist_ok=True)
        self._loaded = None
        chosen = self._levels(choice, curve, folder, settings[0].max_gen_toks)
        settings = list({one.name: one for one in (*settings, *chosen)}.values())
        return [self._scored(choice, setting, folder) for setting in settings]

    def _scored(self, choice: TaskChoice, setting: Setting, folder: Path) -> TaskResult:
        file = folder / f"{file_name(setting.name)}.json"
        held = self._held(file, choice)
        if held is None:
            held = score_task(self.adapter, self.plan, choice, setting, self._tasks_of(choice))
            keep(file, {"plan": self.plan.of_task(choice), **asdict(held)})
            self.say(f"{choice.task}, {setting.name}: {held.metric} {held.value:.4f} in {held.seconds:.0f} s")
        else:
            self.say(f"{choice.task}, {setting.name}: taken from {file}")
        return held

    def _tasks_of(self, choice: TaskChoice) -> dict[str, Any]:
        """lm-eval's tasks of the choice that is being scored, loaded when the first setting needs them."""
        if self._manager is None:
            self._manager = task_manager(self.plan)
        if self._loaded is None:
            self._loaded = load_choice(self._manager, choice, self.plan, self.out / "tasks")
        return self._loaded

    def _levels(self, choice: TaskChoice, curve: Curve, folder: Path, length: int | None) -> list[Setting]:
        """Settings of the curve, from the file that an earlier run has left, or chosen on the task's own answers."""
        if not curve.rules:
            return []
        file = folder / "levels.json"
        asked = {
            "plan": self.plan.of_task(choice),
            "rules": list(curve.rules),
            "points": curve.points,
            "length": length,
        }
        if file.is_file():
            held = read_kept(file)
            if {name: held.get(name) for name in asked} == json.loads(json.dumps(asked)):
                return [
                    Setting(policy_of(rule, level), stage_one=stage, max_gen_toks=length)
                    for rule, level, stage in held["levels"]
                ]
        adapter, full = self.adapter, Setting(FixedDepth(self.adapter.trained_loops), max_gen_toks=length)
        adapter.batching = replace(adapter.batching, changes=True)
        if self._held(folder / f"{file_name(full.name)}.json", choice) is None:
            self._scored(choice, full, folder)
        else:  # its scores are known, its answers are not
            ask(adapter, self.plan, full, self._tasks_of(choice))
        answers = self._answers()
        found = []
        for stage_one in (False, True)[: 1 + (self.plan.stage_one is not None)]:
            adapter.setting = replace(full, stage_one=stage_one)
            record = joined(adapter.record_texts(answers), adapter.trained_loops)
            for rule in curve.rules if not stage_one else [rule for rule in curve.rules if rule == "gate"]:
                found += [replace(adapter.setting, exit=one) for one in spread_exits(record, rule, curve.points)]
        keep(file, {**asked, "levels": [[*rule_of(one.exit), one.stage_one] for one in found]})
        return found

    def _answers(self) -> list[Key]:
        """Some of the answers just scored or written."""
        scored = [key for _, key in self.adapter.batching.kept]
        written = [(tuple(one.prompt_token_ids), tuple(one.token_ids)) for one in self.adapter.written]
        keys = scored or written
        return keys[:: max(1, len(keys) // MOST_LEVEL_TEXTS)]

    def _held(self, file: Path, choice: TaskChoice) -> TaskResult | None:
        """What an earlier run has found. Raises UserError where it asked something else."""
        if not file.is_file():
            return None
        held = read_kept(file)
        before, mine = held.pop("plan"), json.loads(json.dumps(self.plan.of_task(choice)))
        if before != mine:
            changed = [name for name in mine if before.get(name) != mine[name]]
            raise UserError(
                f"{file} holds scores of another evaluation ({', '.join(changed)} differ); choose another --out."
            )
        parts = {"scores": Score, "samples": SampleScore, "loop_changes": LoopChange}
        for name, kind in parts.items():
            held[name] = tuple(kind(**one) for one in held[name])
        return TaskResult(**held | {name: tuple(held[name]) for name in ("values", "categories")})


def ask(adapter: LoopLMAdapter, plan: TaskPlan, setting: Setting, loaded: dict[str, Any]) -> dict[str, Any]:
    """lm-eval's results under one setting. Raises UserError for a task that would run code unasked."""
    adapter.setting, adapter.work = setting, Work()
    random.seed(plan.seed)
    np.random.seed(plan.seed)
    torch.manual_seed(plan.seed)
    evaluate: Callable[..., Any] = lm_evaluate  # its decorator hides the signature
    try:
        results = evaluate(
            lm=adapter,
            task_dict=loaded,
            limit=plan.limit,
            apply_chat_template=plan.chat,
            log_samples=True,
            bootstrap_iters=BOOTSTRAP_ITERS,
            confirm_run_unsafe_code=plan.allow_code,
        )
    except TemplateError as error:
        raise UserError(
            f"A question of {', '.join(loaded['tasks'])} does not fit the task's template: {error}. Its documents "
            "need the fields that the template names."
        ) from error
    except ValueError as error:
        if "unsafe" not in str(error):
            raise
        raise UserError(
            f"{', '.join(loaded['tasks'])} would run generated code in this very process. `looplm code` runs it "
            "apart; --allow-code-execution lets lm-eval do it."
        ) from error
    assert results is not None  # only ranks above 0 get nothing
    return results


def score_task(
    adapter: LoopLMAdapter, plan: TaskPlan, choice: TaskChoice, setting: Setting, loaded: dict[str, Any]
) -> TaskResult:
    """One task under one setting. Raises UserError for a metric that the task does not have."""
    start = time.monotonic()
    results = ask(adapter, plan, setting, loaded)
    scores = [score for task, metrics in results["results"].items() for score in scores_of(task, metrics)]
    known = list(dict.fromkeys(score.metric for score in scores))
    metric = known[0] if choice.metric is None else choice.metric
    if metric not in known:
        raise UserError(f"{choice.task} has no metric {metric}; it has {', '.join(known)}.")
    logged = results["samples"]
    values, categories = question_values(logged, metric, plan.category_field)
    num_questions = sum(int(count["effective"]) for count in results["n-samples"].values())
    samples: list[SampleScore] = []
    writes = any(task.get_config("output_type") == "generate_until" for task in loaded["tasks"].values())
    several = plan.samples if writes else 1
    if several > 1:
        answers = [each for task in loaded["tasks"].values() for each in sampled_answers(task, metric)]
        samples = sample_scores(answers)
        values = [sum(score for _, score in each) / len(each) for each in answers]
    own = next((one for one in scores if (one.task, one.metric) == (choice.task, metric)), None)
    value, stderr = (own.value, own.stderr) if own and not samples else mean_and_error(values)
    return TaskResult(
        task=choice.task, setting=setting.name, **setting.axes(), metric=metric, value=value, stderr=stderr,
        mean_loops=adapter.work.mean_loops, prompt_flops=adapter.work.prompt_flops / num_questions / several,
        decode_flops=adapter.work.decode_flops / num_questions / several, num_questions=num_questions,
        cut_prompts=adapter.work.cut_prompts, seconds=time.monotonic() - start, scores=tuple(scores),
        values=tuple(values), categories=tuple(categories), samples=tuple(samples),
        loop_changes=tuple(loop_changes(right_answers(adapter, logged))),
    )  # fmt: skip


def file_name(name: str) -> str:
    """A name that every file system takes."""
    return re.sub("[^a-z0-9.]+", "_", name.lower())


def read_kept(file: Path) -> Any:
    """What `keep` has written. Raises UserError for a file that is damaged."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{file} is damaged; delete it, and the same command makes it anew.") from None


def keep(file: Path, numbers: dict[str, Any]) -> None:
    """Writes whole, or not at all."""
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    fresh.replace(file)
