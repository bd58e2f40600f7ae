"""Tasks of lm-eval at many settings of one model: scores with standard errors, the depth really used, resumable."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from looplm.errors import UserError
from looplm.evaluation.lm_eval_adapter import DepthCount, LoopLMAdapter, Setting


@dataclass(frozen=True)
class Score:
    """One metric of one task."""

    task: str
    metric: str
    """With lm-eval's filter behind a comma, where it has one."""
    value: float
    stderr: float | None


@dataclass(frozen=True)
class SettingScores:
    """All tasks under one setting."""

    setting: str
    mean_loops: float | None
    """Loop that a token was read out at, over all scored and generated tokens."""
    scores: tuple[Score, ...]
    num_samples: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """What is asked, the same at every setting."""

    checkpoint: str
    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    limit: int | None = None
    """Questions of each task, all when None."""
    chat: bool = False
    include_path: str | None = None
    """Folder with YAML tasks of one's own."""
    seed: int = 0


def sweep(
    adapter: LoopLMAdapter, plan: TaskPlan, settings: Sequence[Setting], out: Path, say: Callable[[str], None] = print
) -> list[SettingScores]:
    """Scores every setting, one file each in `out`; those that are there are taken from it.

    Raises UserError for a task that lm-eval does not know, and for files of another plan.
    """
    manager = task_manager(plan)
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for setting in settings:
        file = out / f"{re.sub('[^a-z0-9.]+', '_', setting.name.lower())}.json"
        held = _held(file, plan)
        if held is None:
            held = score_setting(adapter, plan, setting, manager)
            fresh = file.with_suffix(".new")
            fresh.write_text(json.dumps({"plan": asdict(plan), **asdict(held)}, indent=1) + "\n", encoding="utf-8")
            fresh.replace(file)
        else:
            say(f"{setting.name}: taken from {file}")
        found.append(held)
    return found


def task_manager(plan: TaskPlan) -> TaskManager:
    """Finds the plan's tasks: in its own folder if they are all there, else among lm-eval's, which takes a while.

    Raises UserError for a task that is in neither.
    """
    if plan.include_path is not None:
        own = TaskManager(include_path=plan.include_path, include_defaults=False)
        if set(plan.tasks) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=plan.include_path, include_defaults=True)
    if unknown := [task for task in plan.tasks if task not in manager.all_tasks]:
        raise UserError(f"lm-eval knows no task {', '.join(unknown)}. A YAML task of your own: --include-path FOLDER.")
    return manager


def score_setting(adapter: LoopLMAdapter, plan: TaskPlan, setting: Setting, manager: TaskManager) -> SettingScores:
    """All tasks under one setting."""
    adapter.setting, adapter.depths, start = setting, DepthCount(), time.monotonic()
    evaluate: Callable[..., Any] = simple_evaluate  # its decorator hides the signature
    results = evaluate(
        model=adapter,
        tasks=list(plan.tasks),
        num_fewshot=plan.num_fewshot,
        limit=plan.limit,
        apply_chat_template=plan.chat,
        task_manager=manager,
        log_samples=False,
        random_seed=plan.seed,
        numpy_random_seed=plan.seed,
        torch_random_seed=plan.seed,
        fewshot_random_seed=plan.seed,
    )
    assert results is not None  # only ranks above 0 get nothing
    counts = results["n-samples"]
    return SettingScores(
        setting.name,
        adapter.depths.mean,
        tuple(score for task, metrics in results["results"].items() for score in _scores(task, metrics)),
        sum(int(count["effective"]) for count in counts.values()),
        time.monotonic() - start,
    )


def _scores(task: str, metrics: dict[str, Any]) -> list[Score]:
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


def _held(file: Path, plan: TaskPlan) -> SettingScores | None:
    """What an earlier run has found. Raises UserError where it asked something else."""
    if not file.is_file():
        return None
    held = json.loads(file.read_text(encoding="utf-8"))
    mine = json.loads(json.dumps(asdict(plan)))
    if held["plan"] != mine:
        changed = [name for name in mine if held["plan"].get(name) != mine[name]]
        raise UserError(
            f"{file} holds scores of another evaluation ({', '.join(changed)} differ); choose another --out."
        )
    scores = tuple(Score(**score) for score in held["scores"])
    return SettingScores(held["setting"], held["mean_loops"], scores, held["num_samples"], held["seconds"])
